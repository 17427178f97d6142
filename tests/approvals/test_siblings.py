"""Calls side by side, some of which wait for a person: each has its own record, and none holds back another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent_runtime.approvals import ApprovalRequest, Verdict
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict, RecoveryNeedsDecision, ToolError
from agent_runtime.inbox import MessageKind, post_message
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.store import Answer, Append
from tests.approvals.desk import CHARGE, Mixed, charging, kinds, look, needing, paused, post, resume, stands, the_request
from tests.bench import RING, Bench, Counting, Delegate, Place, Script, Worker, error_of, results_in

PENDING, STARTED, DONE = RecordKind.PENDING, RecordKind.STARTED, RecordKind.DONE


MIXED = Script(
    [("refund", {"amount": 1}), ("charge", {"amount": 2}), ("charge", {"amount": 3}), ("charge", {"amount": 4})], "done"
)
"""One waits, one is answered with an error, one is in doubt, one is done."""


def mixed() -> tuple[Mixed, Script]:
    bench = Mixed()

    async def before(tool: str, args: dict[str, object]) -> None:
        if args["amount"] == 2:
            raise ToolError("no")
        if args["amount"] == 3:
            raise ConnectionResetError("lost")

    bench.before = before
    return bench, Script(*MIXED.steps)


@pytest.mark.parametrize("parallel", [1, 2, 4])
async def test_each_sibling_ends_by_its_own_record_and_a_doubt_goes_before_a_pause(place: Place, parallel: int) -> None:
    bench, model = mixed()
    needed = await error_of(Worker(place).run(model, bench.registry, parallel=parallel))
    assert isinstance(needed, RecoveryNeedsDecision)
    assert [doubt.call for doubt in needed.doubts] == ["0.2"]
    stored = await place.load("run")
    assert stored.row.status == RunStatus.BLOCKED
    assert kinds(stored, "0.0") == [PENDING]
    assert kinds(stored, "0.1") == [STARTED, DONE]
    assert kinds(stored, "0.2") == [STARTED]
    assert kinds(stored, "0.3") == ([STARTED, DONE] if parallel > 3 else [])
    bench.before = Bench().before
    request = the_request(await look(place, bench, model, rerun_in_doubt=needed.doubts))
    assert (await place.load("run")).row.status == RunStatus.PAUSED
    assert (bench.remote.count("charge"), bench.remote.count("refund")) == (2, 0)
    result = await resume(place, bench, request.approve(by="ana"), model=model)
    assert results_in(result.messages)[1] == "error: ToolError: no"
    assert (result.status, bench.effects, model.asked) == ("done", 3, 2)


async def test_a_verdict_for_a_blocked_run_is_stored_and_spent_once_the_doubt_is_settled(place: Place) -> None:
    bench, model = mixed()
    needed = await error_of(Worker(place).run(model, bench.registry))
    assert isinstance(needed, RecoveryNeedsDecision)
    pending = ApprovalRequest("0.0", "run", 0, "refund", {"amount": 1}, _digest(await place.load("run")))
    error = await error_of(resume(place, bench, pending.approve(by="ana"), model=model))
    assert isinstance(error, RecoveryNeedsDecision)
    assert kinds(await place.load("run"), "0.0") == [PENDING, RecordKind.VERDICT]
    assert bench.remote.count("refund") == 0
    bench.before = Bench().before
    assert (await look(place, bench, model, rerun_in_doubt=True)).status == "done"
    assert bench.remote.count("refund") == 1


def _digest(stored: Any) -> str:
    from agent_runtime.approvals import read_pending

    return read_pending(next(record.body for record in stored.records if record.kind == PENDING)).digest


async def test_with_one_call_at_a_time_those_behind_a_request_still_start(place: Place) -> None:
    bench, model = Mixed(), Script([("refund", {"amount": 1}), *CHARGE, ("charge_i", {"amount": 3})], "done")
    request = the_request(await Worker(place).run(model, bench.registry, parallel=1))
    assert [effect.tool for effect in bench.remote.effects] == ["charge", "charge_i"]
    result = await resume(place, bench, request.deny(by="ana"), model=model)
    assert results_in(result.messages) == ["error: Denied: ana did not approve this call", "effect 1", "effect 2"]


async def test_a_cancel_closes_what_was_pending_for_good(place: Place) -> None:
    bench, model = Mixed(), Script([("refund", {"amount": 1}), *CHARGE], "done")
    request = the_request(await Worker(place).run(model, bench.registry))
    sealer = sealer_for(RING, tenant="", run_id="run")
    await post_message(place.open(), sealer, MessageKind.CANCEL, {"by": "bo", "why": "no more"})
    result = await look(place, bench, model)
    assert (result.status, result.pending) == ("cancelled", ())
    error = await error_of(resume(place, bench, request.approve(by="ana"), model=model))
    assert isinstance(error, CheckpointConflict)
    assert (bench.remote.count("refund"), bench.remote.count("charge")) == (0, 1)


@pytest.mark.parametrize("parallel", [2, 3])
async def test_a_request_can_be_seen_and_answered_while_a_sibling_is_on_its_way(place: Place, parallel: int) -> None:
    bench, go = Mixed(), asyncio.Event()

    async def before(tool: str, args: dict[str, object]) -> None:
        if args["amount"] == 100:
            await go.wait()

    bench.before = before
    model = Script([*CHARGE, ("charge", {"amount": 2}), ("refund", {"amount": 1})], "done")
    work = asyncio.ensure_future(Worker(place).run(model, bench.registry, parallel=parallel))
    await place.becomes("run", lambda run: any(record.kind == PENDING for record in run.records))
    stored = await place.load("run")
    request = ApprovalRequest("0.2", "run", 0, "refund", {"amount": 1}, _digest(stored))
    left = await resume(place, bench, request.approve(by="ana"), model=model)
    assert (left.status, [each.id for each in left.pending]) == ("running", ["0.2"])
    go.set()
    result = await work
    assert (result.status, bench.effects, model.asked) == ("done", 3, 2)


# What it costs.


async def _appends(
    place: Place, bench: Bench, run_id: str, *answers: Callable[[ApprovalRequest], Verdict], **options: Any
) -> int:
    """How many commits of the run a whole run takes, with these answers to its requests."""
    store, model = Counting(place.open()), charging()
    result = await Worker(place).run(model, bench.registry, run_id, checkpoints=store, **options)
    for answer in answers:
        verdicts = [answer(the_request(result))]
        result = await Worker(place).recover(model, bench.registry, run_id, checkpoints=store, verdicts=verdicts)
    assert result.status == "done"
    return len(store.appends)


async def test_an_approval_adds_two_commits_a_denial_one_and_a_port_one(place: Place) -> None:
    plain = await _appends(place, Bench(), "plain")
    approved = await _appends(place, needing(), "approved", lambda request: request.approve(by="ana"))
    edited = await _appends(place, needing(), "edited", lambda request: request.edit({"amount": 1}, by="ana"))
    denied = await _appends(place, needing(), "denied", lambda request: request.deny(by="ana"))
    asked = await _appends(place, needing(), "asked", approvals=lambda request: request.approve(by="ana"))
    assert [each - plain for each in (approved, edited, denied, asked)] == [2, 2, 1, 1]


async def test_a_request_is_written_together_with_the_reply_that_asks_and_the_verdict_with_the_claim(place: Place) -> None:
    store, bench = Counting(place.open()), needing()
    request = the_request(await Worker(place).run(charging(), bench.registry, checkpoints=store))
    assert [RecordKind(r.kind).name for r in store.appends[-1].records] == ["DONE", "PENDING", "RELEASED"]
    await Worker(place).recover(charging(), bench.registry, checkpoints=store, verdicts=[request.approve(by="ana")])
    assert [RecordKind(r.kind).name for r in store.appends[2].records] == ["CLAIMED", "VERDICT"]
    assert [RecordKind(r.kind).name for r in store.appends[3].records] == ["STARTED"]


# A batch half answered.

ABC = [("charge_i", {"amount": 1}), ("charge", {"amount": 2}), ("charge_i", {"amount": 3})]


@pytest.mark.parametrize("commits", ["grouped", "each"])
@pytest.mark.parametrize("needs", [1, 2, 3])
async def test_an_approved_batch_that_is_killed_between_its_calls_goes_on_where_it_was(
    place: Place, needs: int, commits: str
) -> None:
    """`needs`: the call that a person approved; the worker dies after the first call's confirm, before the next intent."""
    bench = Bench(needs_approval=lambda args: args["amount"] == needs)
    model = Script([("charge_i", {"amount": at}) for at in (1, 2, 3)], "done")
    request = the_request(await Worker(place).run(model, bench.registry, parallel=1, commits=commits))
    assert bench.effects == 2
    dying = Worker(place).killed_at(CrashPoint.AFTER_CONFIRM)
    verdicts = [request.approve(by="ana")]
    await dying.recover_and_die(model, bench.registry, parallel=1, commits=commits, verdicts=verdicts)
    result = await look(place, bench, model, commits=commits)
    assert (result.status, bench.effects, model.asked) == ("done", 3, 2)
    order = sorted((1, 2, 3), key=lambda at: (at == needs, at))
    assert results_in(model.requests[-1]) == [f"effect {order.index(at) + 1}" for at in (1, 2, 3)]


async def test_three_approved_calls_the_worker_dies_after_the_first_and_the_person_is_not_asked_again(place: Place) -> None:
    bench, model = needing(), Script(ABC, "done")
    result = await Worker(place).run(model, bench.registry, parallel=1)
    verdicts = [request.approve(by="ana") for request in result.pending]
    dying = Worker(place).killed_at(CrashPoint.BEFORE_INTENT, nth=2)
    await dying.recover_and_die(model, bench.registry, parallel=1, verdicts=verdicts)
    assert bench.effects == 1
    result = await look(place, bench, model)
    assert (result.status, bench.effects, model.asked) == ("done", 3, 2)
    assert [effect.args["amount"] for effect in bench.remote.effects] == [1, 2, 3]
    assert results_in(model.requests[-1]) == ["effect 1", "effect 2", "effect 3"]


async def test_of_three_approved_calls_only_the_keyless_one_that_was_under_way_is_named_as_in_doubt(place: Place) -> None:
    bench, model = needing(), Script(ABC, "done")
    result = await Worker(place).run(model, bench.registry, parallel=1)
    verdicts = [request.approve(by="ana") for request in result.pending]
    dying = Worker(place).killed_at(CrashPoint.AFTER_INTENT, nth=2)
    await dying.recover_and_die(model, bench.registry, parallel=1, verdicts=verdicts)
    needed = await error_of(look(place, bench, model))
    assert isinstance(needed, RecoveryNeedsDecision)
    assert [tool for tool, _ in needed.calls] == ["charge"]
    assert str(await error_of(look(place, bench, model))) == str(needed)
    assert [effect.args["amount"] for effect in bench.remote.effects] == [1]
    result = await look(place, bench, model, rerun_in_doubt=needed.doubts)
    assert (result.status, model.asked) == ("done", 2)
    assert [effect.args["amount"] for effect in bench.remote.effects] == [1, 2, 3]
    assert results_in(result.messages) == ["effect 1", "effect 2", "effect 3"]


# Somebody answers at the very moment at which the run is parked.


class Answering(Delegate):
    """A worker's store on which somebody posts a verdict just before, or just after, the write that parks the run."""

    def __init__(self, place: Place, *, late: bool) -> None:
        super().__init__(place.open())
        self.place, self.late, self.posted = place, late, 0

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        if not self.late:
            await self._say_all(appends)
        answers = await super().commit(appends)
        if self.late:
            await self._say_all(appends)
        return answers

    async def _say_all(self, appends: Sequence[Append]) -> None:
        for append in appends:
            if append.row.status == RunStatus.PAUSED:
                for record in append.records:
                    if record.kind == PENDING:
                        await self._say(append, record.call)

    async def _say(self, append: Append, call: str) -> None:
        from agent_runtime.approvals import request_of
        from agent_runtime.journal.replay import CallLife

        body = next(record.body for record in append.records if record.kind == PENDING)
        self.posted += 1
        await post(self.place, request_of("run", CallLife(call, pending=body), "").approve(by="ana"))


@pytest.mark.parametrize("late", [False, True], ids=["before the write", "after the write"])
async def test_a_verdict_posted_while_the_run_parks_is_not_lost_and_the_same_worker_goes_on(place: Place, late: bool) -> None:
    bench, model = needing(), Script(CHARGE, CHARGE, "done")
    store = Answering(place, late=late)
    result = await Worker(place).run(model, bench.registry, checkpoints=store)
    assert (result.status, bench.effects, store.posted, model.asked) == ("done", 2, 2, 3)


async def test_a_verdict_posted_to_a_run_that_nobody_works_wakes_it(place: Place) -> None:
    bench = needing()
    request = await paused(place, bench)
    assert (await place.load("run")).row.wake_at is None
    await post(place, request._replace(digest="d").approve(by="ana"))
    assert (await place.load("run")).row.wake_at is not None
    assert the_request(await look(place, bench)) == request
    assert (await place.load("run")).row.wake_at is None, "what is of no use keeps nobody awake"
    await post(place, request.approve(by="ana"))
    assert (await place.load("run")).row.wake_at is not None
    assert (await look(place, bench)).status == "done"


async def test_nothing_is_claimed_or_written_when_a_paused_run_is_looked_at(place: Place) -> None:
    bench = needing()
    await paused(place, bench)
    before = await stands(place)
    for _ in range(20):
        the_request(await look(place, bench))
    assert await stands(place) == before
    assert (await place.load("run")).row.attempts == 0
