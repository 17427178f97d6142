"""Those who wait for messages to runs cost next to nothing while none comes, and leave nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agent_runtime import doorbell as doorbells
from agent_runtime.doorbell import doorbell
from agent_runtime.ids import RunId
from agent_runtime.journal.store import CheckpointStore, Ear
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.stores.sqlite_ear import SQLiteEar
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.store_contract.witness import opened
from tests.bench import until
from tests.doorbell.waiting import (
    RUN,
    SECONDS,
    CountingEars,
    Minimal,
    PassingEar,
    bell_tasks,
    post,
    until_nobody_listens,
    wait,
)


async def test_nobody_waits_and_nothing_is_left(store: CheckpointStore, tmp_path: Path) -> None:
    draft = await opened(store)
    await post(store, draft)
    files = []
    for _ in range(3):
        assert await asyncio.wait_for(doorbell(store).wait(RUN, seen=0), SECONDS) == 1
        await until_nobody_listens()
        files.append(open_files(tmp_path))
        assert [ear for ear in vars(store)["_ears"] if not is_closed(ear)] == []
    assert files[0] == files[2], "SQLite keeps one for the next connection"


async def test_one_connection_to_the_file_is_enough_for_all_who_wait(tmp_path: Path) -> None:
    store = SQLiteCheckpointStore(tmp_path / "runs.db")
    drafts = [await opened(store, f"run-{i}") for i in range(20)]
    before = open_files(tmp_path).count(str(store.path))
    waiting = [wait(doorbell(store), draft.run_id) for draft in drafts]
    await until(lambda: open_files(tmp_path).count(str(store.path)) > before)
    assert open_files(tmp_path).count(str(store.path)) == before + 1
    for task in waiting:
        task.cancel()
    await until_nobody_listens()
    await store.close()
    assert open_files(tmp_path) == []


async def test_a_wait_that_is_cancelled_leaves_nothing(store: CheckpointStore) -> None:
    await opened(store)
    bell = doorbell(store)
    waiting = [wait(bell) for _ in range(10)]
    await until(lambda: len(bell_tasks()) == 1)
    for task in waiting:
        task.cancel()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    assert bell._guests == {}
    await until_nobody_listens()


async def test_somebody_who_comes_back_at_once_finds_the_same_ear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbells, "LINGER_SECONDS", 5.0)
    store = CountingEars(MemoryCheckpointStore())
    draft = await opened(store)
    for count in range(1, 6):
        await post(store, draft, b"%d" % count)
        assert await asyncio.wait_for(doorbell(store).wait(RUN, seen=count - 1), SECONDS) == count
    assert store.listened == 1


async def test_a_closed_store_lets_go_of_its_ear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbells, "LINGER_SECONDS", 5.0)
    store = SQLiteCheckpointStore(tmp_path / "runs.db")
    draft = await opened(store)
    await post(store, draft)
    await asyncio.wait_for(doorbell(store).wait(RUN, seen=0), SECONDS)
    assert bell_tasks(), "the ear is kept for a moment"
    await store.close()
    assert open_files(tmp_path) == []


async def test_a_bell_is_one_of_its_store_and_keeps_no_store_that_nobody_uses() -> None:
    store = MemoryCheckpointStore()
    assert doorbell(store) is doorbell(store)
    assert doorbell(store) is not doorbell(store.reopen())
    known = weakref.ref(store)
    del store
    gc.collect()
    assert known() is None


def test_each_event_loop_has_a_bell_of_its_own_and_those_of_loops_that_ended_are_forgotten(tmp_path: Path) -> None:
    store = SQLiteCheckpointStore(tmp_path / "runs.db")
    seen = []

    async def use(count: int) -> None:
        draft = await opened(store, f"run-{count}")
        waiting = wait(doorbell(store), draft.run_id)
        await asyncio.sleep(0.01)
        await post(store, draft)
        assert await asyncio.wait_for(waiting, SECONDS) == 1
        seen.append(doorbell(store))

    for count in range(3):
        asyncio.run(use(count))
    assert len(set(map(id, seen))) == 3
    assert len(doorbells._BELLS[store]) == 1
    asyncio.run(store.close())


async def test_a_bell_does_not_drive_a_clock_that_sleepers_move(clock: ManualClock) -> None:
    store = Minimal()
    draft = await opened(store)
    waiting = wait(doorbell(store, clock))
    await until(lambda: clock.sleepers == 1)
    assert clock.monotonic() == 0
    await post(store, draft)
    await clock.sleep(1)
    assert await asyncio.wait_for(waiting, SECONDS) == 1
    assert clock.monotonic() == 1


async def test_a_store_that_has_to_be_asked_is_asked_less_often_the_longer_it_takes(clock: ManualClock) -> None:
    store = Slow(Minimal(), clock, seconds=0.5)
    await opened(store)
    waiting = wait(doorbell(store, clock))
    await until(lambda: clock.sleepers == 1)
    asked = store.asked
    clock.advance(doorbells.RESTS * 0.5 - 0.1)
    await asyncio.sleep(0.05)
    assert store.asked == asked
    clock.advance(0.2)
    await until(lambda: store.asked > asked)
    waiting.cancel()


class Slow(CountingEars):
    """Takes its time, by a clock, to say how many messages there are."""

    def __init__(self, inner: CheckpointStore, clock: ManualClock, seconds: float) -> None:
        super().__init__(inner)
        self.asked = 0
        self._clock, self._seconds = clock, seconds

    async def listen(self, ring: Callable[[], None]) -> Ear:
        ear = await super().listen(ring)
        return SlowEar(ear, self)

    def take_time(self) -> None:
        self.asked += 1
        self._clock.advance(self._seconds)


class SlowEar(PassingEar):
    def __init__(self, ear: Ear, store: Slow) -> None:
        super().__init__(ear)
        self._store = store

    async def posted(self, run_ids: Sequence[RunId]) -> list[int | None]:
        self._store.take_time()
        return await super().posted(run_ids)


def is_closed(ear: SQLiteEar) -> bool:
    try:
        ear._db.execute("SELECT 1")
    except sqlite3.ProgrammingError:
        return True
    return False


def open_files(folder: Path) -> list[str]:
    """The files of the folder that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return sorted(found)
