"""Workers of a sweep on Postgres: one that dies at a write takes its connection along, with the write on its way.

Dying before a write, its request is lost between the two; dying after it, the request arrives and its reply is lost. So the
server sees what it sees of a worker that is killed: a connection that ends in the middle.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from agent_runtime.errors import InvalidSetting, StoreUnavailable
from agent_runtime.journal.store import Answer, Append, CheckpointStore
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.testing.faults import FaultyStore, Life, Where
from agent_runtime.testing.tcp_proxy import How, Strike, TcpProxy, Way


class Severing:
    """A server to sweep on, for as long as the block lasts: the stores in it, and each worker's way to them."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.hostname is None or "@" not in parts.netloc:
            raise InvalidSetting("the sweep's server is postgresql://USER@HOST:PORT/DATABASE")
        self._url = url
        self._proxy = TcpProxy(parts.hostname, parts.port or 5432)
        self._parts = parts
        self._schemas: list[str] = []
        self._strikes: list[Strike] = []

    async def __aenter__(self) -> Severing:
        await self._proxy.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._proxy.__aexit__(kind, error, trace)
        await self._drop_schemas()
        whole = sum(not strike.struck.is_set() for strike in self._strikes)
        if whole and error is None:
            raise InvalidSetting(
                f"{whole} writes that were to be cut passed whole: expected to see them on their way to the server, found "
                "nothing of them there; let the URL say sslmode=disable"
            )

    async def make_store(self) -> CheckpointStore:
        """An empty store, in a schema that goes with the block."""
        self._schemas.append(f"sweep_{secrets.token_hex(8)}")
        return PostgresCheckpointStore(self._url, schema=self._schemas[-1])

    def open_store(self, store: CheckpointStore, life: Life) -> CheckpointStore:
        """A worker's way to the latest store."""
        user, _, _ = self._parts.netloc.rpartition("@")
        through = self._parts._replace(netloc=f"{user}@127.0.0.1:{self._proxy.port}").geturl()
        return _SeveredStore(PostgresCheckpointStore(through, schema=self._schemas[-1]), life, self._strike)

    def _strike(self, write: Sequence[Append], way: Way) -> None:
        """Cut the connection that carries this write and no other: a head is drawn from all that stands before it."""
        self._strikes.append(self._proxy.strike(How.LOST, way, matching=write[0].row.head))

    async def _drop_schemas(self) -> None:
        import asyncpg

        connection: Any = await asyncpg.connect(self._url)
        try:
            for schema in self._schemas:
                await connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        finally:
            await connection.close()


class _SeveredStore(FaultyStore):
    """The store, whose connection is cut in the write at which its worker dies."""

    def __init__(self, inner: CheckpointStore, life: Life, strike: Callable[[Sequence[Append], Way], None]) -> None:
        super().__init__(inner, life=life)
        self._strike = strike
        self._in_flight: set[asyncio.Future[None]] = set()

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        flight: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_flight.add(flight)
        try:
            return await self._commit(appends)
        finally:
            self._in_flight.discard(flight)
            flight.set_result(None)

    async def close(self) -> None:
        """Once the server has done what it was sent: a worker that dies does not take back what is on its way."""
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        await super().close()

    async def _commit(self, appends: Sequence[Append]) -> list[Answer]:
        if self.life.ends_next(Where.BEFORE_WRITE):
            self._strike(appends, Way.TO_SERVER)
            with suppress(StoreUnavailable):  # whatever the store makes of it, nobody is left to be told
                await self.inner.commit(appends)
        elif self.life.ends_next(Where.AFTER_WRITE):
            self._strike(appends, Way.TO_CLIENT)
        return await super().commit(appends)

    def reopen(self) -> FaultyStore:
        again = _SeveredStore(self.inner.reopen(), self.life, self._strike)
        again.counts = self.counts
        return again
