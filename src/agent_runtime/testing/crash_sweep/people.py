"""The person of a sweep, who answers each request once, and what must be true of a call that needed them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

from agent_runtime import codec
from agent_runtime.approvals import ApprovalRequest, Decision, Verdict, digest_of, read_verdict
from agent_runtime.journal.records import RecordKind, StoredRecord
from agent_runtime.settlements import read_asked
from agent_runtime.testing.crash_sweep.rules import Broken, Rule
from agent_runtime.tools import Tool

Answer: TypeAlias = Callable[[ApprovalRequest], Verdict]
"""What a person says to a request: the same each time it is shown."""


class Answers(Enum):
    """The way on which answers come."""

    VERDICTS = "verdicts"
    """All at once, with whoever goes on with the run; again with the next one, where that worker died."""
    INBOX = "inbox"
    """One by one, the last request first, as messages that are posted once, after others that are for none of ours."""
    PORT = "port"
    """At once, while the worker waits."""


def by_what_is_asked(request: ApprovalRequest) -> Verdict:
    """Deny what says "no", let something else be sent where it says "other", and approve the rest."""
    what = str(request.args.get("what"))
    if " no " in f" {what} ":
        return request.deny(by="ana", note="not this one")
    if " other " in f" {what} ":
        return request.edit({"what": f"{what}, but cheaper"}, by="ana")
    return request.approve(by="ana")


class Person:
    """Answers the requests of one run, and keeps what was shown and said."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._shown: dict[str, ApprovalRequest] = {}
        self.said: dict[str, Verdict] = {}

    def answer(self, request: ApprovalRequest) -> Verdict:
        """The one answer to a request."""
        if request.id not in self.said:
            self._shown[request.id] = request
            self.said[request.id] = self._answer(request)
        return self.said[request.id]

    def check_agreed(self, records: Sequence[StoredRecord], call: str, tool: Tool, sent: Mapping[str, object]) -> list[Broken]:
        """What is durable at the moment at which a call acts, against what was shown and said."""
        of_call = [record for record in records if record.call == call]
        asked = [read_asked(record.body) for record in of_call if record.kind == RecordKind.STARTED]
        is_pending = any(record.kind == RecordKind.PENDING for record in of_call)
        if not asked or not (is_pending or (tool.approval is not None and tool.needs_approval(codec.encode(asked[-1].args)))):
            return []
        stored = [record for record in of_call if record.kind == RecordKind.VERDICT]
        if len(stored) != 1:
            rule = Rule.SPENT_ONCE if stored else Rule.VERDICT_FIRST
            return [Broken(rule, f"call {call} acts on {len(stored)} verdicts")]
        verdict, said = read_verdict(stored[0].body), self.said.get(call)
        if verdict.decision is Decision.DENY or (said is not None and said.decision is Decision.DENY):
            return [Broken(Rule.DENIED, f"call {call} acts, and {verdict.by} did not agree")]
        if said is None or not verdict.is_same_answer(said) or said.digest != self._digest(call):
            return [Broken(Rule.VERDICT_FIRST, f"call {call} acts on {verdict}, and said was {said}")]
        agreed = dict(said.args if said.args is not None else self._shown[call].args)
        if asked[-1].args != agreed or any(agreed.get(name, value) != value for name, value in sent.items()):
            return [Broken(Rule.VERDICT_FIRST, f"call {call} acts with {dict(sent)}, and agreed was {agreed}")]
        digest = verdict.digest
        if verdict.args is not None:  # what an edit lets out has a digest of its own
            digest = digest_of(verdict.run_id, call, tool.name, codec.encode(dict(verdict.args)))
        return _check_named(of_call, stored[0], call, digest)

    def check_asked(self, call: str, records: Sequence[StoredRecord], epoch: int) -> list[Broken]:
        """What must be durable when a port is asked."""
        if any(record.call == call and record.kind == RecordKind.VERDICT for record in records):
            return [Broken(Rule.NAMED_REQUESTS, f"somebody is asked about call {call}, whose verdict is durable")]
        if not any((r.call, r.kind, r.epoch) == (call, RecordKind.STARTED, epoch) for r in records):
            return [Broken(Rule.INTENT_FIRST, f"somebody is asked about call {call} before its intent is durable")]
        return []

    def _digest(self, call: str) -> str:
        shown = self._shown[call]
        return digest_of(shown.run_id, call, shown.tool, codec.encode(dict(shown.args)))


def _check_named(of_call: Sequence[StoredRecord], verdict: StoredRecord, call: str, digest: str) -> list[Broken]:
    """Each attempt that began after the verdict names it."""
    attempts = [record for record in of_call if record.kind == RecordKind.STARTED and record.number > verdict.number]
    named = [codec.decode(record.body).get("verdict") for record in attempts]
    if set(named) <= {digest}:
        return []
    return [Broken(Rule.SPENT_ONCE, f"the attempts at call {call} name {named}, its verdict is {digest}")]


def strays(request: ApprovalRequest) -> list[Verdict]:
    """Approvals that are for this request by their name alone: of other arguments, of another run, by nobody."""
    fair = request.approve(by="mallory")
    other = digest_of(request.run_id, request.id, request.tool, codec.encode({"what": "all of it"}))
    return [fair._replace(digest=other), fair._replace(run_id="another"), fair._replace(by=" ")]
