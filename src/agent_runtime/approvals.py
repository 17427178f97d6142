"""Approvals: what a person is asked before a call goes out, what they answered, and whether the answer holds.

Rules of this file:

* A verdict names one request of one run and the digest of the very arguments that will be sent. Anything else is refused.
* The default is *not run*: no answer, another's answer, a late or a malformed one leave the call waiting as it was.
* One verdict is ever stored for a request. The same answer again is no other answer.
* Time is the store's: a request that has expired is answered as expired, which is never a person's denial.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from agent_runtime import codec
from agent_runtime.clock import milliseconds, moment
from agent_runtime.errors import InvalidArguments, Unrecordable, VerdictRefused
from agent_runtime.journal.replay import CallLife
from agent_runtime.redaction import Redact, find_marks, holds_mark, shown_args
from agent_runtime.tools import Tool

LONGEST_NOTE = 10_000
LONGEST_NAME = 500


class Decision(Enum):
    """What a person answered."""

    APPROVE = "approve"
    DENY = "deny"
    EDIT = "edit"


class Verdict(NamedTuple):
    """A person's answer to one request. Made by `ApprovalRequest.approve`, `.deny` or `.edit`."""

    run_id: str
    request: str
    digest: str
    """Of the request that was answered: the run, the call, the tool and the arguments shown."""
    decision: Decision
    by: str
    note: str = ""
    args: Mapping[str, object] | None = None
    """What shall be sent instead: all arguments, where they were edited."""

    def to_json(self) -> str:
        """The verdict as text, for another process."""
        return json.dumps(self.to_plain())

    @staticmethod
    def from_json(text: str) -> "Verdict":
        """The verdict that `to_json` was asked of; `VerdictRefused` where the text holds none."""
        try:
            return Verdict.from_plain(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise VerdictRefused(f"expected the JSON of a verdict, found what cannot be read: {error}") from error

    def to_plain(self) -> dict[str, object]:
        plain = {**self._asdict(), "decision": self.decision.value}
        if self.args is None:
            del plain["args"]
        return plain

    @staticmethod
    def from_plain(plain: object) -> "Verdict":
        """The verdict that `to_plain` was asked of; `VerdictRefused` where it is none."""
        if not isinstance(plain, Mapping):
            raise VerdictRefused(f"expected a Verdict, found {type(plain).__name__}; make it with request.approve(by='…')")
        given = dict(plain)
        try:
            given["decision"] = Decision(given["decision"])
            verdict = Verdict(**given)
        except (KeyError, ValueError, TypeError) as error:
            raise VerdictRefused(f"expected the parts of a verdict, found others: {error}") from error
        return check_form(verdict)

    def is_same_answer(self, other: "Verdict") -> bool:
        """Whether both let the same be done, whoever said so."""
        return (self.request, self.digest, self.decision, self.args) == (
            other.request, other.digest, other.decision, other.args,
        )  # fmt: skip


class ApprovalRequest(NamedTuple):
    """A call that waits for a verdict: `args` are the arguments as they will be sent, `digest` binds a verdict to them.

    Where a face redacts them they are shown as they may be, and the digest binds to the true ones all the same.
    """

    id: str
    """The call's place in its run: what a verdict names."""
    run_id: str
    step: int
    tool: str
    args: Mapping[str, object]
    digest: str
    key: str = ""
    asked_at: datetime | None = None
    expires_at: datetime | None = None
    is_redacted: bool = False
    """Whether `args` are not all that will be sent."""

    def approve(self, *, by: str, note: str = "") -> Verdict:
        """Let the call go out with these very arguments."""
        return self._answer(Decision.APPROVE, by, note)

    def deny(self, *, by: str, note: str = "") -> Verdict:
        """Do not let it go out; the model sees the note."""
        return self._answer(Decision.DENY, by, note)

    def edit(self, changes: Mapping[str, object], *, by: str, note: str = "") -> Verdict:
        """Let it go out with some arguments changed: those named are replaced. They are checked like the model's."""
        if not isinstance(changes, Mapping):
            raise VerdictRefused(f"an edit is a dict of the arguments to change, found {type(changes).__name__}")
        if self.is_redacted:
            raise VerdictRefused(
                f"request {self.id!r} of run {self.run_id!r} is shown redacted, and an edit sends all arguments: make it with "
                "Runs.edit(request, changes, by='…'), which knows the others"
            )
        return self._answer(Decision.EDIT, by, note, {**self.args, **changes})

    def _answer(self, decision: Decision, by: str, note: str, args: Mapping[str, object] | None = None) -> Verdict:
        return check_form(Verdict(self.run_id, self.id, self.digest, decision, by, note, args))

    def to_json(self) -> str:
        """The request as text, for another process."""
        times = {"asked_at": self.asked_at, "expires_at": self.expires_at}
        told = {name: None if at is None else milliseconds(at) for name, at in times.items()}
        return json.dumps({**self._asdict(), "args": dict(self.args), **told})

    @staticmethod
    def from_json(text: str) -> "ApprovalRequest":
        """The request that `to_json` was asked of; `VerdictRefused` where the text holds none."""
        try:
            plain = json.loads(text)
            times = {name: None if plain[name] is None else moment(plain[name]) for name in ("asked_at", "expires_at")}
            request = ApprovalRequest(**{**plain, **times})
        except (KeyError, ValueError, TypeError, OverflowError, OSError, RecursionError) as error:
            raise VerdictRefused(f"expected the JSON of a request, found what cannot be read: {error!r}") from error
        texts = (request.id, request.run_id, request.tool, request.digest, request.key)
        others = ((request.step, int), (request.args, dict), (request.is_redacted, bool))
        if not (all(type(text) is str for text in texts) and all(type(part) is kind for part, kind in others)):
            raise VerdictRefused(f"expected the JSON of a request, found parts of other types: {request!r:.200}")
        return request


MayApprove: TypeAlias = Callable[[str, ApprovalRequest], bool]
"""Whether somebody may answer a request; raising says no, too."""


def redact_request(request: ApprovalRequest, redact: Redact | None) -> ApprovalRequest:
    """The request as it may be shown: approving or denying it means the true one."""
    args = shown_args(redact, request.args)
    return request if args == request.args else request._replace(args=args, is_redacted=True)


def edit_true(true: ApprovalRequest, seen: ApprovalRequest, changes: Mapping[str, object], *, by: str, note: str) -> Verdict:
    """The edit of a request by somebody who saw it redacted: what they leave out is sent as it truly is.

    `VerdictRefused` where it holds what was shown in place of something: nobody means that to be sent. It is bound to what
    was seen.
    """
    verdict = true.edit(changes, by=by, note=note)
    marks = find_marks(seen.args, true.args)
    if seen.is_redacted and (names := [name for name, value in changes.items() if holds_mark(value, marks)]):
        raise VerdictRefused(
            f"the edit of {names} holds what is only shown in place of the true value, and would be sent so; leave it out to "
            "send it as it is, or give all of it anew"
        )
    return verdict._replace(digest=seen.digest)


class Asked(NamedTuple):
    """What a `pending` record says."""

    tool: str
    args: dict[str, object]
    """As they were asked for."""
    sent: dict[str, object]
    """As they will be sent."""
    digest: str
    at_ms: int
    step: int
    expires_ms: int | None
    no_self: bool


def digest_of(run_id: str, call: str, tool: str, sent: bytes) -> str:
    """What a verdict is bound to: the run, the call, the tool and the bytes of the arguments as they will be sent."""
    parts = (run_id.encode(), call.encode(), tool.encode(), sent)
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


def pending_body(
    asked: bytes, *, sent: bytes, digest: str, at_ms: int, step: int, expires_ms: int | None, no_self: bool
) -> bytes:
    """The body of a `pending` record; `asked` begins it as it will begin the call's `started`."""
    ends = b"" if expires_ms is None else b',"expires":%d' % expires_ms
    alone = b',"no_self":true' if no_self else b""
    return b'%b%d,"step":%d,"digest":"%b","sent":%b%b%b}' % (asked, at_ms, step, digest.encode(), sent, ends, alone)


def read_pending(body: bytes) -> Asked:
    """What the body of a `pending` record says."""
    plain = codec.decode(body)
    return Asked(
        plain["tool"], plain["args"], plain["sent"], plain["digest"], plain["at"], plain["step"], plain.get("expires"),
        plain.get("no_self", False),
    )  # fmt: skip


def request_of(run_id: str, life: CallLife, key: str) -> ApprovalRequest:
    """The request that a call waits with."""
    asked = read_pending(life.pending)
    expires_at = None if asked.expires_ms is None else moment(asked.expires_ms)
    return ApprovalRequest(
        life.call, run_id, asked.step, asked.tool, asked.sent, asked.digest, key, moment(asked.at_ms), expires_at
    )


class Checked(NamedTuple):
    """A verdict that holds. `sent`: the arguments that its edit makes of the call, as they will be sent."""

    verdict: Verdict
    sent: bytes = b""


def verdict_body(checked: Checked, at_ms: int) -> bytes:
    """The body of a `verdict` record."""
    sent = {"sent": codec.decode(checked.sent)} if checked.sent else {}
    return codec.encode({**checked.verdict.to_plain(), "at": at_ms, **sent})


def read_verdict(body: bytes) -> Verdict:
    """The verdict that a `verdict` record holds."""
    plain = codec.decode(body)
    return Verdict.from_plain({name: value for name, value in plain.items() if name not in ("at", "sent")})


def read_edit(body: bytes) -> bytes:
    """The arguments that the edit of a `verdict` record made of its call: what was checked is what is sent."""
    return codec.encode_checked(codec.decode(body)["sent"])


def check_form(verdict: object) -> Verdict:
    """The verdict, if it is one: from somebody, with text for a note, and plain arguments where they were edited."""
    if not isinstance(verdict, Verdict) or not isinstance(verdict.decision, Decision):
        raise VerdictRefused(f"expected a Verdict, found {verdict!r:.200}; make it with request.approve(by='…')")
    texts = (verdict.run_id, verdict.request, verdict.digest, verdict.by, verdict.note)
    if not all(type(text) is str for text in texts) or len(verdict.note) > LONGEST_NOTE or len(verdict.by) > LONGEST_NAME:
        raise VerdictRefused(
            f"a verdict holds text, its note up to {LONGEST_NOTE} characters and its by up to {LONGEST_NAME}; "
            f"found {verdict!r:.200}"
        )
    if not verdict.by.strip():
        raise VerdictRefused("a verdict is somebody's: say whose, with by='…'")
    if (verdict.args is not None) is not (verdict.decision is Decision.EDIT):
        raise VerdictRefused("an edit, and nothing else, has arguments of its own")
    if verdict.args is not None and type(verdict.args) is not dict:
        raise VerdictRefused(f"an edit holds its arguments as a dict by name, found {type(verdict.args).__name__}")
    try:
        codec.check_plain({**verdict.to_plain()})
    except Unrecordable as error:
        raise VerdictRefused(f"a verdict holds plain data; at {error.path} found {error.found}") from error
    return verdict


def check_verdict(verdict: Verdict, request: ApprovalRequest, life: CallLife, *, now_ms: int | None) -> bool:
    """Whether the verdict is to be stored; false where the same answer is. `VerdictRefused` where it does not hold.

    `now_ms` is the store's time, asked for where the request expires.
    """
    where = f"request {request.id!r} of run {request.run_id!r}"
    if verdict.run_id != request.run_id or verdict.digest != request.digest:
        raise VerdictRefused(f"the verdict is for another run or other arguments than {where} shows; look at it again")
    if life.verdict:
        stored = read_verdict(life.verdict)
        if stored.is_same_answer(verdict):
            return False
        raise VerdictRefused(f"{where} was answered already: {stored.decision.value}, by {stored.by}; the first answer stands")
    if request.expires_at is not None and now_ms is not None and now_ms >= milliseconds(request.expires_at):
        raise VerdictRefused(f"{where} expired at {request.expires_at.isoformat()}; the model is told so")
    return True


def check_approver(
    verdict: Verdict, request: ApprovalRequest, life: CallLife, tool: Tool | None, *, principal: str | None
) -> None:
    """Refuse an answer of somebody who may not give one: by what the tool said when it was asked, or says now."""
    approval = None if tool is None else tool.approval
    no_self = read_pending(life.pending).no_self or (approval is not None and approval.no_self)
    if no_self and principal is not None and verdict.by.strip() == principal.strip():
        raise VerdictRefused(f"request {request.id!r} of run {request.run_id!r} acts for {principal!r}, who may not answer it")
    if approval is not None and approval.may_approve is not None:
        check_may(verdict, request, approval.may_approve)


def check_may(verdict: Verdict, request: ApprovalRequest, may_approve: MayApprove) -> None:
    """Refuse an answer of somebody of whom the hook does not say that they may give one."""
    try:
        may = may_approve(verdict.by, request)
    except Exception as error:
        raise VerdictRefused(
            f"whether {verdict.by!r} may answer request {request.id!r} could not be told: {type(error).__name__}: {error}"
        ) from error
    if may is not True:
        raise VerdictRefused(f"{verdict.by!r} may not answer request {request.id!r} of run {request.run_id!r}")


def check_sent(verdict: Verdict, request: ApprovalRequest, life: CallLife, tool: Tool | None) -> Checked:
    """The verdict with what it lets out, which for a denial is nothing; `VerdictRefused` where its tool would send another."""
    if verdict.decision is Decision.DENY:
        return Checked(verdict)
    where = f"request {request.id!r} of run {request.run_id!r}"
    if tool is None:
        raise VerdictRefused(f"{where} is for tool {request.tool!r}, which is not registered here; register it, or deny it")
    if verdict.decision is Decision.EDIT:
        return Checked(verdict, check_edit(verdict, tool))
    if find_digest(request.run_id, request.id, tool, asked_args(life)) != request.digest:
        raise VerdictRefused(
            f"{where} shows other arguments than tool {tool.name!r} would send now: its code has changed since it was asked. "
            "Nothing was stored, the request is still open: deny it, say with an edit what shall be sent, or use the old code"
        )
    return Checked(verdict)


def check_room(checked: Checked, most: int) -> Checked:
    """The verdict, if there is room for it: an edit may be as large as any arguments."""
    if checked.verdict.args is not None and (size := len(verdict_body(checked, 0))) > most:
        raise VerdictRefused(
            f"the edit takes {size:,} bytes as it is recorded, and {most:,} are allowed; nothing was stored, the request is "
            "still open: send less"
        )
    return checked


def asked_args(life: CallLife) -> bytes:
    """The arguments of a call that waits, as they were asked for."""
    return codec.encode_checked(read_pending(life.pending).args)


def find_digest(run_id: str, call: str, tool: Tool, recorded: bytes) -> str | None:
    """The digest of a call as its tool would send it now; None where the tool does not take it."""
    try:
        return digest_of(run_id, call, tool.name, tool.shown(recorded))
    except InvalidArguments:
        return None


def check_edit(verdict: Verdict, tool: Tool) -> bytes:
    """The arguments that an edit makes of a call, as they will be sent; `VerdictRefused` where the tool does not take them."""
    assert verdict.args is not None, "an edit has arguments"
    try:
        return tool.shown(codec.encode(dict(verdict.args)))
    except InvalidArguments as error:
        raise VerdictRefused(f"the edit does not fit: {error}; nothing was stored, the request is still open") from error


def denial(verdict: Verdict) -> dict[str, Any]:
    """The answer that a denied call gives."""
    note = f": {verdict.note}" if verdict.note else ""
    return {"type": "Denied", "message": f"{verdict.by} did not approve this call{note}"}


def expiry(request: ApprovalRequest) -> dict[str, Any]:
    """The answer that a call gives whose request nobody answered in time."""
    at = "" if request.expires_at is None else f" by {request.expires_at.isoformat(timespec='seconds')}"
    return {"type": "ApprovalExpired", "message": f"nobody answered the request for approval{at}; the call was not made"}


NOT_AGREED = codec.encode({"error": {"type": "NotSent", "message": "nobody had agreed to it"}})
"""The body of an `unsent` that says: its worker was still asking, so nothing went out."""

WITHDRAWN = {"type": "Withdrawn", "message": "the program does not ask for this call any more; it was not made"}
"""The answer of a call that was asked about, and that its node does not make any more."""
