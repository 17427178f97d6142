"""Model, tools, model, until done: starts a run of it, goes on with one, or gives back what one came to."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agent_runtime.approvals import Verdict
from agent_runtime.asking import Ask
from agent_runtime.backing import make_backing
from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.crash import UNARMED, CrashPlan
from agent_runtime.doubts import Case, Decider, RerunInDoubt
from agent_runtime.entropy import SYSTEM_ENTROPY, Entropy
from agent_runtime.errors import (
    CheckpointConflict,
    InvalidSetting,
    RecoveryNeedsDecision,
)
from agent_runtime.events import Sink
from agent_runtime.executor import (
    Executor,
)
from agent_runtime.ids import RunId, check_run_id
from agent_runtime.journal.journal import Commits
from agent_runtime.journal.seal import CheckpointKey
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.loop import KIND, MAX_STEPS, PARALLEL, Loop, LoopOptions, LoopResult, stored_result
from agent_runtime.messages import (
    Message,
    decode_messages,
    encode_messages,
    read_messages,
)
from agent_runtime.model import Model, ModelFunction, as_model
from agent_runtime.offload import SYSTEM_OFFLOAD, Offload
from agent_runtime.recovery import Found, admit_resume, in_use, reopen
from agent_runtime.redaction import Redact
from agent_runtime.run import (
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    MAX_ATTEMPTS,
    NOBODY,
    Backing,
    Run,
    RunContext,
    start,
)
from agent_runtime.settings import MAX_VALUE_BYTES
from agent_runtime.tools import ToolRegistry
from agent_runtime.waiting import check_patience, until_decided
from agent_runtime.working import Parked, work

_log = logging.getLogger("agent_runtime")

__all__ = ["KIND", "LoopResult", "recover_tool_loop", "run_tool_loop"]


async def run_tool_loop(
    model: Model | ModelFunction | str,
    registry: ToolRegistry,
    messages: str | Sequence[Message | Mapping[str, object]] | None = None,
    *,
    run_id: str | None = None,
    verdicts: Sequence[Verdict] | None = None,
    approvals: Ask | None = None,
    wait_seconds: float = 0.0,
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
    max_value_bytes: int = MAX_VALUE_BYTES,
    redact: Redact | None = None,
    crash: CrashPlan = UNARMED,
    clock: Clock = SYSTEM_CLOCK,
    entropy: Entropy = SYSTEM_ENTROPY,
    offload: Offload = SYSTEM_OFFLOAD,
) -> LoopResult:
    """Work a new run to its end. `CheckpointConflict` where the id is, or was, in use.

    `max_steps` counts the replies of the whole run, restarts included; past it `StepLimitReached` ends the run.
    `parallel` bounds the calls of one reply that run side by side. `commits="each"` writes every record by itself.

    A call that needs a person's verdict pauses the run, unless `approvals` answers at once: the result is `paused`, its
    `pending` the open requests. For `wait_seconds` this worker waits beside such a run first. With `verdicts`, and no
    messages, the run of that id goes on; then the run's own `ctx` is needed, and a run that has ended is a conflict.
    `VerdictRefused` where one does not hold: nothing was stored then, and the run is paused still. While another worker has
    the run they are left to it, and the result is `running`. Messages to a run that is paused are refused with
    `CheckpointConflict`: decide first.
    """
    options = _options(max_steps, parallel, wait_seconds)
    if verdicts is not None:
        if messages is not None or run_id is None or checkpoints is None:
            raise InvalidSetting(
                "verdicts= goes on with the run run_id= that is paused in checkpoints=, and has its messages; pass those two, "
                "and leave messages out"
            )
        return await recover_tool_loop(
            model, registry, run_id, verdicts=verdicts, approvals=approvals, wait_seconds=wait_seconds,
            checkpoints=checkpoints, checkpoint_key=checkpoint_key, ctx=ctx, sinks=sinks, max_steps=max_steps,
            parallel=parallel, tenant=tenant, commits=commits, lease_seconds=lease_seconds,
            heartbeat_seconds=heartbeat_seconds, max_attempts=max_attempts, stuck_after=stuck_after,
            accept_lost_writes=accept_lost_writes, max_value_bytes=max_value_bytes, redact=redact, crash=crash, clock=clock,
            entropy=entropy, offload=offload,
        )  # fmt: skip
    if messages is None:
        raise InvalidSetting("a loop starts with messages; pass messages='…', or verdicts=[…] to go on with a paused run")
    backing = make_backing(
        checkpoints, checkpoint_key, tenant=tenant, namespace=namespace, commits=commits, sinks=sinks, crash=crash,
        lease_seconds=lease_seconds, heartbeat_seconds=heartbeat_seconds, max_attempts=max_attempts, stuck_after=stuck_after,
        accept_lost_writes=accept_lost_writes, max_value_bytes=max_value_bytes, redact=redact, clock=clock, entropy=entropy,
        offload=offload,
    )  # fmt: skip
    ask = as_model(model)
    known_id = check_run_id(run_id if run_id is not None else entropy.draw(16).hex())
    history = read_messages(messages)
    run = start(backing, known_id, kind=KIND, name=name, context=ctx, given={"messages": encode_messages(history)})
    executor = Executor(registry, approvals=approvals)
    try:
        return await work(run, Loop(run, ask, executor, options, history).go())
    except (Parked, RecoveryNeedsDecision) as parked:  # nothing stands between a run and its caller that need not
        again = _Again(backing, known_id, ask, executor, options, ctx)
        return await until_decided(_raising(parked), again.look, backing, known_id, options.wait_seconds)
    except CheckpointConflict as conflict:
        if run.journal.guard is None:
            raise in_use(known_id) from conflict
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
    rerun_in_doubt: RerunInDoubt = False,
    verdicts: Sequence[Verdict] | None = None,
    approvals: Ask | None = None,
    wait_seconds: float = 0.0,
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
    max_value_bytes: int = MAX_VALUE_BYTES,
    redact: Redact | None = None,
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
    heartbeat leaves the run to its lease; longer than any call may take, or any person whom `approvals` asks.

    A run that waits for a person is given back as `paused`, with its requests; nothing is claimed. With `approvals` they are
    asked; with `verdicts` it goes on as `run_tool_loop` says.
    """
    options = _options(max_steps, parallel, wait_seconds)
    backing = make_backing(
        checkpoints, checkpoint_key, tenant=tenant, commits=commits, sinks=sinks, crash=crash,
        lease_seconds=lease_seconds, heartbeat_seconds=heartbeat_seconds, max_attempts=max_attempts, stuck_after=stuck_after,
        accept_lost_writes=accept_lost_writes, max_value_bytes=max_value_bytes, redact=redact, clock=clock, entropy=entropy,
        offload=offload,
    )  # fmt: skip
    ask = as_model(model)
    known_id = check_run_id(run_id)
    executor = Executor(registry, approvals=approvals)
    again = _Again(backing, known_id, ask, executor, options, ctx)
    if verdicts is not None:
        first = partial(again.resume, verdicts, rerun_in_doubt, take_over=take_over)
    else:
        first = partial(again.recover, rerun_in_doubt, take_over=take_over)
    return await until_decided(first, again.look, backing, known_id, options.wait_seconds)


def _raising(error: Exception) -> Callable[[], Awaitable[LoopResult]]:
    async def step() -> LoopResult:
        raise error

    return step


class _Again:
    """Goes on with a stored run: by itself, with verdicts, or after it was parked."""

    __slots__ = ("_ask", "_backing", "_context", "_executor", "_options", "_run_id")

    def __init__(
        self,
        backing: Backing,
        run_id: RunId,
        ask: ModelFunction,
        executor: Executor,
        options: LoopOptions,
        context: RunContext | None,
    ) -> None:
        self._backing = backing
        self._run_id = run_id
        self._ask = ask
        self._executor = executor
        self._options = options
        self._context = context

    async def recover(self, rerun: RerunInDoubt, *, take_over: bool) -> LoopResult:
        decide = self._decider(rerun=rerun, can_ask=self._executor.approvals is not None)
        return await self._go_on(decide, context=self._context, take_over=take_over)

    async def resume(self, verdicts: Sequence[Verdict], rerun: RerunInDoubt, *, take_over: bool) -> LoopResult:
        """For whoever asks from outside: the run's own identity is needed."""
        decide = self._decider(rerun=rerun, verdicts=verdicts, can_ask=self._executor.approvals is not None)
        context = NOBODY if self._context is None else self._context
        return await self._go_on(decide, context=context, take_over=take_over, admit=partial(admit_resume, context))

    async def look(self) -> LoopResult:
        """Where the run stands after it was parked; it goes on where something has come meanwhile."""
        decide = self._decider(is_live=True)
        return await self._go_on(decide, context=self._context, take_over=False, when_held=_leave_alone)

    def _decider(self, **options: Any) -> Decider:
        return Decider(self._backing, self._run_id, self._executor.registry, **options)

    async def _go_on(self, decide: Decider, **options: Any) -> LoopResult:
        when_held = {"when_held": decide.post} if decide.verdicts else {}
        found = await reopen(self._backing, self._run_id, kind=KIND, decide=decide, **{**when_held, **options})
        if isinstance(found, Found):
            return stored_result(found)
        return await work(found, self._continue(found))

    async def _continue(self, run: Run) -> LoopResult:
        """Within the work: the run is held by now, and what was said to it may be nothing that this version reads."""
        history = decode_messages(run.input["messages"])
        return await Loop(run, self._ask, self._executor, self._options, history).go()


async def _leave_alone(case: Case) -> None:
    """Somebody else works the run by now: it is given back as it stands."""


def _options(max_steps: int, parallel: int, wait_seconds: float) -> LoopOptions:
    _check_count("max_steps", max_steps)
    _check_count("parallel", parallel)
    return LoopOptions(max_steps, parallel, check_patience(wait_seconds))


def _check_count(option: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise InvalidSetting(f"{option}= is a whole number from 1, found {value!r}")
