"""The calls of one superstep: their places, what the journal holds of each, and the `run` that a node gets.

Rules of this file:

* A call replays, or runs again under its first key, where its place and the bytes of its arguments are the recorded ones.
* Other arguments are another call: it gets a place of its own, `~1`, `~2`, …, and so a key of its own.
* A call that was started with arguments that nobody asks for any more stays in doubt, whatever its rule: nothing new
  starts, and somebody must decide.
* Nothing that node code does with a call stops the call: it ends, or is in doubt, before the superstep is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, TypeAlias

from agent_runtime import codec
from agent_runtime.approvals import NOT_AGREED, WITHDRAWN, ApprovalRequest
from agent_runtime.asking import CallPaused
from agent_runtime.doubts import make_doubt
from agent_runtime.endings import Ending
from agent_runtime.errors import CallFailed, FlowError, InvalidArguments, UnknownTool, Unrecordable
from agent_runtime.executor import CallInDoubt, Executor, Siblings
from agent_runtime.ids import CallId, RunId
from agent_runtime.journal.records import RecordKind
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.states import IN_DOUBT, WAITING, CallState, Settlement
from agent_runtime.run import Run
from agent_runtime.settlements import read_asked


class Halt(BaseException):
    """A call of the superstep is in doubt, or waits for a person: node code stops here.

    Not an `Exception`, so that it lets it pass.
    """


Again: TypeAlias = Callable[[], Mapping[str, object]]
"""Gives a call's arguments anew."""


class Planned(NamedTuple):
    """A call whose place is chosen."""

    call: CallId
    tool: str
    args: Mapping[str, object]
    is_done: bool


class Calls:
    """Makes the calls of one superstep, and remembers which of those that the journal held were used."""

    def __init__(
        self, run: Run, executor: Executor, *, superstep: int, gate: asyncio.Semaphore, may_rerun: Callable[[CallLife], bool]
    ) -> None:
        self.run = run
        self.doubts: list[CallInDoubt] = []
        self.paused: list[ApprovalRequest] = []
        self.siblings = Siblings(0)
        self.replayed = 0
        self.rerun = 0
        self._executor = executor
        self._gate = gate
        self._may_rerun = may_rerun
        self._lives = {call: life for call, life in run.lives.items() if call.startswith(f"{superstep}/")} if run.lives else {}
        self._used: set[str] = set()

    def plan(
        self,
        place: str,
        tool: str,
        args: Mapping[str, object],
        *,
        whose: str,
        again: Again | None,
    ) -> Planned:
        """The call at a place with these arguments: the recorded one, or a new one.

        `again` gives the arguments anew; where they are not the recorded ones they are asked for twice.
        """
        recorded = encode_args(args, whose)
        call = self._find(place, tool, recorded) if self._lives else None
        if call is None:
            call = self._new_place(place, tool, recorded, whose, again) if self._lives else CallId(place)
        self._used.add(call)
        life = self._lives.get(call)
        is_done = life is not None and life.state is CallState.DONE
        if is_done:
            self.replayed += 1
        else:
            self.siblings.running += 1
            self.rerun += life is not None and (life.state in IN_DOUBT or life.state is CallState.REOPENED)
        return Planned(call, tool, codec.decode(recorded), is_done)

    async def make(self, planned: Planned) -> Ending:
        """The ending of a call; `CallFailed` where it is an error, `Halt` where nobody knows it or another one's."""
        if planned.is_done:
            return _checked(planned, await self._executor.call(self.run, *planned[:3], self.siblings))
        async with self._gate:
            if self.siblings.has_doubt:
                self.siblings.running -= 1
                raise Halt
            try:
                ending = await self._executor.call(self.run, *planned[:3], self.siblings)
            except CallInDoubt as doubt:
                self.siblings.running -= 1
                self._stop(doubt)
            except CallPaused as paused:
                self.siblings.running -= 1
                self.paused.append(paused.request)
                if self.siblings.running > 0:
                    await self.run.barrier()  # a person can see the request while the others are on their way
                raise Halt from None
        return _checked(planned, ending)

    def orphans(self) -> list[CallLife]:
        """The recorded calls of this superstep that its nodes did not make again."""
        return [life for call, life in self._lives.items() if call not in self._used]

    def check_orphans(self) -> None:
        """A call that nobody asks for any more, and of which nobody knows whether it happened, needs a decision."""
        for life in self.orphans():
            self._withdraw(life)
            with suppress(Halt):
                self._require_known(life, "its node does not make it any more")

    def _withdraw(self, life: CallLife) -> None:
        """Nobody asks any more for a call that a person was asked about: it never goes out."""
        if life.state not in (*WAITING, CallState.DECIDED):
            return
        if life.state is CallState.ASKING:
            self.run.journal.note(RecordKind.UNSENT, life.call, life.attempts, NOT_AGREED)
        self.run.journal.note(RecordKind.DONE, life.call, 0, codec.encode({"error": WITHDRAWN, "at": self.run.now_ms()}))
        life.state = CallState.DONE

    def _find(self, place: str, tool: str, recorded: bytes) -> CallId | None:
        """The recorded call at that place with these arguments; in code that makes several, else any of the node."""
        for life in self._variants(place):
            if self._is_same(life, tool, recorded):
                return CallId(life.call)
        node, dot, _ = place.rpartition(".")
        if not dot:
            return None
        lives = (life for call, life in self._lives.items() if call.startswith(f"{node}.") and call not in self._used)
        return next((CallId(life.call) for life in lives if self._is_same(life, tool, recorded)), None)

    def _new_place(self, place: str, tool: str, recorded: bytes, whose: str, again: Again | None) -> CallId:
        others = [life for life in self._variants(place) if life.call not in self._used]
        if others and again is not None and encode_args(again(), whose) != recorded:
            raise FlowError(
                f"{whose} gives other arguments each time it is asked, for the same state; those of call {others[0].call} on "
                f"record are of tool {_tool_of(others[0]) or tool!r}. Let it compute them from the state alone, and recover"
            )
        for life in others:
            self._require_known(life, "it was started with other arguments than its node asks for now")
        return CallId(_variant(place, len(self._variants(place))))

    def _variants(self, place: str) -> list[CallLife]:
        """The recorded calls at a place, each with arguments of its own; they are numbered without a gap."""
        found, number = [], 0
        while (life := self._lives.get(_variant(place, number))) is not None:
            found.append(life)
            number += 1
        return found

    def _is_same(self, life: CallLife, tool: str, recorded: bytes) -> bool:
        if life.call in self._used:
            return False
        if asked := life.pending or life.asked:
            return asked.startswith(b'{"tool":%b,"args":%b,"at":' % (codec.encode_checked(tool), recorded))
        return self._is_refused(tool, recorded)  # it was refused and never sent, and its arguments are on no record

    def _is_refused(self, tool: str, recorded: bytes) -> bool:
        try:
            self._executor.registry.get(tool).check(recorded)
        except (UnknownTool, InvalidArguments):
            return True
        return False

    def _require_known(self, life: CallLife, why: str) -> None:
        if life.state not in IN_DOUBT:
            return
        if self._may_rerun(life):
            body = codec.encode({"how": Settlement.RERUN.value, "why": f"rerun_in_doubt; {why}", "at": self.run.now_ms()})
            self.run.journal.note(RecordKind.SETTLED, life.call, life.attempts, body)
            life.state = CallState.REOPENED
            return
        asked = read_asked(life.asked)
        told = f"{why}, and nobody knows whether it happened"
        age_ms = self.run.now_ms() - asked.at_ms
        doubt = make_doubt(
            self.run.run_id, life.call, self.run.key(life.call), asked.tool, life.attempts, told, asked.args, age_ms
        )
        self._stop(CallInDoubt(doubt))

    def _stop(self, doubt: CallInDoubt) -> NoReturn:
        self.siblings.has_doubt = True
        self.doubts.append(doubt)
        raise Halt


class NodeRun:
    """The `run` that a node's function gets: it makes calls, each written down before it is made and after."""

    def __init__(self, calls: Calls, place: str, whose: str) -> None:
        self._calls = calls
        self._place = place
        self._whose = whose
        self._count = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._is_over = False

    @property
    def run_id(self) -> RunId:
        """The id of the run."""
        return self._calls.run.run_id

    async def call(self, tool: str, /, **args: object) -> Any:
        """What the tool gives, once it is written down; `CallFailed` where it answered with an error.

        Calls have places in the order in which they are begun. They may run side by side. One that is not awaited to
        its end goes on, and ends before the superstep does.
        """
        if self._is_over:
            raise FlowError(f"{self._whose} is over, and still calls {tool!r}; await every call in the function itself")
        place = f"{self._place}.{self._count}"
        self._count += 1
        return (await asyncio.shield(self._spawn(self._make(place, tool, args)))).value

    async def close(self) -> None:
        """Every call that was begun has ended when this returns; where this worker is being stopped, it was stopped too."""
        self._is_over = True
        try:
            while pending := [task for task in self._tasks if not task.done()]:
                await asyncio.wait(pending)
        except asyncio.CancelledError:
            await self.cancel()
            raise

    async def cancel(self) -> None:
        """This worker is being stopped: so are its calls."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def first_failure(self, group: BaseExceptionGroup[BaseException]) -> CallFailed | None:
        """The first call, in the order in which they were begun, whose failure is all that a group of errors holds."""
        if group.split(CallFailed)[1] is not None:
            return None
        errors = (None if task.cancelled() else task.exception() for task in self._tasks)
        return next((error for error in errors if isinstance(error, CallFailed)), None)

    def raise_signal(self) -> None:
        """Raise what stopped a call for good, whatever node code made of it."""
        for task in self._tasks:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, CallFailed):
                raise error

    def _spawn(self, work: Coroutine[Any, Any, Ending]) -> asyncio.Task[Ending]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def _make(self, place: str, tool: str, args: Mapping[str, object]) -> Ending:
        if self._calls.siblings.has_doubt:
            raise Halt
        return await self._calls.make(self._calls.plan(place, tool, args, whose=self._whose, again=None))


def encode_args(args: object, whose: str) -> bytes:
    """Arguments as recorded, in the order of their names; `FlowError` where they are none."""
    if not isinstance(args, Mapping) or not all(isinstance(name, str) for name in args):
        raise FlowError(f"{whose} gives its arguments as a dict by name, found {type(args).__name__}")
    try:
        return codec.encode({name: args[name] for name in sorted(args)})
    except Unrecordable as error:
        raise FlowError(f"{whose} has an argument that cannot be recorded, at {error.path}: {error.found}") from error


def _variant(place: str, number: int) -> str:
    """The place of a call that has other arguments than those before it at this place."""
    return f"{place}~{number}" if number else place


def _tool_of(life: CallLife) -> str:
    asked = life.pending or life.asked
    return read_asked(asked).tool if asked else ""


def _checked(planned: Planned, ending: Ending) -> Ending:
    if ending.error_type is not None:
        raise CallFailed(planned.tool, ending.error_type, ending.error)
    return ending
