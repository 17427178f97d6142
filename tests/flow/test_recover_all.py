"""`recover_all`: every unfinished run of a flow to its result or its error, some side by side, none in another's way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict, CheckpointStoreCorrupt, InvalidSetting, RecoveryNeedsDecision
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.runner import FlowResult
from agent_runtime.flow.unfinished import PAGE
from agent_runtime.journal.journal import guard_of
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.store import Append
from agent_runtime.telemetry import HistorySink
from tests.bench import Bench, NoHeartbeat, Place, Script, Worker, error_of
from tests.flow.desk import CHARGE, LOOK, MAIL, Order, chain, run, run_and_die, runner_on


async def left(place: Place, bench: Bench, flow: Flow[Any], *run_ids: str) -> None:
    """Runs whose workers died inside their first call."""
    for run_id in run_ids:
        await run_and_die(Worker(place).killed_at(CrashPoint.AFTER_CALL), bench.registry, flow, run_id=run_id)


async def test_every_unfinished_run_is_mapped_to_its_result_or_its_error_and_none_stops_the_rest(place: Place) -> None:
    bench, flow = Bench(), chain(CHARGE, LOOK)
    doubtful = chain(MAIL, LOOK)
    await left(place, bench, flow, "a", "c", "d")
    await run(Worker(place), bench.registry, flow, run_id="done")
    await left(place, bench, doubtful, "b")
    await left(place, bench, chain(CHARGE, LOOK, name="others"), "others")
    loop = Worker(place).killed_at(CrashPoint.BEFORE_DECIDE)
    await loop.run_and_die(Script("done"), bench.registry, "loop", name="orders", commits="each")
    history = HistorySink()
    results = await runner_on(Worker(place), bench.registry, sinks=[history]).recover_all(flow)
    assert list(results) == ["a", "b", "c", "d"]
    assert [type(result).__name__ for result in results.values()] == ["FlowResult", "FlowError", "FlowResult", "FlowResult"]
    told = [event for event in history.events if event.name == "recovery.progress"]
    assert sorted((event.run_id, event.data["outcome"]) for event in told) == [
        ("a", "done"), ("b", "FlowError"), ("c", "done"), ("d", "done"),
    ]  # fmt: skip
    assert [event.data["recovered"] for event in told] == [1, 2, 3, 4]
    assert dict(told[-1].data) == {
        "kind": "flow",
        "flow": "orders",
        "outcome": told[-1].data["outcome"],
        "recovered": 4,
        "found": 4,
    }
    assert bench.remote.count("charge_i") == 5, "each key had one effect"
    [only] = (await runner_on(Worker(place), bench.registry).recover_all(doubtful)).items()
    assert (only[0], type(only[1])) == ("b", RecoveryNeedsDecision)
    [result] = (await runner_on(Worker(place), bench.registry).recover_all(doubtful, rerun_in_doubt=True)).values()
    assert isinstance(result, FlowResult)
    assert (result.status, bench.remote.count("email")) == ("done", 2)
    assert await runner_on(Worker(place), bench.registry).recover_all(flow) == {}


async def test_no_more_runs_are_picked_up_side_by_side_than_it_was_told(place: Place) -> None:
    bench, flow = Bench(), chain(CHARGE, LOOK)
    await left(place, bench, flow, *(f"run-{at}" for at in range(9)))
    working, most = 0, 0

    async def enter(tool: str, args: dict[str, object]) -> None:
        nonlocal working, most
        working += 1
        most = max(most, working)
        await asyncio.sleep(0.001)
        working -= 1

    bench.before = enter
    results = await runner_on(Worker(place), bench.registry).recover_all(flow, at_once=4)
    assert len(results) == 9
    assert most == 4
    with pytest.raises(InvalidSetting):
        await runner_on(Worker(place), bench.registry).recover_all(flow, at_once=0)


async def test_a_run_that_this_process_works_is_left_alone_and_reported(place: Place) -> None:
    bench, flow = Bench(), chain(CHARGE, LOOK)
    entered, go = asyncio.Event(), asyncio.Event()

    async def stand(tool: str, args: dict[str, object]) -> None:
        entered.set()
        await go.wait()

    bench.before = stand
    runner = runner_on(Worker(place), bench.registry)
    living = asyncio.ensure_future(runner.run(flow, Order(), run_id="run"))
    await entered.wait()
    [error] = (await runner.recover_all(flow)).values()
    assert isinstance(error, CheckpointConflict)
    go.set()
    assert (await living).status == "done"
    assert bench.entered["charge_i"] == 1


async def test_a_run_whose_owner_lets_go_in_time_is_waited_for(place: Place) -> None:
    bench, flow = Bench(), chain(CHARGE, LOOK)
    worker, entered = Worker(place), asyncio.Event()

    async def hang(tool: str, args: dict[str, object]) -> None:
        if not entered.is_set():
            entered.set()
            await asyncio.Event().wait()

    bench.before = hang
    options: dict[str, Any] = {"lease_seconds": 0.6, "heartbeat_seconds": 0.2, "offload": NoHeartbeat()}
    frozen = asyncio.ensure_future(error_of(run(worker, bench.registry, flow, **options)))
    await entered.wait()
    began = SYSTEM_CLOCK.monotonic()
    [result] = (await runner_on(Worker(place), bench.registry).recover_all(flow, wait_seconds=20)).values()
    assert isinstance(result, FlowResult)
    assert (result.status, bench.entered["charge_i"]) == ("done", 2)
    assert SYSTEM_CLOCK.monotonic() - began < 15
    frozen.cancel()
    await asyncio.wait([frozen])


async def test_a_run_that_was_tampered_with_is_reported_and_the_others_go_on(place: Place) -> None:
    bench, flow = Bench(), chain(CHARGE, LOOK)
    await left(place, bench, flow, "a", "b")
    place.is_tampered = True
    store, stored = place.open(), await place.load("a")
    record = stored.records[-1]
    forged = record._replace(number=record.number + 1, body=b"{}")
    row = stored.row._replace(number=forged.number, head=forged.seal)
    await store.commit([Append(row, guard_of(stored.row), (forged,))])
    results = await runner_on(Worker(place), bench.registry).recover_all(flow)
    assert [type(result) for result in results.values()] == [CheckpointStoreCorrupt, FlowResult]


async def test_all_pages_are_read_and_what_had_happened_does_not_happen_again(tmp_path: Path) -> None:
    place, bench, flow, count = Place("memory", tmp_path), Bench(), chain(CHARGE, LOOK), PAGE + 20
    dying, all_entered = Worker(place), asyncio.Event()

    async def stand(tool: str, args: dict[str, object]) -> None:
        if bench.entered["charge_i"] == count:
            all_entered.set()
        await asyncio.Event().wait()

    bench.after = stand
    runner = runner_on(dying, bench.registry)
    tasks = [asyncio.ensure_future(runner.run(flow, Order(), run_id=f"left-{at:04}")) for at in range(count)]
    await all_entered.wait()
    dying.is_dead = True
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    bench.after = Bench().after
    results = await runner_on(Worker(place), bench.registry).recover_all(flow)
    assert len(results) == count
    assert {result.status for result in results.values() if isinstance(result, FlowResult)} == {"done"}
    assert bench.remote.count("charge_i") == count
    assert {row.status for row in await place.open().list_runs(limit=10_000)} == {RunStatus.DONE}
    await place.close()
