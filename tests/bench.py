"""The bench of every scenario: a scripted model, a remote that counts, tools, workers that can be killed, and their stores."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.crash import CrashPlan, CrashPoint
from agent_runtime.errors import KeyConflict
from agent_runtime.ids import RunId, Step
from agent_runtime.journal.records import StoredCheckpoint, StoredMessage, StoredRecord, StoredRow, StoredRun
from agent_runtime.journal.seal import KeyRing, open_run
from agent_runtime.journal.store import Answer, Append, CheckpointStore, Ear, Guard
from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec
from agent_runtime.model import Model, ModelFunction
from agent_runtime.offload import ThreadOffload
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.tool_loop import LoopResult, recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry, idempotency_key

KEY = b"a key for tests, which guards nothing"
RING = KeyRing.of(KEY)
LONG_SECONDS = 20.0
"""How long anything may take before a test gives up on it."""

Asked: TypeAlias = "tuple[str, Mapping[str, object]]"
"""A tool and its arguments, as a script's model asks for them."""
AnyModel: TypeAlias = "Model | ModelFunction"
ScriptStep: TypeAlias = "str | Sequence[Asked] | Callable[[Sequence[Message]], Reply]"


class Killed(BaseException):
    """The worker's process is gone, as far as whatever it still tries can tell."""


class Script:
    """A model that follows a script: text ends the loop, a list asks for calls. No two answers of it are equal.

    `asked` counts its requests; each of them must be one that a provider would accept.
    """

    def __init__(self, *steps: ScriptStep) -> None:
        self.steps = steps
        self.asked = 0
        self.requests: list[list[Message]] = []

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        self.asked += 1
        self.requests.append(list(messages))
        assert_acceptable(messages)
        step = self.steps[min(decisions_in(messages), len(self.steps) - 1)]
        usage = {"input": len(messages), "output": 1}
        if callable(step):
            return step(messages)
        if isinstance(step, str):
            return Reply(step, usage=usage)
        calls = [ToolCall(f"call-{self.asked}.{at}", name, args) for at, (name, args) in enumerate(step)]
        return Reply(f"answer {self.asked}", calls, usage)


def decisions_in(messages: Sequence[Message]) -> int:
    """How often the model has answered already."""
    return sum(message.role == "assistant" for message in messages)


def results_in(messages: Sequence[Message]) -> list[str]:
    """What the tools gave, as the model sees it."""
    return [message.content for message in messages if message.role == "tool"]


def assert_acceptable(messages: Sequence[Message]) -> None:
    """Every call has one result, right after the message that asked and in its order; all of it can be sent as UTF-8."""
    assert messages
    assert messages[0].role in ("system", "user"), messages[0]
    waiting: list[str] = []
    for message in messages:
        if message.role == "tool":
            assert waiting, f"a result that nobody asked for: {message}"
            assert message.tool_call_id == waiting.pop(0), f"a result out of its place: {message}"
        else:
            assert not waiting, f"{message} comes before the results of {waiting}"
            waiting = [call.id for call in message.tool_calls]
            assert len(set(waiting)) == len(waiting), f"one id twice: {waiting}"
        calls = [dict(call.args) for call in message.tool_calls]
        json.dumps([message.content, message.name, calls], ensure_ascii=False, allow_nan=False).encode()
    assert not waiting, f"no results of {waiting}"


@dataclass(frozen=True, slots=True)
class Effect:
    """Something that happened at the remote."""

    tool: str
    key: str | None
    args: dict[str, object]


class Remote:
    """The outside world: counts what really happened, and knows the keys it was given."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.keys: list[str] = []
        """Every key that was ever sent, repeats included."""
        self._first: dict[str, Effect] = {}

    def act(self, tool: str, args: dict[str, object], key: str | None = None) -> str:
        """Make an effect, or know the key and give the first one's answer again."""
        effect = Effect(tool, key, dict(args))
        if key is not None:
            self.keys.append(key)
            first = self._first.setdefault(key, effect)
            if first.args != args or first.tool != tool:
                raise KeyConflict(f"key {key} came with {args}, first with {first.args}")
            if first is not effect:
                return f"effect {self.effects.index(first) + 1}"
        self.effects.append(effect)
        return f"effect {len(self.effects)}"

    def count(self, tool: str) -> int:
        return sum(effect.tool == tool for effect in self.effects)


Hook: TypeAlias = "Callable[[str, dict[str, object]], Awaitable[None]]"


async def _nothing(tool: str, args: dict[str, object]) -> None:
    return None


class Bench:
    """The tools of every scenario, over one remote. `entered` counts how often each tool's body was entered.

    `before` and `after` are awaited in each tool around its act: there a test fails it, stalls it or kills its worker.
    """

    def __init__(self, **options: Any) -> None:
        self.remote = Remote()
        self.entered: Counter[str] = Counter()
        self.before: Hook = _nothing
        self.after: Hook = _nothing
        self.registry = ToolRegistry()
        self._add(self.registry, options)

    def _add(self, registry: ToolRegistry, options: dict[str, Any]) -> None:
        async def act(tool: str, args: dict[str, object], *, keyed: bool) -> str:
            self.entered[tool] += 1
            await self.before(tool, args)
            result = self.remote.act(tool, args, idempotency_key() if keyed else None)
            await self.after(tool, args)
            return result

        @registry.tool(**options)
        async def charge(amount: int) -> str:
            return await act("charge", {"amount": amount}, keyed=False)

        @registry.tool(**options)
        async def email(to: str) -> str:
            return await act("email", {"to": to}, keyed=False)

        @registry.tool(idempotent=True, pause=0.001, **options)
        async def charge_i(amount: int) -> str:
            return await act("charge_i", {"amount": amount}, keyed=True)

        @registry.tool(pure=True, pause=0.001, **options)
        async def lookup(name: str) -> str:
            self.entered["lookup"] += 1
            await self.before("lookup", {"name": name})
            await self.after("lookup", {"name": name})
            return f"what is known of {name}"

    @property
    def effects(self) -> int:
        return len(self.remote.effects)


class Delegate:
    """A store that passes every verb on: what a faulty or counting double inherits from."""

    def __init__(self, inner: CheckpointStore) -> None:
        self.inner = inner

    def check(self, verb: str) -> None:
        """Called before each verb: raises to refuse it."""

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        self.check("commit")
        return await self.inner.commit(appends)

    async def save(
        self,
        run_id: RunId,
        step: Step,
        checkpoint: StoredCheckpoint | None,
        *,
        row: StoredRow,
        guard: Guard | None = None,
        records: Sequence[StoredRecord] = (),
    ) -> Answer:
        self.check("save")
        return await self.inner.save(run_id, step, checkpoint, row=row, guard=guard, records=records)

    async def record_call(self, run_id: RunId, record: StoredRecord, *, row: StoredRow, guard: Guard) -> Answer:
        self.check("record_call")
        return await self.inner.record_call(run_id, record, row=row, guard=guard)

    async def latest(self, run_id: RunId) -> StoredRun | None:
        self.check("latest")
        return await self.inner.latest(run_id)

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        self.check("load_many")
        return await self.inner.load_many(run_ids)

    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        self.check("calls")
        return await self.inner.calls(run_id, since=since)

    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        self.check("list_unfinished")
        return await self.inner.list_unfinished(name=name, limit=limit, after=after)

    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        self.check("list_runs")
        return await self.inner.list_runs(status=status, limit=limit, after=after)

    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        self.check("list_recent")
        return await self.inner.list_recent(status=status, before=before, limit=limit)

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        self.check("delete")
        return await self.inner.delete(run_id, guard=guard)

    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        self.check("renew")
        return await self.inner.renew(run_id, guard=guard, seen=seen, wake_at=wake_at)

    async def renew_all(self, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        self.check("renew_all")
        return await self.inner.renew_all(guards)

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        self.check("post")
        return await self.inner.post(run_id, message)

    async def inbox(self, run_id: RunId) -> list[StoredMessage]:
        self.check("inbox")
        return await self.inner.inbox(run_id)

    async def now(self) -> datetime:
        self.check("now")
        return await self.inner.now()

    async def listen(self, ring: Callable[[], None]) -> Ear:
        return await self.inner.listen(ring)  # unchecked: nobody could catch a refusal in the background

    def reopen(self) -> CheckpointStore:
        return self.inner.reopen()

    async def close(self) -> None:
        await self.inner.close()


class Counting(Delegate):
    """Counts the verbs asked of a store, and keeps every append."""

    def __init__(self, inner: CheckpointStore) -> None:
        super().__init__(inner)
        self.verbs: Counter[str] = Counter()
        self.appends: list[Append] = []

    def check(self, verb: str) -> None:
        self.verbs[verb] += 1

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        answers = await super().commit(appends)
        self.appends.extend(appends)
        return answers


class NoHeartbeat(ThreadOffload):
    """Threads for tools, and none that says that the worker lives: what a frozen process looks like from outside."""

    def spawn(self, name: str, target: Callable[[], None]) -> None:
        if name != "agent-runtime-heartbeat":
            super().spawn(name, target)


class Place:
    """Where runs are kept: memory, or one SQLite file. Each worker opens it for itself."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.path = folder / "runs.db"
        self.is_tampered = False
        self._memory: MemoryCheckpointStore | None = None
        self._opened: list[CheckpointStore] = []

    def open(self, clock: Clock | None = None) -> CheckpointStore:
        """A store object of one's own on what is kept here; in memory, the first one's clock is everybody's."""
        if self.kind == "memory":
            self._memory = self._memory or MemoryCheckpointStore(clock=clock or SYSTEM_CLOCK)
            return self._memory.reopen()
        store = SQLiteCheckpointStore(self.path) if clock is None else SQLiteCheckpointStore(self.path, clock=clock)
        self._opened.append(store)
        return store

    def looker(self) -> CheckpointStore:
        """A store object to look with, that no worker has."""
        return self.open()

    async def load(self, run_id: str) -> StoredRun:
        """A run that must be there, verified."""
        [run] = await self.looker().load_many([RunId(run_id)])
        assert run is not None, f"run {run_id!r} is not there"
        open_run(RING, run, tenant="")
        return run

    async def becomes(self, run_id: str, holds: Callable[[StoredRun], bool]) -> StoredRun:
        """The run as soon as that holds of what is stored of it."""
        store = self.open()
        for _ in range(int(LONG_SECONDS * 1000)):
            [run] = await store.load_many([RunId(run_id)])
            if run is not None and holds(run):
                return run
            await asyncio.sleep(0.001)
        raise AssertionError(f"run {run_id!r} never came to that")

    async def close(self) -> None:
        """Let go of all stores; every run must verify."""
        if not self.is_tampered:
            for row in await self.looker().list_runs(limit=10_000):
                await self.load(row.run_id)
        for store in self._opened:
            await store.close()


class KillPlan(CrashPlan):
    """Kills its worker where it reaches a point for the nth time; a dead worker reaches nothing more.

    It is not armed, as a plan for a whole process is: records are committed as the run was told to.
    """

    worker: Worker
    point: CrashPoint | None
    at_seq: int
    nth: int
    reached: Counter[tuple[CrashPoint, int]]

    @staticmethod
    def of(worker: Worker, point: CrashPoint | None = None, seq: int = 0, nth: int = 1) -> KillPlan:
        plan = KillPlan()
        plan.worker, plan.point, plan.at_seq, plan.nth, plan.reached = worker, point, seq, nth, Counter()
        return plan

    async def reach(self, point: CrashPoint, seq: int, *, recovering: bool, clock: Clock) -> None:
        self.worker.check("a crash point")
        self.reached[point, seq] += 1
        if (point, seq) == (self.point, self.at_seq) and self.reached[point, seq] == self.nth:
            self.worker.die()


class Worker(Delegate):
    """A worker that can be killed: then every verb of its store and every crash point raises `Killed`."""

    def __init__(self, place: Place, *, clock: Clock | None = None) -> None:
        super().__init__(place.open(clock))
        self.is_dead = False
        self.plan = KillPlan.of(self)

    def check(self, verb: str) -> None:
        if self.is_dead:
            raise Killed(verb)

    def die(self) -> None:
        """The process ends here."""
        self.is_dead = True
        raise Killed("killed")

    def killed_at(self, point: CrashPoint, seq: int = 0, *, nth: int = 1) -> Worker:
        """The same worker, which will die there."""
        self.plan = KillPlan.of(self, point, seq, nth)
        return self

    async def run(self, model: AnyModel, registry: ToolRegistry, run_id: str = "run", **options: Any) -> LoopResult:
        """Start a run on this worker."""
        given = {"checkpoints": self, "checkpoint_key": KEY, "crash": self.plan, **options}
        return await run_tool_loop(model, registry, given.pop("messages", "go"), run_id=run_id, **given)

    async def recover(self, model: AnyModel, registry: ToolRegistry, run_id: str = "run", **options: Any) -> LoopResult:
        """Pick a run up on this worker."""
        given = {"checkpoints": self, "checkpoint_key": KEY, "crash": self.plan, **options}
        return await recover_tool_loop(model, registry, run_id, **given)

    async def run_and_die(self, model: AnyModel, registry: ToolRegistry, run_id: str = "run", **options: Any) -> None:
        """Start a run that this worker's death cuts short."""
        await expect_death(self.run(model, registry, run_id, **options))

    async def recover_and_die(self, model: AnyModel, registry: ToolRegistry, run_id: str = "run", **options: Any) -> None:
        """Pick a run up, and die on it."""
        await expect_death(self.recover(model, registry, run_id, **options))


async def error_of(work: Awaitable[object]) -> Exception | None:
    """The error that the work ends with, or None."""
    try:
        await work
    except Exception as error:
        return error
    return None


async def expect_death(work: Awaitable[object]) -> None:
    """Wait for work that must end by its worker's death."""
    try:
        await work
    except Killed:
        return
    raise AssertionError("the worker was to die and did not")


async def kill_when(worker: Worker, work: Awaitable[object], moment: asyncio.Event) -> None:
    """Let the worker work until the moment comes, and kill it there, wherever its tasks are."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(moment.wait())
    await asyncio.wait({task, waiting}, timeout=LONG_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    assert moment.is_set(), f"the moment never came: {task}"
    waiting.cancel()
    worker.is_dead = True
    task.cancel()
    try:
        await task
    except (Killed, asyncio.CancelledError):
        return
    raise AssertionError("the worker was to die and did not")


async def until(holds: Callable[[], bool]) -> None:
    """Let others run until it holds; fails where that takes too long."""
    for _ in range(int(LONG_SECONDS * 1000)):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to hold")


def transcript(result: LoopResult) -> list[Message]:
    """The whole conversation of a result."""
    return list(result.messages)
