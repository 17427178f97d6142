"""A graph: what is refused when it is built, what changes its digest, and how two of them differ by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest

from agent_runtime.errors import FlowError
from agent_runtime.flow.description import differences
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.state import append
from tests.flow.desk import CHARGE, LOOK, MAIL, Order, chain


def start() -> Flow[Order]:
    return Flow("orders", state=Order).node("a", CHARGE)


async def takes_run(order: Order, run: object) -> None:
    return None


def plain(order: Order) -> None:
    return None


def not_async(order: Order, run: object) -> None:
    return None


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "an edge from an unknown node": (lambda: start().edge("x", "a"), "names 'x', which is no node"),
    "an edge to an unknown node": (lambda: start().edge("a", "x"), "names 'x', which is no node"),
    "an edge twice": (lambda: start().edge("a", "a").edge("a", "a"), "is there already"),
    "an unknown end": (lambda: start().end("x"), "names 'x', which is no node"),
    "no end": (lambda: start().end(), "has no end"),
    "an unknown join": (lambda: start().join("x"), "names 'x', which is no node"),
    "a join of one": (lambda: start().node("b", LOOK).edge("a", "b").join("b").end("b"), "fewer than two"),
    "an unknown on_error": (lambda: start().node("b", LOOK, on_error="x").edge("a", "b").end("b"), "on_error='x'"),
    "an error_into alone": (lambda: Flow("f", state=Order).node("a", LOOK, error_into="note").end("a"), "error_into"),
    "a node that cannot be reached": (lambda: start().node("b", LOOK).end("a", "b"), "'b' of flow 'orders' cannot be reached"),
    "a node with no way to an end": (lambda: start().node("b", LOOK).edge("a", "b").end("a"), "no way leads from node 'b'"),
    "a name twice": (lambda: start().node("a", LOOK), "has a node named 'a' already"),
    "a reserved name": (lambda: Flow("f", state=Order).node("model", LOOK), "no node may be named 'model'"),
    "a name that no place can hold": (lambda: Flow("f", state=Order).node("a/b", LOOK), "found 'a/b'"),
    "a flow without a name": (lambda: Flow("", state=Order), "name of a flow"),
    "an into that is no field": (lambda: Flow("f", state=Order).node("a", Call("lookup", into="x")), "into='x' is no field"),
    "an error_into that is no field": (
        lambda: Flow("f", state=Order).node("a", LOOK, on_error="b", error_into="x"), "error_into='x' is no field"
    ),
    "an over that is no field": (
        lambda: Flow("f", state=Order).map("a", Call("lookup"), over="x", into="found"), "over='x' is no field"
    ),
    "a writes that is no field": (lambda: Flow("f", state=Order).node("a", plain, writes=["x"]), "writes='x' is no field"),
    "writes for a call": (lambda: Flow("f", state=Order).node("a", LOOK, writes=["note"]), "writes= is for functions"),
    "an into in a map's call": (lambda: Flow("f", state=Order).map("a", LOOK, over="names", into="found"), "leave into="),
    "no visits": (lambda: Flow("f", state=Order).node("a", LOOK, max_visits=0), "max_visits= is a whole number"),
    "two writers of one field": (
        lambda: start().node("b", LOOK).node("c", MAIL).edge("a", "b").edge("a", "c").end("b", "c"),
        "'b' and 'c' run in one superstep and both write field 'note'",
    ),
    "two failures into one field": (
        lambda: start().node("m", plain)
        .node("d", Call("lookup"), on_error="m", error_into="trouble")
        .node("e", Call("email"), on_error="m", error_into="trouble")
        .edge("a", "d").edge("a", "e").end("d", "e", "m"),
        "'d' and 'e' run in one superstep and both write field 'trouble'",
    ),
    "two writers that meet later": (
        lambda: start().node("b", plain).node("c", plain).node("d", LOOK).node("e", MAIL)
        .edge("a", "b").edge("a", "c").edge("b", "d").edge("c", "e").end("d", "e"),
        "'d' and 'e' run in one superstep",
    ),
    "a function of too much": (lambda: Flow("f", state=Order).node("a", lambda one, two: None), "takes the state"),
    "a function of nothing": (lambda: Flow("f", state=Order).node("a", lambda: None), "takes the state"),
    "a plain function that takes run": (lambda: Flow("f", state=Order).node("a", not_async), "it is async"),
    "what is no function": (lambda: Flow("f", state=Order).node("a", "lookup"), "its work is a Call"),  # type: ignore[arg-type]
    "a state that is no model": (lambda: Flow("f", state=dict), "pydantic model"),  # type: ignore[type-var]
    "an inner flow over a reducer": (lambda: start().node("b", chain(LOOK)), "field 'notes' has a reducer"),
    "a flow inside that is not complete": (lambda: start().node("b", start()), "is not complete"),
    "enter= for a call": (lambda: start().node("b", LOOK, enter=lambda order: order), "are for an inner flow"),
    "a flow in a map": (
        lambda: start().map("b", chain(LOOK), over="names", into="found"), "found a flow"  # type: ignore[arg-type]
    ),
    "a node after the end": (lambda: chain(LOOK).node("b", LOOK), "is complete; name its ends last"),
    "an edge after the end": (lambda: chain(LOOK).edge("n0", "n0"), "is complete; name its ends last"),
    "a flow that is used before it is complete": (lambda: start().digest, "is not complete"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_graph_is_refused_when_it_is_built(wrong: str) -> None:
    build, told = WRONG[wrong]
    with pytest.raises(FlowError) as refused:
        build()
    assert told in str(refused.value)


def test_writers_that_a_condition_keeps_apart_and_writers_with_a_reducer_are_not_refused() -> None:
    either = start().node("b", LOOK).node("c", MAIL)
    either.edge("a", "b", when=lambda order: True).edge("a", "c", when=lambda order: False).end("b", "c")
    noted = Call("lookup", args=lambda order: {"name": order.to}, into="notes")
    start().node("b", noted).node("c", noted).edge("a", "b").edge("a", "c").end("b", "c")


class Typed(Order):
    rounds: float = 0  # type: ignore[assignment]


class Reduced(Order):
    found: Annotated[list[str], append] = []  # noqa: RUF012  # pydantic copies it


def three(
    b: Call = LOOK, *, name: str = "b", when: bool = True, limit: int | None = None, late: bool = False, state: Any = Order
) -> Flow[Any]:
    """A flow of three nodes, in which one thing may be otherwise."""
    flow = Flow("orders", state=state).node("a", CHARGE)
    if late:
        flow.node("c", plain)
    flow.node(name, b, max_visits=limit)
    if not late:
        flow.node("c", plain)
    return flow.edge("a", name, when=bool if when else None).edge("a", "c").edge(name, "c").end("c")


CHANGES: dict[str, tuple[Flow[Any], str]] = {
    "a renamed node": (three(name="z"), "node 'b' is gone"),
    "another tool": (three(MAIL), "node 'b': tool was 'lookup' and is 'email'"),
    "an edge without its condition": (three(when=False), "edge 'a → b when' is gone"),
    "a limit": (three(limit=2), "node 'b': max_visits was None and is 2"),
    "a field of another type": (three(state=Typed), "field 'rounds' was int and is float"),
    "a field with a reducer": (three(state=Reduced), "field 'found' was list[str] and is list[str] with a reducer"),
    "nodes in another order": (three(late=True), "stand in another order"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_graph_has_another_digest_and_the_change_is_named(change: str) -> None:
    changed, told = CHANGES[change]
    assert changed.digest != three().digest
    assert told in "; ".join(differences(three().described, changed.described))


def test_other_functions_in_the_same_places_are_the_same_graph() -> None:
    def another(order: Order) -> dict[str, object]:
        """Does something else altogether."""
        return {"rounds": 7}

    again = start().node("b", Call("lookup", args=lambda order: {"name": "bo"}, into="note")).node("c", another)
    again.edge("a", "b", when=lambda order: order.rounds > 3).edge("a", "c").edge("b", "c").end("c")
    assert again.digest == three().digest


def test_a_change_inside_an_inner_flow_is_named_with_its_way() -> None:
    before = Flow("outer", state=Order).node("in", chain(LOOK), writes=["note"]).end("in")
    after = Flow("outer", state=Order).node("in", chain(MAIL), writes=["note"]).end("in")
    assert differences(before.described, after.described) == ["node 'in/n0': tool was 'lookup' and is 'email'"]


def test_mermaid_draws_calls_conditions_joins_errors_ends_and_inner_flows() -> None:
    flow = (
        Flow("all", state=Order)
        .node("a", LOOK, on_error="e")
        .node("b", chain(MAIL), writes=["note"])
        .map("m", Call("lookup"), over="names", into="found")
    )
    flow.node("e", plain).node("j", plain)
    flow.edge("a", "b", when=bool).edge("a", "m").edge("b", "j").edge("m", "j").join("j").edge("e", "a").end("j")
    assert flow.mermaid().splitlines() == [
        "flowchart TD",
        '    a["a<br/>lookup"]',
        '    subgraph b["b: orders"]',
        '        b__n0["n0<br/>email"]',
        "        b__n0 --> b___end(((end)))",
        "    end",
        '    m["m<br/>lookup × n"]',
        '    e["e"]',
        '    j{{"j"}}',
        "    a -. when .-> b",
        "    a --> m",
        "    b --> j",
        "    m --> j",
        "    e --> a",
        "    a -- error --> e",
        "    j --> _end(((end)))",
    ]
