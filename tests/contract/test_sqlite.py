"""The store in a SQLite file passes the contract."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.testing.store_contract import StoreContract


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
