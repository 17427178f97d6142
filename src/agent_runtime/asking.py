"""The gate before a call that needs a person: pend it, ask, and spend the verdict once.

A call passes with a stored verdict for the very arguments that go out, or it does not pass. What waits without a worker
is `pending`; what an approvals port is asked about has its intent written first, and is asked about again after a crash.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from agent_runtime.approvals import (
    NOT_AGREED,
    ApprovalRequest,
    Checked,
    Decision,
    Verdict,
    check_approver,
    check_form,
    check_room,
    check_sent,
    check_verdict,
    denial,
    digest_of,
    expiry,
    find_digest,
    pending_body,
    read_edit,
    read_pending,
    read_verdict,
    request_of,
    verdict_body,
)
from agent_runtime.clock import milliseconds
from agent_runtime.errors import InvalidArguments, VerdictRefused
from agent_runtime.journal.records import RecordKind
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.states import WAITING, CallState
from agent_runtime.run import Run
from agent_runtime.side_by_side import is_being_cancelled
from agent_runtime.tools import Tool, is_async_callable

Ask: TypeAlias = Callable[[ApprovalRequest], Verdict | Awaitable[Verdict]]
"""The synchronous port: answers a request at once, such as a person at a console."""


class CallPaused(Exception):
    """The call waits for a person; nothing has gone out."""

    def __init__(self, request: ApprovalRequest) -> None:
        super().__init__(f"call {request.id} waits for a verdict")
        self.request = request


class Passed(NamedTuple):
    """The call may go out with these arguments, as `granted` says in its `started`."""

    recorded: bytes
    arguments: dict[str, Any]
    granted: bytes
    attempts: int = 0
    """How many attempts are on record."""
    is_started: bool = False
    """The intent of the attempt that is about to be made is on record."""


class Stopped(NamedTuple):
    """The call does not go out: this is its answer."""

    error: Mapping[str, str]


def must_ask(tool: Tool, life: CallLife | None, recorded: bytes) -> bool:
    """Whether a call passes the gate: one that was asked about, and one that its tool lets start by a person's word only."""
    if life is not None and life.pending:
        return True
    is_to_start = life is None or life.state in (CallState.UNSENT, CallState.REOPENED)
    return tool.approval is not None and is_to_start and tool.needs_approval(recorded)


def check_args_size(size: int, most: int) -> None:
    """Refuse arguments, as they are recorded, that take more than may be: whoever gave them is told."""
    if size > most:
        raise InvalidArguments(f"its arguments take {size:,} bytes as they are recorded, and {most:,} are allowed; give less")


def went_out(life: CallLife | None, passed: Passed | None) -> TypeGuard[CallLife]:
    """Whether the latest intent on record is one that acted: not one that nobody had agreed to yet."""
    if life is None or not life.asked or life.state in (*WAITING, CallState.DECIDED):
        return False
    return passed is None or bool(life.verdict)


class Gate:
    """Asks about one call of a run."""

    def __init__(self, run: Run, tool: Tool, call: str, asked: bytes, recorded: bytes, ask: Ask | None) -> None:
        """`asked` is how the call's intent begins, up to its time; `recorded` are its arguments as they were decided."""
        self._run = run
        self._tool = tool
        self._call = call
        self._asked = asked
        self._recorded = recorded
        self._ask = ask

    async def pass_or_pause(self, life: CallLife | None) -> Passed | Stopped:
        """Whether the call may go out; `CallPaused` where nobody has said so yet."""
        if life is None or not life.pending:
            life = await self._pend(0 if life is None else life.attempts)
        if life.state in WAITING:
            return await self._wait(life)
        verdict = read_verdict(life.verdict)
        if verdict.decision is Decision.DENY:
            return Stopped(denial(verdict))
        if life.state is CallState.DECIDED and await self._is_late(life):
            return Stopped(expiry(self._request(life)))
        return self._spend(life, verdict, read_edit(life.verdict) if verdict.decision is Decision.EDIT else self._recorded)

    async def _pend(self, attempts: int) -> CallLife:
        run, approval = self._run, self._tool.approval
        assert approval is not None, "only a call that needs a verdict is asked about"
        sent = self._tool.shown(self._recorded)
        digest = digest_of(run.run_id, self._call, self._tool.name, sent)
        expires_ms = None
        if approval.expires_seconds is not None:
            expires_ms = milliseconds(await run.backing.store.now()) + int(approval.expires_seconds * 1000)
        body = pending_body(
            self._asked, sent=sent, digest=digest, at_ms=run.now_ms(), step=run.journal.step, expires_ms=expires_ms,
            no_self=approval.no_self,
        )  # fmt: skip
        check_args_size(len(body), run.most_bytes)
        run.journal.note(RecordKind.PENDING, self._call, 0, body)
        await run.barrier_if_each()
        life = CallLife(self._call, CallState.PENDING, attempts, pending=body)
        if run.has_sinks:
            run.announce_when_committed("approval.requested", self._told(self._request(life)))
        return life

    async def _wait(self, life: CallLife) -> Passed | Stopped:
        """Ask the port, where there is one; else the request stays open."""
        run, request = self._run, self._request(life)
        if life.state is CallState.ASKING:  # its worker was asking, and is gone: it never sent
            run.journal.note(RecordKind.UNSENT, self._call, life.attempts, NOT_AGREED)
            life.state = CallState.PENDING
            await run.barrier_if_each()
        if await self._is_late(life):
            return Stopped(expiry(request))
        if self._ask is None:
            raise CallPaused(request)
        attempt = life.attempts + 1
        intent = b"%b%d%b}" % (self._asked, run.now_ms(), self._tool.recorded_settling)
        run.journal.note(RecordKind.STARTED, self._call, attempt, intent)
        await run.ready_to_act(is_alone=False)
        checked = await self._answer(request, life)
        verdict = checked.verdict
        if verdict.decision is not Decision.APPROVE:
            run.journal.note(RecordKind.UNSENT, self._call, attempt, NOT_AGREED)
            await run.barrier_if_each()
        body = verdict_body(checked, run.now_ms())
        run.journal.note(RecordKind.VERDICT, self._call, 0, body)
        await run.barrier_if_each()
        if run.has_sinks:
            run.announce_when_committed("approval.decided", {**self._told(request), **told_verdict(verdict)})
        if verdict.decision is Decision.DENY:
            return Stopped(denial(verdict))
        passed = self._spend(life, verdict, checked.sent or self._recorded)
        return passed._replace(attempts=attempt, is_started=verdict.decision is Decision.APPROVE)

    async def _answer(self, request: ApprovalRequest, life: CallLife) -> Checked:
        """What the port says. One that raises, or gives what does not hold, has not answered."""
        assert self._ask is not None, "there is a port to ask"
        try:
            verdict = check_form(await _ask_port(self._run, self._ask, request))
            now_ms = await self._now_if_it_ends(life)
            if verdict.request != request.id:
                raise VerdictRefused(f"the verdict is for request {verdict.request!r}, asked was {request.id!r}")
            check_verdict(verdict, request, life, now_ms=now_ms)
            check_approver(verdict, request, life, self._tool, principal=self._run.context.principal)
            return check_room(check_sent(verdict, request, life, self._tool), self._run.most_bytes)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            why = f"{type(error).__name__}: {error}"
            self._run.announce("approval.refused", {**self._told(request), "why": why})
            raise CallPaused(request) from error

    def _spend(self, life: CallLife, verdict: Verdict, recorded: bytes) -> Passed:
        """Let the call out with these arguments, if its tool still makes of them what was agreed to."""
        run, tool, digest = self._run, self._tool, read_pending(life.pending).digest
        if verdict.decision is Decision.EDIT:
            digest = digest_of(run.run_id, self._call, tool.name, recorded)
        if find_digest(run.run_id, self._call, tool, recorded) != digest:
            raise VerdictRefused(
                f"call {self._call} of run {run.run_id!r} would not go out with the arguments that {verdict.by} agreed to: "
                f"tool {tool.name!r} makes others of them now. Nothing was run: recover it with the old code, or cancel it"
            )
        return Passed(recorded, tool.check(recorded), b',"verdict":"%b"' % digest.encode(), life.attempts)

    async def _is_late(self, life: CallLife) -> bool:
        expires_ms = read_pending(life.pending).expires_ms
        return expires_ms is not None and (await self._now_if_it_ends(life) or 0) >= expires_ms

    async def _now_if_it_ends(self, life: CallLife) -> int | None:
        """The store's time, where the request expires."""
        ends = read_pending(life.pending).expires_ms is not None
        return milliseconds(await self._run.backing.store.now()) if ends else None

    def _request(self, life: CallLife) -> ApprovalRequest:
        return request_of(self._run.run_id, life, self._run.key(self._call))

    def _told(self, request: ApprovalRequest) -> dict[str, object]:
        return told_request(request)


async def _ask_port(run: Run, ask: Ask, request: ApprovalRequest) -> object:
    """What the port answers; a plain function waits for its person on a thread."""
    if not is_async_callable(ask):
        given = await run.backing.offload.start(partial(ask, request)).outcome
        return await given if inspect.isawaitable(given) else given
    answer: Any = ask(request)
    return await answer


def told_request(request: ApprovalRequest) -> dict[str, object]:
    """What events say of a request."""
    return {"step": request.step, "call": request.id, "tool": request.tool, "args": request.args, "digest": request.digest}


def told_verdict(verdict: Verdict) -> dict[str, object]:
    """What events say of a verdict."""
    return {"decision": verdict.decision.value, "by": verdict.by, "note": verdict.note}
