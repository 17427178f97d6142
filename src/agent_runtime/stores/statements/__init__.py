"""The statements of the stores: files of SQL and Lua, and the function that reads them by name."""

from __future__ import annotations

from importlib import resources


def read_statements(file: str) -> dict[str, str]:
    """The statements of a file by name. A statement begins with a line `-- name: what it is for`."""
    text = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
    statements: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("-- ") and ": " in line and line[3 : line.index(":")].isidentifier():
            name = line[3 : line.index(":")]
            statements[name] = ""
        elif name and not line.startswith("--"):
            statements[name] += line + "\n"
    return {name: body.strip().removesuffix(";") for name, body in statements.items()}
