"""The Postgres store over an engine of SQLAlchemy: its connections are taken from the pool for a statement and given back.

A statement is sent as the driver takes it. One that takes too long, or whose caller is cancelled, loses its connection:
nobody knows what became of it.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet, ref

from agent_runtime.clock import Clock
from agent_runtime.errors import AgentRuntimeError, InvalidSetting, StoreUnavailable
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.stores.postgres_errors import Fate, fate_of, leads_to_primary, state_of, translate
from agent_runtime.stores.postgres_link import (
    READS_AT_ONCE,
    SETTINGS,
    WAITS_FOR_STANDBYS,
    WRITES_AT_ONCE,
    Connection,
    Lender,
    unreachable,
)
from agent_runtime.stores.sqlalchemy_engine import Driver, Source, driver_error

if TYPE_CHECKING:
    from sqlalchemy import CursorResult
    from sqlalchemy.ext.asyncio import AsyncConnection

T = TypeVar("T")

_STALE_TRIES = 16
"""How many connections in a row may have been ended while they lay in the pool."""


class PostgresByEngine(PostgresCheckpointStore):
    """The native store, whose connections SQLAlchemy makes."""

    def __init__(
        self,
        source: Source,
        driver: Driver,
        *,
        schema: str,
        prefix: str,
        pooler: bool,
        timeout_seconds: float,
        clock: Clock,
    ) -> None:
        self._source, self._driver = source, driver
        plain = source.url.replace(f"+{driver.name}", "", 1)
        super().__init__(plain, schema=schema, prefix=prefix, pooler=pooler, timeout_seconds=timeout_seconds, clock=clock)

    def __repr__(self) -> str:
        return f"{self._place!r} by {self._driver.name}"

    def _make_link(self) -> Lender:
        return EngineLink(
            self._source,
            _WIRES[self._driver.package],
            self._place,
            pooler=self._pooler,
            timeout_seconds=self._timeout,
            greet=self._greet,
            forget=self._keys.clear,  # another server may answer next
        )

    def reopen(self) -> PostgresByEngine:
        again = PostgresByEngine(
            self._source,
            self._driver,
            schema=self._schema,
            prefix=self._prefix,
            pooler=self._pooler,
            timeout_seconds=self._timeout,
            clock=self._clock,
        )
        again._is_set_up, again._layout = self._is_set_up, self._layout
        return again


class EngineLink:
    """The connections of one store object, lent from the pool of an engine."""

    def __init__(
        self,
        source: Source,
        wire: Wire,
        place: str,
        *,
        pooler: bool,
        timeout_seconds: float,
        greet: Callable[[Connection], Awaitable[None]],
        forget: Callable[[], None],
    ) -> None:
        """`greet` is called with each fresh connection, `forget` when one is dropped: what it did is not known."""
        self._source = source
        self._wire = wire
        self._place = place
        self._timeout = timeout_seconds
        self._options = {
            "pool_size": WRITES_AT_ONCE + READS_AT_ONCE,
            "max_overflow": 0,
            "connect_args": wire.arguments(pooler=pooler, timeout_seconds=timeout_seconds),
        }
        self._greet = greet
        self._forget = forget
        self._engine = source.engine(**self._options)
        self._mark = object()
        self._held: WeakSet[Any] = WeakSet()
        self._interrupted: WeakSet[Any] = WeakSet()
        """Connections whose last commit did not wait for its standbys to the end."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def write(self, work: Callable[[Connection], Awaitable[T]]) -> T | None:
        """What the work gave, once it is durable; None where nobody knows. Raises where nothing was written."""
        self._enter_loop()
        async with self._writes:
            connection = await self._connected()
            try:
                result = await work(connection)
            except Exception as error:
                found = driver_error(error)
                fate = fate_of(found)
                await self._take_back(connection, is_sound=leads_to_primary(found))
                if fate is Fate.UNKNOWN:
                    return None
                raise translate(found, self._place) from found
            except BaseException:
                await self._drop(connection)
                raise
            if connection.driver in self._interrupted:
                await self._drop(connection)
                return None
            await self._take_back(connection, is_sound=True)
            return result

    async def read(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """What the work found."""
        self._enter_loop()
        async with self._reads:
            connection = await self._connected()
            try:
                result = await work(connection)
            except AgentRuntimeError:
                await self._take_back(connection, is_sound=True)
                raise
            except Exception as error:
                found = driver_error(error)
                await self._take_back(connection, is_sound=fate_of(found) is not Fate.UNKNOWN)
                raise translate(found, self._place) from found
            except BaseException:
                await self._drop(connection)
                raise
            await self._take_back(connection, is_sound=True)
            return result

    async def close(self) -> None:
        self._is_closed = True
        self._held.clear()
        if not self._source.is_users(self._engine):
            with suppress(Exception):  # it is closed, one way or the other
                await self._engine.dispose()

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            for held in self._held:
                with suppress(Exception):  # its own loop is closed
                    self._wire.finish(held)
            self._held.clear()
            self._engine = self._source.engine(**self._options)
        self._loop = loop
        self._writes, self._reads = asyncio.Semaphore(WRITES_AT_ONCE), asyncio.Semaphore(READS_AT_ONCE)

    async def _connected(self) -> Lent:
        """One that is known to be good as far as can be known without asking the server."""
        for _ in range(_STALE_TRIES):
            lent = await self._checked_out()
            if self._wire.is_gone(lent.driver):
                await self._drop(lent)
                continue
            if self._mark not in lent.info:
                await self._meet(lent)
            return lent
        raise StoreUnavailable(f"{self._place} ends every connection at once; find out why in its log")

    async def _meet(self, lent: Lent) -> None:
        self._forget()
        self._wire.watch(lent.driver, self._interrupted.add)
        try:
            await self._greet(lent)
        except AgentRuntimeError:
            await self._drop(lent)
            raise
        except Exception as error:
            await self._drop(lent)
            found = driver_error(error)
            raise translate(found, self._place) from found
        except BaseException:
            await self._drop(lent)
            raise
        lent.info[self._mark] = True
        if not self._source.is_users(self._engine):
            self._held.add(lent.driver)

    async def _checked_out(self) -> Lent:
        if self._is_closed:
            raise StoreUnavailable(f"the store at {self._place} was closed; open another")
        try:
            async with asyncio.timeout(self._timeout):
                connection = await self._engine.connect()
        except TimeoutError as error:
            raise StoreUnavailable(
                f"there was no connection to {self._place} within {self._timeout} s; see that the server runs and can be "
                "reached from here, and that the engine has a connection free"
            ) from error
        except Exception as error:
            found = driver_error(error)
            if isinstance(found, ValueError | TypeError) and not state_of(found):
                # Without its cause: the driver may quote the URL.
                raise InvalidSetting(
                    f"{self._place}: the driver refuses the URL ({type(found).__name__}); correct it"
                ) from None
            assert isinstance(found, Exception), "nobody was cancelled"
            raise unreachable(found, self._place) from found
        return Lent(connection, self._wire, self._timeout)

    async def _take_back(self, lent: Lent, *, is_sound: bool) -> None:
        if is_sound and not self._wire.is_gone(lent.driver):
            await lent.give_back()
        else:
            await self._drop(lent)

    async def _drop(self, lent: Lent) -> None:
        self._forget()
        with suppress(Exception):  # whatever state it is in, it is not used again
            self._wire.finish(lent.driver)
        with suppress(Exception):
            await lent.invalidate()


class Lent:
    """A connection while it is lent: what the store uses of a connection, by the means of SQLAlchemy."""

    def __init__(self, connection: AsyncConnection, wire: Wire, timeout_seconds: float) -> None:
        self._connection = connection
        self._wire = wire
        self._timeout = timeout_seconds
        assert connection.sync_connection is not None, "it was started"
        pooled = connection.sync_connection.connection
        self.info = pooled.info
        """What is kept of it for as long as it lives in the pool."""
        self.driver: Any = pooled.driver_connection

    async def fetch(self, query: str, *args: object, timeout: float | None = None) -> list[Any]:
        return list((await self._carry(query, args, timeout)).fetchall())

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> None:
        await self._carry(query, args, timeout)

    @asynccontextmanager
    async def transaction(self, *, isolation: str | None = None, readonly: bool = False) -> AsyncIterator[None]:
        level = "" if isolation is None else f" ISOLATION LEVEL {isolation.replace('_', ' ').upper()}"
        await self.execute(f"BEGIN{level}{' READ ONLY' if readonly else ''}")
        try:
            yield
        except Exception:
            with suppress(Exception):  # what went wrong before is what is told
                await self.execute("ROLLBACK")
            raise
        await self.execute("COMMIT")

    async def give_back(self) -> None:
        await self._connection.close()

    async def invalidate(self) -> None:
        try:
            await self._connection.invalidate()
        finally:
            await self._connection.close()

    async def _carry(self, query: str, args: tuple[object, ...], timeout: float | None) -> CursorResult[Any]:
        alarm = asyncio.get_running_loop().call_later(timeout or self._timeout, self._wire.sever, self.driver)
        try:
            return await self._connection.exec_driver_sql(*self._wire.form(query, args))
        finally:
            alarm.cancel()


class Wire(ABC):
    """What differs between drivers."""

    @abstractmethod
    def arguments(self, *, pooler: bool, timeout_seconds: float) -> dict[str, Any]:
        """What a connection of ours is made with."""

    @abstractmethod
    def form(self, query: str, args: tuple[object, ...]) -> tuple[str, Any]:
        """A statement and its values as the driver takes them."""

    @abstractmethod
    def is_gone(self, held: Any) -> bool:
        """Whether a connection on which nothing is under way is known to be of no use any more."""

    @abstractmethod
    def watch(self, held: Any, on_interrupted: Callable[[Any], None]) -> None:
        """Call it with the connection where a commit of it did not wait for its standbys to the end."""

    @abstractmethod
    def sever(self, held: Any) -> None:
        """End a connection, so that whoever waits for a statement on it hears of it."""

    def finish(self, held: Any) -> None:
        """End a connection that nobody uses, without a word to the server."""
        self.sever(held)


class AsyncpgWire(Wire):
    """asyncpg, which takes statements as they stand."""

    def arguments(self, *, pooler: bool, timeout_seconds: float) -> dict[str, Any]:
        if not pooler:
            return {"server_settings": SETTINGS, "timeout": timeout_seconds}
        # A prepared statement without a name belongs to nobody's session.
        unnamed = {"statement_cache_size": 0, "prepared_statement_cache_size": 0, "prepared_statement_name_func": str}
        return {"timeout": timeout_seconds, **unnamed}

    def form(self, query: str, args: tuple[object, ...]) -> tuple[str, Any]:
        return query, args

    def is_gone(self, held: Any) -> bool:
        return bool(held.is_closed())

    def watch(self, held: Any, on_interrupted: Callable[[Any], None]) -> None:
        def hear(connection: Any, said: Any) -> None:
            if said.server_source_function == WAITS_FOR_STANDBYS:
                on_interrupted(connection)

        held.add_log_listener(hear)

    def sever(self, held: Any) -> None:
        held.terminate()


class PsycopgWire(Wire):
    """psycopg, which has names for values."""

    def arguments(self, *, pooler: bool, timeout_seconds: float) -> dict[str, Any]:
        waits = {"connect_timeout": max(2, round(timeout_seconds))}
        if pooler:
            return {"prepare_threshold": None, **waits}
        settings = (f"-c {name}={value}".replace(" ", r"\ ").replace(r"\ ", " ", 1) for name, value in SETTINGS.items())
        return {"options": " ".join(settings), **waits}

    def form(self, query: str, args: tuple[object, ...]) -> tuple[str, Any]:
        return (_named(query), {f"p{n}": value for n, value in enumerate(args, start=1)}) if args else (query, None)

    def is_gone(self, held: Any) -> bool:
        if held.closed:
            return True
        with _line(held) as line:
            try:
                # Nobody asked for anything: what is there is the end of the session, or word of it.
                return line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) in (b"", b"E")
            except BlockingIOError:
                return False
            except OSError:
                return True

    def watch(self, held: Any, on_interrupted: Callable[[Any], None]) -> None:
        of = ref(held)  # the handler is held by the connection itself

        def hear(said: Any) -> None:
            if said.source_function == WAITS_FOR_STANDBYS and (connection := of()) is not None:
                on_interrupted(connection)

        held.add_notice_handler(hear)

    def sever(self, held: Any) -> None:
        with _line(held) as line:
            line.shutdown(socket.SHUT_RDWR)

    def finish(self, held: Any) -> None:
        held.pgconn.finish()


def _line(held: Any) -> socket.socket:
    """The socket of a connection of libpq; its own stays as it is."""
    return socket.socket(fileno=os.dup(held.pgconn.socket))


@cache
def _named(query: str) -> str:
    return re.sub(r"\$(\d+)", r"%(p\1)s", query.replace("%", "%%"))


_WIRES = {"asyncpg": AsyncpgWire(), "psycopg[binary]": PsycopgWire()}
