"""A run in each state that it can stand in when somebody decides about it from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agent_runtime import Runs
from agent_runtime.crash import CrashPoint
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, StoredMessage, StoredRun
from agent_runtime.journal.store import Answer, CheckpointStore
from tests.bench import KEY, Asked, Bench, Delegate, Place, Script, Worker, error_of, until

CHARGE: list[Asked] = [("charge", {"amount": 5})]
CHARGE_I: list[Asked] = [("charge_i", {"amount": 5})]
AT_REST = ("dead", "doubtful", "paused", "blocked", "done", "failed", "cancelled", "cancelled in doubt", "quarantined")
STATES = ("alive", *AT_REST)


class Overtaken(Delegate):
    """Somebody else's message is there just before one's own, and after one has looked."""

    def __init__(self, inner: CheckpointStore, message: StoredMessage) -> None:
        super().__init__(inner)
        self.message = message

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        await super().post(run_id, self.message)
        return await super().post(run_id, message)


def operator(place: Place, **options: Any) -> Runs:
    return Runs(place.open(), checkpoint_key=KEY, **options)


def script() -> Script:
    return Script(CHARGE, "done")


async def die(place: Place, bench: Bench, point: CrashPoint, run: str = "run", model: Script | None = None) -> None:
    await Worker(place).killed_at(point).run_and_die(model or script(), bench.registry, run)


async def block(place: Place, bench: Bench, run: str = "run") -> None:
    """A call of the run is in doubt, and its worker said so."""
    await die(place, bench, CrashPoint.AFTER_CALL, run)
    assert await error_of(Worker(place).recover(script(), bench.registry, run))


async def bring_to(place: Place, state: str, run: str = "run") -> Bench:
    """Bring a run to a state in which nobody works it; gives the bench that its tools are on."""
    bench = Bench(needs_approval=state == "paused")
    match state:
        case "dead":
            await die(place, bench, CrashPoint.AFTER_DECIDE, run)
        case "doubtful":
            await die(place, bench, CrashPoint.AFTER_CALL, run)
        case "paused":
            assert (await Worker(place).run(script(), bench.registry, run)).status == "paused"
        case "blocked":
            await block(place, bench, run)
        case "done":
            await Worker(place).run(Script("done"), bench.registry, run)
        case "failed":
            assert await error_of(Worker(place).run(Script(CHARGE), bench.registry, run, max_steps=1))
        case "cancelled":
            await die(place, bench, CrashPoint.AFTER_DECIDE, run)
            assert await operator(place).cancel(run, by="ana", why="enough")
        case "cancelled in doubt":
            await block(place, bench, run)
            assert await operator(place).cancel(run, by="ana", why="enough")
        case _:
            assert state == "quarantined"
            await die(place, bench, CrashPoint.AFTER_CALL, run, Script(CHARGE_I, "done"))
            dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
            await dying.recover_and_die(Script(CHARGE_I, "done"), bench.registry, run)
            assert await error_of(Worker(place).recover(Script(CHARGE_I, "done"), bench.registry, run, max_attempts=1))
    return bench


@asynccontextmanager
async def alive(place: Place, run: str = "run", **options: Any) -> AsyncIterator[tuple[asyncio.Task[Any], Bench]]:
    """A run whose worker is inside its call until the block is left."""
    leave, bench = asyncio.Event(), Bench()

    async def before(_: str, __: dict[str, object]) -> None:
        await leave.wait()

    bench.before = before
    task = asyncio.ensure_future(Worker(place).run(script(), bench.registry, run, **options))
    await until(lambda: bench.entered.total() > 0 or task.done())
    try:
        yield task, bench
    finally:
        leave.set()
        await asyncio.wait({task})


def kinds(run: StoredRun, since: int = 0) -> list[str]:
    """What the records say, in order."""
    return [RecordKind(record.kind).name.lower() for record in run.records[since:]]


async def stored(place: Place, run: str = "run") -> StoredRun:
    """The run as it is stored, but for how long ago its owner was heard, which is told anew with each look."""
    found = await place.load(run)
    return found._replace(row=found.row._replace(idle_ms=0))
