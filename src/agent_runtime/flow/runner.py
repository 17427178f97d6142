"""FlowRunner: work a flow's run from its start, from where it was left, or all of them that nobody works.

A runner does not know whether a superstep is worked for the first time. Its nodes are worked again after a crash, and
their calls replay by place and arguments; what is not on record is done now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias

from agent_runtime import codec
from agent_runtime.approvals import ApprovalRequest, Verdict
from agent_runtime.asking import Ask
from agent_runtime.backing import make_backing
from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.crash import UNARMED, CrashPlan
from agent_runtime.doubts import Case, Decider, RerunInDoubt, is_permitted
from agent_runtime.entropy import SYSTEM_ENTROPY, Entropy
from agent_runtime.errors import CheckpointConflict, CheckpointNotFound, FlowError, InvalidSetting
from agent_runtime.events import Sink
from agent_runtime.executor import Executor, pause, stop_in_doubt
from agent_runtime.flow.calls import Calls
from agent_runtime.flow.checks import unknown_tools
from agent_runtime.flow.description import differences
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Graph
from agent_runtime.flow.saved import Keeper, Saved, first_held, given, read_saved
from agent_runtime.flow.state import Fields, S
from agent_runtime.flow.superstep import NodeError, Position, advance, fail, first_position, gather
from agent_runtime.flow.unfinished import Unfinished
from agent_runtime.flow.work import MAX_SUPERSTEPS, work_superstep
from agent_runtime.ids import RunId, check_run_id
from agent_runtime.journal.journal import Commits
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.replay import CallLife
from agent_runtime.journal.seal import CheckpointKey
from agent_runtime.journal.states import IN_DOUBT
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.offload import SYSTEM_OFFLOAD, Offload
from agent_runtime.recovery import Found, admit_resume, in_use, reopen
from agent_runtime.redaction import Redact
from agent_runtime.run import (
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    MAX_ATTEMPTS,
    NOBODY,
    Run,
    RunContext,
    start,
)
from agent_runtime.settings import MAX_VALUE_BYTES
from agent_runtime.waiting import check_patience, until_decided
from agent_runtime.working import work

KIND = "flow"
PARALLEL = 16
AT_ONCE = 16
"""How many runs are picked up side by side."""

Migrate: TypeAlias = "Callable[[dict[str, Any]], object]"
"""From a stored state as plain data to the state under the graph as it is now, or to its fields."""


class FlowResult(NamedTuple, Generic[S]):
    """What a run came to."""

    status: str
    state: S
    run_id: RunId
    pending: Sequence[ApprovalRequest] = ()
    """The requests that wait for a verdict."""
    replayed: int = 0
    """How many calls this worker took from the journal instead of making them."""
    rerun: int = 0
    """How many calls in doubt it made again."""
    error: NodeError | None = None
    """Why the run failed, where it did."""


class FlowRunner:
    """Works the runs of flows on a store, with the tools of an executor."""

    def __init__(
        self,
        executor: Executor,
        *,
        checkpoints: CheckpointStore | None = None,
        checkpoint_key: CheckpointKey | None = None,
        sinks: Sequence[Sink] = (),
        approvals: Ask | None = None,
        wait_seconds: float = 0.0,
        parallel: int = PARALLEL,
        max_supersteps: int = MAX_SUPERSTEPS,
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
    ) -> None:
        """`parallel` bounds the calls of one run that are on their way; `max_supersteps` counts over the whole run.

        `approvals` answers at once where a call needs a person's verdict; without it such a call pauses its run. For
        `wait_seconds` the worker waits beside a run that waits for a person, which any other may pick up meanwhile.
        """
        for option, value in (("parallel", parallel), ("max_supersteps", max_supersteps)):
            if type(value) is not int or value < 1:
                raise InvalidSetting(f"{option}= is a whole number from 1, found {value!r}")
        self.executor = executor if approvals is None else Executor(executor.registry, approvals=approvals)
        self._parallel = parallel
        self._wait_seconds = check_patience(wait_seconds)
        self._max_supersteps = max_supersteps
        self._backing = make_backing(
            checkpoints, checkpoint_key, tenant=tenant, namespace=namespace, commits=commits, sinks=sinks, crash=crash,
            lease_seconds=lease_seconds, heartbeat_seconds=heartbeat_seconds, max_attempts=max_attempts,
            stuck_after=stuck_after, accept_lost_writes=accept_lost_writes, max_value_bytes=max_value_bytes, redact=redact,
            clock=clock,
            entropy=entropy, offload=offload,
        )  # fmt: skip

    async def run(self, flow: Flow[S], state: S, *, run_id: str | None = None, ctx: RunContext | None = None) -> FlowResult[S]:
        """Work a new run to its end. `CheckpointConflict` where the id is, or was, in use."""
        self._check(flow)
        known_id = check_run_id(run_id if run_id is not None else self._backing.entropy.draw(16).hex())
        fields, checked = flow.shape.freeze(flow.shape.check(state))
        opened = given(flow.shape, fields, flow.recorded)
        run = start(self._backing, known_id, kind=KIND, name=flow.name, context=ctx, given=opened)
        keeper = Keeper(run, flow.shape, flow.digest, fields, first_held(fields))
        first = first_position(flow.graph)
        try:
            return await self._until_decided(
                lambda: work(run, self._work(run, flow, first, checked, keeper, rerun=False)),
                partial(self._look, flow, known_id, ctx),
                known_id,
            )
        except CheckpointConflict as conflict:
            if run.journal.guard is None:
                raise in_use(known_id) from conflict
            raise

    async def recover(
        self,
        flow: Flow[S],
        run_id: str,
        *,
        ctx: RunContext | None = None,
        rerun_in_doubt: RerunInDoubt = False,
        take_over: bool = False,
        migrate: Migrate | None = None,
    ) -> FlowResult[S]:
        """Go on with a run whose worker is gone, or give back the result of one that has ended.

        Raises `CheckpointNotFound`, `CheckpointConflict`, `CheckpointStoreCorrupt`, `IdentityMismatch`, `RunQuarantined`,
        `RecoveryNeedsDecision` where a call is in doubt that neither its tool's rule nor `rerun_in_doubt` lets run again,
        and `FlowError` where the graph has changed and there is no `migrate`; nothing was claimed then.
        """
        return await self._pick_up(
            flow, check_run_id(run_id), ctx, rerun_in_doubt, migrate, take_over=take_over, wait_seconds=self._wait_seconds
        )  # fmt: skip

    async def resume(
        self,
        flow: Flow[S],
        run_id: str,
        verdicts: Sequence[Verdict] = (),
        *,
        ctx: RunContext | None = None,
        rerun_in_doubt: RerunInDoubt = False,
    ) -> FlowResult[S]:
        """`recover` for whoever asks from outside, with what people answered to its open requests.

        The run's own `ctx` is needed, and a run that has ended is a conflict. `VerdictRefused` where a verdict does not
        hold: nothing was stored then. Where another worker has the run, the verdicts are left to it, and the result is
        `running`.
        """
        known_id = check_run_id(run_id)
        reader = _Reader(flow, None, asked_as=NOBODY if ctx is None else ctx)
        can_ask = self.executor.approvals is not None
        decide = self._decider(known_id, rerun=rerun_in_doubt, verdicts=verdicts, can_ask=can_ask)
        when_held = decide.post if decide.verdicts else None
        first = partial(self._recover, flow, known_id, reader, ctx, decide, rerun=rerun_in_doubt, when_held=when_held)
        return await self._until_decided(first, partial(self._look, flow, known_id, ctx), known_id)

    async def start_or_recover(
        self,
        flow: Flow[S],
        state: S,
        *,
        run_id: str,
        ctx: RunContext | None = None,
        rerun_in_doubt: RerunInDoubt = False,
        migrate: Migrate | None = None,
    ) -> FlowResult[S]:
        """Go on with the run of that id where there is one; else start it from the state."""
        try:
            return await self.recover(flow, run_id, ctx=ctx, rerun_in_doubt=rerun_in_doubt, migrate=migrate)
        except CheckpointNotFound:
            return await self.run(flow, state, run_id=run_id, ctx=ctx)

    async def recover_all(
        self,
        flow: Flow[S],
        *,
        contexts: Mapping[str, RunContext] | None = None,
        rerun_in_doubt: RerunInDoubt = False,
        migrate: Migrate | None = None,
        at_once: int = AT_ONCE,
        wait_seconds: float = 0.0,
    ) -> dict[RunId, FlowResult[S] | Exception]:
        """Go on with every unfinished run of the flow, `at_once` side by side: its result, or the error that stopped it.

        A run whose owner lives is left alone and reported as `CheckpointConflict`, after up to `wait_seconds` in which
        its owner may let it go. `contexts`: by run id, for runs that act for a principal.
        """
        if type(at_once) is not int or at_once < 1:
            raise InvalidSetting(f"at_once= is a whole number from 1, found {at_once!r}")
        self._check(flow)
        known = contexts or {}

        async def one(run_id: RunId) -> FlowResult[S]:
            return await self._pick_up(flow, run_id, known.get(run_id), rerun_in_doubt, migrate)

        runs = Unfinished(self._backing, KIND, flow.name, one)
        return await runs.recover_all(at_once=at_once, wait_seconds=wait_seconds)

    async def close(self) -> None:
        """Let go of the store."""
        await self._backing.store.close()

    # One run.

    def _check(self, flow: Flow[S]) -> None:
        """Refuse a flow that is not complete, or that calls tools which are not there."""
        missing = unknown_tools(flow.graph, lambda tool: self.executor.registry.find(tool) is not None)
        if missing:
            [(node, tool), *_] = missing
            there = sorted(spec.name for spec in self.executor.registry.specs)
            raise FlowError(
                f"node {node!r} of flow {flow.name!r} calls tool {tool!r}, which is not registered; there are {there}"
            )

    async def _pick_up(
        self,
        flow: Flow[S],
        run_id: RunId,
        ctx: RunContext | None,
        rerun: RerunInDoubt,
        migrate: Migrate | None,
        *,
        take_over: bool = False,
        wait_seconds: float = 0.0,
    ) -> FlowResult[S]:
        decide = self._decider(run_id, rerun=rerun, can_ask=self.executor.approvals is not None)
        first = partial(self._recover, flow, run_id, _Reader(flow, migrate), ctx, decide, rerun=rerun, take_over=take_over)
        again = partial(self._look, flow, run_id, ctx, migrate)
        return await until_decided(first, again, self._backing, run_id, wait_seconds)

    async def _until_decided(
        self, first: Callable[[], Awaitable[FlowResult[S]]], again: Callable[[], Awaitable[FlowResult[S]]], run_id: RunId
    ) -> FlowResult[S]:
        return await until_decided(first, again, self._backing, run_id, self._wait_seconds)

    def _decider(self, run_id: RunId, **options: Any) -> Decider:
        return Decider(self._backing, run_id, self.executor.registry, **options)

    async def _look(
        self, flow: Flow[S], run_id: RunId, ctx: RunContext | None, migrate: Migrate | None = None
    ) -> FlowResult[S]:
        """Where a run stands after it was parked; it goes on where something has come meanwhile."""
        return await self._recover(
            flow, run_id, _Reader(flow, migrate), ctx, self._decider(run_id, is_live=True), when_held=_leave_alone
        )  # fmt: skip

    async def _recover(
        self,
        flow: Flow[S],
        run_id: RunId,
        reader: _Reader[S],
        ctx: RunContext | None,
        decide: Decider,
        *,
        rerun: RerunInDoubt = False,
        take_over: bool = False,
        when_held: Callable[[Case], Awaitable[None]] | None = None,
    ) -> FlowResult[S]:
        self._check(flow)
        found = await reopen(
            self._backing, run_id, kind=KIND, name=flow.name, context=ctx, decide=decide, take_over=take_over, admit=reader,
            when_held=when_held,
        )  # fmt: skip
        if isinstance(found, Found):
            return reader.result(found)
        return await work(found, self._go_on(found, flow, reader, rerun))

    async def _go_on(self, run: Run, flow: Flow[S], reader: _Reader[S], rerun: RerunInDoubt) -> FlowResult[S]:
        saved, position, state = reader.saved, reader.position, reader.state
        if saved.digest == flow.digest:
            keeper = Keeper(run, flow.shape, flow.digest, saved.fields, saved.held)
        else:
            run.journal.note(RecordKind.MIGRATED, body=codec.encode({"from": saved.digest, "graph": flow.described}))
            await run.barrier_if_each()
            keeper = Keeper(run, flow.shape, flow.digest, {}, {})
            await keeper.keep(position, reader.fields)
            await run.barrier()
        return await self._work(run, flow, position, state, keeper, rerun=rerun)

    async def _work(
        self, run: Run, flow: Flow[S], position: Position, state: S, keeper: Keeper, *, rerun: RerunInDoubt
    ) -> FlowResult[S]:
        """Superstep after superstep, each from what is durable to what the next barrier makes durable."""
        graph = flow.graph
        replayed = again = 0
        gate = asyncio.Semaphore(self._parallel)
        while not position.is_over:
            await run.barrier()  # what the calls gave reaches a node's code only once it is durable
            calls = Calls(
                run, self.executor, superstep=position.superstep, gate=gate,
                may_rerun=lambda life: is_permitted(rerun, run.run_id, life),
            )  # fmt: skip
            outcomes = await work_superstep(calls, graph, position, state, f"{position.superstep}/")
            if outcomes is not None:
                outcomes = _settle(calls, outcomes)
            if outcomes is None:
                if calls.doubts:
                    await stop_in_doubt(run, calls.doubts)
                await pause(run, calls.paused)
            fields, state = graph.shape.freeze(gather(graph, state, outcomes))
            position = self._limit(advance(graph, position, outcomes, state))
            replayed, again = replayed + calls.replayed, again + calls.rerun
            await keeper.keep(position, fields)
            self._announce_saved(run, flow, position, calls)
            await run.barrier_if_each()
        return await self._end(run, position, FlowResult("done", state, run.run_id, (), replayed, again, position.failure))

    def _limit(self, position: Position) -> Position:
        if position.is_over or position.superstep < self._max_supersteps:
            return position
        message = f"the run took {position.superstep} supersteps and has not ended; max_supersteps counts over the whole run"
        return fail(position, NodeError(position.frontier[0], "", "StepLimitReached", message))

    async def _end(self, run: Run, position: Position, result: FlowResult[S]) -> FlowResult[S]:
        if position.failure is None:
            await run.end(RunStatus.DONE, codec.encode({"status": "done"}))
            if run.has_sinks:
                run.announce("run.done", {"kind": KIND, "step": run.journal.step})
            return result
        error = position.failure
        body = codec.encode({"status": "failed", "type": error.type, "message": error.message, "node": error.node})
        await run.end(RunStatus.FAILED, body)
        if run.has_sinks:
            run.announce("run.failed", {"kind": KIND, "step": run.journal.step, "node": error.node, "error": str(error)})
        return result._replace(status="failed")

    def _announce_saved(self, run: Run, flow: Flow[S], position: Position, calls: Calls) -> None:
        if not run.has_sinks:
            return
        status = "running" if not position.is_over else "done" if position.failure is None else "failed"
        data: dict[str, object] = {"kind": KIND, "step": run.journal.step, "status": status, "flow": flow.name}
        if unreplayed := [life.call for life in calls.orphans()]:
            data["unreplayed"] = unreplayed
        run.announce_when_committed("checkpoint.saved", data)


class _Reader(Generic[S]):
    """Reads a stored run before it is claimed, and refuses one that cannot go on under the graph as it is now."""

    saved: Saved
    position: Position
    fields: Fields
    state: S

    def __init__(self, flow: Flow[S], migrate: Migrate | None, *, asked_as: RunContext | None = None) -> None:
        self._flow = flow
        self._migrate = migrate
        self._asked_as = asked_as

    def __call__(self, found: Found) -> dict[str, CallLife]:
        run_id = found.stored.row.run_id
        if self._asked_as is not None:
            admit_resume(self._asked_as, found)
        self.saved = saved = read_saved(found)
        graph = self._flow.graph
        self.position = saved.position or first_position(graph)
        lives = _lives_of(found.history.lives, self.position.superstep)
        if found.status.is_final or saved.digest == self._flow.digest:
            self.fields, self.state = saved.fields, graph.shape.thaw(saved.fields)
            return lives
        changes = "; ".join(differences(saved.described, self._flow.described)[:5])
        if self._migrate is None:
            raise FlowError(
                f"run {run_id!r} sleeps under another graph of flow {self._flow.name!r}: {changes}. Nothing was changed: "
                "recover it with the code that it was started with, or with migrate="
            )
        self.fields, self.state = self._migrated(run_id, saved, self._migrate)
        self._check_position(run_id, graph)
        return lives

    def result(self, found: Found) -> FlowResult[S]:
        """What a run that has ended, or waits, came to."""
        status, run_id = found.status.name.lower(), found.stored.row.run_id
        return FlowResult(status, self.state, run_id, found.pending, error=self.position.failure)

    def _migrated(self, run_id: str, saved: Saved, migrate: Migrate) -> tuple[Fields, S]:
        plain = {name: codec.decode(data) for name, data in saved.fields.items()}
        try:
            values = migrate(plain)
        except Exception as error:
            raise FlowError(f"migrate= raised {type(error).__name__} over the state of run {run_id!r}: {error}") from error
        shape = self._flow.graph.shape
        return shape.freeze(shape.build(values, by=f"what migrate= made of the state of run {run_id!r}"))

    def _check_position(self, run_id: str, graph: Graph) -> None:
        """Where the run stands must be there in the graph as it is now."""
        gone = sorted({*self.position.frontier, *self.position.arrived} - set(graph.nodes))
        if saved_start := self.saved.position is None:
            gone = [] if self.saved.described["order"][0] == graph.start else [self.saved.described["order"][0]]
        if gone:
            where = "starts at" if saved_start else "stands at"
            raise FlowError(f"run {run_id!r} {where} node {gone[0]!r}, which the graph has no more; keep a node of that name")


def _lives_of(lives: Mapping[str, CallLife], superstep: int) -> dict[str, CallLife]:
    """What the journal holds of the superstep that was cut short; what was before it is over, but for a doubt."""
    return {call: life for call, life in lives.items() if call.startswith(f"{superstep}/") or life.state in IN_DOUBT}


async def _leave_alone(case: Case) -> None:
    """Somebody else works the run by now: it is given back as it stands."""


def _settle(calls: Calls, outcomes: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The outcomes, unless a recorded call that nobody made again is in doubt."""
    calls.check_orphans()
    return None if calls.doubts else outcomes
