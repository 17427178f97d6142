"""Answering the open requests of runs from outside: what is refused at the door, and what is left to a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_runtime import Outcome, Runs, ToolRegistry, runs
from agent_runtime.approvals import ApprovalRequest, Decision, Verdict
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import (
    CheckpointConflict,
    CheckpointNotFound,
    RecoveryNeedsDecision,
    RunQuarantined,
    VerdictRefused,
)
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, write_message
from agent_runtime.journal.records import StoredMessage
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.store import Answer
from agent_runtime.run import RunContext
from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import KEY, RING, Bench, Delegate, Killed, Place, Script, Worker, error_of, expect_death, results_in
from tests.standing import Overtaken, bring_to, operator, script, stored

BOTH = Script([("charge", {"amount": 5}), ("email", {"to": "ana"})], "done")


async def paused(place: Place, run: str = "run", **options: Any) -> tuple[Bench, ApprovalRequest]:
    bench = Bench(needs_approval=True, **options)
    await Worker(place).run(script(), bench.registry, run)
    [request] = await operator(place).pending(run)
    return bench, request


async def refused(answering: Any, *words: str) -> None:
    error = await error_of(answering)
    assert isinstance(error, VerdictRefused), error
    assert all(word in str(error) for word in words), error


# What an answer does.


async def test_a_request_shows_what_will_be_sent_and_an_approval_lets_that_go_out_once(place: Place) -> None:
    bench, request = await paused(place)
    assert (request.run_id, request.id, request.tool, request.args, request.key) == (
        "run",
        "0",
        "charge",
        {"amount": 5},
        "run:0",
    )
    [info] = await operator(place).list(status="paused")
    assert info.why == "waiting for approval: charge amount=5 (call 0)"
    before = await stored(place)
    await operator(place).approve(request, by="ana", note="go")
    after = await stored(place)
    assert (after.records, after.row.posted) == (before.records, before.row.posted + 1), "a worker stores it"
    assert after.row.wake_at is not None, "which any may pick up now"
    result = await Worker(place).recover(script(), bench.registry)
    assert (result.status, results_in(result.messages)) == ("done", ["effect 1"])
    timeline = (await operator(place).show("run")).timeline
    assert timeline.calls["0"].verdict == {"decision": "approve", "by": "ana", "note": "go"}
    assert timeline.pending == []
    assert bench.remote.count("charge") == 1


async def test_a_denial_is_told_to_the_model_and_nothing_goes_out(place: Place) -> None:
    bench, request = await paused(place)
    await operator(place).deny(request, by="ana", note="too much")
    result = await Worker(place).recover(script(), bench.registry)
    assert results_in(result.messages) == ["error: Denied: ana did not approve this call: too much"]
    assert bench.effects == 0


async def test_an_edit_lets_other_arguments_go_out(place: Place) -> None:
    bench, request = await paused(place)
    await operator(place, registry=bench.registry).edit(request, {"amount": 3}, by="ana")
    await Worker(place).recover(script(), bench.registry)
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 3}]
    timeline = (await operator(place).show("run")).timeline
    assert timeline.calls["0"].verdict == {"decision": "edit", "by": "ana", "args": {"amount": 3}}
    assert timeline.calls["0"].args == {"amount": 3}


async def test_a_request_may_be_named_and_may_have_been_through_json(place: Place) -> None:
    bench, request = await paused(place)
    again = ApprovalRequest.from_json(request.to_json())
    assert again == request
    await operator(place).approve(again, by="ana")
    await operator(place).approve(("run", "0"), by="ana")
    await operator(place).answer(Verdict.from_json(request.approve(by="ben").to_json()))
    assert (await Worker(place).recover(script(), bench.registry)).status == "done"
    assert (await operator(place).show("run")).timeline.calls["0"].verdict["by"] == "ana"


# In each state of the run.


async def test_of_a_run_that_is_not_there_nothing_is_answered(place: Place) -> None:
    _, request = await paused(place)
    with pytest.raises(CheckpointNotFound):
        await operator(place).answer(request._replace(run_id="nobody").approve(by="ana"))


@pytest.mark.parametrize("state", ["dead", "blocked"])
async def test_where_nothing_waits_nothing_is_answered(place: Place, state: str) -> None:
    await bring_to(place, state)
    await refused(operator(place).approve(("run", "0"), by="ana"), "no request '0'", "open are none")
    foreign = ApprovalRequest("0", "run", 1, "charge", {"amount": 5}, "a digest")
    await refused(operator(place).approve(foreign, by="ana"), "no request '0'")


async def test_the_answer_to_a_run_whose_worker_died_is_taken_up_by_the_next(place: Place) -> None:
    bench = Bench(needs_approval=True)
    # It dies once the request is written down, and before it can give the run back.
    worker = Worker(place)

    def ask(request: ApprovalRequest) -> Verdict:
        raise Killed("killed")

    await expect_death(worker.run(script(), bench.registry, approvals=ask, commits="each"))
    [request] = await operator(place).pending("run")
    await operator(place).approve(request, by="ana")
    assert (await Worker(place).recover(script(), bench.registry)).status == "done"
    assert bench.effects == 1


async def test_the_answer_to_a_run_that_is_worked_is_taken_up_when_its_worker_parks(place: Place) -> None:
    registry, entered, leave = ToolRegistry(), asyncio.Event(), asyncio.Event()

    @registry.tool(needs_approval=True)
    async def charge(amount: int) -> str:
        return f"charged {amount}"

    @registry.tool
    async def email(to: str) -> str:
        entered.set()
        await leave.wait()
        return f"told {to}"

    task = asyncio.ensure_future(Worker(place).run(BOTH, registry))
    await asyncio.wait_for(entered.wait(), 20)
    [request] = await operator(place).pending()
    assert [info.status for info in await operator(place).list()] == ["running"]
    await operator(place).approve(request, by="ana")
    leave.set()
    result = await asyncio.wait_for(task, 20)
    assert (result.status, results_in(result.messages)) == ("done", ["charged 5", "told ana"])


async def test_the_answer_to_a_blocked_run_waits_for_the_doubt_to_be_settled(place: Place) -> None:
    registry = ToolRegistry()

    @registry.tool(needs_approval=True)
    async def charge(amount: int) -> str:
        return f"charged {amount}"

    @registry.tool
    async def email(to: str) -> str:
        raise RuntimeError("after which nobody knows")

    assert isinstance(await error_of(Worker(place).run(BOTH, registry)), RecoveryNeedsDecision)
    [request] = await operator(place).pending()
    await operator(place).approve(request, by="ana")
    [info] = await operator(place).list()
    assert (info.status, info.why) == ("in-doubt", 'in doubt: email to="ana" (call 0.1)')
    await operator(place).settle("run", "0.1", Outcome.done("told"), by="ana", why="saw it")
    result = await Worker(place).recover(BOTH, registry)
    assert results_in(result.messages) == ["charged 5", "told"]


async def test_of_a_run_that_ended_or_is_in_quarantine_nothing_is_answered(place: Place) -> None:
    _, request = await paused(place)
    await operator(place).cancel("run", by="ana")
    before = await stored(place)
    for answering in (operator(place).approve(request, by="ana"), operator(place).deny(("run", "0"), by="ana")):
        with pytest.raises(CheckpointConflict, match=r"has ended \(cancelled\)"):
            await answering
    assert await stored(place) == before
    assert list(await operator(place).pending()) == list(await operator(place).pending("run")) == []

    bench = Bench(needs_approval=True)
    answered = operator(place)
    dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
    model = Script([("charge_i", {"amount": 5}), ("charge", {"amount": 5})], "done")
    assert (await Worker(place).run(model, bench.registry, "poison")).status == "paused"
    await answered.approve(("poison", "0.0"), by="ana")
    await dying.recover_and_die(model, bench.registry, "poison")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).recover_and_die(model, bench.registry, "poison")
    assert isinstance(await error_of(Worker(place).recover(model, bench.registry, "poison", max_attempts=1)), RunQuarantined)
    assert list(await answered.pending()) == list(await answered.pending("poison")) == []
    with pytest.raises(RunQuarantined):
        await answered.approve(("poison", "0.1"), by="ana")


# What is refused at the door.


async def test_an_answer_to_another_request_or_other_arguments_is_refused(place: Place) -> None:
    bench, request = await paused(place)
    _, other = await paused(place, "other")
    before = await stored(place)
    for forged in (request._replace(id="1"), request._replace(digest=other.digest), other._replace(run_id="run")):
        await refused(operator(place).approve(forged, by="ana"))
    await refused(operator(place).approve(("run", "0/model"), by="ana"), "open are ['0']")
    assert await stored(place) == before
    assert (await Worker(place).recover(script(), bench.registry)).status == "paused"


@pytest.mark.parametrize("verdict", [None, "approve", True, ("run", "0"), {"request": "0"}], ids=repr)
async def test_what_is_no_verdict_is_refused(place: Place, verdict: Any) -> None:
    await paused(place)
    await refused(operator(place).answer(verdict), "expected a Verdict")


@pytest.mark.parametrize("which", [None, "0", ("run",), ("run", 0), ["run", "0"], 7], ids=repr)
async def test_what_is_no_request_is_refused(place: Place, which: Any) -> None:
    await paused(place)
    await refused(operator(place).approve(which, by="ana"), "expected a request")


@pytest.mark.parametrize("by", ["", " ", None, 7])
async def test_nobody_answers_nothing(place: Place, by: Any) -> None:
    _, request = await paused(place)
    await refused(operator(place).approve(request, by=by))
    assert (await stored(place)).row.posted == 0


async def test_who_may_answer_is_asked_of_the_operators_hook_and_of_the_tools_where_it_is_here(place: Place) -> None:
    def only_ben(by: str, request: ApprovalRequest) -> bool:
        return by == "ben" and request.args["amount"] == 5

    def broken(by: str, request: ApprovalRequest) -> bool:
        raise OSError("the directory is away")

    bench, request = await paused(place, may_approve=only_ben)
    for options in ({"may_approve": only_ben}, {"registry": bench.registry}):
        await refused(operator(place, **options).approve(request, by="ana"), "'ana' may not answer")
    await refused(operator(place, may_approve=broken).approve(request, by="ben"), "the directory is away")
    assert (await stored(place)).row.posted == 0
    await operator(place, may_approve=only_ben, registry=bench.registry).approve(request, by="ben")


async def test_whom_the_run_acts_for_may_not_answer_where_the_tool_says_so(place: Place) -> None:
    bench, ctx = Bench(needs_approval=True, no_self_approval=True), RunContext(principal="ana")
    await Worker(place).run(script(), bench.registry, ctx=ctx)
    [request] = await operator(place).pending()
    await refused(operator(place).approve(request, by="ana"), "who may not answer it")
    await operator(place).approve(request, by="ben")
    assert (await Worker(place).recover(script(), bench.registry, ctx=ctx)).status == "done"


async def test_what_has_expired_by_the_stores_clock_is_answered_no_more(place: Place) -> None:
    clock = ManualClock()
    bench = Bench(needs_approval=True, approval_expires=60)
    await Worker(place, clock=clock).run(script(), bench.registry, clock=clock)
    operating = Runs(place.open(clock), checkpoint_key=KEY)
    [request] = await operating.pending()
    clock.advance(60)
    await refused(operating.approve(request, by="ana"), "expired at")
    result = await Worker(place, clock=clock).recover(script(), bench.registry, clock=clock)
    assert "ApprovalExpired" in results_in(result.messages)[0]
    assert bench.effects == 0


@pytest.mark.parametrize(
    "changes", [{"amount": "many"}, {"colour": "red"}, {"amount": None}, {"amount": {1}}, "amount", None], ids=repr
)
async def test_an_edit_that_does_not_fit_is_refused_where_the_tools_are_here(place: Place, changes: Any) -> None:
    bench, request = await paused(place)
    await refused(operator(place, registry=bench.registry).edit(request, changes, by="ana"))
    assert (await stored(place)).row.posted == 0
    await refused(operator(place, registry=ToolRegistry()).edit(request, {"amount": 1}, by="ana"), "cannot be checked")
    await operator(place, registry=ToolRegistry()).approve(request, by="ana")


# Two answers.


async def test_the_same_answer_again_is_fine_and_another_is_refused_with_who_was_first(place: Place) -> None:
    bench, request = await paused(place)
    await operator(place).approve(request, by="ana")
    await operator(place).approve(request, by="ana")
    assert (await stored(place)).row.posted == 1, "the same word is there once"
    await operator(place).approve(request, by="ben", note="me too")
    for other in (request.deny(by="ben"), request.edit({"amount": 1}, by="ben")):
        await refused(operator(place).answer(other), "approve, by ana", "the first answer stands")
    await Worker(place).recover(script(), bench.registry)
    assert bench.remote.count("charge") == 1
    assert (await operator(place).show("run")).timeline.calls["0"].verdict["by"] == "ana"


async def test_an_answer_that_is_stored_already_is_not_left_again(place: Place) -> None:
    bench, request = await paused(place)
    dying = Worker(place).killed_at(CrashPoint.BEFORE_INTENT)
    await dying.recover_and_die(script(), bench.registry, verdicts=[request.approve(by="ana")])
    count = (await stored(place)).row.posted
    await operator(place).approve(request, by="ana")
    assert (await stored(place)).row.posted == count
    await refused(operator(place).deny(request, by="ben"), "approve, by ana")


async def test_an_answer_that_does_not_hold_blocks_no_other(place: Place) -> None:
    bench, request = await paused(place)
    sealer = sealer_for(RING, tenant="", run_id="run")
    bad: list[dict[str, object]] = [
        {"request": "0"},
        request._replace(digest="x").deny(by="eve").to_plain(),
        request.edit({"amount": "many"}, by="eve").to_plain(),
    ]
    for body in bad:
        await place.open().post(RunId("run"), write_message(sealer, MessageKind.VERDICT, body))
    await operator(place, registry=bench.registry).approve(request, by="ana")
    assert (await Worker(place).recover(script(), bench.registry)).status == "done"
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 5}]


async def by_may_approve(place: Place) -> tuple[Bench, ApprovalRequest, Verdict]:
    """An answer of somebody of whom the operator cannot know that the tool does not let them."""
    bench, request = await paused(place, may_approve=lambda by, _: by == "ana")
    return bench, request, request.approve(by="mallory")


async def by_edit(place: Place) -> tuple[Bench, ApprovalRequest, Verdict]:
    """An edit that does not fit, which the operator cannot know without the tools."""
    bench, request = await paused(place)
    return bench, request, request.edit({"amuont": 3}, by="eve")


@pytest.mark.parametrize("bring", [by_edit, by_may_approve])
async def test_an_answer_that_a_worker_found_not_to_hold_keeps_nobody_from_answering(place: Place, bring: Any) -> None:
    bench, request, wrong = await bring(place)
    await operator(place).answer(wrong)
    await refused(operator(place).deny(request, by="ana"), "the first answer stands")  # nobody has looked at it yet
    assert [left.by for left in (await operator(place).show("run")).left] == [wrong.by]
    result = await Worker(place).recover(script(), bench.registry)
    assert (result.status, list(result.pending)) == ("paused", [request])
    assert (await stored(place)).row.wake_at is None, "nobody looks at the run again for what does not hold"
    assert list((await operator(place).show("run")).left) == [], "nothing of it is waited for any more"
    await refused(operator(place).answer(wrong), "did not hold", "answer otherwise")
    await operator(place).approve(request, by="ana")
    await refused(operator(place).deny(request, by="ben"), "approve, by ana", "the first answer stands")
    assert [left.by for left in (await operator(place).show("run")).left] == ["ana"]
    assert (await Worker(place).recover(script(), bench.registry)).status == "done"
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 5}]


async def test_who_is_overtaken_by_another_answer_is_told_by_whom(place: Place) -> None:
    _, request = await paused(place)
    sealer = sealer_for(RING, tenant="", run_id="run")
    same = write_message(sealer, MessageKind.VERDICT, request.approve(by="ben").to_plain())
    await Runs(Overtaken(place.open(), same), checkpoint_key=KEY).approve(request, by="ana")
    _, request = await paused(place, "other")
    sealer = sealer_for(RING, tenant="", run_id="other")
    other = write_message(sealer, MessageKind.VERDICT, request.deny(by="ben").to_plain())
    await refused(Runs(Overtaken(place.open(), other), checkpoint_key=KEY).approve(request, by="ana"), "deny, by ben")


async def test_who_is_overtaken_by_a_worker_that_stores_another_answer_is_told_by_whom(place: Place) -> None:
    bench, request = await paused(place)

    class Resumed(Delegate):
        async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
            dying = Worker(place).killed_at(CrashPoint.BEFORE_INTENT)
            await dying.recover_and_die(script(), bench.registry, verdicts=[request.approve(by="ben")])
            return await super().post(run_id, message)

    await refused(Runs(Resumed(place.open()), checkpoint_key=KEY).deny(request, by="ana"), "approve, by ben")


async def test_of_two_different_answers_at_once_one_is_told_yes_and_that_one_counts(place: Place) -> None:
    for at in range(10):
        run = f"run-{at}"
        bench, request = await paused(place, run)
        answers = (request.approve(by="ana"), request.edit({"amount": 1}, by="ben"))
        errors = await asyncio.gather(*(error_of(operator(place).answer(verdict)) for verdict in answers))
        assert sorted(type(error).__name__ for error in errors) == ["NoneType", "VerdictRefused"]
        yes = answers[errors.index(None)]
        assert (await Worker(place).recover(script(), bench.registry, run)).status == "done"
        sent = {"amount": 5} if yes.decision is Decision.APPROVE else {"amount": 1}
        assert [effect.args for effect in bench.remote.effects] == [sent]


@pytest.mark.parametrize("bring", [by_edit, by_may_approve])
async def test_an_answer_that_does_not_hold_wakes_a_blocked_run_once(place: Place, bring: Any) -> None:
    bench = Bench(needs_approval=lambda args: args["amount"] == 5, may_approve=lambda by, _: by == "ana")
    model = Script([("charge", {"amount": 4}), ("charge", {"amount": 5})], "done")

    async def lose(tool: str, args: dict[str, object]) -> None:
        raise RuntimeError("after which nobody knows")

    bench.after = lose
    assert isinstance(await error_of(Worker(place).run(model, bench.registry)), RecoveryNeedsDecision)
    [request] = await operator(place).pending("run")
    wrong = request.edit({"amuont": 3}, by="ana") if bring is by_edit else request.approve(by="mallory")
    await operator(place).answer(wrong)
    assert (await stored(place)).row.wake_at is not None
    assert isinstance(await error_of(Worker(place).recover(model, bench.registry)), RecoveryNeedsDecision)
    assert (await stored(place)).row.wake_at is None
    await operator(place).approve(request, by="ana")
    bench.after = Bench().after
    await operator(place).settle("run", "0.0", Outcome.done("paid"), by="ana", why="saw it")
    assert (await Worker(place).recover(model, bench.registry)).status == "done"
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 4}, {"amount": 5}]


# Listing.


async def test_open_requests_are_read_page_by_page_and_no_corrupt_run_hides_them(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "PAGE", 2)
    for run in "abcde":
        await paused(place, run)
    await bring_to(place, "done", "f")
    place.is_tampered = True  # one of them is sealed with another key
    bench = Bench(needs_approval=True)
    await Worker(place).run(script(), bench.registry, "foreign", checkpoint_key=b"another key, which is as long")
    assert [request.run_id for request in await operator(place).pending()] == list("abcde")
    assert [request.run_id for request in await operator(place).pending(limit=3)] == list("abc")
    assert list(await operator(place).pending(limit=0)) == []
    assert [request.run_id for request in await operator(place).pending("b")] == ["b"]


async def test_what_waits_is_told_in_words_that_fit_a_line(place: Place) -> None:
    many = Script([("charge", {"amount": at}) for at in range(5)], "done")
    bench = Bench(needs_approval=True)
    await Worker(place).run(many, bench.registry)
    [info] = await operator(place).list()
    assert info.why.endswith("charge amount=2 (call 0.2) and 2 more")
    assert len((await operator(place).show("run")).timeline.pending) == 5
    long = Script([("email", {"to": "a\x1b" * 1000})], "done")
    await Worker(place).run(long, bench.registry, "long")
    [info] = await operator(place).list(after="a", limit=1)
    assert len(info.why) < 300
    assert "\x1b" not in info.why
