"""The statements of the stores: files of SQL and Lua, and the function that reads them by name."""

from __future__ import annotations

import os


def read_statements(file: str) -> dict[str, str]:
    """The statements of a file by name. A statement begins with a line `-- name: what it is for`."""
    with open(os.path.join(os.path.dirname(__file__), file), encoding="utf-8") as source:
        text = source.read()
    statements: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("-- ") and ": " in line and line[3 : line.index(":")].isidentifier():
            name = line[3 : line.index(":")]
            statements[name] = ""
        elif name and not line.startswith("--"):
            statements[name] += line + "\n"
    return {name: body.strip().removesuffix(";") for name, body in statements.items()}
