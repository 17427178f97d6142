"""Where runs are kept: one file a technology, and the function that opens a store by its URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_runtime.errors import InvalidSetting
from agent_runtime.stores.blob_url import split_blobs

if TYPE_CHECKING:
    from agent_runtime.journal.store import CheckpointStore
    from agent_runtime.stores.blobs import BlobStore
    from agent_runtime.stores.memory import MemoryCheckpointStore
    from agent_runtime.stores.postgres import PostgresCheckpointStore
    from agent_runtime.stores.redis import RedisCheckpointStore
    from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
    from agent_runtime.stores.sqlite import SQLiteCheckpointStore

__all__ = [
    "BlobStore",
    "MemoryCheckpointStore",
    "PostgresCheckpointStore",
    "RedisCheckpointStore",
    "SQLAlchemyCheckpointStore",
    "SQLiteCheckpointStore",
    "file_at",
    "open_store",
    "shown_url",
    "sqlite_path",
]

_HOMES = {
    "BlobStore": "blobs",
    "MemoryCheckpointStore": "memory",
    "PostgresCheckpointStore": "postgres",
    "RedisCheckpointStore": "redis",
    "SQLAlchemyCheckpointStore": "sqlalchemy",
    "SQLiteCheckpointStore": "sqlite",
    "shown_url": "postgres_url",
}


def open_store(url: str) -> CheckpointStore:
    """The store at a URL: `sqlite:///runs.db`, `postgresql://…`, `redis://…` or `memory://`; imports only the backend.

    With `?blobs=FOLDER` (and `&blobs_above=BYTES`), behind whatever else the URL holds, large bodies lie in that folder.
    The options of a store stand behind the `?`: `postgresql://…?schema=t1`, `redis://…?prefix=t1`.
    """
    own, blobs = split_blobs(url)
    if blobs is None:
        return _open_store(own)
    from agent_runtime.stores.blobs import BlobStore

    return BlobStore(_open_store(own), blobs.folder, above=blobs.above)


def _open_store(url: str) -> CheckpointStore:
    scheme = url.split(":", 1)[0]
    match scheme:
        case "memory" if url == "memory://":
            from agent_runtime.stores.memory import MemoryCheckpointStore

            return MemoryCheckpointStore()
        case "sqlite":
            from agent_runtime.stores.sqlite import SQLiteCheckpointStore

            return SQLiteCheckpointStore(sqlite_path(url))
        case "postgresql" | "postgres":
            from agent_runtime.stores.postgres import PostgresCheckpointStore
            from agent_runtime.stores.postgres_url import take_apart

            plain, options = take_apart(url)
            return PostgresCheckpointStore(plain, **options)
        case _ if "+" in scheme:  # the driver is named, as SQLAlchemy has it
            from agent_runtime.stores.postgres_url import take_apart
            from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore

            plain, options = take_apart(url)
            return SQLAlchemyCheckpointStore(plain, **options)
        case "redis" | "rediss":
            from agent_runtime.stores import redis_url
            from agent_runtime.stores.redis import RedisCheckpointStore

            address = redis_url.take_apart(url)
            return RedisCheckpointStore(redis_url.make_client(address.url, is_cluster=address.is_cluster), **address.options)
        case _:
            from agent_runtime.stores.postgres_url import shown_url

            raise InvalidSetting(
                f"a store is sqlite:///PATH, postgresql://USER@HOST/DATABASE, redis://HOST:PORT or memory://, found "
                f"{shown_url(url)!r}; set DATABASE_URL to one of these"
            )


def sqlite_path(url: str) -> str:
    """The path in a SQLite URL: `sqlite:///runs.db` is relative, `sqlite:////var/runs.db` is not."""
    scheme, mark, path = split_blobs(url)[0].partition(":///")
    if scheme == "sqlite+aiosqlite":
        path = path.partition("?")[0]
    elif scheme != "sqlite":
        mark = ""
    elif "?" in path:
        raise InvalidSetting(
            f"the URL of a SQLite store takes no options, found {url!r}: each tenant has a file of its own; name that file"
        )
    if not mark or not path or path.startswith((":memory:", "file:")):
        raise InvalidSetting(f"a SQLite store is sqlite:///PATH, found {url!r}; for one in memory use memory://")
    return path


def file_at(url: str) -> str | None:
    """The path of a store that is a file; None of one that is not."""
    return sqlite_path(url) if url.startswith(("sqlite:", "sqlite+")) else None


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
