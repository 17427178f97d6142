"""Runs in a database that SQLAlchemy reaches: the same tables and statements as the native store of that database.

A database that one of them wrote opens with the other. The native stores are quicker; this one is for programs whose
connections SQLAlchemy makes already: its URLs, its drivers, its engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, cast

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.errors import InvalidSetting
from agent_runtime.ids import RunId
from agent_runtime.journal.records import StoredMessage, StoredRecord, StoredRow, StoredRun
from agent_runtime.journal.store import Answer, Append, BatchStore, CheckpointStore, Guard, Roomy, Searching, Sifting
from agent_runtime.stores.layouts import Layout, Migratable
from agent_runtime.stores.sqlalchemy_engine import Source, driver_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

SCHEMA, PREFIX = "public", "agent_runtime_"


class Tables(CheckpointStore, Migratable, Sifting, Protocol):
    """The store that does the work."""


class SQLAlchemyCheckpointStore(BatchStore):
    """Runs in the database at `url`, or in that of `engine`: Postgres by asyncpg or psycopg, SQLite by aiosqlite."""

    def __init__(
        self,
        url: str | None = None,
        *,
        engine: AsyncEngine | None = None,
        schema: str = SCHEMA,
        prefix: str = PREFIX,
        pooler: bool = False,
        timeout_seconds: float = 5.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`engine`: one of yours; it keeps its settings and stays open. The others are those of the Postgres store."""
        if (url is None) == (engine is None):
            raise InvalidSetting("a SQLAlchemy store has either a URL or an engine=: give one of the two")
        if not timeout_seconds > 0:
            raise InvalidSetting(f"timeout_seconds is a number above 0, found {timeout_seconds!r}")
        source = Source(url, engine)
        driver = driver_of(source.url)
        if driver.dialect == "sqlite":
            if (schema, prefix, pooler) != (SCHEMA, PREFIX, False):
                raise InvalidSetting("schema=, prefix= and pooler= are for Postgres; in SQLite a store is a file of its own")
            from agent_runtime.stores.sqlalchemy_sqlite import SQLiteByEngine

            self._tables: Tables = SQLiteByEngine(source, timeout_seconds=timeout_seconds, clock=clock)
        else:
            from agent_runtime.stores.sqlalchemy_postgres import PostgresByEngine

            self._tables = PostgresByEngine(
                source,
                driver,
                schema=schema,
                prefix=prefix,
                pooler=pooler or engine is not None,  # others use the sessions of an engine too
                timeout_seconds=timeout_seconds,
                clock=clock,
            )
        self.lanes = getattr(self._tables, "lanes", 1)
        self.max_body_bytes = getattr(self._tables, "max_body_bytes", None)

    def __repr__(self) -> str:
        return f"SQLAlchemyCheckpointStore({self._tables!r})"

    # Writing.

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        return await self._tables.commit(appends)

    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        return await self._tables.renew(run_id, guard=guard, seen=seen, wake_at=wake_at)

    async def renew_all(self, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        return await self._tables.renew_all(guards)

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        return await self._tables.post(run_id, message)

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        return await self._tables.delete(run_id, guard=guard)

    # Reading.

    async def latest(self, run_id: RunId) -> StoredRun | None:
        return await self._tables.latest(run_id)

    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        return await self._tables.calls(run_id, since=since)

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        return await self._tables.load_many(run_ids)

    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        return await self._tables.list_unfinished(name=name, limit=limit, after=after)

    async def list_awake(
        self, *, at: int, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        return await self._tables.list_awake(at=at, name=name, limit=limit, after=after)

    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        return await self._tables.list_runs(status=status, limit=limit, after=after)

    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        return await self._tables.list_recent(status=status, before=before, limit=limit)

    async def inbox(self, run_id: RunId) -> list[StoredMessage]:
        return await self._tables.inbox(run_id)

    async def strays(self) -> list[StoredRecord]:
        """The first record that is left of runs whose row is gone."""
        return await self._tables.strays() if isinstance(self._tables, Searching) else []

    async def now(self) -> datetime:
        return await self._tables.now()

    # Its layout.

    async def read_layout(self) -> Layout:
        return await self._tables.read_layout()

    async def migrate(self) -> Layout:
        return await self._tables.migrate()

    # Its connections.

    async def vacuum(self) -> int:
        """Give the room of what was removed back to the file system; 0 where the database does so by itself."""
        return await self._tables.vacuum() if isinstance(self._tables, Roomy) else 0

    def reopen(self) -> SQLAlchemyCheckpointStore:
        again = object.__new__(SQLAlchemyCheckpointStore)
        again._tables, again.lanes = cast(Tables, self._tables.reopen()), self.lanes
        again.max_body_bytes = self.max_body_bytes
        return again

    async def close(self) -> None:
        await self._tables.close()
