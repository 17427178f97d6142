"""One tool call through the journal: check, key, intent, act, confirm.

What an attempt came to is for `acting` to say; what that makes of the call is decided here, and nowhere else. The tool's own
answer ends it. An attempt that did not go out is made again. A call in doubt runs again under its first key where its repeat
rule lets it, and stops the run where it does not.
"""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NoReturn, assert_never

from agent_runtime import codec
from agent_runtime.acting import Answered, Came, Returned, Unknown, Unsent, act, named
from agent_runtime.approvals import ApprovalRequest, Decision, denial, read_verdict, request_of
from agent_runtime.asking import Ask, CallPaused, Gate, Passed, Stopped, check_args_size, must_ask, went_out
from agent_runtime.clock import milliseconds
from agent_runtime.crash import CrashPoint
from agent_runtime.doubts import FORGOTTEN, MOST_UNRECORDABLE, make_doubt
from agent_runtime.endings import Ending, answer_body, error_body, read_ending, result_body, text_ending
from agent_runtime.errors import (
    CheckpointStoreCorrupt,
    Doubt,
    InvalidArguments,
    RecoveryNeedsDecision,
    StoreRefused,
    UnknownTool,
    Unrecordable,
    VerdictRefused,
)
from agent_runtime.ids import CallId, seq_of
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.states import IN_DOUBT, WAITING, CallState
from agent_runtime.run import Run
from agent_runtime.settlements import Asked, read_asked
from agent_runtime.tools import Tool, ToolRegistry
from agent_runtime.working import Parked, next_wake


class CallInDoubt(Exception):
    """Nobody knows what became of the call, and it is not tried again in this life of the worker."""

    def __init__(
        self,
        doubt: Doubt,
        cause: BaseException | None = None,
        *,
        may_rerun: bool = False,
        can_probe: bool = False,
        pause_seconds: float = 0.0,
    ) -> None:
        """`may_rerun`: its rule lets it run again, and only its tries are used up for now. `can_probe`: there is a probe,
        to be asked after `pause_seconds`."""
        super().__init__(doubt.why)
        self.doubt = doubt
        self.cause = cause
        self.may_rerun = may_rerun
        self.can_probe = can_probe
        self.pause_seconds = pause_seconds


_STARTED, _ENDED = RecordKind.STARTED, RecordKind.DONE


class Siblings:
    """The calls of one reply: how many are on their way, and whether one of them is in doubt.

    The last to end leaves its record to the next barrier. Once one is in doubt, none that has not begun begins any more.
    """

    __slots__ = ("has_doubt", "running")

    def __init__(self, running: int) -> None:
        self.running = running
        self.has_doubt = False


def _refuse_store(run: Run, tool: Tool) -> NoReturn:
    """Refuse a call that could be made twice without anybody noticing, its record lost with a store that fails over."""
    raise StoreRefused(
        f"tool {tool.name!r} has no repeat rule, and {run.backing.store!r} may lose writes that it acknowledged: after a "
        "failover the call would be made again. Give the tool a rule (idempotent=, pure=), make the store durable as its page "
        "says, or accept it: accept_lost_writes=True"
    )


class Executor:
    """Makes the tool calls of runs."""

    __slots__ = ("approvals", "registry")

    def __init__(self, registry: ToolRegistry, *, approvals: Ask | None = None) -> None:
        """`approvals` answers at once where a call needs a person; without it such a call pauses its run."""
        self.registry = registry
        self.approvals = approvals

    def call(
        self, run: Run, call: CallId, name: str, args: Mapping[str, object], siblings: Siblings
    ) -> Coroutine[object, object, Ending]:
        """The ending of a call, to be awaited at once: the recorded one, or that of an act made now.

        `CallInDoubt` where nobody knows it, `CallPaused` where a person must agree first. A plain function, so that no frame
        of it waits beside the act.
        """
        life = run.life(call)
        if life is not None and life.state is CallState.DONE:
            return _known(read_ending(life.ended, self.registry.find(name), is_settled=life.is_settled))
        recorded_args = codec.encode_checked(dict(args))
        try:
            tool = self.registry.get(name)
            if life is None:
                check_args_size(len(recorded_args), run.most_bytes)
            arguments = tool.check(recorded_args, args) if life is None or not life.pending else {}
        except (UnknownTool, InvalidArguments) as error:
            return _refuse(run, call, life, name, error, siblings)
        if life is not None and life.state in IN_DOUBT and not tool.may_repeat:
            raise CallInDoubt(_doubt(run, life, name, "it was started and has no ending, and nobody has decided about it"))
        if not tool.may_repeat and run.may_lose_writes:
            _refuse_store(run, tool)
        if (life is not None or tool.approval is not None) and must_ask(tool, life, recorded_args):
            return self._ask_first(run, call, tool, recorded_args, life, siblings)
        return self._act(run, call, tool, arguments, _Attempts(run, call, tool, recorded_args, life, siblings, None))

    async def _ask_first(
        self, run: Run, call: CallId, tool: Tool, recorded_args: bytes, life: CallLife | None, siblings: Siblings
    ) -> Ending:
        """The ending of a call that needs a verdict."""
        came = await self._ask(run, call, tool, recorded_args, life)
        if isinstance(came, Stopped):
            return await _answer(run, call, tool.name, came.error, siblings)
        attempts = _Attempts(run, call, tool, came.recorded, life, siblings, came)
        return await self._act(run, call, tool, came.arguments, attempts)

    async def _ask(self, run: Run, call: CallId, tool: Tool, recorded_args: bytes, life: CallLife | None) -> Passed | Stopped:
        """Whether a call that needs a verdict may go out."""
        try:
            return await Gate(run, tool, call, _asked(tool, recorded_args), recorded_args, self.approvals).pass_or_pause(life)
        except InvalidArguments as error:  # no person could be shown what they agree to
            return Stopped({"type": type(error).__name__, "message": str(error)})
        except VerdictRefused as error:
            if life is None or life.state not in IN_DOUBT:
                raise
            raise CallInDoubt(_doubt(run, life, tool.name, str(error)), error) from error

    async def _act(self, run: Run, call: CallId, tool: Tool, arguments: dict[str, Any], attempts: "_Attempts") -> Ending:
        """Intent, act, confirm; again where the rule lets it, until there is an ending."""
        while True:
            if run.is_armed:
                await run.reach(CrashPoint.BEFORE_INTENT, seq_of(call))
            attempts.note_intent()
            await run.ready_to_act(is_alone=attempts.siblings.running == 1)
            try:
                if run.has_sinks:
                    attempts.announce_started()
                if run.is_armed:
                    await run.reach(CrashPoint.AFTER_INTENT, seq_of(call))
                outcome = await act(run, tool, arguments, attempts.key)
            finally:
                if run.has_sinks:
                    attempts.announce_returned()
            if run.is_armed:
                await run.reach(CrashPoint.AFTER_CALL, seq_of(call))
            body = attempts.body_of(outcome)
            if not isinstance(body, bytes):
                body = await attempts.without_ending(outcome, body)
            if body is not None:
                if attempts.note_ending(body, outcome):
                    await run.barrier()
                if run.is_armed:
                    await run.reach(CrashPoint.AFTER_CONFIRM, seq_of(call))
                return attempts.ending(body, outcome)
            await attempts.pause()
            attempts.check_key()
            arguments = tool.check(attempts.recorded_args)  # fresh ones: the attempt before may have changed its own


async def _known(ending: Ending) -> Ending:
    return ending


async def _refuse(
    run: Run, call: CallId, life: CallLife | None, name: str, error: UnknownTool | InvalidArguments, siblings: Siblings
) -> Ending:
    """A call that no tool takes is answered with why, and never sent; one that was sent before is in doubt."""
    if life is not None and life.state in WAITING:
        raise CallPaused(request_of(run.run_id, life, run.key(call))) from error
    if life is not None and life.state is CallState.DECIDED:
        verdict = read_verdict(life.verdict)
        if verdict.decision is not Decision.DENY:
            raise error
        return await _answer(run, call, name, denial(verdict), siblings)
    if life is not None and life.state is not CallState.NEW:
        raise CallInDoubt(_doubt(run, life, name, f"its tool no longer takes it: {error}"), error) from error
    body = error_body(error, run.backing.redact)
    told = {"call": call, "tool": name, "attempt": 0, "error": named(error)}
    if note_ending(run, call, 0, body, siblings, told):
        await run.barrier()
    return read_ending(body, None)


async def _answer(run: Run, call: CallId, name: str, error: Mapping[str, str], siblings: Siblings) -> Ending:
    """A call that does not go out, with why: a person's words may hold what no request can."""
    body = answer_body(error["type"], error["message"])
    told = {"call": call, "tool": name, "attempt": 0, "error": f"{error['type']}: {error['message']}"}
    if note_ending(run, call, 0, body, siblings, told):
        await run.barrier()
    return read_ending(body, None)


def _asked(tool: Tool, recorded_args: bytes) -> bytes:
    """How the intent of a call begins, up to its time."""
    return b'{"tool":%b,"args":%b,"at":' % (tool.recorded_name, recorded_args)


def note_ending(
    run: Run, call: CallId, attempt: int, body: bytes, siblings: Siblings, told: Mapping[str, object] | None
) -> bool:
    """Note a call's ending; whether it is to be written by itself: while a sibling is still on its way."""
    run.journal.note(_ENDED, call, attempt, codec.timed(body, run.now_ms()))
    if told is not None and run.has_sinks:
        run.announce_when_committed("call.done", told)
    siblings.running -= 1
    return siblings.running > 0 or run.journal.is_each


class _Attempts:
    """The attempts at one call, until one of them ends it or leaves it in doubt."""

    __slots__ = (
        "asked", "attempt", "began", "call", "ends", "first_ms", "is_started", "is_unsure", "key", "recorded_args", "run",
        "seconds", "siblings", "started_ms", "tool", "tries_left", "unrecordable",
    )  # fmt: skip

    def __init__(
        self,
        run: Run,
        call: CallId,
        tool: Tool,
        recorded_args: bytes,
        life: CallLife | None,
        siblings: Siblings,
        passed: Passed | None,
    ) -> None:
        self.run, self.call, self.tool, self.siblings = run, call, tool, siblings
        self.recorded_args = recorded_args
        self.key = run.key(call)
        self.asked = _asked(tool, recorded_args)
        self.ends = tool.recorded_settling
        self.is_started = self.is_unsure = False
        self.first_ms: int | None = None
        self.began = self.seconds = 0.0
        self.started_ms = self.attempt = self.unrecordable = 0
        self.tries_left = tool.attempts
        if life is not None or passed is not None:
            self._go_on(life, passed)

    def _go_on(self, life: CallLife | None, passed: Passed | None) -> None:
        """From where the call stands on record, or the gate let it through."""
        if life is not None:
            self.is_unsure = life.is_unsure or life.state in IN_DOUBT
            self.first_ms = read_asked(life.first_asked).at_ms if life.first_asked else None
            self.attempt, self.unrecordable = life.attempts, life.unrecordable
        if passed is not None:
            self.ends = passed.granted + self.ends
            self.is_started = passed.is_started
            self.attempt = passed.attempts - passed.is_started
        self.tries_left = max(1, self.tool.attempts - self.attempt)
        if went_out(life, passed) and not life.asked.startswith(self.asked):
            raise CheckpointStoreCorrupt(
                f"run {self.run.run_id!r}: call {self.call} was asked with other arguments than its decision holds; nothing "
                "was run"
            )

    def note_intent(self) -> None:
        """The next attempt is about to be made."""
        self.attempt += 1
        self.tries_left -= 1
        self.started_ms = self.run.now_ms()
        if self.first_ms is None:
            self.first_ms = self.started_ms
        if self.is_started:
            self.is_started = False
        else:
            self.run.journal.note(_STARTED, self.call, self.attempt, b"%b%d%b}" % (self.asked, self.started_ms, self.ends))

    def announce_started(self) -> None:
        """The act is about to be made: told in the task that makes it."""
        self.began = self.run.backing.clock.monotonic()
        args = codec.decode(self.recorded_args)
        self.run.announce("call.started", {**self.data(), "args": args})

    def announce_returned(self) -> None:
        """The act is over, whatever came of it: told in the same task."""
        self.seconds = self.run.backing.clock.monotonic() - self.began
        self.run.announce("call.returned", {**self.data(), "duration": self.seconds})

    def body_of(self, outcome: Came) -> bytes | Unrecordable | None:
        """What an attempt that ended the call is recorded as; why it cannot be; or None where it has not ended the call."""
        if isinstance(outcome, Returned):
            try:
                return result_body(self.tool, outcome.value, self.run.most_bytes)
            except Unrecordable as error:
                return error.named(self.tool.name)
        return error_body(outcome.error, self.run.backing.redact) if isinstance(outcome, Answered) else None

    async def without_ending(self, outcome: Came, trouble: Unrecordable | None) -> bytes | None:
        """What to record of an attempt that has not ended its call; None where it is to be tried again."""
        if isinstance(outcome, Unsent) and self.is_unsure:
            outcome = Unknown(f"nothing went out this time, yet it may have before: {outcome.error}", outcome.error)
        self.is_unsure = self.is_unsure or not isinstance(outcome, Unsent)
        match outcome:
            case Returned():
                assert trouble is not None, "what was returned is recorded, or cannot be"
                await self._note_unrecordable(trouble)
                return None
            case Unsent(error):
                body = error_body(error, self.run.backing.redact)
                self.run.journal.note(RecordKind.UNSENT, self.call, self.attempt, codec.timed(body, self.run.now_ms()))
                if self.tries_left <= 0:
                    return error_body(error, self.run.backing.redact)
                await self.run.barrier()
                return None
            case Unknown(why, error, on_thread):
                self._announce_doubt(why)
                may_rerun = self._may_repeat(later=self._next_pause())
                if not may_rerun or on_thread or self.tries_left <= 0:
                    can_probe = self.tool.probe is not None and not on_thread
                    doubt = self._doubt(why if may_rerun or not self.tool.may_repeat else f"{why}; {FORGOTTEN}")
                    pause = self._next_pause()
                    raise CallInDoubt(doubt, error, may_rerun=may_rerun, can_probe=can_probe, pause_seconds=pause)
                return None
            case Answered():
                raise AssertionError("an answer ends its call")
            case _:
                assert_never(outcome)

    async def _note_unrecordable(self, error: Unrecordable) -> None:
        """It happened, and what it gave cannot be stored: in doubt, and never forgotten."""
        self.unrecordable += 1
        body = error_body(error, self.run.backing.redact)
        self.run.journal.note(RecordKind.UNRECORDABLE, self.call, self.attempt, codec.timed(body, self.run.now_ms()))
        await self.run.barrier()
        self._announce_doubt(str(error))
        if not self._may_repeat() or self.unrecordable >= MOST_UNRECORDABLE:
            raise CallInDoubt(self._doubt(f"it ran, and {error}"), error, can_probe=self.tool.probe is not None)

    def _may_repeat(self, *, later: float = 0.0) -> bool:
        """Whether the tool's rule lets the call run again: not past the time for which the remote knows its key."""
        seconds, first_ms = self.tool.key_seconds, self.first_ms
        is_known = seconds is None or first_ms is None or self.run.now_ms() - first_ms < (seconds - later) * 1000
        return self.tool.may_repeat and is_known

    def check_key(self) -> None:
        """Before another attempt, however long the pause took: one that was sent before needs a key that is still known."""
        if self.is_unsure and self.tool.may_repeat and not self._may_repeat():
            raise CallInDoubt(self._doubt(FORGOTTEN))

    def ending(self, body: bytes, outcome: Came) -> Ending:
        """The ending as it is read back from its record. A text comes back as it is."""
        if isinstance(outcome, Returned) and type(outcome.value) is str and self.tool.result.is_plain:
            return text_ending(outcome.value)
        return read_ending(body, self.tool)

    def note_ending(self, body: bytes, outcome: Came) -> bool:
        """The call has ended; whether its record is to be written by itself."""
        told: dict[str, object] | None = None
        if self.run.has_sinks:
            came = {"result": outcome.value} if isinstance(outcome, Returned) else {"error": named(outcome.error)}
            told = {**self.data(), "duration": self.seconds, **came}
        return note_ending(self.run, self.call, self.attempt, body, self.siblings, told)

    async def pause(self) -> None:
        """Before the next attempt: twice as long each time."""
        await self.run.backing.clock.sleep(self._next_pause())

    def _next_pause(self) -> float:
        tried = max(1, self.tool.attempts - self.tries_left)
        return self.tool.pause_seconds * 2.0 ** min(tried - 1, 10)

    def data(self) -> dict[str, object]:
        """What an event says of this call."""
        step = self.run.journal.step
        return {"step": step, "call": self.call, "tool": self.tool.name, "key": self.key, "attempt": self.attempt}

    def _doubt(self, why: str) -> Doubt:
        args, age_ms = codec.decode(self.recorded_args), self.run.now_ms() - self.started_ms
        return make_doubt(self.run.run_id, self.call, self.key, self.tool.name, self.attempt, why, args, age_ms)

    def _announce_doubt(self, why: str) -> None:
        if self.run.has_sinks:
            self.run.announce("call.in_doubt", {**self.data(), "why": why})


async def stop_in_doubt(run: Run, doubts: Sequence[CallInDoubt]) -> NoReturn:
    """Every sibling has ended or is in doubt: block the run until somebody says what happened.

    Where nobody has to, since every call may run again by its rule, the run wakes by itself: later each time. `Parked`
    where somebody can be asked: a probe, or whoever has posted meanwhile. A worker that dies before it has asked leaves a
    run that wakes, too.
    """
    may_rerun = all(doubt.may_rerun for doubt in doubts)
    pauses = [doubt.pause_seconds for doubt in doubts if doubt.can_probe]
    wake_at = next_wake(run) if may_rerun or pauses else None
    await run.give_back(RunStatus.BLOCKED, "in doubt", counts=may_rerun, wake_at=wake_at)
    if run.has_sinks:
        run.announce("run.blocked", {"kind": run.journal.kind, "step": run.journal.step})
    if not run.has_running_thread and (run.has_unread_messages or pauses):
        await run.backing.clock.sleep(max(pauses, default=0.0))
        raise Parked from doubts[0].cause
    unrecordable = [doubt.cause for doubt in doubts if isinstance(doubt.cause, Unrecordable)]
    needed = RecoveryNeedsDecision(run.run_id, [doubt.doubt for doubt in doubts])
    if len(unrecordable) == len(doubts) == 1:
        raise unrecordable[0] from needed
    raise needed from doubts[0].cause


async def pause(run: Run, requests: Sequence[ApprovalRequest]) -> NoReturn:
    """Every sibling has ended or waits for a person: let the run go until somebody answers, or a request expires."""
    times = [milliseconds(request.expires_at) for request in requests if request.expires_at is not None]
    await run.give_back(RunStatus.PAUSED, "waits for a verdict", counts=False, wake_at=min(times, default=None))
    if run.has_sinks:
        waiting = [request.id for request in requests]
        run.announce("run.paused", {"kind": run.journal.kind, "step": run.journal.step, "pending": waiting})
    raise Parked


def _doubt(run: Run, life: CallLife, name: str, why: str) -> Doubt:
    asked = read_asked(life.asked) if life.asked else Asked(name, {}, run.now_ms())
    return make_doubt(
        run.run_id, life.call, run.key(life.call), name, life.attempts, why, asked.args, run.now_ms() - asked.at_ms
    )
