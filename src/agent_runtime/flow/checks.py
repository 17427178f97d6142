"""What makes a graph wrong, found when it is built. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from agent_runtime.errors import FlowError
from agent_runtime.flow.nodes import Call, Code, Graph, Inner, Mapped, Node
from agent_runtime.flow.state import StateShape

RESERVED = frozenset({"model", "undo"})
"""Stand in the places of calls with a meaning of their own."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


def check_name(what: str, name: object) -> None:
    """Refuse a name that could not stand in the place of a call."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FlowError(f"the name of a {what} is 1 to 64 letters, digits, _ or -, found {name!r}")
    if what == "node" and name in RESERVED:
        raise FlowError(f"no node may be named {name!r}: it stands in the places of calls with a meaning of its own")


def check_field(shape: StateShape[Any], name: str, option: str, field: str | None) -> None:
    """Refuse a field that the state does not have."""
    if field is not None and field not in shape.fields:
        raise FlowError(
            f"node {name!r}: {option}={field!r} is no field of {shape.model.__name__}, which has {sorted(shape.fields)}"
        )


def check_graph(graph: Graph) -> None:
    """Refuse a graph that could not be worked to an end."""
    _check_errors(graph)
    _check_joins(graph)
    reached = _closure([graph.start], graph.targets)
    for name in graph.nodes:
        if name not in reached:
            raise FlowError(f"node {name!r} of flow {graph.name!r} cannot be reached from its start, {graph.start!r}")
    for name in graph.nodes:
        if not graph.ends & _closure([name], graph.targets):
            raise FlowError(f"no way leads from node {name!r} of flow {graph.name!r} to an end; name its ends in .end(…)")
    _check_writers(graph)


def unknown_tools(graph: Graph, is_known: Callable[[str], bool]) -> list[tuple[str, str]]:
    """(node, tool) of each call to a tool that is not there, inner graphs included."""
    found = []
    for node in graph.nodes.values():
        work = node.work.each if isinstance(node.work, Mapped) else node.work
        if isinstance(work, Call) and not is_known(work.tool):
            found.append((node.name, work.tool))
        if isinstance(work, Inner):
            found += [(f"{node.name}/{inner}", tool) for inner, tool in unknown_tools(work.graph, is_known)]
    return found


def _check_errors(graph: Graph) -> None:
    for node in graph.nodes.values():
        if node.on_error is not None and node.on_error not in graph.nodes:
            raise FlowError(f"node {node.name!r}: on_error={node.on_error!r} is no node of flow {graph.name!r}")
        if node.on_error is not None and node.on_error in graph.joins:
            raise FlowError(f"node {node.name!r}: on_error={node.on_error!r} is a join, which waits for edges alone")
        if node.error_into is not None and node.on_error is None:
            raise FlowError(f"node {node.name!r}: error_into= is written where on_error= leads on, and there is none")


def _check_joins(graph: Graph) -> None:
    for name in graph.joins:
        if len(set(graph.predecessors(name))) < 2:
            raise FlowError(f"join {name!r} of flow {graph.name!r} has fewer than two nodes to wait for")


def _check_writers(graph: Graph) -> None:
    """Two writers of one field that are certain to meet in a superstep; others are refused when they do."""
    for left, right in certain_pairs(graph):
        shared = set(graph.nodes[left].touches) & set(graph.nodes[right].touches)
        for field in sorted(shared - set(graph.shape.reducers)):
            raise FlowError(
                f"nodes {left!r} and {right!r} run in one superstep and both write field {field!r}; "
                f"declare a reducer: {field}: Annotated[…, reducer]"
            )


def certain_pairs(graph: Graph) -> set[tuple[str, str]]:
    """The nodes that run in one superstep whenever the edges without a condition that lead to them are taken."""
    steps = {
        name: [edge.target for edge in edges if edge.when is None and edge.target not in graph.joins]
        for name, edges in graph.edges_from.items()
    }
    waiting = [(name, name) for name in graph.nodes]
    seen: set[tuple[str, str]] = set(waiting)
    while waiting:
        one, other = waiting.pop()
        for left in steps[one]:
            for right in steps[other]:
                pair = (left, right) if left <= right else (right, left)
                if pair not in seen:
                    seen.add(pair)
                    waiting.append(pair)
    return {(left, right) for left, right in seen if left != right}


def _closure(names: Iterable[str], targets: Callable[[str], set[str]]) -> set[str]:
    found, waiting = set(names), list(names)
    while waiting:
        for target in targets(waiting.pop()) - found:
            found.add(target)
            waiting.append(target)
    return found


def check_node(shape: StateShape[Any], node: Node) -> None:
    """Refuse a node that names fields that the state does not have, or that cannot do what it says."""
    for option, field in (("into", _into(node)), ("error_into", node.error_into)):
        check_field(shape, node.name, option, field)
    if isinstance(node.work, Code | Inner):
        for field in node.work.writes or ():
            check_field(shape, node.name, "writes", field)
    if isinstance(node.work, Inner) and node.work.leave is None:
        for field in sorted(set(node.work.carried_out(shape)) & set(shape.reducers)):
            raise FlowError(
                f"node {node.name!r}: field {field!r} has a reducer, and its flow inside has one of that name; say "
                "with leave= what it gives to it, or leave it out of writes="
            )
    if isinstance(node.work, Mapped) and isinstance(node.work.over, str):
        check_field(shape, node.name, "over", node.work.over)
    if node.max_visits is not None and (type(node.max_visits) is not int or node.max_visits < 1):
        raise FlowError(f"node {node.name!r}: max_visits= is a whole number from 1, found {node.max_visits!r}")


def _into(node: Node) -> str | None:
    return node.work.into if isinstance(node.work, Call | Mapped) else None
