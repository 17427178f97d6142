"""The synchronous port: a person who answers at once, asked once the call's intent is written, and again after a crash."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agent_runtime.approvals import ApprovalRequest, Verdict
from agent_runtime.crash import CrashPoint
from agent_runtime.journal.records import RecordKind
from agent_runtime.settlements import read_asked
from agent_runtime.telemetry import HistorySink
from tests.approvals.desk import charging, kinds, look, needing, resume, the_request
from tests.bench import Bench, Place, Script, Worker, error_of, kill_when, results_in

PENDING, STARTED, UNSENT = RecordKind.PENDING, RecordKind.STARTED, RecordKind.UNSENT
VERDICT, DONE = RecordKind.VERDICT, RecordKind.DONE


class Desk:
    """Somebody at a console: what they were shown, and what they say."""

    def __init__(self, answer: Callable[[ApprovalRequest], Any]) -> None:
        self.asked: list[ApprovalRequest] = []
        self.threads: set[int] = set()
        self._answer = answer

    def plain(self, request: ApprovalRequest) -> Verdict:
        self.asked.append(request)
        self.threads.add(threading.get_ident())
        verdict: Verdict = self._answer(request)
        return verdict

    async def later(self, request: ApprovalRequest) -> Verdict:
        await asyncio.sleep(0)
        return self.plain(request)


def yes(request: ApprovalRequest) -> Verdict:
    return request.approve(by="ana")


@pytest.mark.parametrize("commits", ["grouped", "each"])
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_the_port_is_asked_once_the_intent_is_written_and_its_yes_is_acted_upon(
    place: Place, kind: str, commits: str
) -> None:
    bench, model, desk = needing(), charging(), Desk(yes)
    written: list[list[RecordKind]] = []

    async def ask(request: ApprovalRequest) -> Verdict:
        written.append(kinds(await place.load("run"), "0"))
        return await desk.later(request)

    port = ask if kind == "async" else desk.plain
    result = await Worker(place).run(model, bench.registry, approvals=port, commits=commits)
    assert (result.status, bench.effects, len(desk.asked)) == ("done", 1, 1)
    assert desk.asked[0].args == {"amount": 100}
    assert kinds(await place.load("run"), "0") == [PENDING, STARTED, VERDICT, DONE]
    if kind == "async":
        assert written == [[PENDING, STARTED]]
    else:
        assert threading.get_ident() not in desk.threads


async def test_what_a_port_was_asked_about_says_as_any_intent_for_how_long_it_may_take_effect(place: Place) -> None:
    bench = needing(settles_after=60)
    await Worker(place).run(charging(), bench.registry, approvals=Desk(yes).plain)
    [started] = [record for record in (await place.load("run")).records if record.kind == STARTED and record.call == "0"]
    assert read_asked(started.body).settles_ms == 60_000


async def test_a_yes_of_the_port_is_durable_before_the_call_goes_out(place: Place) -> None:
    bench, seen = needing(), []

    async def before(tool: str, args: dict[str, object]) -> None:
        seen.append(kinds(await place.load("run"), "0"))

    bench.before = before
    await Worker(place).run(charging(), bench.registry, approvals=yes)
    assert seen == [[PENDING, STARTED, VERDICT]]


async def test_the_port_denies_and_edits(place: Place) -> None:
    bench, model = needing(), Script([("charge", {"amount": at}) for at in (1, 2)], "done")

    def ask(request: ApprovalRequest) -> Verdict:
        return request.deny(by="bo", note="no") if request.args["amount"] == 1 else request.edit({"amount": 20}, by="ana")

    result = await Worker(place).run(model, bench.registry, approvals=ask)
    assert results_in(result.messages) == ["error: Denied: bo did not approve this call: no", "effect 1"]
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 20}]
    stored = await place.load("run")
    assert kinds(stored, "0.0") == [PENDING, STARTED, UNSENT, VERDICT, DONE]
    assert kinds(stored, "0.1") == [PENDING, STARTED, UNSENT, VERDICT, STARTED, DONE]


def _raise(error: BaseException) -> Any:
    raise error


GARBAGE: list[Callable[[ApprovalRequest], Any]] = [
    lambda request: None,
    lambda request: True,
    lambda request: "yes",
    lambda request: {"approve": True},
    lambda request: request,
    lambda request: request._replace(id="1").approve(by="ana"),
    lambda request: request._replace(run_id="other").approve(by="ana"),
    lambda request: request._replace(digest="d").approve(by="ana"),
    lambda request: request.approve(by="ana")._replace(by=""),
    lambda request: request.edit({"amount": "many"}, by="ana"),
    lambda request: _raise(EOFError("no console")),
    lambda request: _raise(asyncio.CancelledError()),
    lambda request: _raise(TimeoutError()),
]


@pytest.mark.parametrize("kind", ["plain", "later"])
@pytest.mark.parametrize("at", range(len(GARBAGE)))
async def test_a_port_that_does_not_answer_leaves_the_request_open_and_nothing_runs(place: Place, at: int, kind: str) -> None:
    bench, model, desk, sink = needing(), charging(), Desk(GARBAGE[at]), HistorySink()
    result = await Worker(place).run(model, bench.registry, approvals=getattr(desk, kind), sinks=[sink])
    request = the_request(result)
    assert (bench.effects, len(desk.asked)) == (0, 1)
    assert "approval.refused" in [event.name for event in sink.events]
    assert (await resume(place, bench, request.approve(by="ana"), model=model)).status == "done"
    assert (bench.effects, model.asked) == (1, 2)


async def test_who_may_not_approve_may_not_at_the_port_either(place: Place) -> None:
    bench = needing(may_approve=lambda by, request: by == "ana")
    refused = await Worker(place).run(charging(), bench.registry, approvals=lambda request: request.approve(by="bo"))
    the_request(refused)
    assert bench.effects == 0
    assert (await look(place, bench, approvals=yes)).status == "done"


async def _dies_while_asked(place: Place, bench: Bench, model: Script) -> None:
    worker, asked = Worker(place), asyncio.Event()

    async def wait_for_ever(request: ApprovalRequest) -> Verdict:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    await kill_when(worker, worker.run(model, bench.registry, approvals=wait_for_ever), asked)


@pytest.mark.parametrize("tool", ["charge", "charge_i", "lookup"])
async def test_a_worker_that_dies_while_it_asks_has_sent_nothing_and_no_rule_runs_the_call(place: Place, tool: str) -> None:
    args: dict[str, object] = {"name": "x"} if tool == "lookup" else {"amount": 100}
    bench, model, desk = needing(), Script([(tool, args)], "done"), Desk(yes)
    await _dies_while_asked(place, bench, model)
    assert kinds(await place.load("run"), "0") == [PENDING, STARTED]
    request = the_request(await look(place, bench, model, rerun_in_doubt=True))
    assert (request.tool, bench.entered.total()) == (tool, 0)
    if tool == "charge":
        result = await resume(place, bench, request.approve(by="ana"), model=model)
    else:
        result = await look(place, bench, model, approvals=desk.later)
        assert [each.id for each in desk.asked] == ["0"]
    assert (result.status, bench.entered.total(), model.asked) == ("done", 1, 2)


@pytest.mark.parametrize("door", ["verdicts", "port"])
@pytest.mark.parametrize("answer", ["approve", "edit", "deny"])
async def test_what_was_being_asked_when_the_worker_died_can_be_answered_in_every_way(
    place: Place, answer: str, door: str
) -> None:
    """An edit too: the intent that its worker had written holds other arguments, and never acted."""
    bench, model = needing(), charging()
    await _dies_while_asked(place, bench, model)

    def say(request: ApprovalRequest) -> Verdict:
        return {
            "approve": request.approve(by="ana"),
            "deny": request.deny(by="ana"),
            "edit": request.edit({"amount": 7}, by="ana"),
        }[answer]

    if door == "port":
        result = await look(place, bench, model, approvals=say)
    else:
        result = await resume(place, bench, say(the_request(await look(place, bench, model))), model=model)
    assert result.status == "done"
    wanted = {"approve": [{"amount": 100}], "edit": [{"amount": 7}], "deny": []}[answer]
    assert [effect.args for effect in bench.remote.effects] == wanted


@pytest.mark.parametrize("answer", ["approve", "edit"])
@pytest.mark.parametrize("point", [CrashPoint.BEFORE_INTENT, CrashPoint.AFTER_INTENT, CrashPoint.AFTER_CALL])
async def test_what_the_port_said_and_was_stored_is_not_asked_again(place: Place, point: CrashPoint, answer: str) -> None:
    bench, model = needing(), Script([("charge_i", {"amount": 100})], "done")

    def say(request: ApprovalRequest) -> Verdict:
        return request.approve(by="ana") if answer == "approve" else request.edit({"amount": 7}, by="ana")

    dying = Worker(place).killed_at(point)
    await dying.run_and_die(model, bench.registry, approvals=say, commits="each")
    desk = Desk(lambda request: request.deny(by="bo"))
    result = await look(place, bench, model, approvals=desk.plain)
    assert (result.status, desk.asked, bench.effects) == ("done", [], 1)
    assert bench.remote.effects[0].args == {"amount": 100 if answer == "approve" else 7}


async def test_an_answer_that_comes_after_its_worker_has_lost_the_run_lets_nothing_out(place: Place) -> None:
    bench, model = needing(), charging()
    asked, answered = asyncio.Event(), asyncio.Event()

    async def slow(request: ApprovalRequest) -> Verdict:
        asked.set()
        await answered.wait()
        return request.approve(by="ana")

    first = asyncio.ensure_future(Worker(place).run(model, bench.registry, approvals=slow))
    await asyncio.wait_for(asked.wait(), 20)
    request = the_request(await look(place, bench, model, take_over=True))
    answered.set()
    assert await error_of(first) is not None
    assert bench.effects == 0
    assert (await resume(place, bench, request.deny(by="bo"), model=model)).status == "done"
    assert bench.effects == 0


async def test_an_open_request_is_asked_at_the_port_of_whoever_picks_the_run_up(place: Place) -> None:
    bench, desk = needing(), Desk(yes)
    the_request(await Worker(place).run(charging(), bench.registry))
    assert (await look(place, bench, approvals=desk.plain)).status == "done"
    assert (len(desk.asked), bench.effects) == (1, 1)


async def test_a_verdict_posted_while_the_port_is_asked_is_used_once_the_port_gives_up(place: Place) -> None:
    from tests.approvals.desk import post

    bench = needing()

    async def ask(request: ApprovalRequest) -> Verdict:
        await post(place, request.approve(by="ana"))
        raise EOFError

    result = await Worker(place).run(charging(), bench.registry, approvals=ask)
    assert (result.status, bench.effects) == ("done", 1)


async def test_cancelling_the_task_that_waits_for_the_port_is_a_cancel_and_leaves_the_request_open(place: Place) -> None:
    bench, asked = needing(), asyncio.Event()

    async def slow(request: ApprovalRequest) -> Verdict:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    work = asyncio.ensure_future(Worker(place).run(charging(), bench.registry, approvals=slow))
    await asyncio.wait_for(asked.wait(), 20)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    request = the_request(await look(place, bench))
    assert (await resume(place, bench, request.approve(by="ana"))).status == "done"
    assert bench.effects == 1
