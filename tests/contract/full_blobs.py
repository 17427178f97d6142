"""A store with a blob folder beside Postgres passes the contract: `make contract STORE=blobs`, too long for every day."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores.blobs import BlobStore
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.testing.store_contract import StoreContract
from tests.schemas import Schemas
from tests.servers import Server


class TestBlobsBesidePostgres(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path, one_postgres: Server, schemas: Schemas) -> AsyncIterator[CheckpointStore]:
        folder = tmp_path / "blobs"
        folder.mkdir()
        async with schemas.lent(one_postgres.url) as schema:
            store = BlobStore(PostgresCheckpointStore(one_postgres.url, schema=schema), folder, above=1024)
            yield store
            await store.close()
