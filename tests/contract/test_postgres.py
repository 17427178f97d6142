"""The store in Postgres passes the contract, on every server that is there and behind a pooler."""

from collections.abc import AsyncIterator

import pytest

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.testing.store_contract import StoreContract
from tests.servers import Pooler, end_sessions, fresh_schema


class TestPostgresStore(StoreContract):
    async def cut_off(self, store: CheckpointStore) -> None:
        assert isinstance(store, PostgresCheckpointStore)
        await end_sessions(store._url, store._schema)

    @pytest.fixture
    async def store(self, postgres_url: str) -> AsyncIterator[CheckpointStore]:
        async with fresh_schema(postgres_url) as schema:
            store = PostgresCheckpointStore(postgres_url, schema=schema)
            yield store
            await store.close()


class TestPostgresStoreBehindAPooler(StoreContract):
    @pytest.fixture
    async def store(self, pooler: Pooler) -> AsyncIterator[CheckpointStore]:
        async with fresh_schema(pooler.url, pooler=True) as schema:
            store = PostgresCheckpointStore(pooler.url, schema=schema, pooler=True)
            yield store
            await store.close()
