"""Whatever is handed in as a verdict, the tool runs for exactly one: the one for its request, with the arguments agreed to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime import codec
from agent_runtime.approvals import ApprovalRequest, Decision, Verdict
from agent_runtime.errors import AgentRuntimeError, CheckpointConflict, VerdictRefused
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, write_message
from agent_runtime.journal.records import RunStatus, StoredMessage
from agent_runtime.journal.seal import KeyRing, sealer_for
from agent_runtime.messages import Reply, ToolCall
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.remote import Remote
from agent_runtime.testing.script_model import ScriptModel
from agent_runtime.tool_loop import LoopResult, recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry

KEY = b"the key of these runs, no secret"
EXPIRES_SECONDS = 600

CALLS = [("pay", {"to": "ana", "cents": 100}), ("pay", {"to": "bob", "cents": 200}), ("mail", {"to": "ana", "cents": 1})]


class Office:
    """Runs that wait for three answers, and a remote that counts what was done."""

    def __init__(self) -> None:
        self.clock = ManualClock(auto=True)
        self.store = MemoryCheckpointStore(clock=self.clock)
        self.remote = Remote()
        self.registry = ToolRegistry()
        replies = [Reply("", [ToolCall(f"c{at}", tool, args) for at, (tool, args) in enumerate(CALLS)]), Reply("done")]
        self.model = ScriptModel(replies)

        @self.registry.tool(needs_approval=True, approval_expires=EXPIRES_SECONDS)
        async def pay(to: str, cents: int) -> str:
            return (await self.remote.act("pay", {"to": to, "cents": cents})).result

        @self.registry.tool(needs_approval=lambda args: args["cents"] > 0, approval_expires=EXPIRES_SECONDS)
        async def mail(to: str, cents: int) -> str:
            return (await self.remote.act("mail", {"to": to, "cents": cents})).result

    async def open(self, run_id: str = "run") -> Sequence[ApprovalRequest]:
        """The requests of a new run."""
        result = await run_tool_loop(self.model.reply, self.registry, "go", run_id=run_id, **self._terms())
        return result.pending

    async def resume(self, verdicts: Any) -> LoopResult:
        return await run_tool_loop(self.model.reply, self.registry, run_id="run", verdicts=verdicts, **self._terms())

    async def recover(self) -> LoopResult:
        return await recover_tool_loop(self.model.reply, self.registry, "run", **self._terms())

    async def post(self, message: StoredMessage) -> None:
        await self.store.post(RunId("run"), message)

    async def check_untouched(self, requests: Sequence[ApprovalRequest]) -> None:
        """Nothing was done, and the run waits for the same answers."""
        assert self.remote.requests == []
        result = await self.recover()
        assert (result.status, list(result.pending)) == ("paused", list(requests))
        [stored] = await self.store.load_many([RunId("run")])
        assert stored is not None
        assert stored.row.status == RunStatus.PAUSED

    def _terms(self) -> dict[str, Any]:
        return {"checkpoints": self.store, "checkpoint_key": KEY, "clock": self.clock}


def message_of(plain: Mapping[str, object], *, key: bytes = KEY, run_id: str = "run") -> StoredMessage:
    """A verdict as it is posted, sealed for a run under a key."""
    sealer = sealer_for(KeyRing.of(key), tenant="", run_id=run_id)
    return write_message(sealer, MessageKind.VERDICT, dict(plain))


# What is no answer.


class Given(NamedTuple):
    """The requests of the run, and those of another one."""

    requests: Sequence[ApprovalRequest]
    others: Sequence[ApprovalRequest]


Spoil = Callable[[Given, Verdict], object]
WRONG: dict[str, Spoil] = {
    "nothing": lambda given, fair: None,
    "a word": lambda given, fair: "approve",
    "yes": lambda given, fair: True,
    "a dict that says all": lambda given, fair: fair.to_plain(),
    "a dict that says yes": lambda given, fair: {"approved": True},
    "its text": lambda given, fair: fair.to_json(),
    "the request": lambda given, fair: given.requests[0],
    "bare parts": lambda given, fair: tuple(fair),
    "an unknown request": lambda given, fair: fair._replace(request="0.9"),
    "no request": lambda given, fair: fair._replace(request=""),
    "the model's call": lambda given, fair: fair._replace(request="0/model"),
    "another request": lambda given, fair: fair._replace(request=_next(given, fair).id),
    "another request's digest": lambda given, fair: fair._replace(digest=_next(given, fair).digest),
    "another run": lambda given, fair: fair._replace(run_id="other"),
    "another run's request": lambda given, fair: given.others[0].approve(by="ana"),
    "another run's digest": lambda given, fair: fair._replace(digest=_same(given.others, fair).digest),
    "no digest": lambda given, fair: fair._replace(digest=""),
    "a digest in capitals": lambda given, fair: fair._replace(digest=fair.digest.upper() + " "),
    "half a digest": lambda given, fair: fair._replace(digest=fair.digest[:32]),
    "a digest that is bytes": lambda given, fair: fair._replace(digest=fair.digest.encode()),  # type: ignore[arg-type]  # on purpose
    "a decision in words": lambda given, fair: fair._replace(decision="approve"),  # type: ignore[arg-type]  # on purpose
    "a decision that is true": lambda given, fair: fair._replace(decision=True),  # type: ignore[arg-type]  # on purpose
    "by nobody": lambda given, fair: fair._replace(by=""),
    "by blanks": lambda given, fair: fair._replace(by=" \t"),
    "by a number": lambda given, fair: fair._replace(by=7),  # type: ignore[arg-type]  # on purpose
    "an approval with arguments": lambda given, fair: fair._replace(args={"to": "eve", "cents": 9}),
    "an edit without": lambda given, fair: fair._replace(decision=Decision.EDIT),
    "an edit of the wrong type": lambda given, fair: _edit(fair, {"to": "eve", "cents": "a lot"}),
    "an edit that leaves one out": lambda given, fair: _edit(fair, {"to": "eve"}),
    "an edit that adds one": lambda given, fair: _edit(fair, {"to": "eve", "cents": 1, "urgent": True}),
    "an edit that is no data": lambda given, fair: _edit(fair, {"to": "eve", "cents": object()}),
    "an edit that is a list": lambda given, fair: _edit(fair, [("to", "eve")]),
    "an edit of another's": lambda given, fair: _edit(_next(given, fair).approve(by="eve"), {"to": "eve"}),
}  # fmt: skip


def _next(given: Given, fair: Verdict) -> ApprovalRequest:
    at = [request.id for request in given.requests].index(fair.request)
    return given.requests[(at + 1) % len(given.requests)]


def _same(requests: Sequence[ApprovalRequest], fair: Verdict) -> ApprovalRequest:
    return next(request for request in requests if request.id == fair.request)


def _edit(fair: Verdict, args: Any) -> Verdict:
    return fair._replace(decision=Decision.EDIT, args=args)


async def _opened(office: Office) -> Given:
    return Given(await office.open(), await office.open("other"))


def _work(test: Callable[[Office], Awaitable[None]]) -> None:
    asyncio.run(_with_office(test))


async def _with_office(test: Callable[[Office], Awaitable[None]]) -> None:
    await test(Office())


# The fair answers, which all must still be taken after anything else.


async def _check_fair_answers_count_once(office: Office, given: Given, copies: int) -> None:
    """One approved, one edited, one denied, each handed in more than once and out of order."""
    first, second, third = given.requests
    fair = [third.deny(by="ana", note="no"), second.edit({"cents": 50}, by="ana"), first.approve(by="ana")]
    result = await office.resume([Verdict.from_json(verdict.to_json()) for verdict in fair * copies])
    assert result.status == "done"
    sent = [(effect.tool, json.loads(effect.args)) for effect in office.remote.effects]
    done = sorted((tool, args["to"], args["cents"]) for tool, args in sent)
    assert done == [("pay", "ana", 100), ("pay", "bob", 50)]
    with pytest.raises(CheckpointConflict):
        await office.resume(fair)
    assert len(office.remote.requests) == 2


@given(st.sampled_from(sorted(WRONG)), st.integers(0, 2), st.integers(0, 2), st.integers(1, 3))
def test_what_is_no_answer_is_refused_and_nothing_runs(name: str, which: int, before: int, copies: int) -> None:
    async def test(office: Office) -> None:
        given = await _opened(office)
        wrong = WRONG[name](given, given.requests[which].approve(by="ana"))
        others = [request.approve(by="ana") for request in given.requests if request is not given.requests[which]]
        with pytest.raises(VerdictRefused):
            await office.resume([*others[:before], wrong])
        await office.check_untouched(given.requests)
        await _check_fair_answers_count_once(office, given, copies)

    _work(test)


@pytest.mark.parametrize("name", sorted(WRONG))
def test_every_one_of_them_is_refused(name: str) -> None:
    async def test(office: Office) -> None:
        given = await _opened(office)
        with pytest.raises(VerdictRefused):
            await office.resume([WRONG[name](given, given.requests[0].approve(by="ana"))])
        await office.check_untouched(given.requests)

    _work(test)


@given(st.sampled_from([None, "yes", True, 7, {"0.0": "approve"}, b"approve"]))
def test_what_is_no_list_of_verdicts_lets_nothing_run(wrong: object) -> None:
    async def test(office: Office) -> None:
        requests = await office.open()
        with pytest.raises(AgentRuntimeError):
            await office.resume(wrong)
        await office.check_untouched(requests)

    _work(test)


def _is_plain(wrong: object) -> bool:
    try:
        codec.encode(wrong)
    except Exception:
        return False
    return isinstance(wrong, dict)


def _as_message(wrong: object) -> object:
    """What somebody may leave in the inbox who was handed this: a verdict by its parts."""
    if not isinstance(wrong, Verdict):
        return wrong
    plain = {name: value for name, value in wrong._asdict().items() if value is not None}
    decision = plain["decision"]
    return {**plain, "decision": decision.value if isinstance(decision, Decision) else decision}


FAIR_AS_MESSAGE = ("a dict that says all", "a decision in words")
"""No verdicts where one is handed in; a message holds a verdict so."""


@given(st.lists(st.sampled_from(sorted(set(WRONG) - set(FAIR_AS_MESSAGE))), min_size=1, max_size=5), st.integers(0, 2))
def test_messages_that_are_no_answers_are_passed_over_though_their_seals_hold(names: list[str], which: int) -> None:
    async def test(office: Office) -> None:
        given = await _opened(office)
        fair = given.requests[which].approve(by="ana")
        messages = [_as_message(WRONG[name](given, fair)) for name in names]
        for plain in messages:
            if isinstance(plain, dict) and _is_plain(plain):
                await office.post(message_of(plain))
        await office.check_untouched(given.requests)
        await _check_fair_answers_count_once(office, given, 1)

    _work(test)


@given(st.sampled_from(["another key", "another run", "no seal", "another body", "another kind"]), st.integers(0, 2))
def test_a_fair_answer_without_its_seal_is_no_answer(seal: str, which: int) -> None:
    async def test(office: Office) -> None:
        given = await _opened(office)
        plain = given.requests[which].approve(by="ana").to_plain()
        fair = message_of(plain)
        forged = {
            "another key": message_of(plain, key=b"another key of somebody's"),
            "another run": message_of(plain, run_id="other"),
            "no seal": fair._replace(seal=bytes(len(fair.seal))),
            "another body": fair._replace(body=message_of({**plain, "by": "eve"}).body),
            "another kind": message_of(plain)._replace(kind="settle"),
        }
        await office.post(forged[seal]._replace(digest=b"f" * 32))
        await office.check_untouched(given.requests)

    _work(test)


@given(st.integers(0, 2), st.data())
def test_a_verdict_whose_text_was_mangled_is_refused_or_still_says_the_same(which: int, data: st.DataObject) -> None:
    async def test(office: Office) -> None:
        given = await _opened(office)
        fair = given.requests[which].edit({"cents": 3}, by="ana")
        mangled = _mangle(fair.to_json(), data)
        try:
            verdict = Verdict.from_json(mangled)
            result = await office.resume([verdict])
        except VerdictRefused:
            await office.check_untouched(given.requests)
            return
        assert (verdict.run_id, verdict.request, verdict.digest) == (fair.run_id, fair.request, fair.digest)
        assert result.status == "paused"
        assert len(office.remote.requests) == (verdict.decision is not Decision.DENY)
        expected = verdict.args if verdict.args is not None else given.requests[which].args
        assert all(json.loads(effect.args) == dict(expected) for effect in office.remote.effects)

    _work(test)


def _mangle(text: str, data: st.DataObject) -> str:
    at = data.draw(st.integers(0, len(text) - 1))
    match data.draw(st.sampled_from(["cut", "drop", "change", "double", "swap names"])):
        case "cut":
            return text[:at]
        case "drop":
            return text[:at] + text[at + 1 :]
        case "change":
            return text[:at] + data.draw(st.characters(codec="utf-8")) + text[at + 1 :]
        case "double":
            return text[:at] + text[at] + text[at:]
        case _:
            return text.replace('"run_id"', '"was"').replace('"request"', '"run_id"').replace('"was"', '"request"')


@given(st.permutations(range(3)), st.sampled_from(["verdicts", "inbox"]))
def test_answers_swapped_between_requests_let_nothing_run(order: list[int], way: str) -> None:
    async def test(office: Office) -> None:
        given = await _opened(office)
        fair = [request.approve(by="ana") for request in given.requests]
        swapped = [fair[to]._replace(request=fair[at].request) for at, to in enumerate(order) if at != to]
        if way == "inbox":
            for verdict in swapped:
                await office.post(message_of(verdict.to_plain()))
        elif swapped:
            with pytest.raises(VerdictRefused):
                await office.resume(swapped)
        await office.check_untouched(given.requests)

    _work(test)


@given(st.integers(0, 2), st.sampled_from(["verdicts", "inbox"]))
def test_an_answer_that_comes_too_late_is_refused_and_its_call_was_never_made(which: int, way: str) -> None:
    async def test(office: Office) -> None:
        given = await _opened(office)
        late = given.requests[which].approve(by="ana")
        office.clock.advance(EXPIRES_SECONDS + 1)
        if way == "inbox":
            await office.post(message_of(late.to_plain()))
        else:
            with pytest.raises(VerdictRefused, match="expired"):
                await office.resume([late])
        result = await office.recover()
        assert office.remote.requests == []
        assert result.status == "done"
        assert all("ApprovalExpired" in message.content for message in result.messages if message.role == "tool")

    _work(test)


@given(st.lists(st.sampled_from(["approve", "deny", "edit", "edit otherwise"]), min_size=2, max_size=5))
def test_of_several_answers_in_the_inbox_the_first_stands(decisions: list[str]) -> None:
    async def test(office: Office) -> None:
        given = await _opened(office)
        request = given.requests[0]
        said = {
            "approve": request.approve(by="ana"),
            "deny": request.deny(by="bob"),
            "edit": request.edit({"cents": 1}, by="cid"),
            "edit otherwise": request.edit({"cents": 2}, by="dan"),
        }
        for decision in decisions:
            await office.post(message_of(said[decision].to_plain()))
        result = await office.recover()
        assert [each.id for each in result.pending] == [each.id for each in given.requests[1:]]
        first = said[decisions[0]]
        expected = [] if first.decision is Decision.DENY else [dict(first.args or request.args)]
        assert [json.loads(effect.args) for effect in office.remote.effects] == expected

    _work(test)
