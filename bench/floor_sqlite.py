"""The floor's table in a SQLite file: WAL, `synchronous=FULL`, `sqlite3` and nothing around it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from typing import TypeAlias

Statement: TypeAlias = tuple[str, tuple[object, ...]]
Ended: TypeAlias = "dict[tuple[int, int], str | None]"
"""What the table holds of a run: a call's result, or None where it was begun and has none."""

_CREATE = """
CREATE TABLE IF NOT EXISTS calls (
    run TEXT, step INTEGER, kind INTEGER, ended INTEGER, body TEXT, PRIMARY KEY (run, step, kind)
) WITHOUT ROWID
"""
_BEGIN_CALL = "INSERT INTO calls (run, step, kind, ended, body) VALUES (?, ?, ?, 0, ?)"
_END_CALL = "UPDATE calls SET ended = 1, body = ? WHERE run = ? AND step = ? AND kind = ?"
_READ = "SELECT step, kind, ended, body FROM calls WHERE run = ? ORDER BY step, kind"
_CREATE_BEATS = "CREATE TABLE beats (key INTEGER PRIMARY KEY, owner BLOB, heard INTEGER)"
_BEAT = "UPDATE beats SET heard = ? WHERE key = ? AND owner = ?"


class SQLiteTable:
    """The calls of all runs; `grouped`: what waits is committed together."""

    def __init__(self, path: str, *, grouped: bool) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(_CREATE)
        self._writer = _GroupWriter(self._db) if grouped else _EachWriter(self._db)

    async def begin(self, run: str, step: int, kind: int, body: str) -> None:
        await self._writer.write((_BEGIN_CALL, (run, step, kind, body)))

    async def end(self, run: str, step: int, kind: int, body: str) -> None:
        await self._writer.write((_END_CALL, (body, run, step, kind)))

    async def read(self, run: str) -> Ended:
        return {(step, kind): body if ended else None for step, kind, ended, body in self._db.execute(_READ, (run,))}

    async def runs(self) -> list[str]:
        return [run for (run,) in self._db.execute("SELECT DISTINCT run FROM calls")]

    async def fill_beats(self, owners: Sequence[bytes]) -> None:
        self._db.execute(_CREATE_BEATS)
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO beats VALUES (?, ?, 0)", enumerate(owners, start=1))
        self._db.execute("COMMIT")

    async def beat(self, owners: Sequence[bytes], now: int) -> int:
        self._db.execute("BEGIN IMMEDIATE")
        heard = self._db.executemany(_BEAT, [(now, key, owner) for key, owner in enumerate(owners, start=1)]).rowcount
        self._db.execute("COMMIT")
        return heard

    async def close(self) -> None:
        self._writer.close()
        self._db.close()


class _EachWriter:
    """Commits every statement by itself."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    async def write(self, statement: Statement) -> None:
        self._db.execute(*statement)

    def close(self) -> None:
        """Nothing is left to end."""


class _GroupWriter:
    """Commits all statements that wait, on a thread of its own; each caller goes on once its own is durable."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._asleep = True
        self._ended = False
        self._waiting: list[tuple[Statement, asyncio.Future[None]]] = []
        self._thread = threading.Thread(target=self._run, name="floor-writer")
        self._thread.start()

    async def write(self, statement: Statement) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            self._waiting.append((statement, done))
            if self._asleep:
                self._asleep = False
                self._wake.set()
        await done

    def close(self) -> None:
        """End the thread, which has written everything."""
        with self._lock:
            self._ended = True
            self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            self._db.execute("BEGIN IMMEDIATE")
            for statement, _ in batch:
                self._db.execute(*statement)
            self._db.execute("COMMIT")
            self._loop.call_soon_threadsafe(self._tell, [done for _, done in batch])

    def _next_batch(self) -> list[tuple[Statement, asyncio.Future[None]]]:
        """All that waits; nothing only once this has been closed."""
        while True:
            with self._lock:
                batch, self._waiting = self._waiting, []
                if batch or self._ended:
                    return batch
                self._asleep = True
                self._wake.clear()
            self._wake.wait()

    @staticmethod
    def _tell(waiting: Sequence[asyncio.Future[None]]) -> None:
        for done in waiting:
            done.set_result(None)
