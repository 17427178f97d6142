"""What a store tells from outside: bytes kept, transactions committed.

Of a SQLite file, from its write-ahead log; of a Postgres database, from its server, which nobody else may be writing to.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

_NEXT_TRANSACTION = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
_BYTES = """
SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class
WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
"""


class Meter(Protocol):
    """Counts from its entering on."""

    def __enter__(self) -> Meter: ...

    def __exit__(self, *raised: object) -> None: ...

    def commits(self) -> int:
        """How many transactions were committed since."""

    def bytes(self) -> int:
        """What the store takes; ask it once nobody has it open."""


def meter_of(path: str, url: str) -> Meter:
    """The meter of the database at `url`; without one, of the SQLite file at `path`."""
    return ServerMeter(url) if url else LogPin(path)


class LogPin:
    """Keeps a write-ahead log from being begun anew, so that every commit since can be counted in it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._log = path + "-wal"
        self._reader = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> LogPin:
        self._reader.execute("BEGIN")
        self._reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
        self._before = commits_in_log(self._log)
        return self

    def __exit__(self, *raised: object) -> None:
        self._reader.close()

    def commits(self) -> int:
        return commits_in_log(self._log) - self._before

    def bytes(self) -> int:
        return file_bytes(self._path)


class ServerMeter:
    """Transactions that wrote something, as the server numbers them; tables with their indexes, as they stand."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> ServerMeter:
        self._before = self._ask(_NEXT_TRANSACTION)
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is held."""

    def commits(self) -> int:
        return self._ask(_NEXT_TRANSACTION) - self._before

    def bytes(self) -> int:
        return self._ask(_BYTES)

    def _ask(self, question: str) -> int:
        with ThreadPoolExecutor(1) as other:  # this thread may be running an event loop
            return other.submit(asyncio.run, _answer(self._url, question)).result()


async def _answer(url: str, question: str) -> int:
    import asyncpg

    connection = await asyncpg.connect(url)
    answer: int = await connection.fetchval(question)
    await connection.close()
    return answer


def commits_in_log(path: str) -> int:
    """The transactions in a SQLite write-ahead log: each ends in a frame that names the size of the database."""
    with open(path, "rb") as file:
        log = file.read()
    page_size, salt = int.from_bytes(log[8:12], "big"), log[16:24]
    frames = (log[at : at + 24] for at in range(32, len(log) - 23, 24 + page_size))
    return sum(frame[8:16] == salt and frame[4:8] != bytes(4) for frame in frames)


def file_bytes(path: str) -> int:
    """The size of a SQLite file with its log folded in."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    db.close()
    return os.path.getsize(path)
