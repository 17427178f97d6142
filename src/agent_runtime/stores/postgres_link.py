"""Connections to one Postgres: opened when needed, lent for one statement, dropped once nobody knows what they did.

Whoever writes has other places than whoever reads, so that the reads of many runs hold up no commit. A connection belongs
to the event loop that opened it; on another loop the link begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from agent_runtime.errors import AgentRuntimeError, InvalidSetting, ReadOnlyStore, StoreRefused, StoreUnavailable
from agent_runtime.stores.postgres_errors import Fate, fate_of, leads_to_primary, refused_as_replica, state_of, translate
from agent_runtime.stores.postgres_url import each_host, place_of

T = TypeVar("T")

WRITES_AT_ONCE = 2
READS_AT_ONCE = 2
CLOSE_SECONDS = 2.0
WAITS_FOR_STANDBYS = "SyncRepWaitForLSN"
"""The function of Postgres that warns, and then reports success, where the wait for a standby was interrupted."""
APPLICATION = "agent-runtime"
# For a session of our own. A plan is made once, perhaps while the tables are empty, and has to serve when they are full:
# by index, row by row. What a frozen process holds locked is let go in time.
SETTINGS = {
    "application_name": APPLICATION,
    "client_min_messages": "warning",
    "default_transaction_isolation": "read committed",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "idle_in_transaction_session_timeout": "10s",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "search_path": "pg_catalog",
}


_REFUSALS = (
    "password authentication failed",
    "no password supplied",
    '" does not exist',
    "no pg_hba.conf entry",
    "not permitted to log in",
    "permission denied for database",
)
"""What a server says to libpq of a way in that is wrong, which tells no SQLSTATE of it."""


class Connection(Protocol):
    """What we use of a connection: that of asyncpg, or one that behaves so."""

    async def fetch(self, query: str, *args: object, timeout: float | None = None) -> list[Any]: ...

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> object: ...

    def transaction(self, *, isolation: str | None = None, readonly: bool = False) -> AbstractAsyncContextManager[Any]: ...


class Held(Connection, Protocol):
    """A connection of asyncpg, as its link holds it."""

    def is_closed(self) -> bool: ...

    def terminate(self) -> None: ...

    async def close(self, *, timeout: float | None = None) -> None: ...

    async def add_listener(self, channel: str, callback: Callable[[Any, int, str, str], None]) -> None: ...

    def add_termination_listener(self, callback: Callable[[Any], None]) -> None: ...

    def add_log_listener(self, callback: Callable[[Any, Any], None]) -> None: ...


class Lender(Protocol):
    """What a store asks of its connections."""

    async def write(self, work: Callable[[Connection], Awaitable[T]]) -> T | None:
        """What the work gave, once it is durable; None where nobody knows. Raises where nothing was written."""

    async def read(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """What the work found."""

    async def close(self) -> None:
        """Let go of every connection."""


class Link:
    """The connections of one store object."""

    def __init__(
        self,
        url: str,
        place: str,
        *,
        pooler: bool,
        timeout_seconds: float,
        greet: Callable[[Connection], Awaitable[None]],
        forget: Callable[[], None],
    ) -> None:
        """`greet` is called with each fresh connection, `forget` when one is dropped: what it did is not known."""
        self._urls = each_host(url)
        """Each of the hosts; the one that led to the primary last comes first."""
        self._place = place
        self._pooler = pooler
        self._timeout = timeout_seconds
        self._greet = greet
        self._forget = forget
        self._idle: list[Held] = []
        self._kept: list[Held] = []
        self._interrupted: WeakSet[Held] = WeakSet()
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
                fate = fate_of(error)
                self._take_back(connection, is_sound=leads_to_primary(error))
                if fate is Fate.UNKNOWN:
                    return None
                raise self._refusal(error) from error
            except BaseException:
                self._drop(connection)
                raise
            if connection in self._interrupted:
                self._drop(connection)
                return None
            self._take_back(connection, is_sound=True)
            return result

    async def read(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """What the work found."""
        self._enter_loop()
        async with self._reads:
            connection = await self._connected()
            try:
                result = await work(connection)
            except AgentRuntimeError:
                self._take_back(connection, is_sound=True)
                raise
            except Exception as error:
                self._take_back(connection, is_sound=fate_of(error) is not Fate.UNKNOWN)
                raise translate(error, self._place) from error
            except BaseException:
                self._drop(connection)
                raise
            self._take_back(connection, is_sound=True)
            return result

    async def keep(self) -> Held:
        """A connection that nobody else is lent, until `part_with` or the end of the link."""
        connection = await self._greeted()
        self._kept.append(connection)
        return connection

    async def part_with(self, connection: Held) -> None:
        """Close a connection that was kept."""
        if connection in self._kept:
            self._kept.remove(connection)
        await _close(connection)

    async def close(self) -> None:
        self._is_closed = True
        connections = self._idle + self._kept
        self._idle, self._kept = [], []
        for connection in connections:
            await _close(connection)

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        for connection in self._idle:
            with suppress(Exception):  # its own loop is closed
                connection.terminate()
        self._loop, self._idle = loop, []
        self._writes, self._reads = asyncio.Semaphore(WRITES_AT_ONCE), asyncio.Semaphore(READS_AT_ONCE)

    async def _connected(self) -> Held:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
            self._forget()
        return await self._greeted()

    async def _greeted(self) -> Held:
        """A fresh connection to the first of the hosts that can be written."""
        if self._is_closed:
            raise StoreUnavailable(f"the store at {self._place} was closed; open another")
        found: list[AgentRuntimeError] = []
        for url in list(self._urls):
            try:
                connection = await self._greeted_at(url)
            except (StoreUnavailable, ReadOnlyStore) as error:
                found.append(error)
                continue
            if found:
                self._urls.sort(key=lambda other: other != url)
            return connection
        [*others, last] = found
        if others and not all(isinstance(error, ReadOnlyStore) for error in found):
            # One of them may be promoted any moment.
            each = "; ".join(str(error) for error in found)
            raise StoreUnavailable(f"of the hosts of {self._place} none takes writes now: {each}") from last
        raise last

    async def _greeted_at(self, url: str) -> Held:
        connection = await self._connect(url)
        try:
            await self._greet(connection)
        except AgentRuntimeError:
            self._drop(connection)
            raise
        except Exception as error:
            self._drop(connection)
            raise translate(error, self._place) from error
        except BaseException:
            self._drop(connection)
            raise
        return connection

    async def _connect(self, url: str) -> Held:
        asyncpg = _driver()
        options: dict[str, Any] = {"statement_cache_size": 0} if self._pooler else {"server_settings": SETTINGS}
        try:
            connection: Held = await asyncpg.connect(
                url, timeout=self._timeout, command_timeout=self._timeout, max_cached_statement_lifetime=0, **options
            )
        except (asyncpg.InterfaceError, ValueError) as error:
            # Without its cause: the driver may quote the URL.
            raise InvalidSetting(f"{self._place}: the driver refuses the URL ({type(error).__name__}); correct it") from None
        except asyncpg.TargetServerAttributeNotMatched as error:
            raise refused_as_replica(place_of(url)) from error
        except Exception as error:
            raise unreachable(error, place_of(url)) from error
        connection.add_log_listener(self._hear)
        return connection

    def _hear(self, connection: Held, said: Any) -> None:
        """What a server says besides its answers, before the answer."""
        if said.server_source_function == WAITS_FOR_STANDBYS:
            self._interrupted.add(connection)

    def _refusal(self, error: Exception) -> AgentRuntimeError:
        """Where there are several hosts, a replica is not the last word: the next try looks for the primary."""
        refusal = translate(error, self._place)
        if isinstance(refusal, ReadOnlyStore) and len(self._urls) > 1:
            return StoreUnavailable(f"{refusal}. Nothing was written; the other hosts are asked next")
        return refusal

    def _take_back(self, connection: Held, *, is_sound: bool) -> None:
        if is_sound and not connection.is_closed() and not self._is_closed:
            self._idle.append(connection)
        else:
            self._drop(connection)

    def _drop(self, connection: Held) -> None:
        self._forget()
        with suppress(Exception):  # whatever state it is in, it is not used again
            connection.terminate()


async def _close(connection: Held) -> None:
    with suppress(Exception):  # it is closed, one way or the other
        await connection.close(timeout=CLOSE_SECONDS)


def _driver() -> Any:
    try:
        import asyncpg
    except ImportError as error:
        raise InvalidSetting(
            "a Postgres store needs the driver asyncpg, which is not installed; pip install 'durable-agent-runtime[postgres]'"
        ) from error
    return asyncpg


def unreachable(error: Exception, place: str) -> StoreUnavailable | StoreRefused:
    """Nothing was sent yet, so nothing was written, whatever it is."""
    if state_of(error) and fate_of(error) is Fate.REFUSED:
        refused = translate(error, place)
        assert isinstance(refused, StoreRefused), "that is what this fate is translated to"
        return refused
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "unsupported startup parameter" in said:
        return StoreRefused(f"{place} is a pooler that takes no settings ({said}); open the store with pooler=True")
    if any(words in said for words in _REFUSALS):
        return StoreRefused(f"{place} lets nobody in so: {said}; correct user, password and database in the URL")
    return StoreUnavailable(f"{place} does not answer: {said}; see that the server runs and can be reached from here")
