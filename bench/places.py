"""Where a measurement of ours keeps its runs: in the folder it is given, or in the database it is given."""

from __future__ import annotations

import os

from agent_runtime.journal.store import CheckpointStore


def file_in(folder: str) -> str:
    """The SQLite file of ours in a folder."""
    return os.path.join(folder, "ours.db")


def store_in(folder: str, url: str) -> CheckpointStore:
    """The store at `url`; without one, a SQLite file in the folder. Imports only what it opens."""
    if "+" in url.partition(":")[0]:
        from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore

        return SQLAlchemyCheckpointStore(url)
    if url.startswith("redis://"):
        from agent_runtime.stores import open_store

        return open_store(url)
    if url:
        from agent_runtime.stores.postgres import PostgresCheckpointStore

        return PostgresCheckpointStore(url)
    from agent_runtime.stores.sqlite import SQLiteCheckpointStore

    return SQLiteCheckpointStore(file_in(folder))
