"""What people answer to the open requests of a run, from outside: a verdict is left to whoever has the tools.

Here it is checked as far as that can be done without them. What somebody else answered first stands, and whoever answers
otherwise is told so; what a worker has found not to hold stands in nobody's way.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from agent_runtime import codec
from agent_runtime.approvals import (
    ApprovalRequest,
    Checked,
    Decision,
    MayApprove,
    Verdict,
    check_approver,
    check_edit,
    check_form,
    check_may,
    check_room,
    check_verdict,
    read_verdict,
)
from agent_runtime.clock import milliseconds
from agent_runtime.doubts import Case, check_not_passed, check_request, passed_over, verdict_left, verdict_message
from agent_runtime.errors import CheckpointConflict, RunQuarantined, VerdictRefused
from agent_runtime.ids import RunId
from agent_runtime.inbox import Message, MessageKind
from agent_runtime.journal.records import RunStatus
from agent_runtime.outside import Admit, leave, once_it_stands
from agent_runtime.recovery import Found, read_reason, read_verified
from agent_runtime.run import Backing
from agent_runtime.tools import Tool, ToolRegistry


class Door(NamedTuple):
    """What is asked of a verdict before it is left to a run."""

    may_approve: MayApprove | None = None
    registry: ToolRegistry | None = None
    """The tools, where whoever checks has them: then an edit and the tool's own word on approvers are checked as well."""

    def check(self, case: Case, verdict: Verdict, now_ms: int, principal: str | None) -> None:
        """`VerdictRefused` where it does not hold."""
        life = case.history.lives.get(verdict.request)
        request = check_request(case, verdict, life)
        assert life is not None, "a request is a call's"
        check_verdict(verdict, request, life, now_ms=now_ms)
        if self.may_approve is not None:
            check_may(verdict, request, self.may_approve)
        tool = None if self.registry is None else self.registry.find(request.tool)
        check_approver(verdict, request, life, tool, principal=principal)
        self._check_by_tool(verdict, request, tool)

    def _check_by_tool(self, verdict: Verdict, request: ApprovalRequest, tool: Tool | None) -> None:
        if self.registry is None or verdict.decision is not Decision.EDIT:
            return
        if tool is None:
            there = sorted(spec.name for spec in self.registry.specs)
            raise VerdictRefused(f"an edit of a call of {request.tool!r} cannot be checked: the tools here are {there}")
        check_edit(verdict, tool)


async def answer(backing: Backing, verdict: Verdict, *, door: Door, admit: Admit) -> None:
    """Leave a verdict to whoever works its run.

    `VerdictRefused` where it does not hold, or somebody gave another answer first; `CheckpointConflict` where the run has
    ended or is in quarantine. The same answer again is fine.
    """
    run_id = RunId(check_form(verdict).run_id)
    edited = b"" if verdict.args is None else codec.encode(verdict.args)
    check_room(Checked(verdict, edited), backing.most_bytes)

    async def write(found: Found) -> None:
        _check_answerable(found)
        case = await found.case(backing)
        now_ms, principal = milliseconds(await backing.store.now()), found.context.principal
        door.check(case, verdict, now_ms, principal)
        if case.history.lives[verdict.request].verdict:
            return  # the same answer is stored already
        passed, check = passed_over(case, now_ms), partial(door.check, now_ms=now_ms, principal=principal)
        check_not_passed(verdict, passed)
        _check_first_answer(case, verdict, passed, check)
        await leave(backing, run_id, MessageKind.VERDICT, verdict_message(verdict, passed))
        again = await (await read_verified(backing, run_id)).case(backing)
        _check_first_answer(again, verdict, passed, check)

    await once_it_stands(backing, run_id, admit, write, "answered")


def _check_answerable(found: Found) -> None:
    run_id = found.stored.row.run_id
    if found.status.is_final:
        raise CheckpointConflict(f"run {run_id!r} has ended ({found.status.name.lower()}); nothing of it waits for an answer")
    if found.status is RunStatus.QUARANTINED:
        raise RunQuarantined(run_id, read_reason(found.stored.records[-1]))


def _check_first_answer(
    case: Case, verdict: Verdict, passed: Sequence[Message], check: Callable[[Case, Verdict], None]
) -> None:
    """Refuse another answer than the first that holds: the stored one, or of those that were left the one that came first.

    Those that a worker has `passed` over do not hold, whatever can be checked of them here: they stand in nobody's way.
    """
    life = case.history.lives[verdict.request]
    first = read_verdict(life.verdict) if life.verdict else None
    for message in case.messages:
        is_of_it = message.kind is MessageKind.VERDICT and message.body.get("request") == verdict.request
        if first is None and is_of_it and message not in passed:
            with suppress(VerdictRefused):
                check(case, left := verdict_left(message))
                first = left
    if first is not None and not first.is_same_answer(verdict):
        raise VerdictRefused(
            f"request {verdict.request!r} of run {case.run_id!r} was answered already: {first.decision.value}, by {first.by}; "
            "the first answer stands"
        )
