"""Where runs are kept: one file a technology, and the function that opens a store by its URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_runtime.errors import InvalidSetting

if TYPE_CHECKING:
    from agent_runtime.journal.store import CheckpointStore
    from agent_runtime.stores.memory import MemoryCheckpointStore
    from agent_runtime.stores.sqlite import SQLiteCheckpointStore

__all__ = ["MemoryCheckpointStore", "SQLiteCheckpointStore", "open_store", "sqlite_path"]

_HOMES = {"MemoryCheckpointStore": "memory", "SQLiteCheckpointStore": "sqlite"}


def open_store(url: str) -> CheckpointStore:
    """The store at a URL, `sqlite:///runs.db` or `memory://`; imports only the backend asked for."""
    scheme = url.split(":", 1)[0]
    match scheme:
        case "memory" if url == "memory://":
            from agent_runtime.stores.memory import MemoryCheckpointStore

            return MemoryCheckpointStore()
        case "sqlite":
            from agent_runtime.stores.sqlite import SQLiteCheckpointStore

            return SQLiteCheckpointStore(sqlite_path(url))
        case _:
            raise InvalidSetting(f"a store is sqlite:///PATH or memory://, found {url!r}; set DATABASE_URL to one of these")


def sqlite_path(url: str) -> str:
    """The path in a SQLite URL: `sqlite:///runs.db` is relative, `sqlite:////var/runs.db` is not."""
    path = url.removeprefix("sqlite:///")
    if path == url or not path or path == ":memory:":
        raise InvalidSetting(f"a SQLite store is sqlite:///PATH, found {url!r}; for one in memory use memory://")
    return path


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
