"""From where a graph stands and what its nodes gave to where it stands next. Pure, but for the graph's own functions.

Rules of this file:

* Results count in the order in which the nodes were added to the graph, whatever order they came in.
* A node that failed writes nothing but its error; it leads where `on_error` says, else the run has failed.
* A node named in `join` waits until all its predecessors have led to it, and then begins to wait anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from agent_runtime.errors import FlowError
from agent_runtime.flow.nodes import Edge, Graph, Node
from agent_runtime.flow.state import StateShape


class NodeError(NamedTuple):
    """Why a run has failed: the node, the tool that answered with an error (or ""), its type and its message."""

    node: str
    tool: str
    type: str
    message: str

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


class Wrote(NamedTuple):
    """A node's work is done: the values that it gives to fields."""

    values: Mapping[str, object]


class Failed(NamedTuple):
    """A call of the node was answered with an error, and nothing caught it."""

    error: NodeError


Outcome: TypeAlias = Wrote | Failed


class Position(NamedTuple):
    """Where a run stands: the superstep to be worked, the nodes that are due, and how it came there."""

    superstep: int
    frontier: tuple[str, ...]
    visits: Mapping[str, int]
    arrived: Mapping[str, tuple[str, ...]] = {}
    """By each join that waits: the predecessors that have led to it."""
    failure: NodeError | None = None

    @property
    def is_over(self) -> bool:
        return not self.frontier


def first_position(graph: Graph) -> Position:
    """Before anything was done."""
    return Position(0, (graph.start,), {graph.start: 1})


def check_writers(graph: Graph, frontier: tuple[str, ...]) -> None:
    """Refuse, before anything is done, nodes of one superstep that write one field without a reducer."""
    writers: dict[str, str] = {}
    for name in frontier:
        for field in graph.nodes[name].touches:
            _claim_field(graph.shape, writers, field, name)


def gather(graph: Graph, state: Any, outcomes: Mapping[str, Outcome]) -> Any:
    """The state with what the nodes wrote, in the order in which they were added."""
    shape = graph.shape
    held = vars(state)
    values: dict[str, object] = {}
    writers: dict[str, str] = {}
    for name, node in graph.nodes.items():
        outcome = outcomes.get(name)
        if outcome is None:
            continue
        for field, value in _written(node, outcome).items():
            if field not in shape.fields:
                raise FlowError(
                    f"node {name!r} gave a value to {field!r}, which is no field of {shape.model.__name__}; "
                    f"it has {sorted(shape.fields)}"
                )
            _claim_field(shape, writers, field, name)
            values[field] = _reduce(shape, field, values.get(field, held.get(field)), value, name)
    return shape.change(state, values, by=f"what {', '.join(sorted(set(writers.values()))) or 'no node'} wrote")


def advance(graph: Graph, position: Position, outcomes: Mapping[str, Outcome], state: Any) -> Position:
    """The next position, by the edges that the nodes of this one take."""
    led: list[tuple[str, str]] = []
    for name, node in graph.nodes.items():
        match outcomes.get(name):
            case None:
                continue
            case Failed(error):
                if node.on_error is None:
                    return position._replace(superstep=position.superstep + 1, frontier=(), arrived={}, failure=error)
                led.append((name, node.on_error))
            case Wrote():
                led += [(name, edge.target) for edge in _taken(graph, name, state)]
    return _enter(graph, position, led)


def fail(position: Position, error: NodeError) -> Position:
    """Nothing more is to be done: the run has failed."""
    return position._replace(frontier=(), arrived={}, failure=error)


def _enter(graph: Graph, position: Position, led: list[tuple[str, str]]) -> Position:
    arrived = {name: set(sources) for name, sources in position.arrived.items()}
    due = set()
    for source, target in led:
        if target in graph.joins:
            arrived.setdefault(target, set()).add(source)
        else:
            due.add(target)
    for name in [name for name, sources in arrived.items() if sources == set(graph.predecessors(name))]:
        del arrived[name]
        due.add(name)
    if not due and arrived:
        name, sources = next(iter(sorted(arrived.items())))
        missing = sorted(set(graph.predecessors(name)) - sources)
        raise FlowError(f"join {name!r} waits for {missing}, and nothing is left that could lead there")
    frontier = tuple(name for name in graph.nodes if name in due)
    visits = dict(position.visits)
    for name in frontier:
        visits[name] = visits.get(name, 0) + 1
    waiting = {name: tuple(sorted(sources)) for name, sources in sorted(arrived.items())}
    after = Position(position.superstep + 1, frontier, visits, waiting)
    for name in frontier:
        limit = graph.nodes[name].max_visits
        if limit is not None and visits[name] > limit:
            message = f"node {name!r} was visited {limit} times, which is its max_visits, and the flow leads there again"
            return fail(after._replace(visits=position.visits), NodeError(name, "", "StepLimitReached", message))
    return after


def _taken(graph: Graph, name: str, state: Any) -> list[Edge]:
    edges = graph.edges_from[name]
    taken = [edge for edge in edges if edge.when is None or _holds(edge, graph.shape.copy(state))]
    if not taken and name not in graph.ends:
        raise FlowError(f"no edge leads on from {name!r}: of {[edge.target for edge in edges]} none has a `when` that holds")
    return taken


def _holds(edge: Edge, state: Any) -> bool:
    assert edge.when is not None
    try:
        return bool(edge.when(state))
    except Exception as error:
        raise FlowError(
            f"`when` of the edge {edge.source!r} → {edge.target!r} raised {type(error).__name__}: {error}; the superstep "
            "is not saved, its calls are recorded: mend it and recover"
        ) from error


def _written(node: Node, outcome: Outcome) -> Mapping[str, object]:
    if isinstance(outcome, Wrote):
        return outcome.values
    return {} if node.error_into is None else {node.error_into: str(outcome.error)}


def _claim_field(shape: StateShape[Any], writers: dict[str, str], field: str, name: str) -> None:
    other = writers.setdefault(field, name)
    if other != name and field not in shape.reducers:
        raise FlowError(
            f"nodes {other!r} and {name!r} write field {field!r} in one superstep, and it has no reducer; "
            f"declare one: {field}: Annotated[…, reducer]"
        )


def _reduce(shape: StateShape[Any], field: str, held: Any, value: object, name: str) -> object:
    reducer = shape.reducers.get(field)
    if reducer is None:
        return value
    try:
        return reducer(held, value)
    except Exception as error:
        raise FlowError(
            f"the reducer of field {field!r} raised {type(error).__name__} over what node {name!r} wrote: {error}"
        ) from error
