"""Cancelling, releasing and deleting a run from outside, in each state that it can stand in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_runtime import Outcome
from agent_runtime.errors import (
    CheckpointConflict,
    CheckpointNotFound,
    IdentityMismatch,
    InvalidSetting,
    RecoveryNeedsDecision,
)
from agent_runtime.ids import RunId
from agent_runtime.journal.records import NO_OWNER, RunStatus, StoredMessage
from agent_runtime.journal.store import Answer, AnswerKind, Guard
from agent_runtime.run import RunContext
from agent_runtime.runs import Runs
from tests.bench import KEY, Bench, Delegate, Place, Script, Worker, error_of, results_in
from tests.standing import AT_REST, alive, block, bring_to, kinds, operator, script, stored

ANA = RunContext(user="ana", thread="t-1")


# Cancel.


async def test_a_run_that_is_not_there_is_not_found_by_any_verb(place: Place) -> None:
    runs = operator(place)
    for verb in (runs.cancel, runs.release, runs.delete):
        with pytest.raises(CheckpointNotFound):
            await verb("nobody", by="ana")
    with pytest.raises(CheckpointNotFound):
        await runs.pending("nobody")


@pytest.mark.parametrize("state", ["dead", "doubtful", "paused", "blocked", "quarantined"])
async def test_a_run_that_nobody_works_is_cancelled_at_once_and_for_good(place: Place, state: str) -> None:
    bench = await bring_to(place, state)
    count = (await place.load("run")).row.number
    assert await operator(place).cancel("run", by="ana", why="a mistake") is True
    run = await stored(place)
    assert (run.row.status, run.row.owner) == (RunStatus.CANCELLED, NO_OWNER)
    assert kinds(run, count) == ["claimed", "cancelled", "ended"]
    report = await operator(place).show("run")
    assert report.info.status == "cancelled"
    assert report.info.why.startswith("cancelled by ana: a mistake")
    assert report.timeline.segments[-1].why == "cancel"
    assert report.timeline.segments[-1].left == "ended it: cancelled by ana (a mistake)"
    assert (report.timeline.pending, report.timeline.quarantined) == ([], "")
    entered = bench.entered.total()
    assert (await Worker(place).recover(script(), bench.registry)).status == "cancelled"
    assert bench.entered.total() == entered, "nothing of it runs any more"
    assert await operator(place).cancel("run", by="ben") is False
    assert await stored(place) == run, "to cancel it again changes nothing"


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
async def test_to_cancel_a_run_that_has_ended_changes_nothing(place: Place, state: str) -> None:
    await bring_to(place, state)
    before = await stored(place)
    assert await operator(place).cancel("run", by="ana") is False
    assert await stored(place) == before


async def test_what_is_in_doubt_when_a_run_is_cancelled_stays_listed_and_can_be_settled(place: Place) -> None:
    bench = await bring_to(place, "blocked")
    await operator(place).cancel("run", by="ana", why="a mistake")
    [doubt] = (await operator(place).show("run")).timeline.doubts
    assert (doubt.call, doubt.tool) == ("0", "charge")
    assert await operator(place).settle("run", "0", Outcome.done("paid"), by="ben", why="saw it")
    report = await operator(place).show("run")
    assert (report.timeline.doubts, report.info.status) == ([], "cancelled")
    assert results_in((await Worker(place).recover(script(), bench.registry)).messages) == ["paid"]


@pytest.mark.parametrize(("name", "text"), [("by", ""), ("by", None), ("why", " "), ("why", 1)])
async def test_a_cancel_is_somebodys_for_a_reason(place: Place, name: str, text: Any) -> None:
    await bring_to(place, "paused")
    before = await stored(place)
    with pytest.raises(InvalidSetting, match=f"pass {name}="):
        await operator(place).cancel("run", **{"by": "ana", "why": "x", name: text})
    assert await stored(place) == before


async def test_a_run_that_is_worked_is_cancelled_by_its_worker_which_is_told_once(place: Place) -> None:
    async with alive(place, heartbeat_seconds=0.02) as (task, bench):
        assert await operator(place).cancel("run", by="ana", why="a mistake") is True
        assert await operator(place).cancel("run", by="ben", why="another") is False
        result = await asyncio.wait_for(task, 20)
        assert result.status == "cancelled"
        assert bench.effects == 0
    report = await operator(place).show("run")
    assert report.info.why == "cancelled by ana: a mistake; still in doubt: charge amount=5 (call 0)"
    assert [call.call for call in report.timeline.doubts] == ["0"]


async def test_a_cancel_that_a_worker_never_read_ends_the_run_once_it_is_gone(place: Place) -> None:
    async with alive(place) as (task, _):
        assert await operator(place).cancel("run", by="ana", why="a mistake") is True
        task.cancel()
        await asyncio.wait({task})
    assert await operator(place).cancel("run", by="ben", why="another") is True
    report = await operator(place).show("run")
    assert report.timeline.cancelled == {"by": "ana", "why": "a mistake"}, "the first word is the one that ended it"


async def test_a_cancel_between_two_parallel_calls_keeps_the_one_that_is_finished(place: Place) -> None:
    both = Script([("charge", {"amount": 1}), ("email", {"to": "ana"})], "done")
    bench = Bench()

    async def before(tool: str, _: dict[str, object]) -> None:
        if tool == "charge":
            await asyncio.Event().wait()

    bench.before = before
    worker = asyncio.ensure_future(Worker(place).run(both, bench.registry, heartbeat_seconds=0.02))
    await place.becomes("run", lambda run: any(r.call == "0.1" and kinds(run)[r.number - 1] == "done" for r in run.records))
    assert await operator(place).cancel("run", by="ana", why="a mistake")
    assert (await asyncio.wait_for(worker, 20)).status == "cancelled"
    for _ in range(2):  # and it stays so, whoever looks at it
        timeline = (await operator(place).show("run")).timeline
        assert timeline.calls["0.1"].outcome == {"result": "effect 1"}
        assert [call.call for call in timeline.doubts] == ["0.0"]
        assert (await Worker(place).recover(both, bench.registry)).status == "cancelled"
    assert bench.entered == {"charge": 1, "email": 1}


@pytest.mark.parametrize("state", ["paused", "blocked"])
async def test_a_worker_that_waits_beside_a_parked_run_ends_once_it_is_cancelled(place: Place, state: str) -> None:
    bench = Bench(needs_approval=state == "paused")

    async def after(_: str, __: dict[str, object]) -> None:
        raise RuntimeError("after which nobody knows")

    bench.after = after
    task = asyncio.ensure_future(Worker(place).run(script(), bench.registry, wait_seconds=600.0))
    await place.becomes("run", lambda run: run.row.status in (RunStatus.PAUSED, RunStatus.BLOCKED))
    assert await operator(place).cancel("run", by="ana", why="enough") is True
    assert (await asyncio.wait_for(task, 20)).status == "cancelled"
    assert await operator(place).cancel("run", by="ana", why="enough") is False


class Waited(Delegate):
    """A worker beside the run hears a message at once, and acts on it before its sender does anything more."""

    def __init__(self, place: Place, bench: Bench) -> None:
        super().__init__(place.open())
        self.place, self.bench = place, bench

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        answer = await super().post(run_id, message)
        assert (await Worker(self.place).recover(script(), self.bench.registry)).status == "cancelled"
        return answer


async def test_a_cancel_that_a_worker_carried_out_meanwhile_is_one_that_did(place: Place) -> None:
    bench = await bring_to(place, "paused")
    waited = Runs(Waited(place, bench), checkpoint_key=KEY)
    assert await waited.cancel("run", by="ana", why="enough") is True
    assert (await operator(place).show("run")).timeline.cancelled == {"by": "ana", "why": "enough"}


async def test_of_two_who_cancel_at_once_one_did(place: Place) -> None:
    await bring_to(place, "paused")
    assert sorted(await asyncio.gather(*(operator(place).cancel("run", by="ana", why="x") for _ in range(2)))) == [False, True]


async def test_cancelling_the_task_that_waits_for_a_run_does_not_cancel_the_run(place: Place) -> None:
    async with alive(place) as (task, bench):
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
    assert (await stored(place)).row.status == RunStatus.RUNNING
    assert (await operator(place).show("run")).timeline.cancelled is None
    bench.before = Bench().before
    assert isinstance(await error_of(Worker(place).recover(script(), bench.registry)), RecoveryNeedsDecision)
    assert (await Worker(place).recover(script(), bench.registry, rerun_in_doubt=True)).status == "done"


# Release.


@pytest.mark.parametrize("state", [state for state in AT_REST if state != "quarantined"])
async def test_a_run_that_is_in_no_quarantine_is_not_released(place: Place, state: str) -> None:
    await bring_to(place, state)
    before = await stored(place)
    assert await operator(place).release("run", by="ana") is False
    assert await stored(place) == before


async def test_a_run_that_is_worked_is_not_released_and_a_quarantined_one_goes_again(place: Place) -> None:
    async with alive(place):
        assert await operator(place).release("run", by="ana") is False
    await bring_to(place, "quarantined", "poison")
    assert await operator(place).release("poison", by="ana") is True
    run = await stored(place, "poison")
    assert (run.row.status, run.row.owner, run.row.attempts) == (RunStatus.RUNNING, NO_OWNER, 0)


# Delete.


@pytest.mark.parametrize("state", ["dead", "done", "failed", "cancelled"])
async def test_a_run_about_which_nothing_is_left_to_decide_is_deleted_and_its_id_never_used_again(
    place: Place, state: str
) -> None:
    bench = await bring_to(place, state)
    await operator(place).delete("run", by="ana")
    assert list(await operator(place).list()) == []
    with pytest.raises(CheckpointConflict, match="before it was deleted"):
        await Worker(place).run(script(), bench.registry)
    for ask in (operator(place).show, operator(place).pending):
        with pytest.raises(CheckpointConflict, match="was deleted"):
            await ask("run")
    with pytest.raises(CheckpointConflict, match="was deleted"):
        await operator(place).delete("run", by="ana", force=True)


@pytest.mark.parametrize("state", ["doubtful", "paused", "blocked", "cancelled in doubt", "quarantined"])
async def test_a_run_about_which_somebody_has_to_decide_is_deleted_only_by_force(place: Place, state: str) -> None:
    await bring_to(place, state)
    before = await stored(place)
    with pytest.raises(CheckpointConflict, match="decide first"):
        await operator(place).delete("run", by="ana")
    assert await stored(place) == before
    await operator(place).delete("run", by="ana", force=True)
    assert list(await operator(place).list()) == []


@pytest.mark.parametrize("force", [False, True])
async def test_a_run_that_is_worked_is_never_deleted(place: Place, *, force: bool) -> None:
    async with alive(place) as (task, _):
        with pytest.raises(CheckpointConflict, match="may be alive"):
            await operator(place).delete("run", by="ana", force=force)
    assert (await task).status == "done"


async def test_a_deletion_is_somebodys(place: Place) -> None:
    await bring_to(place, "done")
    with pytest.raises(InvalidSetting, match="pass by="):
        await operator(place).delete("run", by="")
    assert (await stored(place)).row.status == RunStatus.DONE


class Forgetful(Delegate):
    """Does what it is told and does not say so, or is overtaken by somebody."""

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        await super().delete(run_id, guard=guard)
        return Answer(AnswerKind.UNKNOWN)


async def test_a_deletion_whose_answer_is_lost_is_looked_for(place: Place) -> None:
    await bring_to(place, "done")
    await Runs(Forgetful(place.open()), checkpoint_key=KEY).delete("run", by="ana")
    assert list(await operator(place).list()) == []


class Overtaken(Delegate):
    """Somebody else writes to the run each time, between a look and what comes of it."""

    def __init__(self, inner: Any, times: int) -> None:
        super().__init__(inner)
        self.times = times

    async def commit(self, appends: Any) -> list[Answer]:
        if self.times:
            self.times -= 1
            return [Answer(AnswerKind.MOVED) for _ in appends]
        return await super().commit(appends)


async def test_a_claim_from_outside_looks_again_where_the_run_moved_and_says_so_in_the_end(place: Place) -> None:
    await block(place, Bench())
    said = {"by": "ana", "why": "saw it"}
    with pytest.raises(CheckpointConflict, match="changed each time"):
        await Runs(Overtaken(place.open(), 1000), checkpoint_key=KEY).cancel("run", **said)
    assert await Runs(Overtaken(place.open(), 3), checkpoint_key=KEY).settle("run", "0", Outcome.done(1), **said)
    assert await Runs(Overtaken(place.open(), 3), checkpoint_key=KEY).cancel("run", **said)


# Whose a run is.


async def test_who_is_somebody_sees_and_changes_the_runs_of_that_identity_alone(place: Place) -> None:
    bench = Bench(needs_approval=True)
    for run, ctx in (("hers", ANA), ("his", RunContext(user="ben")), ("nobodys", None)):
        assert (await Worker(place).run(script(), bench.registry, run, ctx=ctx)).status == "paused"
    hers = operator(place).for_context(ANA)
    assert [info.run_id for info in await hers.list()] == ["hers"]
    assert [request.run_id for request in await hers.pending()] == ["hers"]
    assert [request.run_id for request in await operator(place, ctx=RunContext()).pending()] == ["nobodys"]
    assert [request.run_id for request in await operator(place).pending()] == ["hers", "his", "nobodys"]
    [his] = await operator(place).pending("his")
    refused: list[Any] = [
        hers.show("his"), hers.pending("his"), hers.release("his", by="ana"), hers.cancel("his", by="ana"),
        hers.delete("his", by="ana", force=True), hers.settle("his", "0", Outcome.done(1), by="ana", why="x"),
        hers.approve(his, by="ana"), hers.deny(("his", "0"), by="ana"), hers.verify(), hers.verify("his"),
    ]  # fmt: skip
    before = await stored(place, "his")
    for verb in refused:
        error = await error_of(verb)
        assert isinstance(error, IdentityMismatch), error
        assert "ben" not in str(error)
        assert "charge" not in str(error)
    assert await stored(place, "his") == before
    assert await hers.cancel("hers", by="ana")
    assert [info.status for info in await operator(place).list()] == ["cancelled", "paused", "paused"]
    with pytest.raises(InvalidSetting):
        operator(place).for_context(None)  # type: ignore[arg-type]  # what a face passes by mistake
