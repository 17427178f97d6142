"""Work that lasts longer than a lease: the worker that does it stays its owner; one that froze can change nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from agent_runtime.errors import CheckpointConflict, RecoveryNeedsDecision
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tools import ToolRegistry
from tests.bench import Bench, NoHeartbeat, Place, Script, Worker, error_of, results_in, until

LEASE, BEAT, WORK = 0.6, 0.2, 1.5


class Watcher:
    """Another thread that looks at the run all the time, and tries to pick it up."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.stop = threading.Event()
        self.idle_ms: list[int] = []
        self.errors: list[BaseException | None] = []
        self.entered = 0
        self.thread = threading.Thread(target=lambda: asyncio.run(self._watch()))

    async def _watch(self) -> None:
        registry = ToolRegistry()

        @registry.tool(name="slow")
        async def slow() -> str:
            self.entered += 1
            return "of another worker"

        store, model = self.place.open(), Script("never asked")
        while not self.stop.is_set():
            run = await store.latest(RunId("run"))
            if run is not None and run.row.status == RunStatus.RUNNING:
                self.idle_ms.append(run.row.idle_ms)
                worker = Worker(self.place)
                error = await error_of(worker.recover(model, registry))
                if error is not None:
                    self.errors.append(error)
                await worker.close()
            self.stop.wait(0.05)
        await store.close()


def in_a_thread() -> str:
    time.sleep(WORK)
    return "worked"


async def blocking_the_loop() -> str:
    time.sleep(WORK)  # noqa: ASYNC251  # that it blocks is what is tested
    return "worked"


async def waiting() -> str:
    await asyncio.sleep(WORK)
    return "worked"


WORKS = [("sqlite", in_a_thread), ("sqlite", blocking_the_loop), ("sqlite", waiting), ("memory", blocking_the_loop)]


@pytest.mark.parametrize(("place", "work"), WORKS, indirect=["place"])
async def test_a_call_longer_than_the_lease_is_nobody_elses(place: Place, work: Callable[[], object]) -> None:
    registry = ToolRegistry()
    registry.tool(name="slow")(work)
    watcher, model = Watcher(place), Script([("slow", {})], "done")
    watcher.thread.start()
    try:
        result = await Worker(place).run(model, registry, lease_seconds=LEASE, heartbeat_seconds=BEAT)
    finally:
        watcher.stop.set()
        watcher.thread.join()
    assert results_in(result.messages) == ["worked"]
    assert watcher.entered == 0
    assert len(watcher.errors) >= 5
    assert {type(error) for error in watcher.errors} == {CheckpointConflict}
    assert max(watcher.idle_ms) < LEASE * 1000, "its lease lapsed while it was at work"
    assert (await place.load("run")).row.epoch == 1


@pytest.mark.parametrize("tool", ["charge", "lookup"])
async def test_a_worker_that_froze_in_a_call_and_wakes_after_a_takeover_leaves_its_result_alone(
    place: Place, tool: str
) -> None:
    clock, bench, thaw = ManualClock(), Bench(), asyncio.Event()
    args = {"amount": 5} if tool == "charge" else {"name": "a"}
    model = Script([(tool, args)], "done")
    frozen = [thaw]

    async def after(_: str, __: dict[str, object]) -> None:
        if frozen:
            await frozen.pop().wait()

    bench.after = after
    old = Worker(place, clock=clock)
    work = asyncio.ensure_future(old.run(model, bench.registry, clock=clock, offload=NoHeartbeat()))
    await until(lambda: bench.entered[tool] == 1)
    clock.advance(3600)
    new = Worker(place, clock=clock)
    error = await error_of(new.recover(model, bench.registry, clock=clock, offload=NoHeartbeat()))
    if tool == "charge":
        assert isinstance(error, RecoveryNeedsDecision)
        assert bench.effects == 1
    else:
        assert error is None
        assert bench.entered["lookup"] == 2
    before = await place.load("run")
    thaw.set()
    with pytest.raises(CheckpointConflict, match="this worker has stopped"):
        await work
    after_all = await place.load("run")
    assert (after_all.records, after_all.row.head) == (before.records, before.row.head)
    assert after_all.row.status == before.row.status
    assert bench.entered[tool] == (1 if tool == "charge" else 2)
    assert model.asked == (1 if tool == "charge" else 2)
    result = await Worker(place, clock=clock).recover(model, bench.registry, clock=clock)
    assert (result.status, bench.entered[tool]) == ("done", 1 if tool == "charge" else 2), "the result that it left is adopted"
