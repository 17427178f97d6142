"""A call that was started and has no ending: no passage of time decides what became of it."""

from __future__ import annotations

import pytest

from agent_runtime.clock import SystemClock
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import NotSent, RecoveryNeedsDecision
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tools import ToolRegistry
from tests.bench import Bench, Place, Script, Worker, error_of, results_in

HOUR, DAY = 3600.0, 86_400.0


@pytest.mark.parametrize("point", [CrashPoint.AFTER_INTENT, CrashPoint.AFTER_CALL], ids=["intent", "act"])
@pytest.mark.parametrize("later", [0.0, HOUR, 10 * DAY, 3650 * DAY], ids=["at once", "1 h", "10 days", "10 years"])
async def test_the_answer_is_the_same_at_all_times(place: Place, clock: ManualClock, later: float, point: CrashPoint) -> None:
    bench, model = Bench(), Script([("charge", {"amount": 5})], "done")
    await Worker(place, clock=clock).killed_at(point).run_and_die(model, bench.registry, clock=clock)
    effects = bench.effects
    clock.advance(later)
    for _ in range(3):
        worker = Worker(place, clock=clock)
        with pytest.raises(RecoveryNeedsDecision) as needed:
            await worker.recover(model, bench.registry, clock=clock)
        [doubt] = needed.value.doubts
        assert (doubt.tool, doubt.call, doubt.attempt, dict(doubt.args)) == ("charge", "0", 1, {"amount": 5})
        assert doubt.age_seconds == pytest.approx(later, abs=5)
        assert (bench.effects, model.asked) == (effects, 1)
        clock.advance(later)
        later *= 2


@pytest.mark.parametrize("later", [0.0, HOUR, 10 * DAY])
async def test_what_knows_its_key_runs_under_it_at_any_time(place: Place, clock: ManualClock, later: float) -> None:
    bench, model = Bench(), Script([("charge_i", {"amount": 5})], "done")
    dying = Worker(place, clock=clock).killed_at(CrashPoint.AFTER_CALL)
    await dying.run_and_die(model, bench.registry, clock=clock)
    clock.advance(later)
    result = await Worker(place, clock=clock).recover(model, bench.registry, clock=clock)
    assert (bench.effects, bench.remote.keys, result.status) == (1, ["run:0"] * 2, "done")


class DeadlyPause(SystemClock):
    """The worker dies in its nth pause."""

    def __init__(self, worker: Worker, nth: int) -> None:
        super().__init__()
        self.worker, self.left = worker, nth

    async def sleep(self, seconds: float) -> None:
        self.left -= 1
        if not self.left:
            self.worker.die()


FAILURES = {"nothing went out": NotSent("busy"), "its way failed": ConnectionError("reset")}


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("pause", [1, 2, 3])
async def test_a_worker_that_dies_between_two_attempts_leaves_those_that_are_left(place: Place, how: str, pause: int) -> None:
    entered = 0
    registry = ToolRegistry()

    @registry.tool(idempotent=True, attempts=4, pause=0.001)
    async def act() -> str:
        nonlocal entered
        entered += 1
        raise FAILURES[how]

    model, worker = Script([("act", {})], "done"), Worker(place)
    await worker.run_and_die(model, registry, clock=DeadlyPause(worker, pause))
    assert entered == pause
    error = await error_of(Worker(place).recover(model, registry))
    assert entered == 4
    if how == "nothing went out":
        assert error is None
        result = await Worker(place).recover(model, registry)
        assert results_in(result.messages) == ["error: NotSent: busy"]
    else:
        assert isinstance(error, RecoveryNeedsDecision)


async def test_a_worker_that_dies_before_the_last_attempt_is_counted_and_the_next_one_succeeds(place: Place) -> None:
    entered = 0
    registry = ToolRegistry()

    @registry.tool(attempts=4, pause=0.001)
    async def act() -> str:
        nonlocal entered
        entered += 1
        if entered < 4:
            raise NotSent("busy")
        return "fine"

    model, worker = Script([("act", {})], "done"), Worker(place)
    await worker.run_and_die(model, registry, clock=DeadlyPause(worker, 3))
    result = await Worker(place).recover(model, registry)
    assert (results_in(result.messages), entered) == (["fine"], 4)
