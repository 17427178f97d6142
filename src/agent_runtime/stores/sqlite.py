"""Runs in one SQLite file: durable, for every process of one host.

Rules of this file:

* One writer: a thread, or inline on the event loop while that thread is idle and the disk is quick, as its last commits
  show (`inline=False` turns this off). Every write is one transaction, begun with BEGIN IMMEDIATE.
* WAL, and `synchronous=FULL` read back: with less, acknowledged commits are lost in a power cut.
* An error before COMMIT wrote nothing. An error at COMMIT is unknown: the connection is closed, and what follows reads
  through a fresh one.
* The lease clock is the host's uptime, so that a change of the wall clock takes no run from its owner.
"""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import TypeVar

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.errors import (
    StoreUnavailable,
)
from agent_runtime.ids import RunId
from agent_runtime.journal.records import (
    RunStatus,
    StoredCheckpoint,
    StoredMessage,
    StoredRecord,
    StoredRow,
    StoredRun,
)
from agent_runtime.journal.store import Answer, AnswerKind, Append, BatchStore, Ear, Guard, check_append
from agent_runtime.offload import SYSTEM_OFFLOAD, Offload
from agent_runtime.stores.answers import why_refused
from agent_runtime.stores.sqlite_batch import Batch, changes, runs_on
from agent_runtime.stores.sqlite_ear import SQLiteEar
from agent_runtime.stores.sqlite_file import SQL, Busy, make_private, readable, set_up, translate, translated

T = TypeVar("T")

BUSY_MS = 30_000
SETUP_TRIES = 600
SETUP_PAUSE_SECONDS = 0.05
MOST_KEYS = 50_000
QUICK_COMMIT_SECONDS = 0.004
"""A commit that takes longer, on the average of the last ones, is worth a change of thread."""
COMMITS_REMEMBERED = 8

_RUNNING = int(RunStatus.RUNNING)
_OK, _FENCED = Answer(AnswerKind.OK), Answer(AnswerKind.FENCED)


class SQLiteCheckpointStore(BatchStore):
    """Runs in the SQLite file at `path`, which is made, mode 0600, where there is none."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock = SYSTEM_CLOCK,
        offload: Offload = SYSTEM_OFFLOAD,
        inline: bool = True,
    ) -> None:
        self.path = os.fspath(path)
        self._clock = clock
        self._offload = offload
        self._inline = inline
        self._serial = offload.serial("agent-runtime-sqlite")
        self._in_thread: set[object] = set()
        self._commit_seconds = 0.0
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._keys: dict[RunId, int] = {}
        self._reader_is_stale = False
        self._checkpoints_wal = True
        self._ears: weakref.WeakSet[SQLiteEar] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"SQLiteCheckpointStore({self.path!r})"

    # Writing.

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        for append in appends:
            check_append(append)
        if not appends:
            return []
        answers = await self._write(lambda db: self._append_all(db, appends))
        return [Answer(AnswerKind.UNKNOWN)] * len(appends) if answers is None else answers

    def commit_at_once(self, append: Append) -> Answer | None:
        if self._writer is None or not self._may_go_inline():
            return None
        check_append(append)
        try:
            answer = self._transact(lambda db: self._append_lone(db, append))
        except Busy:
            return None
        return Answer(AnswerKind.UNKNOWN) if answer is None else answer

    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        return await self._answer(lambda db: self._renew(db, run_id, guard, seen, wake_at))

    async def renew_all(self, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        if not guards:
            return []
        answers = await self._write(lambda db: self._renew_all(db, guards))
        return [Answer(AnswerKind.UNKNOWN)] * len(guards) if answers is None else answers

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        return await self._answer(lambda db: self._post(db, run_id, message))

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        return await self._answer(lambda db: self._bury(db, run_id, guard))

    # Reading.

    async def latest(self, run_id: RunId) -> StoredRun | None:
        return await self._read(lambda db: self._read_run(db, run_id, with_records=False))

    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        return await self._read(lambda db: self._read_records(db, self._key(db, run_id), since))

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        return await self._read(lambda db: [self._read_run(db, run_id, with_records=True) for run_id in run_ids])

    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        values = (self._uptime(), after or "", name, name, limit)
        return await self._read(lambda db: [StoredRow._make(row) for row in db.execute(SQL["list_unfinished"], values)])

    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        wanted = None if status is None else int(status)
        values = (self._uptime(), after or "", wanted, wanted, limit)
        return await self._read(lambda db: [StoredRow._make(row) for row in db.execute(SQL["list_runs"], values)])

    async def inbox(self, run_id: RunId) -> list[StoredMessage]:
        return await self._read(lambda db: self._read_messages(db, run_id))

    async def listen(self, ring: Callable[[], None]) -> Ear:
        await self._open()
        with readable(self.path):
            ear = SQLiteEar(self._connect_reader(), self.path)
        self._ears.add(ear)
        return ear

    async def now(self) -> datetime:
        return self._clock.now()

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
        for ear in list(self._ears):
            await ear.close()

    # How a write is carried.

    async def _answer(self, work: Callable[[sqlite3.Connection], Answer]) -> Answer:
        answer = await self._write(work)
        return Answer(AnswerKind.UNKNOWN) if answer is None else answer

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
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

    def _transact_patiently(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
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

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        result = self._begin(work)
        return result if self._end() else None

    def _begin(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do the work in a transaction that is still open afterwards; where it raises, nothing is left of it."""
        db = self._connected()
        try:
            db.execute("BEGIN IMMEDIATE")
            return work(db)
        except sqlite3.Error as error:
            self._roll_back(db)
            raise translate(error, self.path) from error
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
        return True

    def _roll_back(self, db: sqlite3.Connection) -> None:
        try:
            if db.in_transaction:
                self._keys.clear()  # a key given inside the transaction is no run's any more
                db.execute("ROLLBACK")
        except sqlite3.Error:
            self._drop_writer()

    # What a write does, inside its transaction.

    def _append_all(self, db: sqlite3.Connection, appends: Sequence[Append]) -> list[Answer]:
        uptime, now = self._uptime(), self._clock.now_ms()
        answers = self._append_together(db, appends, uptime, now)
        return answers or [self._append_one(db, append, uptime, now) for append in appends]

    def _append_lone(self, db: sqlite3.Connection, append: Append) -> Answer:
        """One append, most often of a run that just runs on."""
        row, guard, records, checkpoint, _ = append
        key = self._keys.get(row.run_id)
        if key is not None and guard is not None and checkpoint is None and runs_on(row, guard):
            values = changes(key, append, guard, self._uptime(), self._clock.now_ms())
            if db.execute(SQL["append"], values).rowcount:
                db.executemany(SQL["insert_record"], [(key, *record) for record in records])
                return self._posted_answers(db, (key,))[0]
        return self._append_all(db, [append])[0]

    def _append_together(
        self, db: sqlite3.Connection, appends: Sequence[Append], uptime: int, now: int
    ) -> list[Answer] | None:
        """All appends in a statement a kind; None, and nothing written, where one of them needs a closer look."""
        batch = Batch(uptime, now, expects_running=True)
        for append in appends:
            key = self._free_key(db, batch) if append.guard is None else self._key(db, append.row.run_id)
            if key is None or not batch.take(key, append):
                return None
        if len(appends) == 1:
            return self._posted_answers(db, batch.keys) if batch.write(db) else None
        db.execute("SAVEPOINT together")
        if not batch.write(db):
            db.execute("ROLLBACK TO together")
            return None
        return self._posted_answers(db, batch.keys)

    def _free_key(self, db: sqlite3.Connection, batch: Batch) -> int:
        """A key that no run has: the write transaction keeps others from taking it."""
        if batch.newest_key is None:
            batch.newest_key = db.execute(SQL["newest_key"]).fetchone()[0]
        batch.newest_key += 1
        return batch.newest_key

    def _posted_answers(self, db: sqlite3.Connection, keys: Collection[int]) -> list[Answer]:
        if db.execute(SQL["newest_message"]).fetchone()[0] is None:
            return [_OK] * len(keys)
        return [self._ok(db, key) for key in keys]

    def _append_one(self, db: sqlite3.Connection, append: Append, uptime: int, now: int) -> Answer:
        batch = Batch(uptime, now, expects_running=False)
        known = self._key(db, append.row.run_id)
        key = known if append.guard is not None else None if known is not None else self._free_key(db, batch)
        if key is None or not (batch.take(key, append) and batch.write(db)):
            return self._why_refused(db, append, known)
        return self._posted_answers(db, batch.keys)[0]

    def _why_refused(self, db: sqlite3.Connection, append: Append, key: int | None) -> Answer:
        found = None if key is None else self._read_row(db, append.row.run_id)
        return why_refused(None if found is None else found[1], append)

    def _renew(self, db: sqlite3.Connection, run_id: RunId, guard: Guard, seen: int | None, wake_at: int | None) -> Answer:
        key = self._key(db, run_id)
        if key is None:
            return _FENCED
        values = (self._uptime(), seen, wake_at, key, guard.epoch, guard.owner)
        found = db.execute(SQL["renew"], values).fetchall()
        return Answer(AnswerKind.OK, found[0][0]) if found else _FENCED

    def _renew_all(self, db: sqlite3.Connection, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        """In one go where all are held as they say, else one by one."""
        uptime = self._uptime()
        keys = [self._key(db, run_id) for run_id, _ in guards]
        values = [(uptime, key, guard.epoch, guard.owner) for key, (_, guard) in zip(keys, guards, strict=True)]
        if db.executemany(SQL["renew_all"], values).rowcount == len(guards):
            return self._posted_answers(db, [key for key in keys if key is not None])
        return [self._renew(db, run_id, guard, None, None) for run_id, guard in guards]

    def _post(self, db: sqlite3.Connection, run_id: RunId, message: StoredMessage) -> Answer:
        found = self._read_row(db, run_id)
        if found is None or found[1].status == RunStatus.DELETED:
            return _FENCED
        key, row = found
        if db.execute(SQL["find_message"], (key, message.digest)).fetchone() is not None:
            return Answer(AnswerKind.OK, row.posted)
        if row.status >= RunStatus.DONE and message.kind != "settlement":
            return Answer(AnswerKind.FENCED, row.posted)
        db.execute(SQL["insert_message"], (key, *message))
        raised = db.execute(SQL["raise_posted"], (self._clock.now_ms(), key)).fetchall()
        return Answer(AnswerKind.OK, raised[0][0])

    def _bury(self, db: sqlite3.Connection, run_id: RunId, guard: Guard) -> Answer:
        found = self._read_row(db, run_id)
        if found is None or found[1].status == RunStatus.DELETED:
            return _FENCED
        key, row = found
        now = self._clock.now_ms()
        if db.execute(SQL["bury_run"], (now, key, *guard[:4])).rowcount == 0:
            mine = (row.epoch, row.owner) == (guard.epoch, guard.owner)
            return Answer(AnswerKind.MOVED if mine else AnswerKind.FENCED, row.posted)
        for name in ("delete_records", "delete_checkpoint", "delete_messages"):
            db.execute(SQL[name], (key,))
        return _OK

    def _ok(self, db: sqlite3.Connection, key: int) -> Answer:
        return Answer(AnswerKind.OK, db.execute(SQL["select_posted"], (key,)).fetchone()[0])

    # What a read does.

    def _read_row(self, db: sqlite3.Connection, run_id: RunId) -> tuple[int, StoredRow] | None:
        found = db.execute(SQL["select_run"], (self._uptime(), run_id)).fetchone()
        return None if found is None else (self._remember(run_id, found[-1]), StoredRow._make(found[:-1]))

    def _read_run(self, db: sqlite3.Connection, run_id: RunId, *, with_records: bool) -> StoredRun | None:
        found = self._read_row(db, run_id)
        if found is None:
            return None
        key, row = found
        checkpoint = db.execute(SQL["select_checkpoint"], (key,)).fetchone()
        records = self._read_records(db, key, 0) if with_records else ()
        return StoredRun(row, None if checkpoint is None else StoredCheckpoint._make(checkpoint), tuple(records))

    def _read_messages(self, db: sqlite3.Connection, run_id: RunId) -> list[StoredMessage]:
        return [StoredMessage._make(row) for row in db.execute(SQL["select_messages"], (self._key(db, run_id),))]

    def _read_records(self, db: sqlite3.Connection, key: int | None, since: int) -> list[StoredRecord]:
        return [StoredRecord._make(row) for row in db.execute(SQL["select_records"], (key, since))]

    def _key(self, db: sqlite3.Connection, run_id: RunId) -> int | None:
        key = self._keys.get(run_id)
        if key is not None:
            return key
        found = db.execute(SQL["find_key"], (run_id,)).fetchone()
        return None if found is None else self._remember(run_id, found[0])

    def _remember(self, run_id: RunId, key: int) -> int:
        if len(self._keys) >= MOST_KEYS:
            self._keys.clear()  # a key is found again by its run id
        self._keys[run_id] = key
        return key

    def _uptime(self) -> int:
        return int(self._clock.monotonic() * 1_000_000)

    # Connections.

    def _connected(self) -> sqlite3.Connection:
        if self._writer is None:
            with translated(self.path):
                self._writer = self._connect()
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

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What the work finds, all of it as the store was at one moment."""
        db = await self._connected_reader()
        try:
            with readable(self.path):
                db.execute("BEGIN")
                return work(db)
        finally:
            if db.in_transaction:
                db.execute("COMMIT")

    async def _connected_reader(self) -> sqlite3.Connection:
        if self._reader is not None and self._reader_is_stale:
            self._reader.close()
            self._reader = None
        if self._reader is None:
            await self._open()
            with translated(self.path):
                self._reader = self._connect_reader()
            self._reader_is_stale = False
        return self._reader

    def _connect_reader(self) -> sqlite3.Connection:
        db = self._connect()
        db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        db.execute("PRAGMA query_only = ON")
        db.text_factory = _lenient  # text that somebody broke is for the seal of its own run to find
        return db

    def _connect(self) -> sqlite3.Connection:
        make_private(self.path)
        db = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=64)
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
        if db is not None:
            db.close()


def _lenient(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")
