"""The verdict: one request, one answer, spent once; anything else leaves the call waiting as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agent_runtime import RunContext
from agent_runtime.approvals import ApprovalRequest, Decision, Verdict, verdict_body
from agent_runtime.errors import CheckpointConflict, InvalidSetting, UnknownTool, VerdictRefused
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.messages import Message, ToolCall
from agent_runtime.telemetry import HistorySink
from agent_runtime.tools import ToolRegistry
from tests.approvals.desk import (
    CHARGE,
    Clamping,
    charging,
    kinds,
    look,
    needing,
    paused,
    post,
    resume,
    stands,
    the_request,
)
from tests.bench import Bench, Place, Script, Worker, error_of, results_in

PENDING, VERDICT, STARTED, DONE = RecordKind.PENDING, RecordKind.VERDICT, RecordKind.STARTED, RecordKind.DONE


async def test_an_approved_call_runs_once_with_what_was_shown(place: Place) -> None:
    bench, model = needing(), charging()
    request = await paused(place, bench, model)
    result = await resume(place, bench, request.approve(by="ana", note="ok"), model=model)
    assert (result.status, result.pending, results_in(result.messages)) == ("done", (), ["effect 1"])
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 100}]
    assert model.asked == 2
    assert kinds(await place.load("run"), "0") == [PENDING, VERDICT, STARTED, DONE]


async def test_a_denied_call_never_runs_and_the_model_sees_who_and_why(place: Place) -> None:
    bench, model = needing(), charging()
    request = await paused(place, bench, model)
    result = await resume(place, bench, request.deny(by="bo", note="too much"), model=model)
    assert results_in(model.requests[-1]) == ["error: Denied: bo did not approve this call: too much"]
    assert (result.status, bench.effects) == ("done", 0)
    assert kinds(await place.load("run"), "0") == [PENDING, VERDICT, DONE]


async def test_a_note_that_no_request_can_hold_is_made_readable_for_the_model(place: Place) -> None:
    bench, model = needing(), charging()
    request = await paused(place, bench, model)
    assert (await resume(place, bench, request.deny(by="b\udc00", note="no \ud800"), model=model)).status == "done"
    assert results_in(model.requests[-1]) == ["error: Denied: b� did not approve this call: no �"]


@pytest.mark.parametrize("commits", ["grouped", "each"])
async def test_an_edited_call_gets_the_checked_arguments_of_the_edit(place: Place, commits: str) -> None:
    tools = Clamping(50)
    request = the_request(await Worker(place).run(charging(), tools.registry, commits=commits))
    edit = request.edit({"amount": 70}, by="ana")
    worker = Worker(place)
    result = await worker.recover(charging(), tools.registry, verdicts=[edit], commits=commits)
    assert (result.status, tools.sent) == ("done", [50])
    stored = await place.load("run")
    started = next(r.body for r in stored.records if r.call == "0" and r.kind == STARTED)
    assert b'"args":{"amount":50}' in started


async def test_what_is_spent_names_the_digest_of_what_goes_out(place: Place) -> None:
    spent = {}
    for run_id in ("approved", "edited"):
        bench = needing()
        request = the_request(await Worker(place).run(charging(), bench.registry, run_id))
        verdict = request.approve(by="ana") if run_id == "approved" else request.edit({"amount": 5}, by="ana")
        await Worker(place).recover(charging(), bench.registry, run_id, verdicts=[verdict])
        stored = await place.load(run_id)
        started = next(r.body for r in stored.records if r.call == "0" and r.kind == STARTED).decode()
        spent[run_id] = request.digest in started
        assert '"verdict":"' in started
    assert spent == {"approved": True, "edited": False}


async def test_the_edit_that_was_checked_is_sent_and_not_what_later_code_makes_of_it(place: Place) -> None:
    tools = Clamping(50)
    request = the_request(await Worker(place).run(charging(), tools.registry))
    await post(place, request.edit({"amount": 70}, by="ana"))
    await _die_once_decided(place, tools.registry)
    for most in (40, 60):
        later = Clamping(most)
        error = await error_of(Worker(place).recover(charging(), later.registry))
        if most < 50:
            assert isinstance(error, VerdictRefused)
            assert later.sent == []
        else:
            assert (error, later.sent) == (None, [50])


async def _die_once_decided(place: Place, registry: ToolRegistry, **options: Any) -> None:
    """A worker that stores the verdict with its claim, and dies of it."""
    from agent_runtime.testing.faults import FaultyStore, Life, Moment, SimulatedCrash, Where

    store = FaultyStore(place.open(), life=Life(Moment(Where.AFTER_WRITE, 1)))
    with pytest.raises(SimulatedCrash):
        await Worker(place).recover(charging(), registry, checkpoints=store, **options)
    assert kinds(await place.load("run"), "0")[-1] is VERDICT


# Nothing counts as yes.


def truthy(request: ApprovalRequest) -> dict[str, Any]:
    return {request.id: True}


NO_YES: list[Any] = [
    lambda request: [],
    lambda request: None,
    lambda request: "yes",
    truthy,
    lambda request: [truthy(request)],
    lambda request: ["yes"],
    lambda request: [None],
    lambda request: [True],
    lambda request: request.approve(by="ana"),
    lambda request: [request.approve(by="ana").to_plain()],
    lambda request: [request.approve(by="ana").to_json()],
    lambda request: [request],
    lambda request: [request._replace(id="1").approve(by="ana")],
    lambda request: [request._replace(id="").approve(by="ana")],
    lambda request: [request._replace(run_id="other").approve(by="ana")],
    lambda request: [request._replace(digest="0" * 64).approve(by="ana")],
    lambda request: [request.approve(by="ana")._replace(decision=True)],
    lambda request: [request.approve(by="ana")._replace(decision="approve")],
]


@pytest.mark.parametrize("at", range(len(NO_YES)))
async def test_nothing_but_an_approval_of_that_request_counts_as_yes(place: Place, at: int) -> None:
    bench, model = needing(), charging()
    request = await paused(place, bench, model)
    before = await stands(place)
    given = NO_YES[at](request)
    error = await error_of(Worker(place).recover(model, bench.registry, verdicts=given))
    assert isinstance(error, VerdictRefused) is (at > 1), error
    error = await error_of(
        Worker(place).run(model, bench.registry, messages=None, verdicts=given)
    )  # the other door, which takes no messages with them
    assert isinstance(error, VerdictRefused | InvalidSetting) is (at > 0), error
    assert (await stands(place), bench.effects, model.asked) == (before, 0, 1)
    assert the_request(await look(place, bench, model)) == request
    assert (await resume(place, bench, request.approve(by="ana"), model=model)).status == "done"


async def test_one_verdict_that_does_not_hold_keeps_the_others_from_being_stored(place: Place) -> None:
    bench, model = needing(), Script([("charge", {"amount": at}) for at in (1, 2)], "done")
    first, second = (await Worker(place).run(model, bench.registry)).pending
    wrong = second._replace(digest=first.digest).approve(by="ana")
    before = await stands(place)
    assert isinstance(await error_of(resume(place, bench, first.approve(by="ana"), wrong, model=model)), VerdictRefused)
    assert (await stands(place), bench.effects) == (before, 0)


@pytest.mark.parametrize("ending", ["call", "half"])
async def test_a_new_run_whose_messages_end_in_an_unanswered_call_is_refused(place: Place, ending: str) -> None:
    bench, model = Bench(), charging()
    calls = (ToolCall("a", "charge", {"amount": 1}), ToolCall("b", "charge", {"amount": 2}))
    messages = [Message("user", "go"), Message("assistant", "", calls)]
    if ending == "half":
        messages.append(Message("tool", "effect 1", tool_call_id="a", name="charge"))
    error = await error_of(Worker(place).run(model, bench.registry, messages=messages))
    assert isinstance(error, InvalidSetting)
    assert (bench.effects, model.asked) == (0, 0)


async def test_a_malformed_message_in_the_inbox_blocks_nobody(place: Place) -> None:
    bench, model, sink = needing(), charging(), HistorySink()
    request = await paused(place, bench, model)
    good = request.approve(by="ana")
    edit: Any = {"decision": Decision.EDIT, "args": [1]}
    for bad in (
        good._replace(digest="d"),
        good._replace(request="1"),
        good._replace(by=" "),
        good._replace(note="n" * 10_001),
        good._replace(**edit),
        good._replace(decision=Decision.EDIT, args={"amount": "x"}),
    ):
        await post(place, bad)
    assert the_request(await look(place, bench, model, sinks=[sink])) == request
    refused = [event.data for event in sink.events if event.name == "approval.refused"]
    assert {told["call"] for told in refused} == {"0"}
    assert len(refused) == 5
    await post(place, good)
    assert (await look(place, bench, model)).status == "done"
    assert bench.effects == 1


# The same pause answered twice.


def answers(request: ApprovalRequest) -> list[Verdict]:
    return [request.approve(by="ana"), request.deny(by="bo"), request.edit({"amount": 5}, by="cy")]


@pytest.mark.parametrize("door", ["given", "inbox"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)], ids=str)
async def test_the_first_answer_stands_and_another_one_is_refused(place: Place, order: tuple[int, int], door: str) -> None:
    bench, model = needing(), charging()
    request = ApprovalRequest.from_json((await paused(place, bench, model)).to_json())
    first, second = (Verdict.from_json(answers(request)[at].to_json()) for at in order)
    if door == "given":
        await resume(place, bench, first, model=model)
        assert isinstance(await error_of(resume(place, bench, second, model=model)), CheckpointConflict)
    else:
        await post(place, first)
        error = await error_of(resume(place, bench, second, model=model))
        assert isinstance(error, VerdictRefused)
        assert bench.effects == 0
        await post(place, second)
        assert (await look(place, bench, model)).status == "done"
    sent = [effect.args["amount"] for effect in bench.remote.effects]
    assert sent == ([] if first.decision is Decision.DENY else [5 if first.decision is Decision.EDIT else 100])
    stored = [record.body for record in (await place.load("run")).records if record.kind == VERDICT]
    assert len(stored) == 1
    assert f'"by":"{first.by}"'.encode() in stored[0]


async def test_while_the_run_goes_on_the_same_answer_again_is_no_other_and_another_is_refused(place: Place) -> None:
    bench = needing()
    model = Script([("charge", {"amount": 1}), ("charge", {"amount": 2})], "done")
    first, second = (await Worker(place).run(model, bench.registry)).pending
    result = await resume(place, bench, first.approve(by="ana"), model=model)
    assert list(result.pending) == [second]
    before = await stands(place)
    again = await resume(place, bench, first.approve(by="dee", note="me too"), model=model)
    assert (again.status, await stands(place)) == ("paused", before)
    error = await error_of(resume(place, bench, first.deny(by="bo"), model=model))
    assert isinstance(error, VerdictRefused)
    assert "approve, by ana" in str(error)
    assert (await resume(place, bench, second.deny(by="bo"), first.approve(by="ana"), model=model)).status == "done"
    assert bench.effects == 1


async def test_a_later_call_with_the_same_tool_and_arguments_needs_its_own_decision(place: Place) -> None:
    bench, model = needing(), Script(CHARGE, CHARGE, "done")
    first = await paused(place, bench, model)
    second = the_request(await resume(place, bench, first.approve(by="ana"), model=model))
    assert (second.id, second.args) == ("1", first.args)
    assert second.digest != first.digest
    for stale in (first.approve(by="ana"), first._replace(id="1").approve(by="ana")):
        error = await error_of(resume(place, bench, stale, model=model))
        assert error is None or isinstance(error, VerdictRefused)
        assert (bench.effects, (await place.load("run")).row.status) == (1, RunStatus.PAUSED)
    assert (await resume(place, bench, second.approve(by="ana"), model=model)).status == "done"
    assert bench.effects == 2


async def test_three_requests_of_one_reply_are_answered_out_of_order_one_edited_one_denied(place: Place) -> None:
    bench, model = needing(), Script([("charge", {"amount": at}) for at in (1, 2, 3)], "done")
    result = await Worker(place).run(model, bench.registry)
    texts = {request.id: request.to_json() for request in result.pending}
    assert list(texts) == ["0.0", "0.1", "0.2"]
    say: dict[str, Callable[[ApprovalRequest], Verdict]] = {
        "0.2": lambda request: request.edit({"amount": 30}, by="ana"),
        "0.0": lambda request: request.deny(by="bo"),
        "0.1": lambda request: request.approve(by="ana"),
    }
    for at, (request_id, answer) in enumerate(say.items()):
        verdict = Verdict.from_json(answer(ApprovalRequest.from_json(texts[request_id])).to_json())
        result = await resume(place, bench, verdict, model=model)
        assert len(result.pending) == 2 - at
    assert result.status == "done"
    assert results_in(model.requests[-1]) == ["error: Denied: bo did not approve this call", "effect 2", "effect 1"]
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 30}, {"amount": 2}]
    assert model.asked == 2


@pytest.mark.parametrize("other", [False, True], ids=["same", "different"])
async def test_two_workers_who_answer_at_the_same_instant_make_one_verdict(place: Place, other: bool) -> None:
    for at in range(25):
        bench, model, run_id = needing(), charging(), f"run-{at}"
        request = the_request(await Worker(place).run(model, bench.registry, run_id))
        second = request.deny(by="bo") if other else request.approve(by="bo")
        ends = await asyncio.gather(
            *(
                Worker(place).recover(model, bench.registry, run_id, verdicts=[verdict])
                for verdict in (request.approve(by="ana"), second)
            ),
            return_exceptions=True,
        )
        stored = await place.load(run_id)
        said = [record.body for record in stored.records if record.kind == VERDICT]
        assert len(said) == 1, ends
        assert stored.row.status == RunStatus.DONE, ends
        assert bench.effects == (b'"approve"' in said[0])
        for end in ends:
            assert not isinstance(end, BaseException) or isinstance(end, VerdictRefused | CheckpointConflict), end


# An ordinary message while the run is paused.


async def test_a_message_to_a_paused_run_is_refused_with_decide_first_and_the_approve_that_follows_works(place: Place) -> None:
    bench, model = needing(), charging()
    request = await paused(place, bench, model)
    before = await stands(place)
    for _ in range(3):
        error = await error_of(Worker(place).run(model, bench.registry, messages="and now?"))
        assert isinstance(error, CheckpointConflict)
        assert "decide first" in str(error)
    error = await error_of(Worker(place).run(model, bench.registry, messages="and now?", verdicts=[request.approve(by="ana")]))
    assert isinstance(error, InvalidSetting)
    assert (await stands(place), bench.effects) == (before, 0)
    result = await Worker(place).run(model, bench.registry, messages=None, verdicts=[request.approve(by="ana")])
    assert (result.status, bench.effects, model.asked) == ("done", 1, 2)


# Shown is executed.


async def test_on_resume_a_model_that_would_say_something_else_is_not_asked(place: Place) -> None:
    bench = needing()
    request = await paused(place, bench)
    other = Script([("charge", {"amount": 999})], "done")
    result = await resume(place, bench, request.approve(by="ana"), model=other)
    assert (result.status, other.asked) == ("done", 1)
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 100}]


async def test_an_approval_of_what_changed_code_would_not_send_is_refused_and_the_request_is_still_open(place: Place) -> None:
    old, new = Clamping(50), Clamping(40)
    request = the_request(await Worker(place).run(charging(), old.registry))
    before = await stands(place)
    error = await error_of(Worker(place).recover(charging(), new.registry, verdicts=[request.approve(by="ana")]))
    assert isinstance(error, VerdictRefused)
    assert (await stands(place), new.sent) == (before, [])
    answer = request.edit({"amount": 30}, by="ana") if place.kind == "memory" else request.deny(by="ana")
    result = await Worker(place).recover(charging(), new.registry, verdicts=[answer])
    assert (result.status, new.sent) == ("done", [30] if place.kind == "memory" else [])


async def test_a_stored_approval_is_not_spent_by_code_that_would_send_something_else(place: Place) -> None:
    old, new = Clamping(50), Clamping(40)
    request = the_request(await Worker(place).run(charging(), old.registry))
    await _die_once_decided(place, old.registry, verdicts=[request.approve(by="ana")])
    for _ in range(2):
        error = await error_of(Worker(place).recover(charging(), new.registry))
        assert isinstance(error, VerdictRefused)
    assert new.sent == []
    assert (await Worker(place).recover(charging(), old.registry)).status == "done"
    assert old.sent == [50]


async def test_a_tool_that_is_gone_can_be_denied_and_not_approved(place: Place) -> None:
    bench, gone = needing(), ToolRegistry()
    request = await paused(place, bench)
    error = await error_of(Worker(place).recover(charging(), gone, verdicts=[request.approve(by="ana")]))
    assert isinstance(error, VerdictRefused)
    assert the_request(await Worker(place).recover(charging(), gone)) == request
    assert (await Worker(place).recover(charging(), gone, verdicts=[request.deny(by="ana")])).status == "done"
    assert bench.effects == 0


async def test_a_tool_that_went_after_its_approval_was_stored_is_missed_by_name_and_found_again(place: Place) -> None:
    bench = needing()
    request = await paused(place, bench)
    await _die_once_decided(place, bench.registry, verdicts=[request.approve(by="ana")])
    assert isinstance(await error_of(Worker(place).recover(charging(), ToolRegistry())), UnknownTool)
    assert (await look(place, bench)).status == "done"
    assert bench.effects == 1


# Code that asks only since it was deployed anew.


async def test_calls_that_have_not_started_need_the_approval_that_their_tool_needs_now(place: Place) -> None:
    from agent_runtime.crash import CrashPoint

    old, new = Bench(), needing()
    dying = Worker(place).killed_at(CrashPoint.AFTER_DECIDE)
    await dying.run_and_die(charging(), old.registry, commits="each")
    request = the_request(await look(place, new))
    assert (old.effects, new.effects) == (0, 0)
    assert (await resume(place, new, request.approve(by="ana"))).status == "done"
    assert new.effects == 1


@pytest.mark.parametrize("tool", ["charge_i", "charge"])
async def test_a_call_in_doubt_is_not_run_by_a_rule_once_its_tool_needs_a_person(place: Place, tool: str) -> None:
    from agent_runtime.crash import CrashPoint
    from agent_runtime.errors import RecoveryNeedsDecision

    old, new = Bench(), needing()
    model = Script([(tool, {"amount": 1})], "done")
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(model, old.registry)
    assert isinstance(await error_of(look(place, new, model)), RecoveryNeedsDecision)
    request = the_request(await look(place, new, model, rerun_in_doubt=True))
    assert new.effects == 0
    result = await resume(place, new, request.edit({"amount": 2}, by="ana"), model=model)
    assert (result.status, [effect.args for effect in new.remote.effects]) == ("done", [{"amount": 2}])


async def test_a_request_stays_open_where_its_tool_needs_nobody_any_more(place: Place) -> None:
    old, new = needing(), Bench()
    request = await paused(place, old)
    assert the_request(await look(place, new)) == request
    assert (await resume(place, new, request.approve(by="ana"))).status == "done"
    assert (old.effects, new.effects) == (0, 1)


# Who answers.


@pytest.mark.parametrize("raises", [False, True])
async def test_only_who_may_approve_can_answer(place: Place, raises: bool) -> None:
    def may(by: str, request: ApprovalRequest) -> bool:
        assert request.args == {"amount": 100}
        if by != "ana" and raises:
            raise LookupError("no directory")
        return by == "ana"

    bench = needing(may_approve=may)
    request = await paused(place, bench)
    before = await stands(place)
    for answer in (request.approve(by="bo"), request.deny(by="bo"), request.edit({"amount": 1}, by="bo")):
        assert isinstance(await error_of(resume(place, bench, answer)), VerdictRefused)
    assert (await stands(place), bench.effects) == (before, 0)
    await post(place, request.deny(by="bo"))
    assert (await resume(place, bench, request.approve(by="ana"))).status == "done"
    assert bench.effects == 1


async def test_a_hook_that_gives_no_bool_lets_nobody_answer(place: Place) -> None:
    bench = needing(may_approve=lambda by, request: "yes")
    request = await paused(place, bench)
    assert isinstance(await error_of(resume(place, bench, request.approve(by="ana"))), VerdictRefused)


async def test_the_principal_of_a_run_may_be_kept_from_approving_it(place: Place) -> None:
    bench, ctx = needing(no_self_approval=True), RunContext(user="u", principal="ana")
    request = await paused(place, bench, ctx=ctx)
    for by in ("ana", " ana", "ana\n"):
        error = await error_of(resume(place, bench, request.approve(by=by), ctx=ctx))
        assert isinstance(error, VerdictRefused), by
    assert bench.effects == 0
    assert (await resume(place, bench, request.approve(by="bo"), ctx=ctx)).status == "done"


async def test_what_keeps_a_principal_from_approving_holds_for_requests_that_were_asked_before(place: Place) -> None:
    old, new, ctx = needing(), needing(no_self_approval=True), RunContext(principal="ana")
    request = await paused(place, old, ctx=ctx)
    assert isinstance(await error_of(resume(place, new, request.approve(by="ana"), ctx=ctx)), VerdictRefused)
    assert (await resume(place, new, request.approve(by="bo"), ctx=ctx)).status == "done"


async def test_a_run_without_a_principal_can_be_approved_by_anybody(place: Place) -> None:
    bench = needing(no_self_approval=True)
    request = await paused(place, bench)
    assert (await resume(place, bench, request.approve(by="None"))).status == "done"


@pytest.mark.parametrize("ctx", [None, RunContext(user="eve"), RunContext(user="u"), RunContext()], ids=str)
async def test_another_identity_or_none_is_refused_and_learns_nothing(place: Place, ctx: RunContext | None) -> None:
    from agent_runtime.errors import IdentityMismatch

    bench, own = needing(), RunContext(user="u", thread="t")
    request = await paused(place, bench, ctx=own)
    before = await stands(place)
    for verdicts in ([request.approve(by="ana")], [request._replace(digest="d").approve(by="ana")], []):
        error = await error_of(Worker(place).run(charging(), bench.registry, messages=None, verdicts=verdicts, ctx=ctx))
        assert isinstance(error, IdentityMismatch)
        assert not any(word in str(error) for word in ("charge", "100", "paused", "thread 't'", "'u'"))
    assert (await stands(place), bench.effects) == (before, 0)
    assert (await resume(place, bench, request.approve(by="ana"), ctx=own)).status == "done"


def test_a_stored_verdict_keeps_its_form() -> None:
    from agent_runtime.approvals import Checked, read_edit, read_verdict

    verdict = Verdict("run", "0", "d", Decision.EDIT, "ana", "n", {"a": 1})
    body = verdict_body(Checked(verdict, b'{"a":2}'), 5)
    assert (read_verdict(body), read_edit(body)) == (verdict, b'{"a":2}')
