"""One worker's way through a loop: decide and act until a reply asks for nothing; what it came to, live or as it is stored.

The loop does not know whether it runs for the first time. It asks the journal for each decision and each call by its
place; what is there is replayed, what is not is made. Its history is computed from what it got.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from agent_runtime import codec
from agent_runtime.approvals import ApprovalRequest
from agent_runtime.asking import CallPaused
from agent_runtime.crash import CrashPoint
from agent_runtime.endings import Ending, read_ending
from agent_runtime.errors import (
    StepLimitReached,
)
from agent_runtime.executor import (
    CallInDoubt,
    Executor,
    Siblings,
    pause,
    stop_in_doubt,
)
from agent_runtime.ids import RunId, is_reply, reply_call, tool_call
from agent_runtime.journal.records import RecordKind, RunStatus, new_tuple
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.states import CallState
from agent_runtime.messages import (
    Message,
    Reply,
    ToolCall,
    Transcript,
    decode_messages,
    decode_reply,
    record_reply,
    reply_message,
)
from agent_runtime.model import ModelFunction, name_of
from agent_runtime.recovery import Found
from agent_runtime.run import (
    Run,
)
from agent_runtime.side_by_side import is_being_cancelled, run_all
from agent_runtime.tools import CALL_KEY
from agent_runtime.transport import is_transport

_log = logging.getLogger("agent_runtime")

KIND = "loop"
MAX_STEPS = 100
PARALLEL = 16
MODEL_TRIES = 3
MODEL_PAUSE_SECONDS = 0.2
_ASKED, _ANSWERED = RecordKind.STARTED, RecordKind.DONE
_DONE = codec.encode({"status": "done"})


class LoopResult(NamedTuple):
    """What a loop came to."""

    status: str
    output: str
    messages: Sequence[Message]
    usage: Mapping[str, int]
    run_id: RunId
    steps: int = 0
    """How many replies asked for calls."""
    llm_calls: int = 0
    """How many model requests were made over the whole run, lost ones included."""
    pending: Sequence[ApprovalRequest] = ()
    """The requests that wait for a verdict."""

    def __repr__(self) -> str:
        shown = {**self._asdict(), "messages": f"<{len(self.messages)} messages>"}
        return f"LoopResult({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


NO_USAGE: Mapping[str, int] = MappingProxyType({})


class LoopOptions(NamedTuple):
    """How a loop is worked; the same for a first run and for every recovery."""

    max_steps: int = MAX_STEPS
    parallel: int = PARALLEL
    wait_seconds: float = 0.0


class Loop:
    """One worker's way through a loop."""

    __slots__ = ("_began", "_seconds", "ask", "executor", "history", "options", "run", "usage")

    def __init__(self, run: Run, ask: ModelFunction, executor: Executor, options: LoopOptions, history: list[Message]) -> None:
        self.run = run
        self.ask = ask
        self.executor = executor
        self.options = options
        self.history = history
        self.usage: Mapping[str, int] = NO_USAGE
        run.input = None  # the history has it
        self._began = self._seconds = 0.0
        run.model_requests = count_requests(run.lives)

    async def go(self) -> LoopResult:
        """Decide and act until a reply asks for nothing."""
        await self.run.barrier_if_each()
        seq = 0
        while True:
            call = reply_call(seq)
            life = self.run.life(call)
            if life is not None and life.state is CallState.DONE:
                reply = self._replay(seq, life)
            else:
                if seq >= self.options.max_steps:
                    await self._give_up(seq)
                reply = await self._buy(seq, call, 0 if life is None else life.attempts)
            if reply.usage:
                self.usage = add_usage(self.usage, reply)
            self.history.append(reply_message(reply))
            if not reply.tool_calls:
                return await self._finish(seq, reply)
            calls = reply.tool_calls
            try:
                endings = [await self._call_alone(seq, calls[0])] if len(calls) == 1 else await self._call_all(seq, calls)
            except CallInDoubt as doubt:
                await stop_in_doubt(self.run, [doubt])
            except CallPaused as paused:
                await pause(self.run, [paused.request])
            seq += 1
            self._answer(seq, calls, endings)

    # Deciding.

    def _replay(self, seq: int, life: CallLife) -> Reply:
        """The recorded reply of a decision."""
        reply = decode_reply(life.ended)
        if self.run.has_sinks:
            self.run.announce("decision.replayed", self._decision(seq, reply))
        return reply

    async def _buy(self, seq: int, call: str, attempt: int) -> Reply:
        """Ask the model, written down before and after. A request whose way failed is made again, and counted again."""
        run = self.run
        asked = b'{"messages":%d}' % len(self.history)
        for tries_left in range(MODEL_TRIES - 1, -1, -1):
            attempt += 1
            if run.is_armed:
                await run.reach(CrashPoint.BEFORE_DECIDE, seq)
            run.journal.note(_ASKED, call, attempt, asked)
            run.model_requests += 1
            await run.ready_to_act(is_alone=True)
            token = CALL_KEY.set(run.key(call))
            failed = ""
            try:
                if run.has_sinks:
                    self._announce_asked(seq, attempt)
                given = await self.ask(Transcript(self.history), self.executor.registry.specs)
                body, reply = record_reply(given, run.most_bytes)
            except (Exception, asyncio.CancelledError) as error:  # the answer is lost, not the decision: none was recorded
                failed = type(error).__name__
                if is_being_cancelled() or not is_transport(error):
                    raise
                if not tries_left and isinstance(error, asyncio.CancelledError):
                    raise ConnectionError("the answer was cancelled inside the model each time it was asked") from error
                if not tries_left:
                    raise
                await run.backing.clock.sleep(MODEL_PAUSE_SECONDS * 2.0 ** (MODEL_TRIES - 1 - tries_left))
                continue
            finally:
                if run.has_sinks:
                    self._announce_returned(seq, attempt, failed)
                CALL_KEY.reset(token)
            if run.is_armed:
                await run.reach(CrashPoint.AFTER_DECIDE_BEFORE_JOURNAL, seq)
            self._pin(seq, call, attempt, body, reply)
            if run.journal.is_each:
                await run.barrier()
            if run.is_armed:
                await run.reach(CrashPoint.AFTER_DECIDE, seq)
            return reply
        raise AssertionError("the last try returns or raises")

    def _pin(self, seq: int, call: str, attempt: int, body: bytes, reply: Reply) -> None:
        """Note the reply: what is recorded of it, and what that is read back as, which alone is acted upon."""
        run = self.run
        run.journal.note(_ANSWERED, call, attempt, body)
        if reply.tool_calls:
            self._move(stage="reply")
        if run.has_sinks:
            run.announce_when_committed("decision.made", {**self._decision(seq, reply), "duration": self._seconds})

    # Acting.

    def _call_alone(self, seq: int, asked: ToolCall) -> Coroutine[object, object, Ending]:
        """The ending of the one call of a reply."""
        return self.executor.call(self.run, tool_call(seq, 0, 1), asked.name, asked.args, Siblings(1))

    async def _call_all(self, seq: int, calls: Sequence[ToolCall]) -> list[Ending]:
        """The endings of a reply's calls, in its order. All end, or are in doubt, before anything is raised."""
        results = await self._call_side_by_side(seq, calls)
        endings = [result for result in results if isinstance(result, Ending)]
        if len(endings) < len(calls):
            if doubts := [result for result in results if isinstance(result, CallInDoubt)]:
                await stop_in_doubt(self.run, doubts)
            await pause(self.run, [result.request for result in results if isinstance(result, CallPaused)])
        return endings

    async def _call_one(
        self, seq: int, index: int, calls: Sequence[ToolCall], siblings: Siblings
    ) -> Ending | CallInDoubt | CallPaused:
        asked = calls[index]
        place = tool_call(seq, index, len(calls))
        try:
            return await self.executor.call(self.run, place, asked.name, asked.args, siblings)
        except CallInDoubt as doubt:
            siblings.running -= 1
            siblings.has_doubt = True
            return doubt
        except CallPaused as paused:
            siblings.running -= 1
            if siblings.running > 0:
                await self.run.barrier()  # a person can see the request while the others are on their way
            return paused

    async def _call_side_by_side(self, seq: int, calls: Sequence[ToolCall]) -> list[Ending | CallInDoubt | CallPaused | None]:
        """What each call came to; None for one that was still queued when another was in doubt."""
        gate = asyncio.Semaphore(self.options.parallel)
        siblings = Siblings(self._unfinished(seq, len(calls)))

        async def one(index: int) -> Ending | CallInDoubt | CallPaused | None:
            async with gate:
                if siblings.has_doubt:
                    siblings.running -= 1
                    return None
                return await self._call_one(seq, index, calls, siblings)

        return await run_all([one(index) for index in range(len(calls))])

    def _unfinished(self, seq: int, count: int) -> int:
        """How many calls of the reply have no recorded ending yet."""
        lives = (self.run.lives.get(tool_call(seq, index, count)) for index in range(count))
        return sum(life is None or life.state is not CallState.DONE for life in lives)

    def _answer(self, seq: int, calls: Sequence[ToolCall], endings: Sequence[Ending]) -> None:
        """Give the results to the conversation. They make a step together with what comes next, decision `seq`."""
        for asked, ending in zip(calls, endings, strict=True):
            self.history.append(new_tuple(Message, ("tool", ending.text, (), asked.id, asked.name)))
        lives = self.run.lives
        if not lives or reply_call(seq) not in lives:
            self._move(stage="results")

    # Ending.

    async def _finish(self, seq: int, reply: Reply) -> LoopResult:
        await self.run.end(RunStatus.DONE, _DONE)
        self._announce_end("run.done", "done", seq, stage="reply")
        return self._result("done", seq, reply.text)

    async def _give_up(self, seq: int) -> NoReturn:
        error = StepLimitReached(
            f"run {self.run.run_id!r} has had {seq} replies and the model asks on; max_steps={self.options.max_steps} counts "
            "the replies of the whole run. Give a new run a higher limit, or the model an end."
        )
        body = codec.encode({"status": "failed", "type": "StepLimitReached", "message": str(error)})
        await self.run.end(RunStatus.FAILED, body)
        self._announce_end("run.failed", "failed", seq, stage="results")
        raise error

    def _result(self, status: str, steps: int, output: str) -> LoopResult:
        history = Transcript(self.history)
        return LoopResult(status, output, history, dict(self.usage), self.run.run_id, steps, self.run.model_requests)

    # Telling.

    def _move(self, *, stage: str) -> None:
        """What was noted last completes a step: a checkpoint, whose cursor is the run's row."""
        run = self.run
        run.journal.move_to_next_step()
        if run.has_sinks:
            data = {"kind": KIND, "step": run.journal.step, "status": "running", "stage": stage}
            run.announce_when_committed("checkpoint.saved", data)

    def _decision(self, seq: int, reply: Reply) -> dict[str, object]:
        calls = [{"tool": call.name, "args": dict(call.args)} for call in reply.tool_calls]
        decision: dict[str, object] = {"seq": seq, "calls": calls, "llm_calls": self.run.model_requests}
        return {**decision, "usage": dict(reply.usage)} if reply.usage else decision

    def _announce_asked(self, seq: int, attempt: int) -> None:
        """The model is about to be asked: told in the task that asks it."""
        self._began = self.run.backing.clock.monotonic()
        asked: dict[str, object] = {"step": self.run.journal.step, "seq": seq, "attempt": attempt}
        name = name_of(self.ask)
        self.run.announce("decision.asked", {**asked, "model": name} if name else asked)

    def _announce_returned(self, seq: int, attempt: int, error: str) -> None:
        """The model has answered, or it has not: told in the same task."""
        self._seconds = self.run.backing.clock.monotonic() - self._began
        back: dict[str, object] = {"step": self.run.journal.step, "seq": seq, "attempt": attempt, "duration": self._seconds}
        self.run.announce("decision.returned", {**back, "error": error} if error else back)

    def _announce_end(self, name: str, status: str, steps: int, *, stage: str) -> None:
        run = self.run
        if run.has_sinks:
            step = run.journal.step
            run.announce("checkpoint.saved", {"kind": KIND, "step": step, "status": status, "stage": stage})
            run.announce(name, {"kind": KIND, "step": step, "steps": steps, "llm_calls": run.model_requests})


def stored_result(found: Found) -> LoopResult:
    """What a run that has ended, or waits, came to, computed from its records."""
    run_id, lives = found.stored.row.run_id, found.history.lives
    history = decode_messages(found.opened["input"]["messages"])
    usage = NO_USAGE
    seq, output = 0, ""
    while (life := lives.get(reply_call(seq))) is not None and life.state is CallState.DONE:
        reply = decode_reply(life.ended)
        output = reply.text
        history.append(reply_message(reply))
        usage = add_usage(usage, reply)
        for index, call in enumerate(reply.tool_calls):
            ended = lives.get(tool_call(seq, index, len(reply.tool_calls)))
            if ended is not None and ended.state is CallState.DONE:
                text = read_ending(ended.ended, None).text
                history.append(Message("tool", text, tool_call_id=call.id, name=call.name))
        seq += 1 if reply.tool_calls else 0
        if not reply.tool_calls:
            break
    if found.status is RunStatus.FAILED and found.history.ended is not None:
        raise StepLimitReached(codec.decode(found.history.ended.body)["message"])
    requests = count_requests(lives)
    status = found.status.name.lower()
    return LoopResult(status, output, Transcript(history), dict(usage), run_id, seq, requests, found.pending)


def count_requests(lives: Mapping[str, CallLife]) -> int:
    """How many model requests were written down."""
    return sum(life.attempts for life in lives.values() if is_reply(life.call))


def add_usage(total: Mapping[str, int], reply: Reply) -> Mapping[str, int]:
    """The total with what a reply used, unit by unit."""
    used = dict(total)
    for unit, amount in reply.usage.items():
        used[unit] = used.get(unit, 0) + amount
    return used
