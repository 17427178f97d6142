"""A living worker asks about its own call in doubt: what the probe says is believed only of what nobody works on any more."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from agent_runtime.errors import CheckpointConflict, RecoveryNeedsDecision, RunQuarantined, Unrecordable
from agent_runtime.journal.records import NO_OWNER, RunStatus
from agent_runtime.settlements import Outcome
from agent_runtime.tools import ToolRegistry, idempotency_key
from tests.bench import Asked, Killed, Place, Script, Worker, error_of, expect_death, results_in, until
from tests.doubts.desk import MAIL, Outbox, says, status


@pytest.mark.parametrize("commits", ["grouped", "each"])
@pytest.mark.parametrize("trouble", [TimeoutError("late"), ValueError("a bug"), ConnectionResetError("gone")], ids=repr)
@pytest.mark.parametrize("happened", [True, False])
async def test_a_living_worker_asks_about_its_own_call(place: Place, trouble: Exception, happened: bool, commits: str) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")

    async def fail() -> None:
        if outbox.entered == 1:
            raise trouble

    setattr(outbox, "after" if happened else "before", fail)
    result = await Worker(place).run(model, outbox.registry, commits=commits)
    assert (results_in(result.messages), outbox.sent) == (["mail 1"], ["run:0"])
    assert (outbox.entered, outbox.asked) == (1 if happened else 2, [("run:0", {"to": "ana"})])
    assert model.asked == 2


async def test_a_timeout_shorter_than_the_remotes_work_is_in_doubt_and_the_probe_says_what_came_of_it(place: Place) -> None:
    outbox, model = Outbox(timeout=0.05), Script(MAIL, "done")

    async def slow() -> None:
        await asyncio.sleep(0.2)

    outbox.after = slow
    result = await Worker(place).run(model, outbox.registry)
    assert (results_in(result.messages), outbox.sent) == (["mail 1"], ["run:0"])


async def test_a_living_worker_whose_probe_does_not_know_stops_in_doubt_and_says_what_the_tool_raised(place: Place) -> None:
    outbox, model, trouble = Outbox(), Script(MAIL, "done"), ValueError("a bug")

    async def fail() -> None:
        raise trouble

    outbox.after, outbox.saying = fail, says(Outcome.unknown())
    with pytest.raises(RecoveryNeedsDecision, match="does not know either") as needed:
        await Worker(place).run(model, outbox.registry)
    assert needed.value.__cause__ is trouble
    assert await status(place) == (RunStatus.BLOCKED, None)
    assert outbox.entered == 1


async def test_a_call_that_never_happens_is_tried_as_often_as_its_tool_says_and_then_is_an_error(place: Place) -> None:
    outbox, model = Outbox(attempts=3), Script(MAIL, "done")

    async def fail() -> None:
        raise ConnectionRefusedError("down")

    outbox.before = fail
    result = await Worker(place).run(model, outbox.registry)
    [answer] = results_in(result.messages)
    assert answer == "error: NotDone: it was tried 3 times, and its probe says that it did not happen"
    assert (outbox.entered, outbox.sent, len(outbox.asked)) == (3, [], 3)


async def test_a_call_that_kills_its_workers_is_set_aside_however_often_its_probe_says_that_it_did_not_happen(
    place: Place,
) -> None:
    outbox, model = Outbox(attempts=100), Script(MAIL, "done")

    async def kill() -> None:
        raise Killed("killed")

    outbox.before = kill
    await expect_death(Worker(place).run(model, outbox.registry))
    for _ in range(3):
        await expect_death(Worker(place).recover(model, outbox.registry, max_attempts=3))
    assert isinstance(await error_of(Worker(place).recover(model, outbox.registry, max_attempts=3)), RunQuarantined)
    assert outbox.entered == 4


async def test_a_worker_that_dies_before_it_has_asked_leaves_a_run_that_wakes(place: Place) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")

    async def fail() -> None:
        raise ValueError("a bug")

    outbox.after, outbox.saying = fail, says(Killed("while it asks"))
    await expect_death(Worker(place).run(model, outbox.registry))
    where, wake_at = await status(place)
    assert where is RunStatus.BLOCKED
    assert wake_at is not None
    outbox.saying = None
    assert results_in((await Worker(place).recover(model, outbox.registry)).messages) == ["mail 1"]


async def test_of_a_call_that_is_still_on_a_thread_no_probe_is_believed_and_its_result_counts(place: Place) -> None:
    registry, model, asked = ToolRegistry(), Script([("work", {})], "done"), list[str]()
    inside, go_on, entered = threading.Event(), threading.Event(), list[str]()

    async def probe(key: str, args: dict[str, Any]) -> Outcome:
        asked.append(key)
        return Outcome.done("worked") if len(entered) > 1 else Outcome.not_done()

    @registry.tool(probe=probe, timeout=0.05)
    def work() -> str:
        entered.append(idempotency_key())
        inside.set()
        go_on.wait()
        entered.append("acted")
        return "worked"

    with pytest.raises(RecoveryNeedsDecision, match="its thread still runs"):
        await Worker(place).run(model, registry)
    assert asked == []
    run = await place.load("run")
    assert (run.row.status, run.row.owner != NO_OWNER) == (RunStatus.BLOCKED, True)
    assert isinstance(await error_of(Worker(place).recover(model, registry)), CheckpointConflict)
    error = await error_of(Worker(place).recover(model, registry, take_over=True))
    assert isinstance(error, RecoveryNeedsDecision)
    assert "not known to be gone" in error.doubts[0].why
    go_on.set()
    await until(lambda: len(entered) == 2)
    result = await Worker(place).recover(model, registry)
    assert (results_in(result.messages), entered) == (["worked"], ["run:0", "acted"])


async def test_a_sibling_on_a_thread_keeps_the_run_and_the_error_says_what_is_in_doubt(place: Place) -> None:
    """A probe could be asked about one of two calls; the run cannot be picked up while the other one's thread holds it."""
    outbox, go_on = Outbox(), threading.Event()

    @outbox.registry.tool(timeout=0.05)
    def work() -> str:
        go_on.wait()
        return "worked"

    async def fail() -> None:
        raise ValueError("a bug")

    outbox.after = fail
    calls: list[Asked] = [*MAIL, ("work", {})]
    model = Script(calls, "done")
    try:
        with pytest.raises(RecoveryNeedsDecision) as needed:
            await Worker(place).run(model, outbox.registry)
        assert [doubt.call for doubt in needed.value.doubts] == ["0.0", "0.1"]
    finally:
        go_on.set()
    outbox.after = Outbox().after
    error: Exception | None = None
    for _ in range(5000):  # until its thread has left
        error = await error_of(Worker(place).recover(model, outbox.registry))
        if not isinstance(error, CheckpointConflict):
            break
        await asyncio.sleep(0.001)
    assert isinstance(error, RecoveryNeedsDecision)
    assert ([doubt.call for doubt in error.doubts], outbox.sent) == (["0.1"], ["run:0.0"])


async def test_a_call_that_ran_is_not_run_again_because_its_probe_says_that_it_did_not(place: Place) -> None:
    registry, model, entered = ToolRegistry(), Script([("odd", {})], "done"), list[str]()

    async def probe(key: str, args: dict[str, Any]) -> Outcome:
        return Outcome.not_done()

    @registry.tool(probe=probe)
    async def odd() -> object:
        entered.append("odd")
        return object()

    error = await error_of(Worker(place).run(model, registry))
    assert isinstance(error, RecoveryNeedsDecision)
    assert isinstance(error.__cause__, Unrecordable)
    assert "and yet its probe says that it did not happen" in error.doubts[0].why
    assert isinstance(await error_of(Worker(place).recover(model, registry)), RecoveryNeedsDecision)
    assert entered == ["odd"]
