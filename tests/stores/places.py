"""Every store there is, as a place where runs are kept: with its real server or its real file."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from agent_runtime.clock import Clock
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
from tests.bench import Place
from tests.redis_servers import RedisCluster, RedisServer
from tests.redis_store.bench import store_on
from tests.schemas import Schemas
from tests.servers import Server

IN_PROCESS = ("memory", "sqlite")
SERVED = ("postgres", "sqlalchemy+asyncpg", "sqlalchemy+psycopg", "sqlalchemy+aiosqlite", "redis", "redis cluster")
STORES = (*IN_PROCESS, *SERVED)
OTHERS = ("sqlalchemy+psycopg", "sqlalchemy+aiosqlite", "redis", "redis cluster")
"""Those whose way to their server is like no other's; Postgres itself has tests of its own for the cases."""

Open: TypeAlias = "Callable[[], CheckpointStore]"


class Somewhere(Place):
    """A place that opens its stores as it is told. Who looks connects once an event loop: that takes longer than to look."""

    def __init__(self, kind: str, folder: Path, make: Open) -> None:
        super().__init__(kind, folder)
        self._make = make
        self._lookers: dict[asyncio.AbstractEventLoop, CheckpointStore] = {}

    def open(self, clock: Clock | None = None) -> CheckpointStore:
        store = self._make()
        self._opened.append(store)
        return store

    def looker(self) -> CheckpointStore:
        loop = asyncio.get_running_loop()
        if loop not in self._lookers:
            self._lookers[loop] = self.open()
        return self._lookers[loop]


@asynccontextmanager
async def place_on(kind: str, folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """A fresh place on a store of that kind; its server is started when it is first asked for. Every run in it verifies."""
    if kind in IN_PROCESS:
        place = Place(kind, folder)
        yield place
        await place.close()
    elif kind.startswith("redis"):
        place = Somewhere(kind, folder, _on_redis(kind, request))
        yield place
        await place.close()
    elif kind.endswith("aiosqlite"):
        place = Somewhere(kind, folder, lambda: SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{folder}/runs.db"))
        yield place
        await place.close()
    else:
        server: Server = request.getfixturevalue("one_postgres")
        schemas: Schemas = request.getfixturevalue("schemas")
        async with schemas.lent(server.url) as schema:
            place = Somewhere(kind, folder, _on_postgres(kind, server.url, schema))
            yield place
            await place.close()


def _on_redis(kind: str, request: pytest.FixtureRequest) -> Open:
    prefix, is_cluster = f"t{secrets.token_hex(8)}", kind == "redis cluster"
    server: RedisServer | RedisCluster = request.getfixturevalue("one_cluster" if is_cluster else "redis_server")
    return lambda: store_on(server.url, is_cluster=is_cluster, prefix=prefix, may_lose_writes=False)


def _on_postgres(kind: str, url: str, schema: str) -> Open:
    _, _, driver = kind.partition("+")
    if not driver:
        return lambda: PostgresCheckpointStore(url, schema=schema)
    return lambda: SQLAlchemyCheckpointStore(url.replace(":", f"+{driver}:", 1), schema=schema)
