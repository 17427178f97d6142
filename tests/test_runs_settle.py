"""Settling a call in doubt from outside: who may say what, in which state of the run, and what comes of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from agent_runtime import Outcome, Rerun, Runs
from agent_runtime.approvals import ApprovalRequest, Verdict
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import (
    CheckpointNotFound,
    InvalidSetting,
    NotInDoubt,
    RecoveryNeedsDecision,
    SettlementRefused,
    StoreUnavailable,
    Unrecordable,
)
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, write_message
from agent_runtime.journal.records import NO_OWNER, RunStatus, StoredMessage
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.states import CallState
from agent_runtime.journal.store import Answer
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tools import ToolRegistry
from tests.bench import (
    KEY,
    RING,
    Asked,
    Bench,
    Delegate,
    Killed,
    NoHeartbeat,
    Place,
    Script,
    Worker,
    error_of,
    expect_death,
    results_in,
    transcript,
    until,
)
from tests.standing import CHARGE_I, Overtaken, alive, block, bring_to, die, kinds, operator, script, stored

SAID: dict[str, Any] = {"by": "ana", "why": "asked the bank"}


async def settle(place: Place, settling: Any, call: str = "0", run: str = "run", **said: Any) -> bool:
    return await operator(place).settle(run, call, settling, **{**SAID, **said})


# What may be said, by whom.


@pytest.mark.parametrize("name", ["by", "why"])
@pytest.mark.parametrize("text", ["", " \n", None, 7])
async def test_a_settlement_is_somebodys_for_a_reason(place: Place, name: str, text: Any) -> None:
    await block(place, Bench())
    before = await stored(place)
    with pytest.raises(InvalidSetting, match=f"pass {name}="):
        await settle(place, Outcome.not_done(), **{name: text})
    assert await stored(place) == before


@pytest.mark.parametrize("settling", [Outcome.unknown(), None, "done", True, Rerun], ids=repr)
async def test_what_says_nothing_settles_nothing(place: Place, settling: object) -> None:
    await block(place, Bench())
    before = await stored(place)
    with pytest.raises(InvalidSetting, match="Outcome"):
        await settle(place, settling)
    assert await stored(place) == before


async def test_a_result_that_cannot_be_recorded_settles_nothing(place: Place) -> None:
    await block(place, Bench())
    with pytest.raises(Unrecordable):
        await settle(place, Outcome.done({1, 2}))
    assert (await place.load("run")).row.status == RunStatus.BLOCKED


# By a claim.


@pytest.mark.parametrize("state", ["blocked", "doubtful"])
async def test_a_call_that_was_done_is_closed_with_its_result_and_the_run_goes_on_with_it(place: Place, state: str) -> None:
    bench = await bring_to(place, state)
    count = (await place.load("run")).row.number
    assert await settle(place, Outcome.done("effect 1, says the bank")) is True
    run = await place.load("run")
    assert (run.row.status, run.row.owner, run.row.attempts) == (RunStatus.RUNNING, NO_OWNER, 0)
    assert kinds(run, count) == ["claimed", "settled"]
    result = await Worker(place).recover(script(), bench.registry)
    assert result.status == "done"
    assert results_in(transcript(result)) == ["effect 1, says the bank"]
    assert bench.entered["charge"] == 1


@pytest.mark.parametrize("settling", [Outcome.not_done(), Rerun()], ids=["not done", "rerun"])
async def test_a_call_that_may_run_again_does_once(place: Place, settling: Any) -> None:
    bench = Bench()
    await block(place, bench)
    assert await settle(place, settling)
    assert (await Worker(place).recover(script(), bench.registry)).status == "done"
    assert bench.entered["charge"] == 2
    timeline = (await operator(place).show("run")).timeline
    assert timeline.calls["0"].settled["by"] == "ana"
    assert [segment.why for segment in timeline.segments] == ["start", "recovery", "settlement", "recovery"]


async def test_a_call_whose_result_could_not_be_stored_is_settled_like_any(place: Place) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def charge(amount: int) -> object:
        return {amount}

    assert isinstance(await error_of(Worker(place).run(script(), registry)), Unrecordable)
    assert (await operator(place).show("run")).timeline.calls["0"].state is CallState.UNRECORDABLE
    await settle(place, Outcome.done([5]))
    result = await Worker(place).recover(script(), registry)
    assert results_in(transcript(result)) == ["[5]"]


async def test_only_after_its_last_doubt_a_blocked_run_goes_again(place: Place) -> None:
    bench, both = Bench(), Script([("charge", {"amount": 1}), ("email", {"to": "ana"})], "done")

    async def both_inside(_: str, __: dict[str, object]) -> None:
        await until(lambda: bench.effects == 2)
        raise Killed("killed")

    bench.after = both_inside
    await expect_death(Worker(place).run(both, bench.registry))
    assert isinstance(await error_of(Worker(place).recover(both, bench.registry)), RecoveryNeedsDecision)
    [info] = await operator(place).list(status="in-doubt")
    assert info.why == 'in doubt: charge amount=1 (call 0.0); email to="ana" (call 0.1)'
    await settle(place, Outcome.done("paid"), "0.0")
    run = await place.load("run")
    assert (run.row.status, run.row.owner) == (RunStatus.BLOCKED, NO_OWNER)
    assert [info.why for info in await operator(place).list()] == ['in doubt: email to="ana" (call 0.1)']
    await settle(place, Outcome.done("sent"), "0.1")
    assert (await place.load("run")).row.status == RunStatus.RUNNING
    bench.after = Bench().after
    assert results_in(transcript(await Worker(place).recover(both, bench.registry))) == ["paid", "sent"]
    assert bench.effects == 2


async def test_a_quarantined_run_stays_so_and_its_reason_too(place: Place) -> None:
    bench = await bring_to(place, "quarantined")
    [before] = await operator(place).list()
    assert await settle(place, Outcome.done("paid"))
    [after] = await operator(place).list()
    assert (after.status, after.why) == ("quarantined", before.why)
    assert (await operator(place).show("run")).info.why == before.why
    assert await operator(place).release("run", by="ana")
    model = Script(CHARGE_I, "done")
    assert results_in(transcript(await Worker(place).recover(model, bench.registry))) == ["paid"]


async def test_a_run_that_ended_takes_the_record_and_nothing_else_changes(place: Place) -> None:
    await bring_to(place, "cancelled in doubt")
    [before] = await operator(place).list()
    assert before.why == "cancelled by ana: enough; still in doubt: charge amount=5 (call 0)"
    was = await stored(place)
    assert await settle(place, Outcome.done("paid")) is True
    run = await stored(place)
    hints = ("number", "head", "seal", "updated_at", "heartbeat_at")
    assert run.row == was.row._replace(**{name: getattr(run.row, name) for name in hints})
    assert kinds(run, was.row.number) == ["settled"]
    report = await operator(place).show("run")
    assert (report.info.status, report.info.why) == ("cancelled", "cancelled by ana: enough")
    assert report.timeline.calls["0"].outcome == {"result": "paid"}
    with pytest.raises(NotInDoubt):
        await settle(place, Outcome.done("paid"))


async def test_a_run_that_ended_under_an_old_key_stays_under_it(place: Place) -> None:
    await bring_to(place, "cancelled in doubt")
    rotated = Runs(place.open(), checkpoint_key={"key": KEY, "new": b"another key, which is as long"})
    assert await rotated.settle("run", "0", Outcome.done("paid"), **SAID)
    assert (await stored(place)).row.key_id == "key"
    assert [verified.holds for verified in await rotated.verify("run")] == [True]


async def test_a_blocked_run_that_is_settled_under_a_new_key_is_under_it_from_then_on(place: Place) -> None:
    bench = Bench()
    await block(place, bench)
    keys = {"key": KEY, "new": b"another key, which is as long"}
    place.is_tampered = True  # it is not under this place's key any more
    assert await Runs(place.open(), checkpoint_key=keys).settle("run", "0", Outcome.done("paid"), **SAID)
    result = await Worker(place).recover(script(), bench.registry, checkpoint_key=keys)
    assert results_in(transcript(result)) == ["paid"]


# What is not in doubt.


@pytest.mark.parametrize(
    ("state", "call", "words"),
    [
        ("dead", "0", "no such call"),
        ("paused", "0", "waits for a verdict"),
        ("done", "0", "no such call"),
        ("failed", "0", "has ended"),
        ("cancelled", "0", "no such call"),
        ("blocked", "0/model", "has ended"),
        ("blocked", "1", "in doubt are \\['0'\\]"),
        ("blocked", "", "no such call"),
    ],
)
async def test_a_call_that_is_not_in_doubt_cannot_be_settled(place: Place, state: str, call: str, words: str) -> None:
    await bring_to(place, state)
    before = await stored(place)
    for settling in (Outcome.done(1), Outcome.not_done(), Rerun()):
        with pytest.raises(NotInDoubt, match=words):
            await settle(place, settling, call)
    assert await stored(place) == before


async def test_a_lost_decision_is_made_again_and_not_settled(place: Place) -> None:
    await die(place, Bench(), CrashPoint.AFTER_DECIDE_BEFORE_JOURNAL)
    with pytest.raises(NotInDoubt, match="made again"):
        await settle(place, Outcome.done(1), "0/model")


async def test_a_call_about_which_somebody_was_being_asked_is_not_in_doubt(place: Place) -> None:
    bench = Bench(needs_approval=True)

    def ask(request: ApprovalRequest) -> Verdict:
        raise Killed("killed while it asks")

    await expect_death(Worker(place).run(script(), bench.registry, approvals=ask))
    assert "started" in kinds(await place.load("run"))[-1]
    with pytest.raises(NotInDoubt, match="being asked"):
        await settle(place, Rerun())


async def test_a_call_that_is_settled_is_not_settled_again(place: Place) -> None:
    await block(place, Bench())
    await settle(place, Rerun())
    with pytest.raises(NotInDoubt, match="will be run again"):
        await settle(place, Rerun())


async def test_of_nobodys_run_nothing_is_settled(place: Place) -> None:
    with pytest.raises(CheckpointNotFound):
        await settle(place, Rerun(), run="nobody")


async def test_of_two_who_settle_at_once_one_is_told_that_it_is_settled_already(place: Place) -> None:
    await block(place, Bench())
    errors = await asyncio.gather(*(error_of(settle(place, Outcome.done(each), by=each)) for each in ("ana", "ben")))
    assert sorted(type(error).__name__ for error in errors) == ["NoneType", "NotInDoubt"]
    winner = ("ana", "ben")[errors.index(None)]
    assert (await operator(place).show("run")).timeline.calls["0"].outcome == {"result": winner}


# It did not happen.


async def test_it_did_not_happen_is_not_believed_while_the_worker_may_still_send(place: Place) -> None:
    clock = ManualClock()
    leave, bench = asyncio.Event(), Bench()

    async def before(_: str, __: dict[str, object]) -> None:
        await leave.wait()

    bench.before = before
    frozen = Worker(place, clock=clock)
    task = asyncio.ensure_future(frozen.run(script(), bench.registry, clock=clock, offload=NoHeartbeat()))
    await until(lambda: bench.entered.total() == 1)
    runs = Runs(place.open(clock), checkpoint_key=KEY)
    clock.advance(60)
    with pytest.raises(SettlementRefused, match="may still send") as refused:
        await runs.settle("run", "0", Outcome.not_done(), **SAID)
    assert refused.value.until is None
    assert await runs.settle("run", "0", Rerun(), **SAID), "a person may permit it, knowing that"
    leave.set()
    assert await error_of(task), "the worker has lost it"


async def test_it_did_not_happen_is_believed_from_when_nothing_sent_takes_effect_any_more(place: Place) -> None:
    clock = ManualClock()
    bench = Bench(settles_after=60)
    worker = Worker(place, clock=clock).killed_at(CrashPoint.AFTER_INTENT)
    await worker.run_and_die(script(), bench.registry, clock=clock)
    runs = Runs(place.open(clock), checkpoint_key=KEY)
    with pytest.raises(SettlementRefused, match="may still take effect") as refused:
        await runs.settle("run", "0", Outcome.not_done(), **SAID)
    until_then = refused.value.until
    assert until_then is not None
    clock.advance((until_then - clock.now()).total_seconds())
    assert await runs.settle("run", "0", Outcome.not_done(), **SAID)


# While the owner lives.


async def test_a_settlement_of_a_run_that_is_worked_is_left_to_its_worker(place: Place) -> None:
    bench = Bench()
    stay: asyncio.Event = asyncio.Event()

    async def before(_: str, __: dict[str, object]) -> None:
        await stay.wait()

    bench.before = before
    worker = Worker(place)
    task = asyncio.ensure_future(worker.run(script(), bench.registry))
    await until(lambda: bench.entered.total() == 1)
    before_it = await place.load("run")
    assert await settle(place, Outcome.done("paid")) is False
    assert await settle(place, Outcome.done("paid")) is False, "the same again is no other word"
    with pytest.raises(SettlementRefused, match="done, by ana"):
        await settle(place, Outcome.done("paid twice"), by="ben")
    after = await place.load("run")
    assert (after.records, after.row.head) == (before_it.records, before_it.row.head)
    worker.is_dead = True
    task.cancel()
    with suppress(Killed, asyncio.CancelledError):
        await task
    with pytest.raises(SettlementRefused, match="done, by ana"):
        await settle(place, Rerun(), by="ben")
    bench.before = Bench().before
    result = await Worker(place).recover(script(), bench.registry)
    assert results_in(transcript(result)) == ["paid"]
    assert bench.entered["charge"] == 1


async def test_a_worker_that_waits_beside_a_blocked_run_goes_on_once_it_is_settled(place: Place) -> None:
    bench = Bench()

    async def after(_: str, __: dict[str, object]) -> None:
        raise RuntimeError("after which nobody knows")

    bench.after = after
    task = asyncio.ensure_future(Worker(place).run(script(), bench.registry, wait_seconds=600.0))
    await place.becomes("run", lambda run: run.row.status == RunStatus.BLOCKED)
    assert await settle(place, Outcome.done("paid"))
    assert results_in(transcript(await asyncio.wait_for(task, 20))) == ["paid"]


async def test_who_is_overtaken_by_another_settlement_of_a_run_that_is_worked_is_told_by_whom(place: Place) -> None:
    said = {"call": "0", "attempt": 1, "how": "done", "by": "ben", "why": "saw it", "ending": {"result": 1}}
    message = write_message(sealer_for(RING, tenant="", run_id="run"), MessageKind.SETTLE, said)
    async with alive(place) as (task, _):
        overtaken = Runs(Overtaken(place.open(), message), checkpoint_key=KEY)
        with pytest.raises(SettlementRefused, match="done, by ben"):
            await overtaken.settle("run", "0", Outcome.done(2), **SAID)
    assert (await task).status == "done", "its worker knows better"


async def test_a_call_that_its_own_worker_knows_to_be_done_is_not_settled_as_anything_else(place: Place) -> None:
    await block(place, Bench())
    run = await place.load("run")
    started = next(record for record in run.records if record.call == "0")
    late = {
        "call": "0",
        "attempt": 1,
        "epoch": started.epoch,
        "opened": run.records[0].seal.hex(),
        "ending": {"result": "late"},
    }
    message = write_message(sealer_for(RING, tenant="", run_id="run"), MessageKind.LATE, late)
    await place.open().post(RunId("run"), message)
    for settling in (Outcome.not_done(), Rerun()):
        with pytest.raises(SettlementRefused, match="left the result"):
            await settle(place, settling)
    assert await settle(place, Outcome.done("paid"))


class Mute(Delegate):
    """A store that takes no message."""

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        raise StoreUnavailable("it does not answer")


async def test_the_messages_that_came_before_a_settlement_still_wake_the_run(place: Place) -> None:
    asked: list[Asked] = [("charge", {"amount": 1}), ("email", {"to": "ana"})]
    bench, both = Bench(), Script(asked, "done")

    async def both_inside(_: str, __: dict[str, object]) -> None:
        await until(lambda: bench.effects == 2)
        raise Killed("killed")

    bench.after = both_inside
    await expect_death(Worker(place).run(both, bench.registry))
    assert await error_of(Worker(place).recover(both, bench.registry))
    sealer = sealer_for(RING, tenant="", run_id="run")
    said = {"call": "0.1", "attempt": 1, "how": "done", "by": "ben", "why": "saw it", "ending": {"result": "sent"}}
    await place.open().post(RunId("run"), write_message(sealer, MessageKind.SETTLE, said))
    mute = Runs(Mute(place.open()), checkpoint_key=KEY)
    assert await mute.settle("run", "0.0", Outcome.done("paid"), **SAID), "it is recorded, whether or not anybody hears of it"
    run = await place.load("run")
    assert (run.row.status, run.row.wake_at is not None) == (RunStatus.BLOCKED, True)
    bench.after = Bench().after
    assert (await Worker(place).recover(both, bench.registry)).status == "done"
    assert bench.effects == 2


async def test_a_settled_run_is_listed_as_what_it_is(place: Place) -> None:
    await block(place, Bench())
    await settle(place, Rerun())
    assert [info.status for info in await operator(place).list()] == ["interrupted"], "it waits for a worker"
    async with alive(place, "other"):
        assert {info.run_id: info.status for info in await operator(place).list()}["other"] == "running"
