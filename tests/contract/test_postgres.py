"""The store in Postgres passes the contract, on every server that is there and behind a pooler."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.testing.store_contract import StoreContract
from tests.conftest import Servers
from tests.schemas import Schemas
from tests.servers import Pooler, end_sessions, fresh_schema, own_origins


class TestPostgresStore(StoreContract):
    async def cut_off(self, store: CheckpointStore) -> None:
        assert isinstance(store, PostgresCheckpointStore)
        await end_sessions(store._url, store._schema)

    @pytest.fixture
    async def store(self, postgres_url: str, schemas: Schemas) -> AsyncIterator[CheckpointStore]:
        async with schemas.lent(postgres_url) as schema:
            store = PostgresCheckpointStore(postgres_url, schema=schema)
            yield store
            await store.close()


async def test_a_store_is_migrated_behind_a_pooler(pooler: Pooler, servers: Servers) -> None:
    async with fresh_schema(pooler.url, pooler=True) as schema:
        server = servers(own_origins()[0])
        server.sql(f"CREATE SCHEMA {schema}")
        server.psql_file(Path(__file__).parent.parent / "golden" / "layout-1" / "postgres.sql", schema=schema)
        stores = [PostgresCheckpointStore(pooler.url, schema=schema, pooler=True) for _ in range(3)]
        before = [row.run_id for row in await stores[0].list_runs()]
        found = await asyncio.gather(*(store.migrate() for store in stores))
        assert found[0].newest == (await stores[0].read_layout()).found
        assert sorted(row.run_id for row in await stores[1].list_recent()) == before
        for store in stores:
            await store.close()


class TestPostgresStoreBehindAPooler(StoreContract):
    @pytest.fixture
    async def store(self, pooler: Pooler, schemas: Schemas) -> AsyncIterator[CheckpointStore]:
        async with schemas.lent(pooler.url) as schema:
            store = PostgresCheckpointStore(pooler.url, schema=schema, pooler=True)
            yield store
            await store.close()
