"""The sweep can fail: a runtime with one guard taken away, and stores that break their word, are each found by name."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agent_runtime.errors import NotSent
from agent_runtime.journal.records import RunStatus, StoredRecord, StoredRow
from agent_runtime.journal.store import Answer, AnswerKind, Append, CheckpointStore
from agent_runtime.messages import Reply, ToolCall
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.crash_sweep import SCENARIOS, Client, Rule, Scenario, SweepReport, sweep
from agent_runtime.testing.faults import Fault, FaultyStore, Write
from agent_runtime.tools import ToolRegistry
from tests.crash.plants import PLANTS

ROOT = Path(__file__).parents[2]

BY_STORES_AND_TOOLS = {
    "a store that answers before it has written": {Rule.INTENT_FIRST, Rule.END_FIRST},
    "a store that loses an acknowledged write": {Rule.GROWS},
    "a store that changes a byte": {Rule.VERIFIES},
    "a tool that is declared idempotent and is not": {Rule.ONE_EFFECT},
    "a tool that acts otherwise each time": {Rule.DIES},
}
"""What the tests below show, beside the plants."""


@pytest.mark.parametrize("name", PLANTS)
def test_a_bug_in_the_runtime_is_found_by_the_rule_it_breaks(name: str) -> None:
    swept = subprocess.run(
        [sys.executable, "-m", "tests.crash.plants", name], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert swept.returncode == 1, swept.stderr
    report = json.loads(swept.stdout)
    found = {Rule[violation["rule"]] for violation in report["violations"]}
    assert PLANTS[name].rules <= found


async def test_a_store_that_answers_before_it_has_written_is_found() -> None:
    report = await _sweep(Behind(MemoryCheckpointStore()))
    assert report.rules_broken >= BY_STORES_AND_TOOLS["a store that answers before it has written"]


async def test_a_store_that_loses_an_acknowledged_write_is_found() -> None:
    report = await _sweep(LosesTheLastWrite())
    assert report.rules_broken >= BY_STORES_AND_TOOLS["a store that loses an acknowledged write"]


async def test_a_store_that_changes_a_byte_is_found() -> None:
    report = await _sweep(ChangesAByte())
    assert report.rules_broken >= BY_STORES_AND_TOOLS["a store that changes a byte"]


async def test_a_tool_that_is_declared_idempotent_and_is_not_is_found() -> None:
    def tools(remote: Client) -> ToolRegistry:
        registry = ToolRegistry()

        @registry.tool(idempotent=True)
        async def charge(what: str) -> str:
            return await remote.act("charge", {"what": what})

        return registry

    report = await _sweep(MemoryCheckpointStore(), _charging(tools))
    assert report.rules_broken == BY_STORES_AND_TOOLS["a tool that is declared idempotent and is not"]


async def test_a_tool_that_acts_otherwise_each_time_is_found() -> None:
    times = [0]

    def tools(remote: Client) -> ToolRegistry:
        registry = ToolRegistry()

        @registry.tool(pure=True, pause=0.001)
        async def charge(what: str) -> str:
            times[0] += 1
            if times[0] == 1:
                raise NotSent("not yet")
            return await remote.read("charge", {"what": what})

        return registry

    report = await _sweep(MemoryCheckpointStore(), _charging(tools))
    assert report.rules_broken >= BY_STORES_AND_TOOLS["a tool that acts otherwise each time"]


def test_every_rule_of_the_sweep_is_shown_to_be_breakable() -> None:
    shown = {rule for plant in PLANTS.values() for rule in plant.rules}
    assert shown.union(*BY_STORES_AND_TOOLS.values()) == set(Rule)


async def _sweep(store: CheckpointStore, scenario: Scenario = SCENARIOS[0]) -> SweepReport:
    async def make_store() -> CheckpointStore:
        return store

    return await sweep(scenario, make_store, commits=["grouped"], depth=1)


def _charging(tools: Callable[[Client], ToolRegistry]) -> Scenario:
    return Scenario("charging", [Reply(tool_calls=[ToolCall("a", "charge", {"what": "seat"})]), Reply("done")], tools)


class WritesBehind(Fault):
    """Acknowledges each write at once, and lets it land with the next one: what a disk cache does without a flush."""

    def __init__(self) -> None:
        self._held: Write | None = None

    async def carry(self, write: Write) -> list[Answer]:
        await asyncio.sleep(0)
        if self._held is not None:
            await self._held.land()
        self._held = write
        return [Answer(AnswerKind.OK)] * len(write.appends)


class Behind(FaultyStore):
    """Each worker's way to this store writes behind; what is read here is what is durable."""

    def reopen(self) -> FaultyStore:
        return FaultyStore(self.inner.reopen(), WritesBehind())


class LosesTheLastWrite(MemoryCheckpointStore):
    """Whoever opens it after a worker died finds the state before that worker's last write."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, tuple[StoredRow, int]] = {}

    def _append_one(self, append: Append) -> Answer:
        run = self._runs.get(append.row.run_id)
        if run is not None:
            self._before[append.row.run_id] = (run.row, len(run.records))
        return super()._append_one(append)

    def reopen(self) -> MemoryCheckpointStore:
        for run_id, run in self._runs.items():
            if run.row.status < RunStatus.DONE and run_id in self._before:
                run.row, kept = self._before.pop(run_id)
                del run.records[kept:]
        return super().reopen()


class ChangesAByte(MemoryCheckpointStore):
    """Stores another byte than it was given in each reply."""

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        return await super().commit([append._replace(records=tuple(map(_changed, append.records))) for append in appends])


def _changed(record: StoredRecord) -> StoredRecord:
    return record._replace(body=record.body.replace(b" to do", b" to d0"))
