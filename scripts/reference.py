"""Writes the reference from the docstrings: `docs/reference/api/`, a page for each area of public names.

    python scripts/reference.py

Each name has its signature, its docstring, its fields with theirs, its public methods with theirs, and what it raises where
its source says so. `tests/test_reference.py` says when it has to be written again.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import FunctionType

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference" / "api"
AREAS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "running": ("Running", "agent_runtime", ("run_tool_loop", "recover_tool_loop", "LoopResult", "RunContext", "Executor")),
    "flows": (
        "Flows", "agent_runtime",
        ("Flow", "Call", "FlowRunner", "FlowResult", "NodeError", "NodeRun", "append", "extend"),
    ),
    "tools": (
        "Tools, model and messages", "agent_runtime",
        ("ToolRegistry", "ToolSpec", "idempotency_key", "Model", "Message", "Reply", "ToolCall"),
    ),
    "people": ("People and operators", "agent_runtime", ("Runs", "ApprovalRequest", "Verdict", "Outcome", "Rerun")),
    "stores": ("Stores", "agent_runtime.stores", ()),
    "testing": ("Testing", "agent_runtime.testing", ()),
    "errors": ("Errors", "agent_runtime.errors", ()),
    "others": ("Keys, events and the rest", "agent_runtime", ()),
}  # fmt: skip
"""Page: its title, the module, and its names. Without names: all that the module offers and no other page has."""


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
    return 0


def pages() -> dict[str, str]:
    """Every page of the reference by its name."""
    return {area: page(title, module, names_of(area)) for area, (title, module, _) in AREAS.items()}


def names_of(area: str) -> list[str]:
    _, module, names = AREAS[area]
    if names:
        return list(names)
    loaded = importlib.import_module(module)
    offered = getattr(loaded, "__all__", None) or [name for name in vars(loaded) if is_ours(loaded, name)]
    elsewhere = {name for other, (_, _, taken) in AREAS.items() if other != area for name in taken}
    if area == "others":
        elsewhere |= {*names_of("errors"), "__version__"}
    return [name for name in offered if name not in elsewhere]


def is_ours(module: object, name: str) -> bool:
    value = getattr(module, name)
    return inspect.isclass(value) and value.__module__ == getattr(module, "__name__", "") and not name.startswith("_")


def page(title: str, module: str, names: list[str]) -> str:
    loaded = importlib.import_module(module)
    parts = [f"# {title}\n\nWritten from the docstrings of `{module}`.\n"]
    parts += [entry(name, getattr(loaded, name), module) for name in names]
    return "\n".join(parts)


def entry(name: str, value: object, module: str) -> str:
    """One name, whatever it is."""
    if inspect.isclass(value):
        return "\n".join(class_entry(name, value, module))
    if isinstance(value, FunctionType):
        return "\n".join([f"## {name}\n", *function_entry(name, value)])
    return f"## {name}\n\n```text\n{name} = {shown(value)}\n```\n"


def class_entry(name: str, value: type, module: str) -> Iterator[str]:
    yield f"## {name}\n"
    bases = [base.__name__ for base in value.__bases__ if base.__name__ not in ("object", "Protocol", "Generic", "NamedTuple")]
    is_exception = issubclass(value, BaseException)
    if is_exception:
        yield f"```text\nclass {name}({', '.join(bases)})\n```\n"
    else:
        yield f"```text\n{constructor(name, value)}\n```\n"
    yield documentation(value)
    fields = list(fields_of(value))
    if fields:
        yield "| field | type | is |\n|---|---|---|\n" + "".join(f"| `{n}` | `{t}` | {d} |\n" for n, t, d in fields)
    for method, function in methods_of(value):
        yield f"### {name}.{method}\n"
        yield from function_entry(method, function)


def constructor(name: str, value: type) -> str:
    if getattr(value, "_is_protocol", False):
        return f"class {name}(Protocol)"
    try:
        return signature(name, inspect.signature(value))
    except (TypeError, ValueError):
        return f"class {name}"


def function_entry(name: str, function: Callable[..., object]) -> Iterator[str]:
    before = "async " if inspect.iscoroutinefunction(function) else ""
    yield f"```text\n{before}{signature(name, inspect.signature(function))}\n```\n"
    yield documentation(function)
    raised = raises(function)
    if raised:
        yield f"Raises by itself: {', '.join(f'`{error}`' for error in raised)}.\n"


def signature(name: str, found: inspect.Signature) -> str:
    """A signature as it would be written, a line for each argument where it is long."""
    kept = [parameter for parameter in found.parameters.values() if parameter.name not in ("self", "cls")]
    returns = "" if found.return_annotation is found.empty else f" -> {shown_type(found.return_annotation)}"
    shown_parameters, is_keyword = [], False
    for parameter in kept:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            shown_parameters.append("*")
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_keyword = True
        shown_parameters.append(shown_parameter(parameter))
    line = f"{name}({', '.join(shown_parameters)}){returns}"
    if len(line) <= 88:
        return line
    inner = "".join(f"    {parameter},\n" for parameter in shown_parameters)
    return f"{name}(\n{inner}){returns}"


def shown_parameter(parameter: inspect.Parameter) -> str:
    stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {shown_type(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {shown(parameter.default)}"
    return text


def shown_type(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text).replace("NoneType", "None")


def shown(value: object) -> str:
    """A default as text that is the same everywhere: an object that has no text of its own is named by its type."""
    if isinstance(value, FunctionType):
        return value.__name__
    text = repr(value)
    return f"{type(value).__name__}(…)" if " object at 0x" in text else re.sub(r" at 0x[0-9a-f]+", "", text)


def documentation(value: object) -> str:
    text = inspect.cleandoc(getattr(value, "__doc__", None) or "")
    # What a class without a docstring gets from `dataclass` or `NamedTuple` says nothing that the signature does not.
    return "" if re.match(r"\w+\(.*\)( -> .*)?$", text) else f"{text}\n"


def fields_of(value: type) -> Iterator[tuple[str, str, str]]:
    """The fields of a record: name, type, and the docstring that follows it in the source."""
    names = (
        [field.name for field in dataclasses.fields(value)]
        if dataclasses.is_dataclass(value)
        else getattr(value, "_fields", ())
    )
    told = told_of_fields(value)
    types = getattr(value, "__annotations__", {})
    for name in names:
        if not name.startswith("_"):
            yield name, shown_type(types.get(name, "")).replace("|", "\\|"), told.get(name, "").replace("|", "\\|")


def told_of_fields(value: type) -> dict[str, str]:
    found: dict[str, str] = {}
    body = class_body(value)
    for this, following in pairwise(body):
        if isinstance(this, ast.AnnAssign) and isinstance(this.target, ast.Name) and isinstance(following, ast.Expr):
            told = following.value
            if isinstance(told, ast.Constant) and isinstance(told.value, str):
                found[this.target.id] = " ".join(told.value.split())
    return found


def class_body(value: type) -> list[ast.stmt]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    except (OSError, TypeError):
        return []
    first = tree.body[0]
    return first.body if isinstance(first, ast.ClassDef) else []


def methods_of(value: type) -> Iterator[tuple[str, FunctionType]]:
    """The public methods that a class itself defines and documents, in the order of the source."""
    for name, member in vars(value).items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if not name.startswith("_") and isinstance(function, FunctionType) and function.__doc__:
            yield name, function


def raises(function: Callable[..., object]) -> list[str]:
    """The errors that a function raises in its own source, by name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    names = [ast.unparse(exc.func if isinstance(exc, ast.Call) else exc) for exc in found]
    return sorted({name.rpartition(".")[2] for name in names if re.fullmatch(r"(\w+\.)*[A-Z]\w+", name)})


if __name__ == "__main__":
    sys.exit(main())
