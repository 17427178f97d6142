"""What a graph is made of: calls, code, maps over a list, inner graphs, and the edges between them. Frozen values. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias

from agent_runtime.flow.state import StateShape

Arguments: TypeAlias = "Callable[..., Mapping[str, object]]"
"""From the state (in a map: the state and an item) to the arguments of a call."""
Condition: TypeAlias = "Callable[[Any], object]"
"""From the state to whether an edge is taken."""


@dataclass(frozen=True, slots=True)
class Call:
    """A node that makes one tool call: `args` of the state are its arguments, its result goes `into` a field.

    `args` is asked again when the superstep is worked again, and must give the same for the same state.
    """

    tool: str
    _: KW_ONLY
    args: Arguments | None = None
    into: str | None = None


@dataclass(frozen=True, slots=True)
class Code:
    """A function of the state (in a map: of the state and an item); with `run` it makes calls of its own."""

    function: Callable[..., Any]
    takes_run: bool = False
    writes: tuple[str, ...] | None = None
    """The fields it may change; None: any."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """One call, or one function, for each item of a list; the results go `into` a field, in the order of the items."""

    each: Call | Code
    over: str | Callable[[Any], object]
    into: str


@dataclass(frozen=True, slots=True)
class Inner:
    """A graph inside a node. `enter` makes its state, `leave` says what of it changes the state outside."""

    graph: Graph
    enter: Callable[[Any], object] | None = None
    leave: Callable[[Any, Any], Mapping[str, object] | None] | None = None
    writes: tuple[str, ...] | None = None

    def carried_out(self, shape: StateShape[Any]) -> list[str]:
        """The fields that its end changes outside where `leave` does not say: those of one name that it may write."""
        shared = [name for name in self.graph.shape.fields if name in shape.fields]
        return shared if self.writes is None else [name for name in shared if name in self.writes]


Work: TypeAlias = Call | Code | Mapped | Inner


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph: what it does, and where its failure leads."""

    name: str
    work: Work
    on_error: str | None = None
    error_into: str | None = None
    max_visits: int | None = None

    @property
    def writes(self) -> tuple[str, ...] | None:
        """The fields that it may change; None: any, which is known only when it has run."""
        match self.work:
            case Call(into=into):
                return () if into is None else (into,)
            case Mapped(into=into):
                return (into,)
            case Code(writes=writes) | Inner(writes=writes):
                return writes

    @property
    def touches(self) -> tuple[str, ...]:
        """The fields that are known to be changed by it, or by its failure."""
        known = self.writes or ()
        return known if self.error_into is None else (*known, self.error_into)


@dataclass(frozen=True, slots=True)
class Edge:
    """From one node to another, taken where `when` holds of the state."""

    source: str
    target: str
    when: Condition | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole graph; its nodes in the order in which they were added, the first of which is its start."""

    name: str
    shape: StateShape[Any]
    nodes: Mapping[str, Node]
    edges: tuple[Edge, ...]
    joins: frozenset[str]
    ends: frozenset[str]
    edges_from: Mapping[str, tuple[Edge, ...]] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        leaving = {name: tuple(edge for edge in self.edges if edge.source == name) for name in self.nodes}
        object.__setattr__(self, "edges_from", leaving)

    @property
    def start(self) -> str:
        return next(iter(self.nodes))

    def predecessors(self, name: str) -> tuple[str, ...]:
        """The nodes with an edge to that one, in order."""
        return tuple(edge.source for edge in self.edges if edge.target == name)

    def targets(self, name: str) -> set[str]:
        """Where a node may lead: by its edges, and by its failure."""
        found = {edge.target for edge in self.edges_from[name]}
        on_error = self.nodes[name].on_error
        return found if on_error is None else found | {on_error}
