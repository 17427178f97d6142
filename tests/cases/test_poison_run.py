"""A run whose workers come to nothing: counted in the store before each attempt, set aside in time, released by a person."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agent_runtime import Runs
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict, InvalidSetting, RecoveryNeedsDecision, RunQuarantined
from agent_runtime.ids import RunId
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus
from agent_runtime.messages import Message, Reply
from agent_runtime.telemetry import HistorySink
from agent_runtime.testing.store_contract.witness import untouched
from tests.bench import KEY, Asked, Bench, Place, Script, Worker, error_of

CALL: list[Asked] = [("charge_i", {"amount": 1})]
CHARGE: list[Asked] = [("charge", {"amount": 1})]
ID = RunId("run")


async def poisoned(place: Place, bench: Bench, model: Script, *, limit: int) -> None:
    """A run whose call killed its first worker, and then as many as a claim allows."""
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(model, bench.registry)
    for attempt in range(1, limit + 1):
        dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
        await dying.recover_and_die(model, bench.registry, max_attempts=limit)
        assert (await place.load("run")).row.attempts == attempt, "counted in the store before it is worked"


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_run_is_claimed_so_often_without_progress_and_then_set_aside_with_its_reason(place: Place, limit: int) -> None:
    bench, model, sink = Bench(), Script(CALL, "done"), HistorySink()
    await poisoned(place, bench, model, limit=limit)
    with pytest.raises(RunQuarantined, match="`agent-runtime release run`") as refused:
        await Worker(place).recover(model, bench.registry, max_attempts=limit, sinks=[sink])
    assert bench.entered["charge_i"] == limit + 1
    assert "claimed once" in refused.value.why if limit == 1 else "claimed 3 times" in refused.value.why
    run = await place.load("run")
    assert (run.row.status, run.row.owner, run.row.wake_at) == (RunStatus.QUARANTINED, NO_OWNER, None)
    assert run.records[-1].kind == RecordKind.QUARANTINED
    assert sink.names() == ["run.quarantined", "run.left"]
    assert sink.of("run.quarantined")[0].data["attempts"] == limit

    every: list[dict[str, Any]] = [{}, {"take_over": True}, {"rerun_in_doubt": True}, {"max_attempts": 100}]
    for options in every:
        async with untouched(place.open(), ID):
            with pytest.raises(CheckpointConflict, match="is quarantined: claimed") as again:
                await Worker(place).recover(model, bench.registry, **options)
        assert isinstance(again.value, RunQuarantined)
    assert bench.entered["charge_i"] == limit + 1


async def test_a_released_run_goes_again_and_has_all_its_attempts_before_it(place: Place) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await poisoned(place, bench, model, limit=1)
    assert isinstance(await error_of(Worker(place).recover(model, bench.registry, max_attempts=1)), RunQuarantined)
    runs = Runs(place.open(), checkpoint_key=KEY)
    assert await runs.release("run", by="ana")
    row = (await place.load("run")).row
    assert (row.status, row.owner, row.attempts) == (RunStatus.RUNNING, NO_OWNER, 0)
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).recover_and_die(model, bench.registry, max_attempts=1)
    assert isinstance(await error_of(Worker(place).recover(model, bench.registry, max_attempts=1)), RunQuarantined)
    assert await runs.release("run", by="ana")
    assert (await Worker(place).recover(model, bench.registry, max_attempts=1)).status == "done"
    assert bench.effects == 1, "every attempt had the same key"


async def test_of_two_who_release_a_run_one_does(place: Place) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await poisoned(place, bench, model, limit=1)
    assert isinstance(await error_of(Worker(place).recover(model, bench.registry, max_attempts=1)), RunQuarantined)
    people = [Runs(place.open(), checkpoint_key=KEY) for _ in range(2)]
    assert sorted(await asyncio.gather(*(runs.release("run", by="one of two") for runs in people))) == [False, True]
    assert (await place.load("run")).row.epoch == 4


async def test_a_release_changes_no_run_that_is_in_no_quarantine(place: Place) -> None:
    bench, runs = Bench(), Runs(place.open(), checkpoint_key=KEY)
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(Script(CALL, "done"), bench.registry, "dead")
    await Worker(place).run(Script("done"), bench.registry, "ended")
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(Script(CHARGE, "done"), bench.registry, "blocked")
    assert isinstance(
        await error_of(Worker(place).recover(Script(CHARGE, "done"), bench.registry, "blocked")), RecoveryNeedsDecision
    )
    for run_id in ("dead", "ended", "blocked"):
        async with untouched(place.open(), RunId(run_id)):
            assert not await runs.release(run_id)


async def test_a_run_that_makes_progress_each_time_may_lose_any_number_of_workers(place: Place) -> None:
    bench, model = Bench(), Script(*[CALL] * 6, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CONFIRM, 0).run_and_die(model, bench.registry, commits="each")
    for seq in range(1, 6):
        dying = Worker(place).killed_at(CrashPoint.AFTER_CONFIRM, seq)
        await dying.recover_and_die(model, bench.registry, max_attempts=1, commits="each")
    assert (await Worker(place).recover(model, bench.registry, max_attempts=1)).status == "done"


async def test_to_be_stopped_or_blocked_is_no_failed_attempt_and_to_raise_is_one(place: Place) -> None:
    bench, stuck = Bench(), asyncio.Event()

    async def hangs(messages: Sequence[Message], tools: object) -> Reply:
        stuck.set()
        await asyncio.Event().wait()
        raise AssertionError("it hangs")

    async def raises(messages: Sequence[Message], tools: object) -> Reply:
        raise KeyError("out of order")

    await Worker(place).killed_at(CrashPoint.BEFORE_DECIDE).run_and_die(Script("done"), bench.registry, commits="each")
    for _ in range(4):
        stuck.clear()
        task = asyncio.ensure_future(Worker(place).recover(hangs, bench.registry, max_attempts=1))
        await asyncio.wait_for(stuck.wait(), 10)
        task.cancel()
        await asyncio.wait([task])
        assert (await place.load("run")).row.attempts == 0
    assert isinstance(await error_of(Worker(place).recover(raises, bench.registry, max_attempts=1)), KeyError)
    with pytest.raises(RunQuarantined, match="gave it back: KeyError"):
        await Worker(place).recover(raises, bench.registry, max_attempts=1)


async def test_a_permission_to_rerun_is_progress_and_a_doubt_blocks_before_it_is_set_aside(place: Place) -> None:
    bench, model = Bench(), Script(CHARGE, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(model, bench.registry)
    for _ in range(3):
        error = await error_of(Worker(place).recover(model, bench.registry, max_attempts=1))
        assert isinstance(error, RecoveryNeedsDecision)
        assert (await place.load("run")).row.status == RunStatus.BLOCKED
        dying = Worker(place).killed_at(CrashPoint.AFTER_INTENT)
        await dying.recover_and_die(model, bench.registry, max_attempts=1, rerun_in_doubt=True)
    result = await Worker(place).recover(model, bench.registry, max_attempts=1, rerun_in_doubt=True)
    assert (result.status, bench.effects) == ("done", 1)


@pytest.mark.parametrize(
    "option",
    [{"max_attempts": value} for value in (0, -1, None, True, 2.5, "5")]
    + [{"stuck_after": value} for value in (0, -1.0, float("inf"), float("nan"))],
    ids=str,
)
async def test_a_bound_that_cannot_be_is_refused_before_anything_is_stored(place: Place, option: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(option))):
        await Worker(place).run(Script("done"), Bench().registry, **option)
    assert await place.open().list_runs() == []


async def test_a_quarantined_run_is_released_under_a_new_key(place: Place) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await poisoned(place, bench, model, limit=1)
    assert isinstance(await error_of(Worker(place).recover(model, bench.registry, max_attempts=1)), RunQuarantined)
    ring = {"key": KEY, "next": b"another key for tests, which is active"}
    assert await Runs(place.open(), checkpoint_key=ring).release("run")
    place.is_tampered = True  # it needs the whole ring now
    result = await Worker(place).recover(model, bench.registry, checkpoint_key=ring)
    assert (result.status, bench.effects) == ("done", 1)
