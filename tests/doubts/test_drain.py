"""When "it did not happen" is to be believed: the attempt is over, and what it may have sent has had its time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from agent_runtime import codec
from agent_runtime.abandoned import Lookout
from agent_runtime.clock import milliseconds
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict, RecoveryNeedsDecision
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowResult
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus, StoredRecord
from agent_runtime.journal.replay import read_history
from agent_runtime.lease import ProcessMark, own_mark
from agent_runtime.settlements import Drain, Outcome, Rerun, drain_of, read_settled
from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import Killed, Place, Script, Worker, error_of, expect_death, results_in
from tests.doubts.desk import MAIL, Frozen, Outbox, post_settling, says, settled_in, status
from tests.flow.desk import runner_on

HOUR = 3600.0
SETTLES = 60.0


async def needed(worker: Worker, model: Script, outbox: Outbox, **options: Any) -> str:
    """Why the one doubt of the run is left to a person."""
    error = await error_of(worker.recover(model, outbox.registry, **options))
    assert isinstance(error, RecoveryNeedsDecision), error
    [doubt] = error.doubts
    return doubt.why


# The time that a request may sit at the remote.


@pytest.mark.parametrize("skew", [0.0, HOUR, -HOUR], ids=["right", "an hour ahead", "an hour behind"])
@pytest.mark.parametrize("worked", [0.0, 600.0], ids=["a quick call", "a call of ten minutes"])
async def test_what_was_sent_has_its_time_by_the_stores_clock_from_when_the_attempt_is_known_to_be_over(
    place: Place, skew: float, worked: float
) -> None:
    """However wrong the clocks of workers are. A call may send at its very end: how long it took is no part of the wait."""
    stores, workers = ManualClock(auto=True), ManualClock(auto=True)
    workers.jump_wall(skew)
    outbox, model = Outbox(settles_after=SETTLES), Script(MAIL, "done")
    place.open(stores)

    async def take_long() -> None:
        stores.advance(worked)

    outbox.before = take_long
    dying = Worker(place, clock=stores).killed_at(CrashPoint.AFTER_CALL)
    await dying.run_and_die(model, outbox.registry, clock=workers)
    outbox.sent.clear()  # it is on its way still
    outbox.before = Outbox().before
    for passed, left in ((0.0, 60), (30.0, 30), (29.0, 1)):
        stores.advance(passed)
        why = await needed(Worker(place, clock=stores), model, outbox, clock=workers)
        assert why == f"its probe says that it did not happen, but what it sent may still take effect for {left} s"
        where, wake_at = await status(place)
        assert where is RunStatus.BLOCKED
        assert wake_at is not None
        assert abs(wake_at - milliseconds(stores.now()) - left * 1000) <= 10
        assert await due(place, stores) == []
    assert outbox.entered == 1
    stores.advance(1.1)
    assert await due(place, stores) == ["run"]
    result = await Worker(place, clock=stores).recover(model, outbox.registry, clock=workers)
    assert (results_in(result.messages), outbox.entered) == (["mail 1"], 2)


async def due(place: Place, clock: ManualClock) -> list[str]:
    """What a supervisor would start a worker on now."""
    lookout = Lookout(place.open(clock), name="", kind="loop", poll_seconds=0.0, clock=clock)
    return [seen.row.run_id for seen in (await lookout.look(lambda _: True, trust_leases=True)).due]


async def test_a_request_that_arrives_while_it_may_is_found_by_the_probe(place: Place) -> None:
    clock, outbox, model = ManualClock(auto=True), Outbox(settles_after=SETTLES), Script(MAIL, "done")
    place.open(clock)
    dying = Worker(place, clock=clock).killed_at(CrashPoint.AFTER_CALL)
    await dying.run_and_die(model, outbox.registry, clock=clock)
    arriving, outbox.remote.keys = outbox.remote.keys, []
    assert "may still take effect" in await needed(Worker(place, clock=clock), model, outbox, clock=clock)
    outbox.remote.keys = arriving
    clock.advance(1)
    result = await Worker(place, clock=clock).recover(model, outbox.registry, clock=clock)
    assert (results_in(result.messages), outbox.entered) == (["mail 1"], 1)


async def test_a_living_workers_own_probe_waits_for_what_it_sent_too(place: Place) -> None:
    clock, outbox, model = ManualClock(auto=True), Outbox(settles_after=SETTLES), Script(MAIL, "done")
    place.open(clock)

    async def fail() -> None:
        if outbox.entered == 1:
            raise ConnectionResetError("gone")

    outbox.before = fail
    error = await error_of(Worker(place, clock=clock).run(model, outbox.registry, clock=clock))
    assert isinstance(error, RecoveryNeedsDecision)
    assert error.doubts[0].why.endswith("what it sent may still take effect for 60 s")
    where, wake_at = await status(place)
    assert where is RunStatus.BLOCKED
    assert wake_at is not None
    assert abs(wake_at - milliseconds(clock.now()) - 60_000) <= 10
    clock.advance(61)
    assert (await Worker(place, clock=clock).recover(model, outbox.registry, clock=clock)).status == "done"
    assert outbox.sent == ["run:0"]


class Letter(BaseModel):
    to: str = "ana"
    note: str = ""


async def test_recover_all_goes_on_with_a_flow_once_its_doubt_is_drained(place: Place) -> None:
    clock, outbox = ManualClock(auto=True), Outbox(settles_after=SETTLES)
    place.open(clock)
    mail = Call("mail", args=lambda letter: {"to": letter.to}, into="note")
    flow = Flow("letters", state=Letter).node("send", mail).end("send")

    async def fail() -> None:
        if outbox.entered == 1:
            raise ConnectionResetError("gone")

    outbox.before = fail
    runner = runner_on(Worker(place, clock=clock), outbox.registry, clock=clock)
    assert isinstance(await error_of(runner.run(flow, Letter(), run_id="run")), RecoveryNeedsDecision)
    for seconds, ends in ((30, RecoveryNeedsDecision), (31, FlowResult)):
        clock.advance(seconds)
        other = runner_on(Worker(place, clock=clock), outbox.registry, clock=clock)
        [ended] = (await other.recover_all(flow)).values()
        assert isinstance(ended, ends)
    assert outbox.sent == ["run:0/send"]


async def test_an_attempt_of_an_older_epoch_stays_over_whoever_looks_later(place: Place) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(model, outbox.registry)
    outbox.saying = says(Outcome.unknown())
    for _ in range(3):
        assert "does not know" in await needed(Worker(place), model, outbox)
        await post_settling(place, Rerun(), attempt=7)  # news of no use: each look may claim again
    run = await place.load("run")
    assert run.row.epoch > 1
    outbox.saying = None
    assert results_in((await Worker(place).recover(model, outbox.registry)).messages) == ["mail 1"]
    assert outbox.sent == ["run:0"]


async def test_a_run_that_was_given_back_by_its_own_worker_is_over_whoever_asks(place: Place) -> None:
    """Cancelled in the middle of its call: the worker lives, and its code of that call does not."""
    outbox, model, inside = Outbox(), Script(MAIL, "done"), asyncio.Event()

    async def hang() -> None:
        inside.set()
        await asyncio.Event().wait()

    outbox.before = hang
    task = asyncio.ensure_future(Worker(place).run(model, outbox.registry))
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    outbox.before = Outbox().before
    run = await place.load("run")
    assert (run.row.owner, run.records[-1].kind) == (NO_OWNER, RecordKind.RELEASED)
    assert await judged(place, far_away(run.records, own_mark()._replace(host="elsewhere", boot="another"))) == Drain()
    assert results_in((await Worker(place).recover(model, outbox.registry)).messages) == ["mail 1"]


# Who can tell that a worker is gone.

ELSEWHERE: dict[str, dict[str, Any]] = {
    "another host": {"host": "elsewhere", "boot": "another"},
    "another boot of who knows which host": {"host": "", "boot": "another"},
    "another container": {"namespace": "pid:[1]"},
    "a system that does not tell": {"boot": "", "namespace": "", "born": ""},
    "a container that does not tell": {"namespace": ""},
}


def far_away(records: Sequence[StoredRecord], mark: ProcessMark) -> list[StoredRecord]:
    """The records as a worker elsewhere would have claimed them."""
    body = codec.encode({**mark.to_plain(), "why": "start"})
    return [each._replace(body=body) if each.kind == RecordKind.CLAIMED else each for each in records]


async def judged(place: Place, records: Sequence[StoredRecord], *, later_ms: int = 10**12) -> Drain:
    """What is to be believed of call 0, long after."""
    run = await place.load("run")
    life = read_history("run", records, read_settled).lives["0"]
    return drain_of(life, run.row, records, run.row.updated_at + later_ms)


@pytest.mark.parametrize("where", ELSEWHERE)
async def test_of_a_worker_elsewhere_nobody_knows_that_it_is_gone(place: Place, where: str) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(model, outbox.registry)
    records = (await place.load("run")).records
    assert await judged(place, records) == Drain(), "here it is gone"
    gone = own_mark()._replace(pid=2**22 + 1, born="1")
    assert await judged(place, far_away(records, gone)) == Drain(), "so is another process of this host"
    there = gone._replace(**ELSEWHERE[where])
    assert "not known to be gone" in (await judged(place, far_away(records, there))).why


async def test_an_earlier_boot_of_this_host_is_over(place: Place) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(model, outbox.registry)
    records = (await place.load("run")).records
    assert await judged(place, far_away(records, own_mark()._replace(boot="the one before"))) == Drain()


async def test_a_living_owner_of_this_very_process_is_never_gone_also_when_another_epoch_holds_the_run(place: Place) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")
    frozen = Frozen(place, outbox, model)
    await frozen.inside()
    for _ in range(3):
        assert "not known to be gone" in await needed(Worker(place), model, outbox, take_over=True)
    run = await place.load("run")
    claims = [codec.decode(record.body) for record in run.records if record.kind == RecordKind.CLAIMED]
    assert [claim.get("gone", False) for claim in claims] == [False] * len(claims)
    frozen.thawed.set()
    with pytest.raises(CheckpointConflict):
        await frozen.work
    assert outbox.sent == ["run:0"]


# What a person says.


async def test_a_persons_not_done_that_came_too_soon_is_never_believed_later(place: Place) -> None:
    """Said while the worker could still send: that it is gone now makes true nothing that was said then."""
    outbox, model = Outbox(probe=None), Script(MAIL, "done")
    frozen = Frozen(place, outbox, model)
    await frozen.inside()
    await post_settling(place, Outcome.not_done())

    async def die() -> None:
        raise Killed("killed once it has sent")

    outbox.after = die
    frozen.thawed.set()
    await expect_death(frozen.work)
    outbox.after = Outbox().after
    for _ in range(2):
        assert "its worker stopped before it could write one" in await needed(Worker(place), model, outbox)
    assert (outbox.sent, outbox.entered) == (["run:0"], 1)
    assert await status(place) == (RunStatus.BLOCKED, None)
    await post_settling(place, Outcome.done("mail 1"))
    assert results_in((await Worker(place).recover(model, outbox.registry)).messages) == ["mail 1"]


async def test_a_persons_not_done_that_was_drained_is_believed_where_it_is_so(place: Place) -> None:
    outbox, model = Outbox(probe=None), Script(MAIL, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(model, outbox.registry)
    await needed(Worker(place), model, outbox)
    await post_settling(place, Outcome.not_done(), drained=True)
    result = await Worker(place).recover(model, outbox.registry)
    assert (results_in(result.messages), outbox.entered) == (["mail 1"], 1)


async def test_nobodys_word_makes_a_living_attempt_undone_but_a_rerun_may_be_permitted(place: Place) -> None:
    outbox, model = Outbox(probe=None), Script(MAIL, "done")
    frozen = Frozen(place, outbox, model)
    await frozen.inside()
    await post_settling(place, Outcome.not_done(), drained=True)
    await needed(Worker(place), model, outbox, take_over=True)
    assert outbox.entered == 1
    await post_settling(place, Rerun())
    assert (await Worker(place).recover(model, outbox.registry)).status == "done"
    assert (outbox.entered, outbox.sent) == (2, ["run:0"])
    frozen.thawed.set()
    with pytest.raises(CheckpointConflict):
        await frozen.work
    assert outbox.sent == ["run:0"] * 2, "knowing that it may happen twice, somebody said so"
    assert [each["how"] for each in settled_in(await place.load("run"))] == ["rerun"]


async def test_a_claim_says_of_the_worker_that_it_found_that_it_is_gone(place: Place) -> None:
    outbox, model = Outbox(probe=None), Script(MAIL, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(model, outbox.registry)
    await needed(Worker(place), model, outbox)
    run = await place.load("run")
    [claim] = [codec.decode(each.body) for each in run.records if each.kind == RecordKind.CLAIMED and each.epoch == 2]
    assert claim["gone"] is True
    assert run.row.created_at <= claim["heard"] <= run.row.updated_at
