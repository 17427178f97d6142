"""The store in a SQLite file passes the contract."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_runtime.errors import StoreUnavailable
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.testing.store_contract import Draft, StoreContract


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
