"""Two workers on one run: one wins, the other has run nothing, and the guard is a count and no time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tool_loop import LoopResult
from agent_runtime.tools import ToolRegistry, idempotency_key
from tests.bench import Asked, Bench, Place, Remote, Script, Worker, error_of

CALL: list[Asked] = [("charge_i", {"amount": 1})]
ROUNDS = 15


def counting_registry(remote: Remote, entered: list[str], who: str) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(idempotent=True)
    async def charge_i(amount: int) -> str:
        entered.append(who)
        await asyncio.sleep(0)
        return remote.act("charge_i", {"amount": amount}, idempotency_key())

    return registry


async def one_line(place: Place, run_id: str) -> None:
    """The journal is one line: numbers, epochs and owners follow each other, and each epoch was claimed once."""
    run = await place.load(run_id)
    assert [record.number for record in run.records] == list(range(1, run.row.number + 1))
    claims = [record.epoch for record in run.records if record.kind == RecordKind.CLAIMED]
    assert claims == list(range(1, run.row.epoch + 1))


async def test_of_two_that_recover_at_the_same_moment_one_wins_and_the_other_ran_nothing(place: Place) -> None:
    for at in range(ROUNDS):
        remote, run_id = Remote(), f"run-{at}"
        script = Script(CALL, CALL, "done")
        dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
        await dying.run_and_die(script, counting_registry(remote, [], "dead"), run_id)
        entered: list[str] = []
        results = await asyncio.gather(
            *(Worker(place).recover(script, counting_registry(remote, entered, who), run_id) for who in "ab"),
            return_exceptions=True,
        )
        won = [who for who, result in zip("ab", results, strict=True) if isinstance(result, LoopResult)]
        lost = [result for result in results if not isinstance(result, LoopResult)]
        assert len(won) == 1
        assert [type(error) for error in lost] == [CheckpointConflict]
        assert set(entered) == set(won)
        assert (len(remote.effects), script.asked) == (2, 3)
        await one_line(place, run_id)


async def take_over_from_two_threads(place: Place, remote: Remote, run_id: str) -> list[BaseException | None]:
    """Two threads, each with a loop and a store of its own, take one run over at the same moment: how each ends."""
    start, endings = threading.Barrier(2), list[BaseException | None]()

    async def recover() -> None:
        worker, model = Worker(place), Script(CALL, CALL, CALL, "done")
        start.wait()
        endings.append(await error_of(worker.recover(model, counting_registry(remote, [], ""), run_id, take_over=True)))
        await worker.close()

    threads = [threading.Thread(target=lambda: asyncio.run(recover())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    return endings


async def test_of_two_threads_that_take_a_run_over_one_at_most_goes_on(place: Place) -> None:
    for at in range(ROUNDS):
        remote, run_id = Remote(), f"run-{at}"
        dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
        await dying.run_and_die(Script(CALL, CALL, CALL, "done"), counting_registry(remote, [], ""), run_id)
        endings = await take_over_from_two_threads(place, remote, run_id)
        assert {type(error) for error in endings} <= {type(None), CheckpointConflict}
        assert endings.count(None) >= 1, "one of them ends the run, or finds it ended"
        assert len(remote.effects) == 3
        await one_line(place, run_id)


async def test_two_starts_of_one_id_make_one_run(place: Place) -> None:
    for at in range(ROUNDS):
        bench, script = Bench(), Script(CALL, "done")
        starts = [Worker(place).run(script, bench.registry, f"run-{at}") for _ in range(3)]
        results = await asyncio.gather(*starts, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["CheckpointConflict"] * 2 + ["LoopResult"]
        assert (bench.effects, bench.entered.total(), script.asked) == (1, 1, 2)
        await one_line(place, f"run-{at}")


async def test_many_saves_in_one_instant_are_no_conflict(place: Place) -> None:
    clock, bench = ManualClock(), Bench()
    result = await Worker(place, clock=clock).run(Script(*[CALL] * 20, "done"), bench.registry, clock=clock, commits="each")
    clock.advance(1000)
    assert (result.status, bench.effects) == ("done", 20)
    await one_line(place, "run")


@pytest.mark.parametrize("hours", [1, -1, 24 * 365, -24 * 365])
async def test_a_wall_clock_that_jumps_takes_no_run_from_its_owner(place: Place, hours: int) -> None:
    clock, bench = ManualClock(), Bench()
    model = Script(CALL, CALL, "done")

    async def jump(_: str, __: dict[str, object]) -> None:
        clock.jump_wall(hours * 3600)
        other = await error_of(Worker(place, clock=clock).recover(model, bench.registry, clock=clock))
        assert isinstance(other, CheckpointConflict)

    bench.after = jump
    result = await Worker(place, clock=clock).run(model, bench.registry, clock=clock)
    clock.advance(1000)
    assert (result.status, bench.effects, model.asked) == ("done", 2, 3)


async def test_a_worker_that_was_taken_over_is_told_at_its_next_write_and_starts_nothing(place: Place) -> None:
    bench, model, other = Bench(), Script(CALL, CALL, "done"), list[BaseException | None]()

    async def taken(_: str, __: dict[str, object]) -> None:
        if not other:
            other.append(None)
            other[0] = await error_of(Worker(place).recover(model, bench.registry, take_over=True))

    bench.after = taken
    with pytest.raises(CheckpointConflict, match="this worker has stopped"):
        await Worker(place).run(model, bench.registry)
    assert other == [None]
    assert (bench.effects, bench.remote.keys) == (2, ["run:0", "run:0", "run:1"])
    assert (await place.open().latest(RunId("run"))) is not None
    await one_line(place, "run")
