"""Picking a flow's run up with code that changed: what replays, what needs a decision, and what is refused or migrated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CallFailed, FlowError, RecoveryNeedsDecision
from agent_runtime.flow.calls import NodeRun
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.journal.records import RecordKind
from agent_runtime.telemetry import HistorySink
from agent_runtime.testing.faults import FaultyStore, Life, Moment, SimulatedCrash, Where
from tests.bench import Bench, Killed, Place, Worker, error_of
from tests.flow.desk import CHARGE, DONE, LOOK, MAIL, Order, chain, left, recover, run, run_and_die, runner_on, still


def paying(amount: int, tool: str = "charge_i") -> Flow[Order]:
    return chain(Call(tool, args=lambda order: {"amount": amount}, into="note"), LOOK)


async def killed_after_a_finished_call(place: Place, bench: Bench, flow: Flow[Order]) -> None:
    """The call's ending is durable, and its superstep is not saved."""
    await left(place, bench, flow, CrashPoint.AFTER_CONFIRM, commits="each")


async def test_a_call_with_changed_arguments_is_a_new_call_and_the_old_one_is_told_of(place: Place) -> None:
    bench, history = Bench(), HistorySink()
    await killed_after_a_finished_call(place, bench, paying(1))
    result = await recover(Worker(place), bench.registry, paying(2), sinks=[history])
    assert (result.status, result.replayed) == ("done", 0)
    assert bench.remote.keys == ["run:0/n0", "run:0/n0~1"]
    saved = [dict(event.data) for event in history.events if event.name == "checkpoint.saved"]
    assert [data.get("unreplayed") for data in saved] == [["0/n0"], None]


async def test_a_changed_call_that_was_cut_short_again_replays_whichever_is_asked_for(place: Place) -> None:
    bench = Bench()
    await killed_after_a_finished_call(place, bench, paying(1))
    with pytest.raises(Killed):
        await recover(Worker(place).killed_at(CrashPoint.AFTER_CONFIRM), bench.registry, paying(2), commits="each")
    assert bench.remote.keys == ["run:0/n0", "run:0/n0~1"]
    first = await recover(Worker(place).killed_at(CrashPoint.AFTER_CALL, 1), bench.registry, paying(1), max_supersteps=1)
    assert (first.status, first.replayed, first.state.note, bench.effects) == ("failed", 1, "effect 1", 2)


async def test_a_started_call_that_nobody_asks_for_any_more_needs_a_decision_though_it_is_idempotent(place: Place) -> None:
    bench = Bench()
    await left(place, bench, paying(1), CrashPoint.AFTER_CALL)
    for _ in range(2):
        error = await error_of(recover(Worker(place), bench.registry, paying(2)))
        assert isinstance(error, RecoveryNeedsDecision)
        assert error.doubts[0].call == "0/n0"
        assert "other arguments" in error.doubts[0].why
        assert bench.remote.keys == ["run:0/n0"]
    history = HistorySink()
    result = await recover(Worker(place), bench.registry, paying(2), rerun_in_doubt=True, sinks=[history])
    assert (result.status, bench.remote.keys) == ("done", ["run:0/n0", "run:0/n0~1"])
    [saved] = [event for event in history.events if "unreplayed" in event.data]
    assert saved.data["unreplayed"] == ["0/n0"]
    settled = [r for r in (await place.load("run")).records if r.kind == RecordKind.SETTLED]
    assert [record.call for record in settled] == ["0/n0"]


async def test_a_started_call_that_node_code_does_not_make_any_more_needs_a_decision_too(place: Place) -> None:
    bench = Bench()
    calls = 1

    async def some(order: Order, run: NodeRun) -> None:
        for at in range(calls):
            await run.call("charge_i", amount=at)

    flow = Flow("f", state=Order).node("some", some).end("some")
    await left(place, bench, flow, CrashPoint.AFTER_CALL)
    calls = 0
    error = await error_of(recover(Worker(place), bench.registry, flow))
    assert isinstance(error, RecoveryNeedsDecision)
    assert "does not make it any more" in error.doubts[0].why
    calls = 1
    assert (await recover(Worker(place), bench.registry, flow)).status == "done"
    assert bench.effects == 1


async def test_calls_that_node_code_makes_in_another_order_still_replay(place: Place) -> None:
    bench, order = Bench(), [1, 2]

    async def some(_: Order, run: NodeRun) -> dict[str, object]:
        return {"found": [await run.call("charge_i", amount=at) for at in order]}

    flow = Flow("f", state=Order).node("some", some).end("some")
    worker = Worker(place).killed_at(CrashPoint.AFTER_CONFIRM, 0, nth=2)
    await run_and_die(worker, bench.registry, flow, commits="each")
    order.reverse()
    result = await recover(Worker(place), bench.registry, flow)
    assert (result.state.found, result.replayed, bench.effects) == (["effect 2", "effect 1"], 2, 2)


async def test_args_that_are_not_the_same_twice_are_found_and_named_and_nothing_is_lost(place: Place) -> None:
    numbers = iter(range(100))
    unsteady = chain(Call("charge_i", args=lambda order: {"amount": next(numbers)}, into="note"), LOOK)
    bench = Bench()
    await killed_after_a_finished_call(place, bench, unsteady)
    error = await error_of(recover(Worker(place), bench.registry, unsteady))
    assert isinstance(error, FlowError)
    assert "args function of node 'n0' of flow 'orders' gives other arguments each time" in str(error)
    assert (await recover(Worker(place), bench.registry, paying(0))).replayed == 1
    assert bench.effects == 1


async def test_a_refused_call_replays_while_it_is_refused_and_is_made_once_the_tool_takes_it(place: Place) -> None:
    bench, amount = Bench(), "much"
    is_stopped = True

    async def some(order: Order, run: NodeRun) -> dict[str, object]:
        with suppress(CallFailed):
            await run.call("charge_i", amount=amount)
        if is_stopped:
            raise KeyError("a bug")
        return {}

    flow = Flow("f", state=Order).node("some", some).end("some")
    assert isinstance(await error_of(run(Worker(place), bench.registry, flow)), KeyError)
    amount, is_stopped = 3, False  # type: ignore[assignment]
    assert (await recover(Worker(place), bench.registry, flow)).status == "done"
    assert bench.remote.keys == ["run:0/some.0~1"]


class Smaller(BaseModel):
    amount: int = 40
    to: str = "ana"
    note: str = ""


def pair(first: str = "n0", *, state: Any = Order, when: Callable[[Any], object] | None = None) -> Flow[Any]:
    """What `chain(CHARGE, LOOK)` is, in which one thing may be otherwise."""
    return Flow("orders", state=state).node(first, CHARGE).node("n1", LOOK).edge(first, "n1", when=when).end("n1")


CHANGED: dict[str, tuple[Callable[[], Flow[Any]], str]] = {
    "a renamed node": (lambda: pair("paid"), "node 'n0' is gone"),
    "a dropped field": (lambda: pair(state=Smaller), "field 'notes' is gone"),
    "another tool": (lambda: chain(MAIL, LOOK), "node 'n0': tool was 'charge_i' and is 'email'"),
    "another edge": (lambda: pair(when=bool), "edge 'n0 → n1' is gone"),
}


@pytest.mark.parametrize("change", CHANGED)
async def test_a_changed_graph_is_refused_by_name_and_leaves_the_run_as_it_was(change: str, place: Place) -> None:
    build, told = CHANGED[change]
    bench = Bench()
    await left(place, bench, chain(CHARGE, LOOK), CrashPoint.AFTER_CALL)
    before = await place.load("run")
    error = await error_of(recover(Worker(place), bench.registry, build()))
    assert isinstance(error, FlowError)
    assert told in str(error)
    assert still(await place.load("run")) == still(before)
    everything = await runner_on(Worker(place), bench.registry).recover_all(build())
    assert [type(each) for each in everything.values()] == [FlowError]
    assert (await recover(Worker(place), bench.registry, chain(CHARGE, LOOK))).state == DONE


async def test_migrate_maps_the_old_state_to_the_new_one_and_is_on_record(place: Place) -> None:
    class Renamed(BaseModel):
        cents: int
        note: str = ""

    new = Flow("orders", state=Renamed).node("n0", Call("charge_i", args=lambda s: {"amount": s.cents}, into="note"))
    new.node("n1", Call("lookup", args=lambda s: {"name": str(s.cents)}, into="note")).edge("n0", "n1").end("n1")
    bench = Bench()
    await left(place, bench, chain(CHARGE, LOOK), CrashPoint.AFTER_CALL)

    def migrate(old: dict[str, Any]) -> Renamed:
        return Renamed(cents=old["amount"], note=old["note"])

    for wrong, told in (
        (lambda old: old, "does not fit"),
        (lambda old: 1 / 0, "raised ZeroDivisionError"),
        (len, "found int"),
    ):
        error = await error_of(recover(Worker(place), bench.registry, new, migrate=wrong))
        assert isinstance(error, FlowError)
        assert told in str(error)
    with pytest.raises(Killed):
        await recover(Worker(place).killed_at(CrashPoint.AFTER_INTENT), bench.registry, new, migrate=migrate)
    error = await error_of(recover(Worker(place), bench.registry, chain(CHARGE, LOOK)))
    assert isinstance(error, FlowError), "it sleeps under the new graph now"
    result = await recover(Worker(place), bench.registry, new)
    assert result.state == Renamed(cents=40, note="what is known of 40")
    assert bench.remote.keys == [
        "run:0/n0",
        "run:0/n0",
    ]
    assert sum(record.kind == RecordKind.MIGRATED for record in (await place.load("run")).records) == 1


async def test_a_migration_cannot_lose_the_node_at_which_the_run_stands(place: Place) -> None:
    bench = Bench()
    await left(place, bench, chain(CHARGE, CHARGE, LOOK), CrashPoint.AFTER_CALL, 1)
    error = await error_of(recover(Worker(place), bench.registry, chain(CHARGE), migrate=dict))
    assert isinstance(error, FlowError)
    assert "stands at node 'n1', which the graph has no more" in str(error)


@pytest.mark.parametrize("commits", ["grouped", "each"])
@pytest.mark.parametrize("superstep", [0, 1])
async def test_a_migration_that_is_cut_short_at_any_write_is_made_again(superstep: int, commits: str, place: Place) -> None:
    class Cents(BaseModel):
        cents: int
        note: str = ""

    new = Flow("orders", state=Cents).node("n0", Call("charge_i", args=lambda s: {"amount": s.cents}, into="note"))
    new.node("n1", Call("charge_i", args=lambda s: {"amount": s.cents + 1}, into="note")).edge("n0", "n1").end("n1")
    old = chain(CHARGE, Call("charge_i", args=lambda order: {"amount": order.amount + 1}, into="note"))

    def migrate(before: dict[str, Any]) -> Cents:
        return Cents(cents=before["amount"], note=before["note"])

    for number in range(1, 5):
        for where in (Where.BEFORE_WRITE, Where.AFTER_WRITE):
            bench, run_id = Bench(), f"{where.name}-{number}"
            await left(place, bench, old, CrashPoint.AFTER_CALL, superstep, run_id=run_id)
            dying = Worker(place)
            dying.inner = FaultyStore(place.open(), life=Life(Moment(where, number)))
            with pytest.raises(SimulatedCrash):
                await recover(dying, bench.registry, new, run_id, migrate=migrate, commits=commits)
            result = await recover(Worker(place), bench.registry, new, run_id, migrate=migrate)
            assert (result.status, result.state) == ("done", Cents(cents=40, note="effect 2"))
            assert bench.effects == 2
