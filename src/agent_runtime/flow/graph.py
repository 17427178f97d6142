"""Flow: nodes, edges, joins, maps and ends, put together one by one and checked as a whole by `end`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, Self

from agent_runtime import codec
from agent_runtime.errors import FlowError
from agent_runtime.flow.checks import check_graph, check_name, check_node
from agent_runtime.flow.description import Described, describe, digest_of, draw
from agent_runtime.flow.nodes import Call, Code, Condition, Edge, Graph, Inner, Mapped, Node
from agent_runtime.flow.state import S, StateShape
from agent_runtime.tools import is_async_callable

RUN_PARAMETER = "run"


class Flow(Generic[S]):
    """A graph of nodes over a state. The first node added is its start; `end` names its ends and completes it.

    What cannot be is refused with `FlowError` as it is added, or by `end`, which looks at the whole.
    """

    def __init__(self, name: str, *, state: type[S]) -> None:
        check_name("flow", name)
        self.name = name
        self.shape = StateShape(state)
        self._nodes: dict[str, Node] = {}
        self._edges: list[Edge] = []
        self._joins: set[str] = set()
        self._graph: Graph | None = None

    def node(
        self,
        name: str,
        work: Call | Flow[Any] | Callable[..., Any],
        *,
        on_error: str | None = None,
        error_into: str | None = None,
        max_visits: int | None = None,
        writes: Sequence[str] | None = None,
        enter: Callable[[S], object] | None = None,
        leave: Callable[[S, Any], Mapping[str, object] | None] | None = None,
    ) -> Self:
        """Add a node: a `Call`; a function of the state, or of the state and `run`; or another flow, which is complete.

        `on_error`: the node that a failure leads to, with the error as text in the field `error_into`. `max_visits`:
        being led there once more fails the run. `writes`: the fields that a function may change. `enter(state)` makes
        the state of an inner flow, `leave(state, inner)` says which fields its end changes; without them, fields of one
        name are carried over.
        """
        if isinstance(work, Flow):
            done: Call | Code | Inner = Inner(work.graph, enter, leave, _names(writes))
        elif enter is not None or leave is not None:
            raise FlowError(f"node {name!r}: enter= and leave= are for an inner flow")
        elif isinstance(work, Call):
            done = work
        else:
            done = _code(name, work, 1, _names(writes))
        if writes is not None and isinstance(work, Call):
            raise FlowError(f"node {name!r}: a Call writes what its into= names; writes= is for functions and flows")
        return self._add(Node(name, done, on_error, error_into, max_visits))

    def map(
        self,
        name: str,
        work: Call | Callable[..., Any],
        *,
        over: str | Callable[[S], object],
        into: str,
        on_error: str | None = None,
        error_into: str | None = None,
        max_visits: int | None = None,
    ) -> Self:
        """Add a node that works each item of a list: the field `over`, or what that function of the state gives.

        `work` is a `Call` whose `args` take the state and the item, or a function of the state and the item (and `run`)
        that returns a result. The results go `into` a field as a list, in the order of the items.
        """
        if isinstance(work, Call) and work.into is not None:
            raise FlowError(f"map {name!r}: its results go into {into!r}; leave into= of the Call away")
        if isinstance(work, Flow):
            raise FlowError(f"map {name!r}: an item is worked by a Call or a function, found a flow")
        each = work if isinstance(work, Call) else _code(name, work, 2, None)
        return self._add(Node(name, Mapped(each, over, into), on_error, error_into, max_visits))

    def edge(self, source: str, target: str, *, when: Condition | None = None) -> Self:
        """Lead from one node to another, where `when(state)` holds. All edges that are taken lead on side by side."""
        self._require_open()
        for name in (source, target):
            self._require_node(name, f"the edge {source!r} → {target!r}")
        if any((edge.source, edge.target) == (source, target) for edge in self._edges):
            raise FlowError(f"the edge {source!r} → {target!r} is there already; let one `when` say both")
        self._edges.append(Edge(source, target, when))
        return self

    def join(self, *names: str) -> Self:
        """Let these nodes wait for all their predecessors."""
        self._require_open()
        for name in names:
            self._require_node(name, "a join")
        self._joins.update(names)
        return self

    def end(self, *names: str) -> Self:
        """Name the ends, and complete the flow: a wrong graph is refused here."""
        self._require_open()
        if not names:
            raise FlowError(f"flow {self.name!r} has no end; name one in .end(…)")
        for name in names:
            self._require_node(name, "an end")
        graph = Graph(self.name, self.shape, self._nodes, tuple(self._edges), frozenset(self._joins), frozenset(names))
        check_graph(graph)
        self._graph = graph
        return self

    @property
    def graph(self) -> Graph:
        """The whole graph; `FlowError` where the flow is not complete."""
        if self._graph is None:
            raise FlowError(f"flow {self.name!r} is not complete: name its ends in .end(…)")
        return self._graph

    @cached_property
    def described(self) -> Described:
        """The graph as plain data, as a run records it."""
        return describe(self.graph)

    @cached_property
    def recorded(self) -> bytes:
        """The description as it is recorded."""
        return codec.encode(self.described)

    @cached_property
    def digest(self) -> str:
        """Changes with the nodes, the edges, the calls and the state's fields, and with nothing else."""
        return digest_of(self.described)

    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart."""
        return draw(self.graph)

    def _add(self, node: Node) -> Self:
        self._require_open()
        check_name("node", node.name)
        if node.name in self._nodes:
            raise FlowError(f"flow {self.name!r} has a node named {node.name!r} already")
        check_node(self.shape, node)
        self._nodes[node.name] = node
        return self

    def _require_open(self) -> None:
        if self._graph is not None:
            raise FlowError(f"flow {self.name!r} is complete; name its ends last")

    def _require_node(self, name: str, where: str) -> None:
        if name not in self._nodes:
            raise FlowError(f"{where} names {name!r}, which is no node of flow {self.name!r}; it has {list(self._nodes)}")


def _names(writes: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if writes is None else tuple(writes)


def _code(name: str, function: object, given: int, writes: tuple[str, ...] | None) -> Code:
    """A function as the work of a node: of so many things, and of `run` where it names that last."""
    what = "the state" if given == 1 else "the state and an item"
    if not callable(function):
        raise FlowError(f"node {name!r}: its work is a Call, a function of {what}, or a flow, found {function!r}")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise FlowError(f"node {name!r}: the signature of {function!r} cannot be read: {error}") from error
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    takes_run = len(parameters) > given and parameters[given].name == RUN_PARAMETER
    needed = [each for each in parameters if each.default is each.empty and each.kind not in stars]
    others = [each for each in needed if each.name != RUN_PARAMETER]
    if len(others) != given or any(each.kind is each.KEYWORD_ONLY for each in needed):
        found = [each.name for each in needed]
        raise FlowError(f"node {name!r}: its function takes {what}, and may take `run` after that; found {found}")
    if takes_run and not is_async_callable(function):
        raise FlowError(f"node {name!r}: a function that takes `run` awaits its calls, so it is async")
    return Code(function, takes_run, writes)
