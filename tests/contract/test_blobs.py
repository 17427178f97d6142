"""A store with a blob folder passes the contract of all stores, whatever the inner one, with every body a blob or a few.

Beside Postgres it is `make contract STORE=blobs` that says so: `full_blobs.py`.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores.blobs import BlobStore
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.store_contract import StoreContract


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    return blobs


class TestBlobsBesideMemory(StoreContract):
    @pytest.fixture
    async def store(self, folder: Path) -> AsyncIterator[CheckpointStore]:
        store = BlobStore(MemoryCheckpointStore(), folder, above=0)
        yield store
        await store.close()


class TestBlobsBesideSQLite(StoreContract):
    @pytest.fixture
    async def store(self, folder: Path) -> AsyncIterator[CheckpointStore]:
        store = BlobStore(SQLiteCheckpointStore(folder.parent / "runs.db"), folder, above=48)
        yield store
        await store.close()
