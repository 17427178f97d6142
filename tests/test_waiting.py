"""A worker that waits beside a run: it goes on as soon as somebody has said something, and no later than it said."""

from __future__ import annotations

import asyncio

import pytest

from agent_runtime.errors import InvalidSetting, RecoveryNeedsDecision
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, post_message
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.states import Settlement
from agent_runtime.recovery import read_verified
from agent_runtime.run import Backing
from agent_runtime.settlements import Said, said_to_plain
from tests.bench import RING, Asked, Bench, Place, Script, Worker, until

RUN = RunId("run")
CALL: list[Asked] = [("charge", {"amount": 5})]
LONG = 60.0


async def post(place: Place, kind: MessageKind, body: dict[str, object]) -> None:
    """Leave a message to the run, as another process would."""
    await post_message(place.open(), sealer_for(RING, tenant="", run_id=RUN), kind, body)


async def parked(place: Place) -> None:
    store = place.open()
    for _ in range(20_000):
        if (stored := await store.latest(RUN)) is not None and stored.row.status in (RunStatus.PAUSED, RunStatus.BLOCKED):
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the run was to be parked")


async def test_a_worker_that_waits_goes_on_with_the_verdict_that_is_posted(place: Place) -> None:
    bench, model = Bench(needs_approval=True), Script(CALL, "done")
    working = asyncio.ensure_future(Worker(place).run(model, bench.registry, wait_seconds=LONG))
    await parked(place)
    [request] = (await read_verified(Backing(place.open(), RING), RUN)).pending
    assert bench.effects == 0
    await post(place, MessageKind.VERDICT, request.approve(by="ana").to_plain())
    result = await asyncio.wait_for(working, 20)
    assert (result.status, bench.effects, model.asked) == ("done", 1, 2)


async def test_a_worker_that_waits_is_told_of_a_settlement_and_of_a_cancel(place: Place) -> None:
    bench, model = Bench(timeout=0.01), Script(CALL, CALL, "done")

    async def late(_: str, __: dict[str, object]) -> None:
        await asyncio.Event().wait()

    bench.after = late
    working = asyncio.ensure_future(Worker(place).run(model, bench.registry, wait_seconds=LONG))
    await parked(place)
    said = Said("0", 1, Settlement.DONE, "ana", "seen at the bank", b'{"result":"effect 1"}')
    await post(place, MessageKind.SETTLE, said_to_plain(said))
    await until(lambda: model.asked == 2)
    await parked(place)
    await post(place, MessageKind.CANCEL, {"by": "ana", "why": "enough"})
    result = await asyncio.wait_for(working, 20)
    assert (result.status, bench.effects) == ("cancelled", 2)


async def test_a_worker_gives_up_waiting_after_its_time_and_leaves_the_run_as_it_was(place: Place) -> None:
    bench, model = Bench(needs_approval=True), Script(CALL, "done")
    result = await Worker(place).run(model, bench.registry, wait_seconds=0.01)
    assert (result.status, [request.id for request in result.pending]) == ("paused", ["0"])
    before = await place.load("run")
    again = await Worker(place).recover(model, bench.registry, wait_seconds=0.01)
    assert (again.status, (await place.load("run")).records) == ("paused", before.records)


async def test_a_worker_that_waits_beside_a_doubt_names_it_in_the_end(place: Place) -> None:
    bench, model = Bench(timeout=0.01), Script(CALL, "done")

    async def late(_: str, __: dict[str, object]) -> None:
        await asyncio.Event().wait()

    bench.after = late
    with pytest.raises(RecoveryNeedsDecision):
        await Worker(place).run(model, bench.registry, wait_seconds=0.01)


async def test_another_worker_may_pick_the_run_up_beside_the_one_that_waits(place: Place) -> None:
    bench, model = Bench(needs_approval=True), Script(CALL, "done")
    working = asyncio.ensure_future(Worker(place).run(model, bench.registry, wait_seconds=LONG))
    await parked(place)
    [request] = (await read_verified(Backing(place.open(), RING), RUN)).pending
    other = await Worker(place).recover(model, bench.registry, verdicts=[request.approve(by="ana")])
    assert (other.status, bench.effects) == ("done", 1)
    working.cancel()
    await asyncio.wait([working])
    assert bench.effects == 1


async def test_a_worker_that_waited_in_vain_gives_what_others_made_of_the_run_meanwhile(place: Place) -> None:
    bench, model = Bench(needs_approval=True), Script(CALL, "done")
    working = asyncio.ensure_future(Worker(place).run(model, bench.registry, wait_seconds=1))
    await parked(place)
    [request] = (await read_verified(Backing(place.open(), RING), RUN)).pending
    await Worker(place).recover(model, bench.registry, verdicts=[request.approve(by="ana")])
    result = await asyncio.wait_for(working, 20)
    assert (result.status, result.output, bench.effects) == ("done", "done", 1)


@pytest.mark.parametrize("seconds", [-1, "1", None, float("nan"), True])
async def test_a_time_that_is_none_is_refused(place: Place, seconds: object) -> None:
    with pytest.raises(InvalidSetting, match="wait_seconds= is a number of seconds from 0"):
        await Worker(place).run(Script("done"), Bench().registry, wait_seconds=seconds)
