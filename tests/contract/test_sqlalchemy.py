"""The store over SQLAlchemy passes the contract, with each driver."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
from agent_runtime.stores.sqlalchemy_postgres import PostgresByEngine
from agent_runtime.testing.store_contract import StoreContract
from agent_runtime.testing.store_contract.crowds import Crowding
from agent_runtime.testing.store_contract.messages import Posting
from agent_runtime.testing.store_contract.writes import Batching, Writing
from tests.schemas import Schemas
from tests.servers import Pooler, Server, end_sessions


class OnServer(StoreContract):
    """What the stores on a server share."""

    async def cut_off(self, store: CheckpointStore) -> None:
        assert isinstance(store, SQLAlchemyCheckpointStore)
        inner = store._tables
        assert isinstance(inner, PostgresByEngine)
        await end_sessions(inner._url, inner._schema)


class TestByAsyncpg(OnServer):
    @pytest.fixture
    async def store(self, one_postgres: Server, schemas: Schemas) -> AsyncIterator[CheckpointStore]:
        async with schemas.lent(one_postgres.url) as schema:
            store = SQLAlchemyCheckpointStore(by("asyncpg", one_postgres.url), schema=schema)
            yield store
            await store.close()


class TestByPsycopg(OnServer):
    @pytest.fixture
    async def store(self, one_postgres: Server, schemas: Schemas) -> AsyncIterator[CheckpointStore]:
        async with schemas.lent(one_postgres.url) as schema:
            store = SQLAlchemyCheckpointStore(by("psycopg", one_postgres.url), schema=schema)
            yield store
            await store.close()


class Pooled(Writing, Batching, Crowding, Posting):
    """What a pooler can spoil: writes, and many at once."""


class TestByAsyncpgBehindAPooler(Pooled):
    @pytest.fixture
    async def store(self, pooler: Pooler, schemas: Schemas) -> AsyncIterator[CheckpointStore]:
        async with schemas.lent(pooler.url) as schema:
            store = SQLAlchemyCheckpointStore(by("asyncpg", pooler.url), schema=schema, pooler=True)
            yield store
            await store.close()


class TestByAiosqlite(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[CheckpointStore]:
        store = SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{tmp_path}/runs.db")
        yield store
        await store.close()


def by(driver: str, url: str) -> str:
    return url.replace("postgresql:", f"postgresql+{driver}:", 1)
