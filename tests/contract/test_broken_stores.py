"""Stores that are broken on purpose: each must fail the case of the contract that is there to find it."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.errors import StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import StoredRun
from agent_runtime.journal.store import Answer, CheckpointStore, Guard
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.store_contract import StoreContract, cases, run_contract, strikes
from tests.contract import broken_messages, broken_otherwise, broken_reads, broken_writes
from tests.contract.broken import Broken
from tests.contract.broken_otherwise import DeletesBitByBit
from tests.contract.broken_writes import LeavesNoTombstone

FOUND_BY = {**broken_otherwise.FOUND_BY, **broken_writes.FOUND_BY, **broken_reads.FOUND_BY, **broken_messages.FOUND_BY}


@pytest.mark.parametrize(("broken", "name"), FOUND_BY.items(), ids=lambda value: getattr(value, "__name__", value))
async def test_the_contract_finds_what_is_broken(
    broken: type[MemoryCheckpointStore], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strikes, "PATIENCE_SECONDS", 0.2)
    with pytest.raises((AssertionError, RuntimeError, TimeoutError)):
        await cases()[name](StoreContract(), broken())


def test_every_store_that_is_broken_here_is_looked_for() -> None:
    assert set(FOUND_BY) == set(Broken.__subclasses__())


async def test_a_store_that_hands_everything_on_is_not_found_broken() -> None:
    for name in sorted(set(FOUND_BY.values())):
        await cases()[name](StoreContract(), Broken())


def test_the_page_names_cases_that_find_a_broken_store() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "guides" / "write-your-own-store.md").read_text()
    named = re.findall(r"\| `([a-z0-9 ]+)` \|", page)
    assert len(named) >= 15
    assert set(named) <= set(FOUND_BY.values())


class DeletesAfterTheNextLook(MemoryCheckpointStore):
    """As one whose statement goes on where its caller was cancelled: it has landed once somebody has looked."""

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._on_its_way[run_id] = guard
            raise
        return await super().delete(run_id, guard=guard)

    async def latest(self, run_id: RunId) -> StoredRun | None:
        [found] = await self.load_many([run_id])
        return found

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        found = await super().load_many(run_ids)
        for run_id in run_ids:
            if run_id in self._on_its_way:
                await super().delete(run_id, guard=self._on_its_way.pop(run_id))
        return found

    @property
    def _on_its_way(self) -> dict[RunId, Guard]:
        ways: dict[RunId, Guard] = self.__dict__.setdefault("on_its_way", {})
        return ways


async def test_a_deletion_that_lands_after_its_caller_was_cancelled_is_not_found_broken() -> None:
    await cases()[FOUND_BY[DeletesBitByBit]](StoreContract(), DeletesAfterTheNextLook())


class CutOffForGood(StoreContract):
    """A contract whose strike a store does not get over."""

    async def cut_off(self, store: CheckpointStore) -> None:
        async def gone(*_: object, **__: object) -> Any:
            raise StoreUnavailable("gone")

        for verb in ("commit", "post", "load_many"):
            setattr(store, verb, gone)


@pytest.mark.parametrize("name", ["a store that lost its connections reads on", "a write over lost connections lands once"])
async def test_the_contract_finds_a_store_that_does_not_connect_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strikes, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        await cases()[name](CutOffForGood(), Broken())


async def test_a_report_names_what_a_broken_store_failed() -> None:
    async def make_store() -> MemoryCheckpointStore:
        return LeavesNoTombstone()

    report = await run_contract(make_store)
    name = FOUND_BY[LeavesNoTombstone]
    assert not report.holds
    assert report.failed[name].startswith("AssertionError")
    assert name in str(report)
    assert {*report.passed, *report.failed} == set(cases())
