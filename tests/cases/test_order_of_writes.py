"""Records are stored before anything that stands on them, however slow a write is and whenever the worker dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import RecoveryNeedsDecision
from agent_runtime.ids import RunId, is_reply
from agent_runtime.journal.records import RecordKind, StoredRun
from agent_runtime.journal.store import Answer, Append
from tests.bench import Asked, Bench, Killed, Place, Script, Worker, error_of, kill_when, until

STEPS: list[list[Asked]] = [
    [("charge_i", {"amount": 1})],
    [("charge", {"amount": 2})],
    [("charge_i", {"amount": 3}), ("lookup", {"name": "a"})],
    [("charge", {"amount": 4})],
]
OUTCOMES = {RecordKind.DONE, RecordKind.UNRECORDABLE, RecordKind.PENDING}


class Late(Worker):
    """Its store takes its time over each write that holds a kind of record, and the worker may die meanwhile."""

    def __init__(self, place: Place, kind: RecordKind, nth: int, moment: asyncio.Event, *, landed: bool) -> None:
        super().__init__(place)
        self.kind, self.left, self.moment, self.landed = kind, nth, moment, landed

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        late = any(record.kind == self.kind for append in appends for record in append.records)
        self.left -= late
        if not late or self.left:
            return await super().commit(appends)
        if self.landed:
            await super().commit(appends)
        self.moment.set()
        await until(lambda: self.is_dead)
        raise Killed("while it waited for its store")


def assert_in_order(run: StoredRun) -> None:
    """Where a decision is visible, every call of the one before it has an ending."""
    calls = [record for record in run.records if record.call]
    for record in calls:
        if is_reply(record.call) and record.kind == RecordKind.STARTED:
            seq = int(record.call.split("/")[0])
            before = [r for r in calls if r.number < record.number and not is_reply(r.call)]
            started = {r.call for r in before if int(r.call.split(".")[0]) < seq and r.kind == RecordKind.STARTED}
            assert started == {r.call for r in before if int(r.call.split(".")[0]) < seq and r.kind in OUTCOMES}


async def recover_to_the_end(place: Place, bench: Bench, model: Script) -> bool:
    """Recover, and allow a call in doubt to run again once it was refused; whether one was."""
    error = await error_of(Worker(place).recover(model, bench.registry))
    if error is None:
        return False
    assert isinstance(error, RecoveryNeedsDecision), error
    assert [doubt.tool for doubt in error.doubts] == ["charge"]
    await Worker(place).recover(model, bench.registry, rerun_in_doubt=error.doubts)
    return True


@pytest.mark.parametrize("landed", [False, True], ids=["before it is durable", "after it is durable"])
@pytest.mark.parametrize("kind", [RecordKind.DONE, RecordKind.STARTED], ids=["outcome", "intent"])
@pytest.mark.parametrize("nth", range(1, 9))
async def test_a_worker_that_dies_while_a_write_is_under_way_leaves_things_in_order(
    place: Place, kind: RecordKind, nth: int, landed: bool
) -> None:
    bench, model, moment = Bench(), Script(*STEPS, "done"), asyncio.Event()
    worker = Late(place, kind, nth, moment, landed=landed)
    await kill_when(worker, worker.run(model, bench.registry), moment)
    [stored] = await place.open().load_many([RunId("run")])
    if stored is None:
        assert (kind, nth, landed, bench.effects) == (RecordKind.STARTED, 1, False, 0)
        return
    assert_in_order(stored)
    was_in_doubt = await recover_to_the_end(place, bench, model)
    assert_in_order(await place.load("run"))
    assert bench.remote.count("charge_i") == 2
    assert bench.remote.count("charge") == 2 or was_in_doubt


@pytest.mark.parametrize("seed", range(25))
async def test_no_call_runs_twice_in_silence_whenever_the_worker_dies(place: Place, seed: int) -> None:
    chance = random.Random(seed)
    bench, model = Bench(), Script(*STEPS, "done")
    worker = Worker(place).killed_at(chance.choice(list(CrashPoint)), chance.randrange(4))
    was_in_doubt = False
    try:
        await worker.run(model, bench.registry, commits=chance.choice(["grouped", "each"]))
    except Killed:
        [stored] = await place.open().load_many([RunId("run")])
        if stored is None:
            return  # it died before its run was there
        assert_in_order(stored)
        was_in_doubt = await recover_to_the_end(place, bench, model)
    assert_in_order(await place.load("run"))
    assert bench.remote.count("charge_i") == 2
    assert bench.remote.count("charge") == 2 or was_in_doubt
