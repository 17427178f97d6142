"""Runs at work on a store whose server is about to die, and what must be true of them afterwards, record by record."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.ids import RunId
from agent_runtime.journal.seal import KeyRing, open_run
from agent_runtime.journal.store import Answer, AnswerKind, Append, CheckpointStore
from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec
from agent_runtime.testing.remote import Remote
from agent_runtime.tool_loop import LoopResult, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY, Delegate

PATIENCE_SECONDS = 30.0


class Remembers(Delegate):
    """Keeps by itself what the store acknowledged."""

    def __init__(self, inner: CheckpointStore) -> None:
        super().__init__(inner)
        self.may_lose_writes = False
        self.acknowledged: list[Append] = []
        self.answers: Counter[AnswerKind] = Counter()

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        answers = await super().commit(appends)
        self.answers.update(answer.kind for answer in answers)
        pairs = zip(appends, answers, strict=True)
        self.acknowledged += [append for append, answer in pairs if answer.kind is AnswerKind.OK]
        return answers


class Load:
    """So many loops at once, each with so many calls of a tool that nobody may repeat."""

    def __init__(self, store: CheckpointStore, *, runs: int = 12, calls: int = 4) -> None:
        self.store = Remembers(store)
        self.remote = Remote()
        self.runs, self.calls = runs, calls
        self._may_answer = asyncio.Semaphore(runs // 2)  # so that runs are in different places when it happens
        self._registry = ToolRegistry()

        @self._registry.tool
        async def charge(n: int) -> str:
            return (await self.remote.act("charge", {"n": n})).result

    @property
    def run_ids(self) -> list[RunId]:
        return [RunId(f"run-{i}") for i in range(self.runs)]

    def start(self) -> asyncio.Future[list[LoopResult]]:
        return asyncio.gather(*map(self._run, self.run_ids))

    async def is_under_way(self) -> None:
        """Return in the middle of it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.remote.count() < self.runs * self.calls // 3:
                await SYSTEM_CLOCK.sleep(0.001)
        assert self.remote.count() < self.runs * self.calls

    async def assert_ended_once(self, running: asyncio.Future[list[LoopResult]], later: CheckpointStore) -> None:
        """Every run is done, each key had one effect, nobody was fenced; `later` reads what is there now."""
        results = await asyncio.wait_for(running, PATIENCE_SECONDS)
        assert [result.status for result in results] == ["done"] * self.runs
        assert Counter(effect.key for effect in self.remote.effects).most_common(1)[0][1] == 1
        assert self.remote.count() == self.runs * self.calls
        assert self.store.answers[AnswerKind.UNKNOWN] > 0, "some write was on its way when it happened"
        assert self.store.answers[AnswerKind.FENCED] + self.store.answers[AnswerKind.MOVED] == 0
        await assert_is_there(later, self.store.acknowledged)
        for run in await later.load_many(self.run_ids):
            assert run is not None
            open_run(KeyRing.of(KEY), run, tenant="")
            assert run.row.epoch == 1

    async def _run(self, run_id: RunId) -> LoopResult:
        return await run_tool_loop(
            self._model, self._registry, "go", run_id=run_id, checkpoints=self.store, checkpoint_key=KEY, commits="each",
            lease_seconds=12.0, heartbeat_seconds=0.2,
        )  # fmt: skip

    async def _model(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        async with self._may_answer:
            await SYSTEM_CLOCK.sleep(0.002)
            return asks(messages, self.calls)


def asks(messages: Sequence[Message], calls: int) -> Reply:
    """What a model says that wants so many charges, one after the other."""
    done = sum(message.role == "tool" for message in messages)
    return Reply(tool_calls=[ToolCall(f"c{done}", "charge", {"n": done})]) if done < calls else Reply("done")


async def assert_is_there(store: CheckpointStore, acknowledged: Sequence[Append]) -> None:
    """Each record that was acknowledged stands in its place, once, under its seal, with its body."""
    run_ids = list({append.row.run_id for append in acknowledged})
    found = dict(zip(run_ids, await store.load_many(run_ids), strict=True))
    for append in acknowledged:
        run = found[append.row.run_id]
        assert run is not None, f"{append.row.run_id} is lost"
        for record in append.records:
            assert run.records[record.number - 1] == record
