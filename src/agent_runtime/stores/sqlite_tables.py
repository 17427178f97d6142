"""The tables of the SQLite store: what each verb reads and writes in them, whoever holds the connection.

A store gives the two ways in, `_write` and `_read`; the work that they carry is done here, inside one transaction.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from heapq import nlargest
from typing import TypeVar

from agent_runtime.clock import Clock
from agent_runtime.ids import RunId
from agent_runtime.journal.records import (
    RunStatus,
    StoredCheckpoint,
    StoredMessage,
    StoredRecord,
    StoredRow,
    StoredRun,
    new_tuple,
)
from agent_runtime.journal.store import MOST_STRAYS, Answer, AnswerKind, Append, BatchStore, Guard, check_append, recency
from agent_runtime.stores.answers import why_refused
from agent_runtime.stores.layouts import Layout, nobody_knows
from agent_runtime.stores.sqlite_batch import Batch, add_values, insert_records, on_values, runs_on
from agent_runtime.stores.sqlite_file import SQL, Database, find_layout, migrate

T = TypeVar("T")

MOST_KEYS = 50_000
ENDED = (RunStatus.DONE, RunStatus.FAILED, RunStatus.CANCELLED)
PAST_ALL = (2**63 - 1, RunId(""))
"""Later than any run has changed."""

_OK, _FENCED = Answer(AnswerKind.OK), Answer(AnswerKind.FENCED)


class SQLiteTables(BatchStore):
    """Runs in the tables of one SQLite file."""

    max_body_bytes: int | None = 900_000_000

    def __init__(self, path: str, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._keys: dict[RunId, int] = {}

    @abstractmethod
    async def _write(self, work: Callable[[Database], T]) -> T | None:
        """What the work gave once it is durable; None where nobody knows. Raises where nothing was written."""

    @abstractmethod
    async def _read(self, work: Callable[[Database], T]) -> T:
        """What the work finds, all of it as the store was at one moment."""

    # Writing.

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        for append in appends:
            check_append(append)
        if not appends:
            return []
        answers = await self._write(lambda db: self._append_all(db, appends))
        return [Answer(AnswerKind.UNKNOWN)] * len(appends) if answers is None else answers

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

    # Its layout.

    async def read_layout(self) -> Layout:
        return find_layout(self.path)

    async def migrate(self) -> Layout:
        before = find_layout(self.path)
        if not before.is_old:
            return before
        found = await self._write(lambda db: migrate(db, self.path))
        if found is None:
            raise nobody_knows(f"SQLite file {self.path!r}")
        return found

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

    async def list_awake(
        self, *, at: int, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        values = (self._uptime(), after or "", name, name, at, limit)
        return await self._read(lambda db: [StoredRow._make(row) for row in db.execute(SQL["list_awake"], values)])

    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        wanted = None if status is None else int(status)
        values = (self._uptime(), after or "", wanted, wanted, limit)
        return await self._read(lambda db: [StoredRow._make(row) for row in db.execute(SQL["list_runs"], values)])

    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        return await self._read(lambda db: self._read_recent(db, status, before or PAST_ALL, limit))

    async def inbox(self, run_id: RunId) -> list[StoredMessage]:
        return await self._read(lambda db: self._read_messages(db, run_id))

    async def strays(self) -> list[StoredRecord]:
        """The first record that is left of runs whose row is gone."""
        return await self._read(
            lambda db: [StoredRecord._make(row) for row in db.execute(SQL["select_strays"], (MOST_STRAYS,))]
        )

    async def now(self) -> datetime:
        return self._clock.now()

    async def _answer(self, work: Callable[[Database], Answer]) -> Answer:
        answer = await self._write(work)
        return Answer(AnswerKind.UNKNOWN) if answer is None else answer

    # What a write does, inside its transaction.

    def _append_all(self, db: Database, appends: Sequence[Append]) -> list[Answer]:
        uptime, now = self._uptime(), self._clock.now_ms()
        answers = self._append_together(db, appends, uptime, now)
        return answers or [self._append_one(db, append, uptime, now) for append in appends]

    def _append_lone(self, db: Database, append: Append) -> Answer:
        """One append, most often of a run that just runs on."""
        row, guard, records, checkpoint, _ = append
        key = self._keys.get(row.run_id)
        if key is not None and guard is not None and checkpoint is None and runs_on(row, guard):
            values = on_values(key, append, guard, self._uptime(), self._clock.now_ms())
            if db.execute(SQL["append"], values).rowcount:
                insert_records(db, add_values([], key, records))
                return self._posted_answers(db, (key,))[0]
        return self._append_all(db, [append])[0]

    def _append_together(self, db: Database, appends: Sequence[Append], uptime: int, now: int) -> list[Answer] | None:
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

    def _free_key(self, db: Database, batch: Batch) -> int:
        """A key that no run has: the write transaction keeps others from taking it."""
        if batch.newest_key is None:
            batch.newest_key = db.execute(SQL["newest_key"]).fetchone()[0]
        batch.newest_key += 1
        return batch.newest_key

    def _posted_answers(self, db: Database, keys: Collection[int]) -> list[Answer]:
        if db.execute(SQL["newest_message"]).fetchone()[0] is None:
            return [_OK] * len(keys)
        return [self._ok(db, key) for key in keys]

    def _append_one(self, db: Database, append: Append, uptime: int, now: int) -> Answer:
        batch = Batch(uptime, now, expects_running=False)
        known = self._key(db, append.row.run_id)
        key = known if append.guard is not None else None if known is not None else self._free_key(db, batch)
        if key is None or not (batch.take(key, append) and batch.write(db)):
            return self._why_refused(db, append, known)
        return self._posted_answers(db, batch.keys)[0]

    def _why_refused(self, db: Database, append: Append, key: int | None) -> Answer:
        found = None if key is None else self._read_row(db, append.row.run_id)
        return why_refused(None if found is None else found[1], append)

    def _renew(self, db: Database, run_id: RunId, guard: Guard, seen: int | None, wake_at: int | None) -> Answer:
        key = self._key(db, run_id)
        if key is None:
            return _FENCED
        values = (self._uptime(), seen, wake_at, key, guard.epoch, guard.owner)
        found = db.execute(SQL["renew"], values).fetchall()
        return Answer(AnswerKind.OK, found[0][0]) if found else _FENCED

    def _renew_all(self, db: Database, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        """In one go where all are held as they say, else one by one."""
        uptime = self._uptime()
        keys = [self._key(db, run_id) for run_id, _ in guards]
        values = [(uptime, key, guard.epoch, guard.owner) for key, (_, guard) in zip(keys, guards, strict=True)]
        if db.executemany(SQL["renew_all"], values).rowcount == len(guards):
            return self._posted_answers(db, [key for key in keys if key is not None])
        return [self._renew(db, run_id, guard, None, None) for run_id, guard in guards]

    def _post(self, db: Database, run_id: RunId, message: StoredMessage) -> Answer:
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

    def _bury(self, db: Database, run_id: RunId, guard: Guard) -> Answer:
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

    def _ok(self, db: Database, key: int) -> Answer:
        return Answer(AnswerKind.OK, db.execute(SQL["select_posted"], (key,)).fetchone()[0])

    # What a read does.

    def _read_row(self, db: Database, run_id: RunId) -> tuple[int, StoredRow] | None:
        found = db.execute(SQL["select_run"], (self._uptime(), run_id)).fetchone()
        return None if found is None else (self._remember(run_id, found[-1]), StoredRow._make(found[:-1]))

    def _read_run(self, db: Database, run_id: RunId, *, with_records: bool) -> StoredRun | None:
        found = self._read_row(db, run_id)
        if found is None:
            return None
        key, row = found
        checkpoint = db.execute(SQL["select_checkpoint"], (key,)).fetchone()
        records = self._read_records(db, key, 0) if with_records else ()
        return StoredRun(row, None if checkpoint is None else StoredCheckpoint._make(checkpoint), tuple(records))

    def _read_recent(self, db: Database, status: int | None, before: tuple[int, RunId], limit: int) -> list[StoredRow]:
        values = (*before, limit)
        found: list[StoredRow] = []
        if status is None or status < RunStatus.DONE:
            of = None if status is None else int(status)
            found += map(StoredRow._make, db.execute(SQL["list_newest"], (self._uptime(), of, *values)))
        for final in ENDED if status is None else (status,) if status >= RunStatus.DONE else ():
            found += map(StoredRow._make, db.execute(SQL["list_ended"], (self._uptime(), int(final), *values)))
        return nlargest(limit, found, key=recency)

    def _read_messages(self, db: Database, run_id: RunId) -> list[StoredMessage]:
        return [StoredMessage._make(row) for row in db.execute(SQL["select_messages"], (self._key(db, run_id),))]

    def _read_records(self, db: Database, key: int | None, since: int) -> list[StoredRecord]:
        return [new_tuple(StoredRecord, row) for row in db.execute(SQL["select_records"], (key, since))]

    def _key(self, db: Database, run_id: RunId) -> int | None:
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
