"""The active key changes at every boundary of a run, in every program and both ways to commit; nothing is lost by it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_runtime import Outcome
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointNotFound, InvalidKey, RecoveryNeedsDecision, UnknownKey
from agent_runtime.journal.keys import KeyRing
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.settlements import Rerun
from tests.bench import Asked, Bench, Killed, Place, Script, Worker, error_of, results_in, until
from tests.flow import desk
from tests.keys.rings import BACK, HIDING, NEW, NEXT, OLD, STILL_OLD, DiesAfter, keys_of, load, runs_of

TWO: Sequence[Asked] = [("charge_i", {"amount": 1}), ("lookup", {"name": "ana"})]
MANY = 400
Program = Callable[[Worker, Bench, KeyRing, str, str], Awaitable[object]]
"""Works a run, started or recovered, to its end or to where it waits; gives what it came to."""


async def loop(worker: Worker, bench: Bench, ring: KeyRing, commits: str, how: str) -> object:
    options: dict[str, Any] = {"checkpoint_key": ring, "commits": commits, "max_attempts": MANY}
    script = Script(TWO, [("charge_i", {"amount": 2})], "done")
    if how == "start":
        return (await worker.run(script, bench.registry, **options)).output
    result = await worker.recover(script, bench.registry, **options)
    return result.status if result.status == "paused" else result.output


async def flow(worker: Worker, bench: Bench, ring: KeyRing, commits: str, how: str) -> object:
    options: dict[str, Any] = {"checkpoint_key": ring, "commits": commits, "max_attempts": MANY}
    start = desk.Order(notes=["x" * 600])  # large, and so named by the record that holds it
    work = desk.run(worker, bench.registry, ORDERS, start, **options) if how == "start" else desk.recover(
        worker, bench.registry, ORDERS, **options
    )  # fmt: skip
    result = await work
    return result.status if result.status == "paused" else result.state


ORDERS = desk.chain(desk.CHARGE, desk.LOOK, desk.CHARGE)


async def attempt(program: Program, worker: Worker, bench: Bench, ring: KeyRing, commits: str) -> object:
    """Go on with the run, or start it where nothing of it is stored; None where the worker dies on it."""
    with suppress(Killed):
        try:
            return await program(worker, bench, ring, commits, "recover")
        except CheckpointNotFound:
            return await program(worker, bench, ring, commits, "start")
    return None


@pytest.mark.parametrize("rings", [(STILL_OLD, NEXT), (BACK, HIDING)], ids=["both plain", "one encrypts"])
@pytest.mark.parametrize("commits", ["grouped", "each"])
@pytest.mark.parametrize("program", [loop, flow])
async def test_the_key_may_change_between_any_two_commits_of_a_run(
    tmp_path: Path, program: Program, commits: str, rings: tuple[KeyRing, KeyRing]
) -> None:
    before, after = rings
    results: list[object] = []
    for boundary in range(1, MANY):
        bench, place = Bench(), Place("memory", tmp_path)
        place.is_tampered = True  # it is under keys of its own
        came = await attempt(program, DiesAfter(place, boundary), bench, before, commits)
        if came is not None:
            break
        first = await load(place, before)
        assert keys_of(first) == ["old"]
        assert isinstance(await error_of(program(Worker(place), bench, NEW, commits, "recover")), UnknownKey)
        assert await load(place, before) == first, "who lacks the key changes nothing"
        results.append(await program(Worker(place), bench, after, commits, "recover"))
        moves = not RunStatus(first.row.status).is_final  # what a run came to is given out as it is
        assert keys_of(await load(place, after)) == (["old", "new"] if moves else ["old"])
        assert bench.remote.count("charge_i") == 2
    assert results == [await _undisturbed(tmp_path, program)] * (boundary - 1), "as a run does that no fault has met"
    assert boundary > 5


@pytest.mark.parametrize("rings", [(STILL_OLD, NEXT), (BACK, HIDING)], ids=["both plain", "one encrypts"])
@pytest.mark.parametrize("commits", ["grouped", "each"])
@pytest.mark.parametrize("program", [loop, flow])
async def test_a_run_that_waits_for_people_ends_right_though_each_worker_has_another_key(
    place: Place, program: Program, commits: str, rings: tuple[KeyRing, KeyRing]
) -> None:
    place.is_tampered = True
    bench, came = Bench(needs_approval=True), None
    for turn in range(MANY):
        mine, others = rings[turn % 2], rings[1 - turn % 2]
        came = await attempt(program, DiesAfter(place, turn % 5 + 2), bench, mine, commits)
        if came == "paused":
            for request in await runs_of(place, others).pending():
                await runs_of(place, others).approve(request, by="ana")
        elif came is not None:
            break
    run = await load(place, rings[0])
    assert keys_of(run)[:3] == ["old", "new", "old"]
    assert came == await _undisturbed(place.path.parent, program)
    assert bench.remote.count("charge_i") == 2


async def _undisturbed(folder: Path, program: Program) -> object:
    alone = Place("memory", folder)
    alone.is_tampered = True
    return await program(Worker(alone), Bench(), STILL_OLD, "grouped", "start")


@pytest.mark.parametrize("rings", [(STILL_OLD, NEXT), (NEXT, STILL_OLD), (BACK, HIDING), (HIDING, BACK)])
@pytest.mark.parametrize("how", [Rerun(), Outcome.done("settled")], ids=["rerun", "done"])
async def test_a_doubt_is_settled_under_another_key_than_the_runs(
    place: Place, how: Any, rings: tuple[KeyRing, KeyRing]
) -> None:
    place.is_tampered = True
    worker, other = rings
    bench, script = Bench(), Script([("charge", {"amount": 1})], "done")
    dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
    await dying.run_and_die(script, bench.registry, checkpoint_key=worker)
    assert isinstance(
        await error_of(Worker(place).recover(script, bench.registry, checkpoint_key=worker)), RecoveryNeedsDecision
    )
    assert await runs_of(place, other).settle("run", "0", how, by="ana", why="I looked")
    assert keys_of(await load(place, worker)) == [worker.active, other.active], "who writes to it takes it along"
    result = await Worker(place).recover(script, bench.registry, checkpoint_key=worker)
    assert results_in(result.messages) == (["settled"] if how != Rerun() else ["effect 2"])


@pytest.mark.parametrize("rings", [(STILL_OLD, NEXT), (NEXT, STILL_OLD), (BACK, HIDING), (HIDING, BACK)])
async def test_a_cancel_under_another_key_is_heard_by_the_worker_that_lives(
    place: Place, rings: tuple[KeyRing, KeyRing]
) -> None:
    place.is_tampered = True
    bench, leave = Bench(), asyncio.Event()

    async def before(_: str, __: dict[str, object]) -> None:
        await leave.wait()

    bench.before = before
    task = asyncio.ensure_future(
        Worker(place).run(
            Script([("charge", {"amount": 1})], "done"), bench.registry, checkpoint_key=rings[0], heartbeat_seconds=0.05
        )
    )
    await until(lambda: bench.entered.total() > 0)
    assert await runs_of(place, rings[1]).cancel("run", by="ana")
    result = await task
    assert result.status == "cancelled"
    assert keys_of(await load(place, rings[0])) == [rings[0].active]


@pytest.mark.parametrize("rings", [(STILL_OLD, NEXT), (NEXT, STILL_OLD), (BACK, HIDING), (HIDING, BACK)])
async def test_a_result_that_came_too_late_is_taken_over_under_another_key(
    place: Place, rings: tuple[KeyRing, KeyRing]
) -> None:
    place.is_tampered = True
    bench, leave = Bench(), asyncio.Event()

    async def before(_: str, __: dict[str, object]) -> None:
        await leave.wait()

    bench.before = before
    script = Script([("charge", {"amount": 1})], "done")
    late = asyncio.ensure_future(Worker(place).run(script, bench.registry, checkpoint_key=rings[0]))
    await until(lambda: bench.entered.total() > 0)
    taken = await error_of(Worker(place).recover(script, Bench().registry, checkpoint_key=rings[1], take_over=True))
    assert isinstance(taken, RecoveryNeedsDecision)
    leave.set()
    await error_of(late)
    result = await Worker(place).recover(script, Bench().registry, checkpoint_key=rings[1])
    assert (result.status, results_in(result.messages), bench.effects) == ("done", ["effect 1"], 1)


async def test_a_message_under_a_key_that_the_worker_lacks_stays_until_one_has_it(place: Place) -> None:
    """Who knows the old key alone passes a verdict over that is under the new one, and the run goes on waiting."""
    place.is_tampered = True
    bench, script = Bench(needs_approval=True), Script([("charge", {"amount": 1})], "done")
    assert (await Worker(place).run(script, bench.registry, checkpoint_key=OLD)).status == "paused"
    [request] = await runs_of(place, NEXT).pending()
    await runs_of(place, NEXT).approve(request, by="ana")
    assert (await Worker(place).recover(script, bench.registry, checkpoint_key=OLD)).status == "paused"
    result = await Worker(place).recover(script, bench.registry, checkpoint_key=STILL_OLD)
    assert (result.status, bench.effects) == ("done", 1)


async def test_without_the_old_key_a_run_is_refused_by_its_id_and_stays_as_it_is(place: Place) -> None:
    place.is_tampered = True
    bench, script = Bench(), Script([("charge_i", {"amount": 1})], "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(script, bench.registry, checkpoint_key=OLD)
    before = await load(place, OLD)
    for work in (
        Worker(place).recover(script, bench.registry, checkpoint_key=NEW),
        runs_of(place, NEW).show("run"),
        runs_of(place, NEW).cancel("run", by="ana"),
        runs_of(place, NEW).reseal("run", by="ana"),
    ):
        with pytest.raises(UnknownKey, match="'old'") as unknown:
            await work
        assert "old key" not in str(unknown.value)
    assert await load(place, OLD) == before
    assert before.records[-1].kind == RecordKind.STARTED


def test_an_id_that_is_on_no_ring_cannot_be_active() -> None:
    with pytest.raises(InvalidKey, match="'third'"):
        KeyRing({"old": b"x" * 32}, "third")
