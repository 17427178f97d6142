"""Shared reads: one call of the store for all that ask in one turn, and none that suffers from another's trouble."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence

import pytest

from agent_runtime.errors import StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.loads import MOST_AT_ONCE, load_run
from agent_runtime.journal.records import StoredRun
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.store_contract.draft import Draft

BAD = RunId("bad")


class Asked(MemoryCheckpointStore):
    """Tells which runs it was asked for together, and cannot read one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[RunId]] = []
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        self.asked.append(sorted(run_ids))
        self.is_asked.set()
        await self.may_answer.wait()
        if BAD in run_ids:
            raise StoreUnavailable("it cannot be read")
        return await super().load_many(run_ids)


async def filled(*run_ids: str) -> Asked:
    store = Asked()
    for run_id in run_ids:
        await store.commit([Draft.of(run_id).open()])
    return store


async def test_runs_that_are_asked_for_in_one_turn_are_read_by_one_call_each_once() -> None:
    store = await filled("a", "b")
    found = await asyncio.gather(*(load_run(store, RunId(name)) for name in ("a", "b", "none", "a")))
    assert [run and run.row.run_id for run in found] == ["a", "b", None, "a"]
    assert store.asked == [["a", "b", "none"]]


async def test_what_is_asked_for_later_is_read_anew() -> None:
    store = await filled("a")
    before = await load_run(store, RunId("a"))
    assert before is not None
    draft = Draft.of("a")
    opened = draft.open()
    await store.commit([draft.after(opened).add(b"more")])
    after = await load_run(store, RunId("a"))
    assert after is not None
    assert len(after.records) == len(before.records) + 1
    assert len(store.asked) == 2


async def test_many_are_read_a_few_at_a_time() -> None:
    store = await filled()
    await asyncio.gather(*(load_run(store, RunId(f"r{at}")) for at in range(MOST_AT_ONCE + 1)))
    assert sorted(map(len, store.asked)) == [1, MOST_AT_ONCE]


async def test_a_run_that_cannot_be_read_fails_for_itself_alone() -> None:
    store = await filled("a", "b")
    found = await asyncio.gather(*(load_run(store, RunId(name)) for name in ("a", BAD, "b")), return_exceptions=True)
    assert [each.row.run_id if isinstance(each, StoredRun) else type(each) for each in found] == ["a", StoreUnavailable, "b"]
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        await load_run(store, BAD)


async def test_a_task_that_is_cancelled_stops_nobodys_read() -> None:
    store = await filled("a", "b")
    store.may_answer.clear()
    first, second = (asyncio.create_task(load_run(store, RunId(name))) for name in ("a", "b"))
    await store.is_asked.wait()
    first.cancel()
    store.may_answer.set()
    assert (await second) is not None
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_nothing_of_a_read_keeps_a_store_that_nobody_uses() -> None:
    store = await filled("a")
    await load_run(store, RunId("a"))
    left = weakref.ref(store)
    del store
    gc.collect()
    assert left() is None


def test_each_event_loop_reads_for_itself() -> None:
    store = asyncio.run(filled("a"))
    for _ in range(2):
        assert asyncio.run(load_run(store, RunId("a"))) is not None
