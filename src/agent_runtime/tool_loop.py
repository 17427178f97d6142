"""Model, tools, model, until done: a loop whose every call is in the journal.

The loop does not know whether it runs for the first time. It asks the journal for each decision and each call by its
place; what is there is replayed, what is not is made. Its history is computed from what it got.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from agent_runtime import codec
from agent_runtime.backing import make_backing
from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.crash import UNARMED, CrashPlan, CrashPoint
from agent_runtime.doubts import Decider, Rerun
from agent_runtime.entropy import SYSTEM_ENTROPY, Entropy
from agent_runtime.errors import (
    CheckpointConflict,
    InvalidSetting,
    StepLimitReached,
)
from agent_runtime.events import Sink
from agent_runtime.executor import (
    CallInDoubt,
    Ending,
    Executor,
    Siblings,
    is_being_cancelled,
    is_transport,
    read_ending,
    stop_in_doubt,
)
from agent_runtime.ids import RunId, check_run_id, is_reply, reply_call, tool_call
from agent_runtime.journal.journal import Commits
from agent_runtime.journal.records import RecordKind, RunStatus, new_tuple
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.seal import CheckpointKey
from agent_runtime.journal.states import CallState
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.messages import (
    Message,
    Reply,
    ToolCall,
    Transcript,
    decode_messages,
    decode_reply,
    encode_messages,
    encode_reply,
    read_messages,
    reply_message,
)
from agent_runtime.model import Model, ModelFunction, as_model
from agent_runtime.offload import SYSTEM_OFFLOAD, Offload
from agent_runtime.recovery import Found, reopen
from agent_runtime.run import (
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    MAX_ATTEMPTS,
    Run,
    RunContext,
    start,
    work,
)
from agent_runtime.side_by_side import run_all
from agent_runtime.tools import CALL_KEY, ToolRegistry

_log = logging.getLogger("agent_runtime")

KIND = "loop"
MAX_STEPS = 100
PARALLEL = 16
MODEL_TRIES = 3
MODEL_PAUSE_SECONDS = 0.2
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
    pending: Sequence[object] = ()

    def __repr__(self) -> str:
        shown = {**self._asdict(), "messages": f"<{len(self.messages)} messages>"}
        return f"LoopResult({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class LoopOptions(NamedTuple):
    """How a loop is worked; the same for a first run and for every recovery."""

    max_steps: int = MAX_STEPS
    parallel: int = PARALLEL


async def run_tool_loop(
    model: Model | ModelFunction | str,
    registry: ToolRegistry,
    messages: str | Sequence[Message | Mapping[str, object]],
    *,
    run_id: str | None = None,
    checkpoints: CheckpointStore | None = None,
    checkpoint_key: CheckpointKey | None = None,
    ctx: RunContext | None = None,
    sinks: Sequence[Sink] = (),
    max_steps: int = MAX_STEPS,
    parallel: int = PARALLEL,
    name: str = "",
    tenant: str = "",
    namespace: str = "",
    commits: str = Commits.GROUPED.value,
    lease_seconds: float = LEASE_SECONDS,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    max_attempts: int = MAX_ATTEMPTS,
    stuck_after: float | None = None,
    accept_lost_writes: bool = False,
    crash: CrashPlan = UNARMED,
    clock: Clock = SYSTEM_CLOCK,
    entropy: Entropy = SYSTEM_ENTROPY,
    offload: Offload = SYSTEM_OFFLOAD,
) -> LoopResult:
    """Work a new run to its end. `CheckpointConflict` where the id is, or was, in use.

    `max_steps` counts the replies of the whole run, restarts included; past it `StepLimitReached` ends the run.
    `parallel` bounds the calls of one reply that run side by side. `commits="each"` writes every record by itself.
    """
    options = _options(max_steps, parallel)
    backing = make_backing(
        checkpoints, checkpoint_key, tenant=tenant, namespace=namespace, commits=commits, sinks=sinks, crash=crash,
        lease_seconds=lease_seconds, heartbeat_seconds=heartbeat_seconds, max_attempts=max_attempts, stuck_after=stuck_after,
        accept_lost_writes=accept_lost_writes, clock=clock, entropy=entropy, offload=offload,
    )  # fmt: skip
    ask = as_model(model)
    known_id = check_run_id(run_id if run_id is not None else entropy.draw(16).hex())
    history = read_messages(messages)
    run = start(backing, known_id, kind=KIND, name=name, context=ctx, given={"messages": encode_messages(history)})
    try:
        return await work(run, _Loop(run, ask, Executor(registry), options, history).go())
    except CheckpointConflict as conflict:
        if run.journal.guard is None:
            raise CheckpointConflict(
                f"run {known_id!r} exists already, or did before it was deleted; recover it, or choose another id"
            ) from conflict
        raise


async def recover_tool_loop(
    model: Model | ModelFunction | str,
    registry: ToolRegistry,
    run_id: str,
    *,
    checkpoints: CheckpointStore,
    checkpoint_key: CheckpointKey | None = None,
    ctx: RunContext | None = None,
    sinks: Sequence[Sink] = (),
    rerun_in_doubt: Rerun = False,
    take_over: bool = False,
    max_steps: int = MAX_STEPS,
    parallel: int = PARALLEL,
    tenant: str = "",
    commits: str = Commits.GROUPED.value,
    lease_seconds: float = LEASE_SECONDS,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    max_attempts: int = MAX_ATTEMPTS,
    stuck_after: float | None = None,
    accept_lost_writes: bool = False,
    crash: CrashPlan = UNARMED,
    clock: Clock = SYSTEM_CLOCK,
    entropy: Entropy = SYSTEM_ENTROPY,
    offload: Offload = SYSTEM_OFFLOAD,
) -> LoopResult:
    """Go on with a run whose worker is gone, or give back the result of one that has ended.

    Raises `CheckpointNotFound`, `CheckpointConflict` while another worker holds it (`take_over=True` takes it all the
    same: fencing makes that safe, and a call then in flight is in doubt), `CheckpointStoreCorrupt`, `IdentityMismatch`,
    `RecoveryNeedsDecision` where a call is in doubt that neither its tool's rule nor `rerun_in_doubt` lets run again, and
    `RunQuarantined` past `max_attempts` claims without progress. `stuck_after`: seconds without a write after which the
    heartbeat leaves the run to its lease; longer than any call may take.
    """
    options = _options(max_steps, parallel)
    backing = make_backing(
        checkpoints, checkpoint_key, tenant=tenant, commits=commits, sinks=sinks, crash=crash,
        lease_seconds=lease_seconds, heartbeat_seconds=heartbeat_seconds, max_attempts=max_attempts, stuck_after=stuck_after,
        accept_lost_writes=accept_lost_writes, clock=clock, entropy=entropy, offload=offload,
    )  # fmt: skip
    ask = as_model(model)
    known_id = check_run_id(run_id)
    decide = Decider(known_id, registry, rerun_in_doubt, clock)
    found = await reopen(backing, known_id, kind=KIND, context=ctx, decide=decide, take_over=take_over)
    if isinstance(found, Found):
        return _stored_result(found)
    history = decode_messages(found.input["messages"])
    return await work(found, _Loop(found, ask, Executor(registry), options, history).go())


class _Loop:
    """One worker's way through a loop."""

    def __init__(self, run: Run, ask: ModelFunction, executor: Executor, options: LoopOptions, history: list[Message]) -> None:
        self.run = run
        self.ask = ask
        self.executor = executor
        self.options = options
        self.history = history
        self.usage: dict[str, int] = {}
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
                add_usage(self.usage, reply)
            self.history.append(reply_message(reply))
            if not reply.tool_calls:
                return await self._finish(seq, reply)
            endings = await self._call_all(seq, reply.tool_calls)
            seq += 1
            self._answer(seq, reply.tool_calls, endings)

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
            run.note(RecordKind.STARTED, call, attempt, asked)
            run.model_requests += 1
            await run.ready_to_act(is_alone=True)
            token = CALL_KEY.set(run.key(call))
            try:
                body = encode_reply(await self.ask(Transcript(self.history), self.executor.registry.specs))
            except (Exception, asyncio.CancelledError) as error:  # the answer is lost, not the decision: none was recorded
                if is_being_cancelled() or not is_transport(error):
                    raise
                if not tries_left and isinstance(error, asyncio.CancelledError):
                    raise ConnectionError("the answer was cancelled inside the model each time it was asked") from error
                if not tries_left:
                    raise
                await run.backing.clock.sleep(MODEL_PAUSE_SECONDS * 2.0 ** (MODEL_TRIES - 1 - tries_left))
                continue
            finally:
                CALL_KEY.reset(token)
            if run.is_armed:
                await run.reach(CrashPoint.AFTER_DECIDE_BEFORE_JOURNAL, seq)
            reply = self._pin(seq, call, attempt, body)
            if run.journal.mode is Commits.EACH:
                await run.barrier()
            if run.is_armed:
                await run.reach(CrashPoint.AFTER_DECIDE, seq)
            return reply
        raise AssertionError("the last try returns or raises")

    def _pin(self, seq: int, call: str, attempt: int, body: bytes) -> Reply:
        """Note the reply. What is acted upon is read back from the recorded bytes."""
        run = self.run
        reply = decode_reply(body)
        run.note(RecordKind.DONE, call, attempt, body)
        if reply.tool_calls:
            self._move(stage="reply")
        if run.has_sinks:
            run.announce_when_committed("decision.made", self._decision(seq, reply))
        return reply

    # Acting.

    async def _call_all(self, seq: int, calls: Sequence[ToolCall]) -> list[Ending]:
        """The endings of a reply's calls, in its order. All end, or are in doubt, before anything is raised."""
        if len(calls) == 1:
            [asked] = calls
            try:
                return [await self.executor.call(self.run, tool_call(seq, 0, 1), asked.name, asked.args, Siblings(1))]
            except CallInDoubt as doubt:
                await stop_in_doubt(self.run, [doubt])
        results = await self._call_side_by_side(seq, calls)
        endings = [result for result in results if isinstance(result, Ending)]
        if len(endings) < len(calls):
            await stop_in_doubt(self.run, [result for result in results if isinstance(result, CallInDoubt)])
        return endings

    async def _call_one(self, seq: int, index: int, calls: Sequence[ToolCall], siblings: Siblings) -> Ending | CallInDoubt:
        asked = calls[index]
        place = tool_call(seq, index, len(calls))
        try:
            return await self.executor.call(self.run, place, asked.name, asked.args, siblings)
        except CallInDoubt as doubt:
            siblings.running -= 1
            siblings.has_doubt = True
            return doubt

    async def _call_side_by_side(self, seq: int, calls: Sequence[ToolCall]) -> list[Ending | CallInDoubt | None]:
        """What each call came to; None for one that was still queued when another was in doubt."""
        gate = asyncio.Semaphore(self.options.parallel)
        siblings = Siblings(self._unfinished(seq, len(calls)))

        async def one(index: int) -> Ending | CallInDoubt | None:
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
        return LoopResult(status, output, history, self.usage, self.run.run_id, steps, self.run.model_requests)

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
        return {"seq": seq, "calls": calls, "llm_calls": self.run.model_requests}

    def _announce_end(self, name: str, status: str, steps: int, *, stage: str) -> None:
        run = self.run
        if run.has_sinks:
            step = run.journal.step
            run.announce("checkpoint.saved", {"kind": KIND, "step": step, "status": status, "stage": stage})
            run.announce(name, {"kind": KIND, "step": step, "steps": steps, "llm_calls": run.model_requests})


def _stored_result(found: Found) -> LoopResult:
    """What a run that has ended, or waits, came to, computed from its records."""
    run_id, lives = found.stored.row.run_id, found.history.lives
    history = decode_messages(found.opened["input"]["messages"])
    usage: dict[str, int] = {}
    seq, output = 0, ""
    while (life := lives.get(reply_call(seq))) is not None and life.state is CallState.DONE:
        reply = decode_reply(life.ended)
        output = reply.text
        history.append(reply_message(reply))
        add_usage(usage, reply)
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
    return LoopResult(found.status.name.lower(), output, Transcript(history), usage, run_id, seq, requests)


def count_requests(lives: Mapping[str, CallLife]) -> int:
    """How many model requests were written down."""
    return sum(life.attempts for life in lives.values() if is_reply(life.call))


def add_usage(total: dict[str, int], reply: Reply) -> None:
    """Add what a reply used to a total, unit by unit."""
    for unit, amount in reply.usage.items():
        total[unit] = total.get(unit, 0) + amount


def _options(max_steps: int, parallel: int) -> LoopOptions:
    _check_count("max_steps", max_steps)
    _check_count("parallel", parallel)
    return LoopOptions(max_steps, parallel)


def _check_count(option: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise InvalidSetting(f"{option}= is a whole number from 1, found {value!r}")
