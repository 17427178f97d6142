"""A graph as plain data: what its digest is made from, how two of them differ, and how it is drawn. Pure."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, Union, assert_never, get_args, get_origin

from agent_runtime import codec
from agent_runtime.flow.nodes import Call, Code, Graph, Inner, Mapped, Node, Work

Described: TypeAlias = dict[str, Any]


def describe(graph: Graph) -> Described:
    """What a run that sleeps relies on: nodes, edges, calls and state fields. No function's body, and no comment."""
    return {
        "name": graph.name,
        "state": {name: _field(graph, name) for name in graph.shape.fields},
        "nodes": {name: _node(node) for name, node in graph.nodes.items()},
        "order": list(graph.nodes),
        "edges": sorted(f"{edge.source} → {edge.target}{'' if edge.when is None else ' when'}" for edge in graph.edges),
        "joins": sorted(graph.joins),
        "ends": sorted(graph.ends),
    }


def digest_of(described: Described) -> str:
    """A short name of a description, which changes with it."""
    return hashlib.sha256(codec.encode(described)).hexdigest()[:32]


def differences(before: Mapping[str, Any], now: Mapping[str, Any], inside: str = "") -> list[str]:
    """How a graph differs from what it was, each by its name."""
    found = []
    for what, part in (("field", "state"), ("node", "nodes")):
        was, has = before.get(part, {}), now.get(part, {})
        found += [f"{what} {inside + name!r} is gone" for name in was if name not in has]
        found += [f"{what} {inside + name!r} is new" for name in has if name not in was]
        for name in was:
            if name in has and was[name] != has[name]:
                found += _changes(what, inside + name, was[name], has[name])
    for part, what in (("edges", "edge"), ("joins", "join"), ("ends", "end")):
        was, has = before.get(part, []), now.get(part, [])
        found += [f"{what} {inside + name!r} is gone" for name in was if name not in has]
        found += [f"{what} {inside + name!r} is new" for name in has if name not in was]
    if not found and before.get("order") != now.get("order"):
        found.append(f"the nodes{f' of {inside[:-1]!r}' if inside else ''} stand in another order")
    return found


def _changes(what: str, name: str, was: Any, has: Any) -> list[str]:
    if what == "field":
        return [f"field {name!r} was {was} and is {has}"]
    if was.get("kind") == has.get("kind") == "flow":
        found = differences(was["flow"], has["flow"], f"{name}/")
        if found:
            return found
    changed = [key for key in {**was, **has} if was.get(key) != has.get(key)]
    return [f"node {name!r}: {key} was {was.get(key)!r} and is {has.get(key)!r}" for key in changed]


def draw(graph: Graph) -> str:
    """The graph as a Mermaid flowchart."""
    return "\n".join(["flowchart TD", *_draw_lines(graph, "", "    ")])


def _draw_lines(graph: Graph, prefix: str, indent: str) -> list[str]:
    lines = []
    for name, node in graph.nodes.items():
        at = prefix + name
        if isinstance(node.work, Inner):
            lines += [f'{indent}subgraph {at}["{name}: {node.work.graph.name}"]']
            lines += [*_draw_lines(node.work.graph, f"{at}__", indent + "    "), f"{indent}end"]
        else:
            lines.append(f"{indent}{at}{_label(node, is_join=name in graph.joins)}")
    for edge in graph.edges:
        arrow = "-->" if edge.when is None else "-. when .->"
        lines.append(f"{indent}{prefix}{edge.source} {arrow} {prefix}{edge.target}")
    for name, node in graph.nodes.items():
        if node.on_error is not None:
            lines.append(f"{indent}{prefix}{name} -- error --> {prefix}{node.on_error}")
    lines += [f"{indent}{prefix}{name} --> {prefix}_end(((end)))" for name in graph.nodes if name in graph.ends]
    return lines


def _label(node: Node, *, is_join: bool) -> str:
    opening, closing = ("{{", "}}") if is_join else ("[", "]")
    return f'{opening}"{node.name}{_drawn(node.work)}"{closing}'


def _drawn(work: Work) -> str:
    match work:
        case Call(tool=tool):
            return f"<br/>{tool}"
        case Mapped(each=each):
            return f"{_drawn(each)} × n"
        case Code() | Inner():
            return ""
        case _:
            assert_never(work)


def _node(node: Node) -> Described:
    plain = {**_work(node.work), "on_error": node.on_error, "error_into": node.error_into, "max_visits": node.max_visits}
    return {key: value for key, value in plain.items() if value is not None}


def _work(work: Work) -> Described:
    match work:
        case Call(tool=tool, into=into):
            return {"kind": "call", "tool": tool, "into": into}
        case Code(takes_run=takes_run, writes=writes):
            return {"kind": "code", "run": takes_run, "writes": None if writes is None else sorted(writes)}
        case Mapped(each=each, over=over, into=into):
            inside = {key: value for key, value in _work(each).items() if value is not None}
            return {"kind": "map", "each": inside, "over": over if isinstance(over, str) else "a function", "into": into}
        case Inner(graph=graph, writes=writes):
            return {"kind": "flow", "flow": describe(graph), "writes": None if writes is None else sorted(writes)}
        case _:
            assert_never(work)


def _field(graph: Graph, name: str) -> str:
    reduced = " with a reducer" if name in graph.shape.reducers else ""
    return type_text(graph.shape.fields[name].annotation) + reduced


def type_text(annotation: Any) -> str:
    """A type as text that is the same in every process, whichever module it was read from."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is type(None):
        return "None"
    if origin is Annotated:
        return type_text(parts[0])
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(part) for part in parts)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if origin is not None:
        named = ", ".join("…" if part is Ellipsis else type_text(part) for part in parts)
        return f"{getattr(origin, '__name__', origin)}[{named}]"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
