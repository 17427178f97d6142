"""The SQLite store over an engine of SQLAlchemy, whose driver has a thread for each connection.

The work of a transaction is the native store's, statement by statement; it runs in SQLAlchemy's way of calling
synchronous code, so that the event loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

from agent_runtime.clock import Clock
from agent_runtime.errors import StoreUnavailable
from agent_runtime.stores import sqlite_path
from agent_runtime.stores.sqlalchemy_engine import Source, driver_error
from agent_runtime.stores.sqlite_file import (
    BUSY_MS,
    Busy,
    Cursor,
    Database,
    Place,
    keep_index,
    lenient,
    set_up,
    translate,
    translated,
    vacuum,
)
from agent_runtime.stores.sqlite_tables import SQLiteTables

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection

T = TypeVar("T")

BUSY_PAUSES = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025)
"""How long to leave a file that is being written alone, time after time; SQLite itself waits so."""


class SQLiteByEngine(SQLiteTables):
    """Runs in the SQLite file that an engine names; one transaction writes at a time, and one reads."""

    def __init__(self, source: Source, *, timeout_seconds: float, clock: Clock) -> None:
        super().__init__(sqlite_path(source.url), clock)
        self._source = source
        self._timeout = timeout_seconds
        self._options = {"pool_size": 2, "max_overflow": 0, "connect_args": {"timeout": 0}}
        self._engine = source.engine(**self._options)
        self._mark = object()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._place = Place(self.path)
        self._is_prepared = False
        self._keeper: sqlite3.Connection | None = None
        """Is there from a commit that failed to the next one that did not: see `keep_index`."""
        self._is_closed = False

    def __repr__(self) -> str:
        return f"{self.path!r} by aiosqlite"

    def reopen(self) -> SQLiteByEngine:
        return SQLiteByEngine(self._source, timeout_seconds=self._timeout, clock=self._clock)

    async def vacuum(self) -> int:
        """Write the file anew without the room of what was removed; how many bytes it is shorter. Writers wait meanwhile."""
        self._enter_loop()
        async with self._writes, self._connected() as connection:
            return await self._patiently(lambda: connection.run_sync(self._vacuum))

    def _vacuum(self, inner: Connection) -> int:
        with translated(self.path):
            return vacuum(Statements(inner), self.path)

    async def close(self) -> None:
        self._is_closed = True
        if not self._source.is_users(self._engine):
            with suppress(Exception):  # it is closed, one way or the other
                await self._engine.dispose()
        self._let_keeper_go()

    # How a transaction is carried.

    async def _write(self, work: Callable[[Database], T]) -> T | None:
        self._enter_loop()
        async with self._writes, self._connected() as connection:
            result = await self._patiently(lambda: connection.run_sync(lambda inner: self._begin(inner, work)))
            try:
                await connection.exec_driver_sql("COMMIT")
            except Exception:
                await self._give_up(connection)
                return None
            if not self._place.is_as_found():
                await self._give_up(connection)
                return None
            self._let_keeper_go()
            return result

    async def _give_up(self, connection: AsyncConnection) -> None:
        """Nothing is known of the connection any more."""
        self._keys.clear()
        if self._keeper is None:
            with suppress(sqlite3.Error):
                self._keeper = keep_index(self._place.path)
        await connection.invalidate()

    def _let_keeper_go(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def _begin(self, inner: Connection, work: Callable[[Database], T]) -> T:
        """Do the work in a transaction that is still open afterwards; where it raises, nothing is left of it."""
        db = Statements(inner)
        try:
            db.execute("BEGIN IMMEDIATE")
            return work(db)
        except BaseException as error:
            self._keys.clear()  # a key given inside the transaction is no run's any more
            if isinstance(error, sqlite3.Error):
                raise translate(error, self.path) from error
            raise

    async def _read(self, work: Callable[[Database], T]) -> T:
        self._enter_loop()
        async with self._reads, self._connected() as connection:
            return await self._patiently(lambda: connection.run_sync(lambda inner: self._look(inner, work)))

    def _look(self, inner: Connection, work: Callable[[Database], T]) -> T:
        db = Statements(inner)
        with translated(self.path):
            db.execute("BEGIN")
            return work(db)

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What the attempt gives once the file is free.

        Waited for here and not in SQLite, which keeps a connection's lock while it waits: whoever then lets go of one of its
        cursors, the garbage collector on any thread for instance, would wait too, and with it all of Python.
        """
        give_up_at = self._clock.monotonic() + BUSY_MS / 1000
        for pause in chain(BUSY_PAUSES, repeat(BUSY_PAUSES[-1])):
            try:
                return await attempt()
            except Busy as error:
                if self._clock.monotonic() > give_up_at:
                    raise StoreUnavailable(
                        f"SQLite file {self.path!r} was locked by another process for {BUSY_MS / 1000:.0f} s; nothing was "
                        "written. Find the process that holds a write transaction open."
                    ) from error
            await self._clock.sleep(pause)
        raise AssertionError("the pauses have no end")

    # Connections.

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            self._engine = self._source.engine(**self._options)
        self._loop = loop
        self._writes, self._reads = asyncio.Semaphore(1), asyncio.Semaphore(1)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        """A connection for one transaction. What is left open of it when it is given back is rolled back."""
        if self._is_closed:
            raise StoreUnavailable(f"the store in SQLite file {self.path!r} was closed; open another")
        if not self._is_prepared:
            self._place.prepare()
            self._is_prepared = True
        self._place.check()
        connection = await self._checked_out()
        try:
            await self._meet(connection)
            yield connection
        except Exception:
            await connection.close()
            raise
        except BaseException:  # cancelled in the middle of a statement, which its thread goes on with
            self._keys.clear()
            with suppress(Exception):
                await connection.invalidate()
            await connection.close()
            raise
        else:
            await connection.close()

    async def _checked_out(self) -> AsyncConnection:
        try:
            return await self._engine.connect()
        except Exception as error:
            found = driver_error(error)
            if isinstance(found, sqlite3.Error):
                raise translate(found, self.path) from found
            raise StoreUnavailable(f"SQLite file {self.path!r} cannot be opened: {found}; nothing was written") from found

    async def _meet(self, connection: AsyncConnection) -> None:
        """Set a fresh connection up, and the file where it is new; eight processes may do so at once."""
        assert connection.sync_connection is not None, "it was started"
        pooled = connection.sync_connection.connection
        if self._mark in pooled.info:
            return
        driver: Any = pooled.driver_connection
        driver.text_factory = lenient
        await self._patiently(lambda: connection.run_sync(self._set_up))
        pooled.info[self._mark] = True

    def _set_up(self, inner: Connection) -> None:
        db = Statements(inner)
        try:
            with translated(self.path):
                set_up(db, self.path)
                db.execute("PRAGMA busy_timeout = 0")
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise


class Statements:
    """A connection of SQLAlchemy in the form of one of `sqlite3`, as far as the work of a transaction uses it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor:
        return self._carry(sql, tuple(parameters))

    def executemany(self, sql: str, parameters: Sequence[Sequence[Any]], /) -> Cursor:
        return self._carry(sql, [tuple(values) for values in parameters])

    def _carry(self, sql: str, values: Any) -> Cursor:
        try:
            found: Cursor = self._connection.exec_driver_sql(sql, values)
        except Exception as error:
            raise driver_error(error) from error
        return found
