"""One tool call through the journal: check, key, intent, act, confirm.

What an ending means is decided here, and nowhere else. Only the tool's own answer makes a call done; only proof that
nothing went out makes it unsent; everything else is in doubt, whatever raised it. A call in doubt runs again under its
first key where its repeat rule lets it, and stops the run where it does not.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias, assert_never

from agent_runtime import codec
from agent_runtime.crash import CrashPoint
from agent_runtime.doubts import MOST_UNRECORDABLE, Asked, make_doubt, read_asked
from agent_runtime.errors import (
    CheckpointStoreCorrupt,
    Doubt,
    InvalidArguments,
    KeyConflict,
    NotSent,
    RecoveryNeedsDecision,
    StoreRefused,
    UnknownTool,
    Unrecordable,
)
from agent_runtime.ids import CallId, seq_of
from agent_runtime.journal.journal import Commits
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.states import CallState
from agent_runtime.offload import Job
from agent_runtime.run import Run, next_wake
from agent_runtime.tools import CALL_KEY, Tool, ToolRegistry

_RESULT = b'{"result":'
_ERROR = b'{"error":'


class Ending(NamedTuple):
    """How a call ended: with a value, or with an error that is the tool's answer."""

    value: Any = None
    error_type: str | None = None
    error: str = ""
    text: str = ""
    """The same as the model sees it."""


class CallInDoubt(Exception):
    """Nobody knows what became of the call, and it is not tried again in this life of the worker."""

    def __init__(self, doubt: Doubt, cause: BaseException | None = None, *, may_rerun: bool = False) -> None:
        """`may_rerun`: its rule lets it run again, and only its tries are used up for now."""
        super().__init__(doubt.why)
        self.doubt = doubt
        self.cause = cause
        self.may_rerun = may_rerun


class Returned(NamedTuple):
    """The tool returned."""

    value: object


class Answered(NamedTuple):
    """The tool answered with an error."""

    error: BaseException


class Unsent(NamedTuple):
    """Nothing went out."""

    error: NotSent


class Unknown(NamedTuple):
    """Nobody knows whether it happened. `on_thread`: the attempt is still on a thread that cannot be stopped."""

    why: str
    error: BaseException
    on_thread: bool = False


Outcome: TypeAlias = Returned | Answered | Unsent | Unknown


class Siblings:
    """The calls of one reply: how many are on their way, and whether one of them is in doubt.

    The last to end leaves its record to the next barrier. Once one is in doubt, none that has not begun begins any more.
    """

    __slots__ = ("has_doubt", "running")

    def __init__(self, running: int) -> None:
        self.running = running
        self.has_doubt = False


def _check_store(run: Run, tool: Tool) -> None:
    """Refuse a call that could be made twice without anybody noticing, its record lost with a store that fails over."""
    backing = run.backing
    if tool.rule.may_repeat or backing.accept_lost_writes or not getattr(backing.store, "may_lose_writes", False):
        return
    raise StoreRefused(
        f"tool {tool.name!r} has no repeat rule, and {backing.store!r} may lose writes that it acknowledged: after a failover "
        "the call would be made again. Give the tool a rule (idempotent=, pure=), make the store durable as its page says, "
        "or accept it: accept_lost_writes=True"
    )


class Executor:
    """Makes the tool calls of runs."""

    def __init__(self, registry: ToolRegistry) -> None:
        self.registry = registry

    async def call(self, run: Run, call: CallId, name: str, args: Mapping[str, object], siblings: Siblings) -> Ending:
        """The ending of a call: the recorded one, or that of an act made now. `CallInDoubt` where there is none."""
        life = run.life(call)
        if life is not None and life.state is CallState.DONE:
            return read_ending(life.ended, self.registry.find(name))
        recorded_args = codec.encode_checked(dict(args))
        try:
            tool = self.registry.get(name)
            arguments = tool.check(recorded_args)
        except (UnknownTool, InvalidArguments) as error:
            return await _refuse(run, call, life, name, error, siblings)
        _check_store(run, tool)
        attempts = _Attempts(run, call, tool, recorded_args, life, siblings)
        while True:
            if run.is_armed:
                await run.reach(CrashPoint.BEFORE_INTENT, seq_of(call))
            attempts.note_intent()
            await run.ready_to_act(is_alone=siblings.running == 1)
            if run.has_sinks:
                run.announce("call.started", attempts.data())
            if run.is_armed:
                await run.reach(CrashPoint.AFTER_INTENT, seq_of(call))
            outcome = await act(run, tool, arguments, attempts.key)
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
                return read_ending(body, tool)
            await attempts.pause()
            arguments = tool.check(recorded_args)  # fresh ones: the attempt before may have changed its own


async def _refuse(
    run: Run, call: CallId, life: CallLife | None, name: str, error: UnknownTool | InvalidArguments, siblings: Siblings
) -> Ending:
    """A call that no tool takes is answered with why, and never sent; one that was sent before is in doubt."""
    if life is not None and life.state is not CallState.NEW:
        raise CallInDoubt(_doubt(run, life, name, f"its tool no longer takes it: {error}"), error) from error
    body = _error_body(error)
    told = {"call": call, "tool": name, "attempt": 0, "error": _named(error)}
    if note_ending(run, call, 0, body, siblings, told):
        await run.barrier()
    return read_ending(body, None)


def note_ending(
    run: Run, call: CallId, attempt: int, body: bytes, siblings: Siblings, told: Mapping[str, object] | None
) -> bool:
    """Note a call's ending; whether it is to be written by itself: while a sibling is still on its way."""
    run.note(RecordKind.DONE, call, attempt, body)
    if told is not None and run.has_sinks:
        run.announce_when_committed("call.done", told)
    siblings.running -= 1
    return siblings.running > 0 or run.journal.mode is Commits.EACH


class _Attempts:
    """The attempts at one call, until one of them ends it or leaves it in doubt."""

    __slots__ = (
        "asked", "attempt", "began", "call", "key", "recorded_args", "run", "siblings", "started_ms", "tool", "tries_left",
        "unrecordable",
    )  # fmt: skip

    def __init__(
        self, run: Run, call: CallId, tool: Tool, recorded_args: bytes, life: CallLife | None, siblings: Siblings
    ) -> None:
        self.run, self.call, self.tool, self.siblings = run, call, tool, siblings
        self.recorded_args = recorded_args
        self.key = run.key(call)
        self.asked = b'{"tool":%b,"args":%b,"at":' % (tool.recorded_name, recorded_args)
        self.began = 0.0
        self.started_ms = 0
        if life is None:
            self.attempt = self.unrecordable = 0
            self.tries_left = tool.attempts
            return
        self.attempt, self.unrecordable = life.attempts, life.unrecordable
        self.tries_left = max(1, tool.attempts - self.attempt)
        if life.asked and not life.asked.startswith(self.asked):
            raise CheckpointStoreCorrupt(
                f"run {run.run_id!r}: call {call} was asked with other arguments than its decision holds; nothing was run"
            )

    def note_intent(self) -> None:
        """The next attempt is about to be made."""
        self.attempt += 1
        self.tries_left -= 1
        self.started_ms = self.run.now_ms()
        self.run.note(RecordKind.STARTED, self.call, self.attempt, b"%b%d}" % (self.asked, self.started_ms))
        if self.run.has_sinks:
            self.began = self.run.backing.clock.monotonic()

    def body_of(self, outcome: Outcome) -> bytes | Unrecordable | None:
        """What an attempt that ended the call is recorded as; why it cannot be; or None where it has not ended the call."""
        if isinstance(outcome, Returned):
            try:
                return _RESULT + self.tool.result.encode(outcome.value) + b"}"
            except Unrecordable as error:
                return error.named(self.tool.name)
        return _error_body(outcome.error) if isinstance(outcome, Answered) else None

    async def without_ending(self, outcome: Outcome, trouble: Unrecordable | None) -> bytes | None:
        """What to record of an attempt that has not ended its call; None where it is to be tried again."""
        match outcome:
            case Returned():
                assert trouble is not None, "what was returned is recorded, or cannot be"
                await self._note_unrecordable(trouble)
                return None
            case Unsent(error):
                self.run.note(RecordKind.UNSENT, self.call, self.attempt, _error_body(error))
                if self.tries_left <= 0:
                    return _error_body(error)
                await self.run.barrier()
                return None
            case Unknown(why, error, on_thread):
                self._announce_doubt(why)
                if not self.tool.rule.may_repeat or on_thread or self.tries_left <= 0:
                    raise CallInDoubt(self._doubt(why), error, may_rerun=self.tool.rule.may_repeat)
                return None
            case Answered():
                raise AssertionError("an answer ends its call")
            case _:
                assert_never(outcome)

    async def _note_unrecordable(self, error: Unrecordable) -> None:
        """It happened, and what it gave cannot be stored: in doubt, and never forgotten."""
        self.unrecordable += 1
        self.run.note(RecordKind.UNRECORDABLE, self.call, self.attempt, _error_body(error))
        await self.run.barrier()
        self._announce_doubt(str(error))
        if not self.tool.rule.may_repeat or self.unrecordable >= MOST_UNRECORDABLE:
            raise CallInDoubt(self._doubt(f"it ran, and {error}"), error)

    def note_ending(self, body: bytes, outcome: Outcome) -> bool:
        """The call has ended; whether its record is to be written by itself."""
        told: dict[str, object] | None = None
        if self.run.has_sinks:
            came = {"result": outcome.value} if isinstance(outcome, Returned) else {"error": _named(outcome.error)}
            told = {**self.data(), "duration": self.run.backing.clock.monotonic() - self.began, **came}
        return note_ending(self.run, self.call, self.attempt, body, self.siblings, told)

    async def pause(self) -> None:
        """Before the next attempt: twice as long each time."""
        tried = self.tool.attempts - self.tries_left
        await self.run.backing.clock.sleep(self.tool.pause_seconds * 2.0 ** min(tried - 1, 10))

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

    Where nobody has to, since every call may run again by its rule, the run wakes by itself: later each time.
    """
    may_rerun = all(doubt.may_rerun for doubt in doubts)
    wake_at = next_wake(run) if may_rerun else None
    await run.give_back(RunStatus.BLOCKED, "in doubt", counts=may_rerun, wake_at=wake_at)
    if run.has_sinks:
        run.announce("run.blocked", {"kind": run.journal.kind, "step": run.journal.step})
    unrecordable = [doubt.cause for doubt in doubts if isinstance(doubt.cause, Unrecordable)]
    needed = RecoveryNeedsDecision(run.run_id, [doubt.doubt for doubt in doubts])
    if len(unrecordable) == len(doubts) == 1:
        raise unrecordable[0] from needed
    raise needed from doubts[0].cause


async def act(run: Run, tool: Tool, arguments: dict[str, Any], key: str) -> Outcome:
    """Call the tool under its idempotency key, and say what is known afterwards."""
    job: Job[Any] | None = None
    deadline = None if tool.timeout_seconds is None else asyncio.timeout(tool.timeout_seconds)
    token = CALL_KEY.set(key)
    try:
        if tool.is_async:
            answer = tool.function(**arguments)
        else:
            job = run.backing.offload.start(partial(tool.function, **arguments))
            run.keep_alive_for(job)
            answer = job.outcome
        if deadline is None:
            return Returned(await answer)
        async with deadline:
            return Returned(await answer)
    except (Exception, asyncio.CancelledError) as error:
        return _after(tool, error, job, is_late=deadline is not None and deadline.expired())
    finally:
        CALL_KEY.reset(token)


def _after(tool: Tool, error: BaseException, job: Job[Any] | None, *, is_late: bool) -> Outcome:
    """What is known of a call that raised. Only what the tool declares is an answer; the rest is as its rule says."""
    if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
        raise error  # it is this worker that is being stopped: the call stays as its intent says, in doubt
    if is_late:
        return _timed_out(tool, error, job)  # our own deadline raised, whatever the tool calls an answer
    if isinstance(error, NotSent):
        return Unsent(error)
    if isinstance(error, tool.answers):
        return Answered(error)
    if (conflict := _find_conflict(error)) is not None:
        raise conflict
    if not tool.rule.may_repeat or is_transport(error):
        return Unknown(_why_unknown(error), error)
    return Answered(error)


def is_being_cancelled() -> bool:
    """Whether it is this task that is being stopped, and not something that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_TRANSPORT = frozenset(
    {
        ("http", "HTTPException"),
        ("httpx", "TransportError"),
        ("httpx2", "TransportError"),
        ("httpcore", "NetworkError"),
        ("aiohttp", "ClientError"),
        ("urllib3", "HTTPError"),
        ("requests", "RequestException"),
        ("grpc", "RpcError"),
        ("websockets", "ConnectionClosed"),
    }
)
"""Errors by which well-known clients say that the way to the remote failed: (top module, class). None is an OSError."""


def _find_conflict(error: BaseException) -> KeyConflict | None:
    """The conflict that a group of errors holds, as tasks side by side raise them."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, KeyConflict) else None
    return next((found for each in error.exceptions if (found := _find_conflict(each)) is not None), None)


def is_transport(error: BaseException) -> bool:
    """Whether the error speaks of the way to the remote, and so says nothing about what the remote did."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_transport(each) for each in error.exceptions)
    if isinstance(error, OSError | EOFError | asyncio.CancelledError):
        return True
    return any((kind.__module__.split(".", 1)[0], kind.__name__) in _TRANSPORT for kind in type(error).__mro__)


def read_ending(body: bytes, tool: Tool | None) -> Ending:
    """The ending that a `done` record holds. Without its tool, the value is plain data."""
    if body.startswith(_RESULT):
        data = body[len(_RESULT) : -1]
        if tool is None or tool.result.is_plain:
            value = codec.decode(data)
            return Ending(value, text=codec.readable(value) if type(value) is str else _text(data))
        return Ending(tool.result.decode(data), text=_text(data))
    error = codec.decode(body)["error"]
    return Ending(None, error["type"], error["message"], f"error: {error['type']}: {error['message']}")


def _text(data: bytes) -> str:
    """A result as the model sees it: text as it is, other data as JSON.

    A lone surrogate, which no request can hold, is shown as U+FFFD; the recorded result keeps it.
    """
    if not data.startswith(b'"'):
        return data.decode() if b"\\ud" not in data else codec.encode_readable(codec.readable(codec.decode(data)))
    return str(codec.readable(codec.decode(data)))


def _error_body(error: BaseException) -> bytes:
    message = str(error).encode("utf-8", "replace").decode()
    return _ERROR + codec.encode({"type": type(error).__name__, "message": message[:10_000]}) + b"}"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _timed_out(tool: Tool, error: BaseException, job: Job[Any] | None) -> Unknown:
    on_thread = job is not None and job.running
    still = "its thread still runs" if on_thread else "the remote may have acted, or may yet"
    return Unknown(f"it took longer than {tool.timeout_seconds} s; {still}", error, on_thread)


def _why_unknown(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not answer in time; the remote may have acted, or may yet: {error}"
    return f"it raised {type(error).__name__}, after which nobody knows whether it happened: {error}"


def _doubt(run: Run, life: CallLife, name: str, why: str) -> Doubt:
    asked = read_asked(life.asked) if life.asked else Asked(name, {}, run.now_ms())
    return make_doubt(
        run.run_id, life.call, run.key(life.call), name, life.attempts, why, asked.args, run.now_ms() - asked.at_ms
    )
