"""The store in a SQLite file passes the contract."""

import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from agent_runtime.clock import Clock, SystemClock
from agent_runtime.errors import StoreUnavailable
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.offload import Serial, SerialThread, ThreadOffload
from agent_runtime.testing.store_contract import Draft, StoreContract

T = TypeVar("T")


class TestSQLiteStore(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[CheckpointStore]:
        from agent_runtime.stores.sqlite import SQLiteCheckpointStore

        store = SQLiteCheckpointStore(tmp_path / "runs.db")
        yield store
        await store.close()


class TestSQLiteStoreOnItsThread(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[CheckpointStore]:
        from agent_runtime.stores.sqlite import SQLiteCheckpointStore

        store = SQLiteCheckpointStore(tmp_path / "runs.db", inline=False)
        yield store
        await store.close()


class SlowDisk(SystemClock):
    """A clock by which every commit takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self._passed = itertools.count()
        self.monotonic = lambda: float(next(self._passed))


@pytest.mark.parametrize(("clock", "is_slow"), [(SystemClock(), False), (SlowDisk(), True)])
async def test_a_disk_that_is_slow_is_waited_for_on_the_thread(tmp_path: Path, clock: Clock, is_slow: bool) -> None:
    from agent_runtime.stores.sqlite import QUICK_COMMIT_SECONDS, SQLiteCheckpointStore

    offload = CountingOffload()
    store = SQLiteCheckpointStore(tmp_path / "runs.db", clock=clock, offload=offload)
    took = []
    for n in range(8):
        began = time.perf_counter()
        [answer] = await store.commit([Draft.of(f"run-{n}").open()])
        took.append(time.perf_counter() - began)
        assert answer.kind is AnswerKind.OK
    await store.close()
    if is_slow or max(took) < QUICK_COMMIT_SECONDS:  # by its own clock the disk may really be slow just now
        assert (offload.handed_over > 0) is is_slow


class CountingOffload(ThreadOffload):
    """Counts what is handed to the threads that it gives out."""

    def __init__(self) -> None:
        super().__init__()
        self.handed_over = 0

    def serial(self, name: str) -> Serial:
        return CountingSerial(name, self)


class CountingSerial(SerialThread):
    def __init__(self, name: str, counted: CountingOffload) -> None:
        super().__init__(name)
        self._counted = counted

    async def run(self, work: Callable[[], T]) -> T:
        self._counted.handed_over += 1
        return await super().run(work)


async def test_a_batch_that_failed_for_certain_may_be_sent_again_run_by_run(tmp_path: Path) -> None:
    from agent_runtime.stores.sqlite import SQLiteCheckpointStore

    store = SQLiteCheckpointStore(tmp_path / "runs.db")
    good, refused_by_the_table = Draft.of("good").open(), Draft.of("bad", epoch=0).open()
    with pytest.raises(StoreUnavailable):
        await store.commit([good, refused_by_the_table])
    other = store.reopen()
    await other.commit([Draft.of("other").open(b"of another run")])
    assert await store.calls(good.row.run_id) == []
    assert [answer.kind for answer in await store.commit([good])] == [AnswerKind.OK]
    await other.close()
    await store.close()
