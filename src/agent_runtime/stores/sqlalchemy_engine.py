"""Engines of SQLAlchemy: which drivers a store knows, where its engine comes from, and what its errors really are.

An engine belongs to the event loop that used it first. For another loop, a heartbeat's for instance, there is a sibling:
the same settings, and a pool of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from agent_runtime.errors import InvalidSetting
from agent_runtime.stores.postgres_errors import state_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

_EXTRA = "pip install 'durable-agent-runtime[sqlalchemy]'"


@dataclass(frozen=True)
class Driver:
    """A driver of a database, by the names that a URL and pip have for it."""

    dialect: str
    name: str
    package: str


DRIVERS = {
    f"{driver.dialect}+{driver.name}": driver
    for driver in (
        Driver("postgresql", "asyncpg", "asyncpg"),
        Driver("postgresql", "psycopg", "psycopg[binary]"),
        Driver("postgresql", "psycopg_async", "psycopg[binary]"),
        Driver("sqlite", "aiosqlite", "aiosqlite"),
    )
}


def driver_of(url: str) -> Driver:
    """The driver that a URL names; one that this store does not know is refused, without showing the URL."""
    scheme = url.partition(":")[0]
    if scheme not in DRIVERS:
        known = ", ".join(f"{name}://…" for name in DRIVERS if name != "postgresql+psycopg_async")
        raise InvalidSetting(
            f"a SQLAlchemy store is at {known}; found {scheme.partition('@')[0]!r}: name one of these drivers"
        )
    return DRIVERS[scheme]


class Source:
    """Where engines come from: made by a URL, or after one of the user's."""

    def __init__(self, url: str | None, given: AsyncEngine | None) -> None:
        """There is one of the two."""
        self.url = given.url.render_as_string(hide_password=False) if given is not None else url or ""
        """With its password."""
        self._given = given
        self._is_given_out = False

    def __repr__(self) -> str:
        return f"Source({self.url.partition(':')[0]!r})"

    def engine(self, **options: Any) -> AsyncEngine:
        """One for whoever asks: the first time the user's own, then siblings of it. `options` are for those that we make."""
        if self._given is None:
            return _made(self.url, driver_of(self.url), options)
        chosen = _sibling(self._given) if self._is_given_out else self._given
        self._is_given_out = True
        return chosen.execution_options(isolation_level="AUTOCOMMIT")  # shares the pool

    def is_users(self, engine: AsyncEngine) -> bool:
        """Whether its connections are those of the engine that was handed in."""
        return self._given is not None and engine.sync_engine.pool is self._given.sync_engine.pool


def _made(url: str, driver: Driver, options: dict[str, Any]) -> AsyncEngine:
    try:
        import_module("greenlet")  # which SQLAlchemy itself asks for only when a connection is made
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError
        from sqlalchemy.ext.asyncio import create_async_engine
    except ImportError as error:
        raise InvalidSetting(
            f"a SQLAlchemy store needs SQLAlchemy and greenlet, and {error.name} is not installed; {_EXTRA} '{driver.package}'"
        ) from error
    try:
        return create_async_engine(
            url, isolation_level="AUTOCOMMIT", pool_pre_ping=False, pool_recycle=-1, hide_parameters=True, **options
        )
    except ImportError as error:
        raise InvalidSetting(
            f"{driver.dialect}+{driver.name} needs the driver {driver.name}, which is not installed; pip install "
            f"'{driver.package}'"
        ) from error
    except (ArgumentError, NoSuchModuleError, ValueError):
        # Without its cause: SQLAlchemy may quote the URL.
        raise InvalidSetting(f"SQLAlchemy cannot take the {driver.dialect}+{driver.name} URL apart; correct it") from None


def _sibling(engine: AsyncEngine) -> AsyncEngine:
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    own = engine.sync_engine
    return AsyncEngine(Engine(own.pool.recreate(), own.dialect, own.url, echo=own.echo, hide_parameters=own.hide_parameters))


def driver_error(error: BaseException) -> BaseException:
    """The driver's own error inside of SQLAlchemy's, whose text would quote the statement and its values."""
    inner = getattr(error, "orig", None) or error
    if type(inner).__module__.startswith("sqlalchemy.") and inner.__cause__ is not None:
        return inner.__cause__  # an error of asyncpg, in the clothes of a DBAPI error
    if type(inner).__module__.startswith("psycopg") and not state_of(inner) and _is_about_values(inner):
        return ValueError(str(inner))
    return inner


def _is_about_values(error: BaseException) -> bool:
    """Whether psycopg refused, before it sent anything, a value that no server could take."""
    from psycopg import DataError, NotSupportedError, ProgrammingError

    return isinstance(error, DataError | NotSupportedError | ProgrammingError)
