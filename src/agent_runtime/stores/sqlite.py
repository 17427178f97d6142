"""Runs in one SQLite file: durable, for every process of one host.

Rules of this file:

* One writer: a thread, or inline on the event loop while that thread is idle and the disk is quick, as its last commits
  show (`inline=False` turns this off). Every write is one transaction, begun with BEGIN IMMEDIATE.
* WAL, and `synchronous=FULL` read back: with less, acknowledged commits are lost in a power cut.
* An error before COMMIT wrote nothing. An error at COMMIT is unknown: the connection is used no more, and what follows reads
  through a fresh one. It is closed once that is open, and not before: SQLite would read the log anew, where the transaction
  is whole, and take it for committed, though its flush has failed and the disk may never have it.
* A file that was removed or replaced under the store is noticed before a write, and before one is acknowledged.
* The lease clock is the host's uptime, so that a change of the wall clock takes no run from its owner.
"""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.errors import AgentRuntimeError, StoreUnavailable
from agent_runtime.journal.store import Answer, AnswerKind, Append, Ear, check_append
from agent_runtime.offload import SYSTEM_OFFLOAD, Offload
from agent_runtime.stores.sqlite_ear import SQLiteEar
from agent_runtime.stores.sqlite_file import (
    BUSY_MS,
    Busy,
    Database,
    Place,
    lenient,
    readable,
    set_up,
    translate,
    translated,
    vacuum,
)
from agent_runtime.stores.sqlite_tables import SQLiteTables

T = TypeVar("T")

SETUP_TRIES = 600
SETUP_PAUSE_SECONDS = 0.05
QUICK_COMMIT_SECONDS = 0.004
"""A commit that takes longer, on the average of the last ones, is worth a change of thread."""
COMMITS_REMEMBERED = 8


class SQLiteCheckpointStore(SQLiteTables):
    """Runs in the SQLite file at `path`, which is made, mode 0600, where there is none."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock = SYSTEM_CLOCK,
        offload: Offload = SYSTEM_OFFLOAD,
        inline: bool = True,
    ) -> None:
        super().__init__(os.fspath(path), clock)
        self._offload = offload
        self._inline = inline
        self._serial = offload.serial("agent-runtime-sqlite")
        self._in_thread: set[object] = set()
        self._commit_seconds = 0.0
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._reader_is_stale = False
        self._failed: list[sqlite3.Connection] = []
        self._place = Place(self.path)
        self._checkpoints_wal = True
        self._ears: weakref.WeakSet[SQLiteEar] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"SQLiteCheckpointStore({self.path!r})"

    # Writing, without a task in between.

    def commit_at_once(self, append: Append) -> Answer | None:
        if self._writer is None or not self._may_go_inline():
            return None
        check_append(append)
        try:
            answer = self._transact(lambda db: self._append_lone(db, append))
        except Busy:
            return None
        return Answer(AnswerKind.UNKNOWN) if answer is None else answer

    async def vacuum(self) -> int:
        """Write the file anew without the room of what was removed; how many bytes it is shorter. Writers wait meanwhile."""
        await self._open()
        return await self._on_thread(self._vacuum)

    def _vacuum(self) -> int:
        db = self._connected()
        db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        try:
            with readable(self.path):
                return vacuum(db, self.path)
        finally:
            db.execute("PRAGMA busy_timeout = 0")

    async def listen(self, ring: Callable[[], None]) -> Ear:
        await self._open()
        with readable(self.path):
            ear = SQLiteEar(self._connect_reader(), self.path)
        self._ears.add(ear)
        return ear

    def reopen(self) -> SQLiteCheckpointStore:
        again = SQLiteCheckpointStore(self.path, clock=self._clock, offload=self._offload, inline=self._inline)
        again._checkpoints_wal = False  # fewer connections that checkpoint the log, fewer that can meet while they do
        return again

    async def close(self) -> None:
        if self._in_thread:
            await self._serial.run(lambda: None)  # a connection is not closed under the thread that uses it
        self._serial.close()
        self._drop_writer()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._close_failed()
        for ear in list(self._ears):
            await ear.close()

    # How a write is carried.

    async def _write(self, work: Callable[[Database], T]) -> T | None:
        """What the work gave once it is durable; None where nobody knows. Raises where nothing was written."""
        if self._writer is None:
            await self._open()
        if self._may_go_inline():
            try:
                return self._transact(work)
            except Busy:
                pass
        return await self._on_thread(lambda: self._transact_patiently(work))

    def _may_go_inline(self) -> bool:
        """Whether to write on the event loop: it spares two changes of thread, and stalls the loop for a disk write."""
        return self._inline and not self._in_thread and self._commit_seconds < QUICK_COMMIT_SECONDS

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """Have the writer thread do it. It counts as busy until it has, even if nobody waits for it any more."""
        token = object()
        self._in_thread.add(token)

        def perform() -> T:
            try:
                return work()
            finally:
                self._in_thread.discard(token)

        return await self._serial.run(perform)

    def _transact_patiently(self, work: Callable[[Database], T]) -> T | None:
        try:
            return self._transact(work)
        except Busy:
            pass
        db = self._connected()
        db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        try:
            return self._transact(work)
        except Busy as error:
            raise StoreUnavailable(
                f"SQLite file {self.path!r} was locked by another process for {BUSY_MS / 1000:.0f} s; nothing was "
                "written. Find the process that holds a write transaction open."
            ) from error
        finally:
            if self._writer is db:
                db.execute("PRAGMA busy_timeout = 0")

    def _transact(self, work: Callable[[Database], T]) -> T | None:
        result = self._begin(work)
        return result if self._end() else None

    def _begin(self, work: Callable[[Database], T]) -> T:
        """Do the work in a transaction that is still open afterwards; where it raises, nothing is left of it."""
        db = self._connected()
        self._place.check()
        try:
            db.execute("BEGIN IMMEDIATE")
            return work(db)
        except sqlite3.Error as error:
            told = translate(error, self.path)
            if not isinstance(told, Busy):
                self._drop_writer()
            raise told from error
        except BaseException:
            self._roll_back(db)
            raise

    def _end(self) -> bool:
        """Commit. False where nobody knows whether it landed: the next read tells."""
        db = self._writer
        assert db is not None, "a transaction is open"
        began = self._clock.monotonic()
        try:
            db.execute("COMMIT")
        except sqlite3.Error:
            self._drop_writer()
            return False
        self._commit_seconds += (self._clock.monotonic() - began - self._commit_seconds) / COMMITS_REMEMBERED
        if not self._place.is_as_found():
            self._drop_writer()
            return False
        return True

    def _roll_back(self, db: sqlite3.Connection) -> None:
        self._keys.clear()  # a key given inside the transaction is no run's any more
        try:
            if db.in_transaction:
                db.execute("ROLLBACK")
        except sqlite3.Error:
            self._drop_writer()

    # Connections.

    def _connected(self) -> sqlite3.Connection:
        if self._writer is None:
            with translated(self.path):
                self._writer = self._connect()
            self._close_failed()
        return self._writer

    async def _open(self) -> None:
        """Connect, and set the file up where it is new; eight processes may do so at once."""
        for _ in range(SETUP_TRIES):
            try:
                self._connected()
            except Busy:
                await self._clock.sleep(SETUP_PAUSE_SECONDS)
            else:
                return
        raise StoreUnavailable(f"SQLite file {self.path!r} stayed locked while it was to be set up; find out by whom")

    async def _read(self, work: Callable[[Database], T]) -> T:
        """What the work finds, all of it as the store was at one moment."""
        db = await self._connected_reader()
        self._place.check()
        try:
            with readable(self.path):
                db.execute("BEGIN")
                try:
                    return work(db)
                finally:
                    if db.in_transaction:
                        db.execute("COMMIT")
        except AgentRuntimeError:
            self._reader_is_stale = True  # a disk that failed a read has failed the connection
            raise

    async def _connected_reader(self) -> sqlite3.Connection:
        if self._reader is None or self._reader_is_stale:
            await self._open()
            with readable(self.path):
                fresh = self._connect_reader()
            self._reader_is_stale = False
            stale, self._reader = self._reader, fresh
            if stale is not None:
                stale.close()
        return self._reader

    def _connect_reader(self) -> sqlite3.Connection:
        db = self._connect(wait_seconds=BUSY_MS / 1000)
        db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        db.execute("PRAGMA query_only = ON")
        db.text_factory = lenient  # text that somebody broke is for the seal of its own run to find
        return db

    def _connect(self, *, wait_seconds: float = 0) -> sqlite3.Connection:
        """A connection. `wait_seconds`: for a file that somebody has locked; a writer waits for its turn outside of SQLite."""
        self._place.prepare()
        db = sqlite3.connect(
            self._place.path, timeout=wait_seconds, isolation_level=None, check_same_thread=False, cached_statements=64
        )  # fmt: skip
        try:
            set_up(db, self.path)
            if not self._checkpoints_wal:
                db.execute("PRAGMA wal_autocheckpoint = 0")
        except BaseException:
            db.close()
            raise
        return db

    def _drop_writer(self) -> None:
        """Nothing is known of the connection any more. The reader may be in use on another thread: it goes later."""
        db, self._writer = self._writer, None
        self._reader_is_stale = True
        self._keys.clear()
        if db is None:
            return
        self._failed.append(db)  # it stays open until a fresh one is: see the rules of this file
        with suppress(sqlite3.Error):
            if db.in_transaction:
                db.execute("ROLLBACK")
        if db.in_transaction:  # then it has the file locked, for all that are to come
            self._close_failed()

    def _close_failed(self) -> None:
        while self._failed:
            self._failed.pop().close()
