"""Runs kept in the memory of this process: the port's whole meaning, in its shortest form.

What is stored are tuples of numbers, text and bytes, which nobody can change; so a copy costs nothing. Every verb is
one critical section under one lock, and none of them waits inside it: that is what makes each an atomic move, also for
the heartbeat, which comes from a thread of its own through `reopen()`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from heapq import nlargest
from itertools import islice

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.ids import RunId
from agent_runtime.journal.records import (
    AFTER_THE_END,
    NO_OWNER,
    NO_SEAL,
    RunStatus,
    StoredCheckpoint,
    StoredMessage,
    StoredRecord,
    StoredRow,
    StoredRun,
)
from agent_runtime.journal.store import Answer, AnswerKind, Append, BatchStore, Ear, Guard, check_append, recency

MESSAGE_FOR_ENDED_RUNS = "settlement"
"""The one kind of message that somebody may still read once a run is final."""


class _Run:
    """All that is kept of one run. Only the lock's holder touches it."""

    __slots__ = ("checkpoint", "messages", "records", "row")

    def __init__(self, row: StoredRow) -> None:
        self.row = row
        self.checkpoint: StoredCheckpoint | None = None
        self.records: list[StoredRecord] = []
        self.messages: dict[bytes, StoredMessage] = {}


class _Ear:
    """Told of each message by whoever posts it."""

    every = float("inf")

    def __init__(self, lock: threading.Lock, runs: dict[RunId, _Run], ears: list[_Ear], ring: Callable[[], None]) -> None:
        self._lock = lock
        self._runs = runs
        self._ears = ears
        self._ring = ring
        self._noted: set[RunId] = set()

    def note(self, run_id: RunId) -> None:
        """A message came to the run. The lock is held."""
        self._noted.add(run_id)
        self._ring()

    async def heard(self) -> Collection[RunId] | None:
        with self._lock:
            noted, self._noted = self._noted, set()
            return noted

    async def posted(self, run_ids: Sequence[RunId]) -> list[int | None]:
        with self._lock:
            return [self._posted(self._runs.get(run_id)) for run_id in run_ids]

    async def close(self) -> None:
        with self._lock:
            if self in self._ears:
                self._ears.remove(self)

    @staticmethod
    def _posted(run: _Run | None) -> int | None:
        return None if run is None or run.row.status == RunStatus.DELETED else run.row.posted


class MemoryCheckpointStore(BatchStore):
    """Holds runs for as long as the process lives. One process only."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[RunId, _Run] = {}
        self._ears: list[_Ear] = []

    def reopen(self) -> MemoryCheckpointStore:
        """A view on the same runs, under the same lock."""
        return copy.copy(self)

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        for append in appends:
            check_append(append)
        with self._lock:
            return [self._append_one(append) for append in appends]

    async def latest(self, run_id: RunId) -> StoredRun | None:
        with self._lock:
            run = self._runs.get(run_id)
            return None if run is None else StoredRun(self._as_read(run.row), run.checkpoint)

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        with self._lock:
            return [self._load_one(run_id) for run_id in run_ids]

    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        with self._lock:
            run = self._runs.get(run_id)
            return [] if run is None else run.records[since:]  # record n stands at n - 1

    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        return self._list(lambda row: not _is_final(row) and (name is None or row.name == name), limit, after)

    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        if status is None:
            return self._list(lambda row: row.status != RunStatus.DELETED, limit, after)
        return self._list(lambda row: row.status == status, limit, after)

    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        with self._lock:
            rows = (run.row for run in self._runs.values())
            wanted = [row for row in rows if row.status == status or (status is None and row.status != RunStatus.DELETED)]
            found = nlargest(limit, (row for row in wanted if before is None or recency(row) < before), key=recency)
            return [self._as_read(row) for row in found]

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        with self._lock:
            run = self._runs.get(run_id)
            if run is None or run.row.status == RunStatus.DELETED:
                return Answer(AnswerKind.FENCED)
            kind = _compare(run.row, guard)
            if kind is AnswerKind.OK:
                self._runs[run_id] = _Run(self._tombstone(run.row))
            return Answer(kind, run.row.posted)

    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        with self._lock:
            return self._renew_one(run_id, guard, seen, wake_at)

    async def renew_all(self, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        with self._lock:
            return [self._renew_one(run_id, guard, None, None) for run_id, guard in guards]

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        with self._lock:
            run = self._runs.get(run_id)
            if run is None or run.row.status == RunStatus.DELETED:
                return Answer(AnswerKind.FENCED)
            if message.digest in run.messages:
                return Answer(AnswerKind.OK, run.row.posted)
            if _is_final(run.row) and message.kind != MESSAGE_FOR_ENDED_RUNS:
                return Answer(AnswerKind.FENCED, run.row.posted)
            run.messages[message.digest] = message
            run.row = run.row._replace(posted=run.row.posted + 1, wake_at=self._wall_ms())
            for ear in self._ears:
                ear.note(run_id)
            return Answer(AnswerKind.OK, run.row.posted)

    async def inbox(self, run_id: RunId) -> list[StoredMessage]:
        with self._lock:
            run = self._runs.get(run_id)
            return [] if run is None else list(run.messages.values())

    async def listen(self, ring: Callable[[], None]) -> Ear:
        ear = _Ear(self._lock, self._runs, self._ears, ring)
        with self._lock:
            self._ears.append(ear)
        return ear

    async def now(self) -> datetime:
        return self._clock.now()

    def _list(self, is_wanted: Callable[[StoredRow], bool], limit: int, after: RunId | None) -> list[StoredRow]:
        with self._lock:
            ids = sorted(run_id for run_id in self._runs if after is None or run_id > after)
            found = (row for row in (self._runs[run_id].row for run_id in ids) if is_wanted(row))
            return [self._as_read(row) for row in islice(found, limit)]

    # Below, the lock is held.

    def _append_one(self, append: Append) -> Answer:
        run = self._runs.get(append.row.run_id)
        kind = _judge(None if run is None else run.row, append)
        if kind is not None:
            return Answer(kind, 0 if run is None else run.row.posted)
        if run is None:
            run = self._runs[append.row.run_id] = _Run(self._first_row(append.row))
        else:
            run.row = self._next_row(run.row, append)
        run.records.extend(append.records)
        if append.checkpoint is not None:
            run.checkpoint = append.checkpoint
        return Answer(AnswerKind.OK, run.row.posted)

    def _first_row(self, row: StoredRow) -> StoredRow:
        now = self._wall_ms()
        return row._replace(heartbeat_at=self._lease_us(), idle_ms=0, posted=0, created_at=now, updated_at=now)

    def _next_row(self, stored: StoredRow, append: Append) -> StoredRow:
        now = self._wall_ms()
        return append.row._replace(
            wake_at=now if stored.posted > append.seen else append.row.wake_at,
            heartbeat_at=self._beat_after(stored),
            idle_ms=0,
            posted=stored.posted,
            created_at=stored.created_at,
            updated_at=now,
        )

    def _tombstone(self, row: StoredRow) -> StoredRow:
        return row._replace(
            status=RunStatus.DELETED, number=0, owner=NO_OWNER, head=NO_SEAL, wake_at=None, updated_at=self._wall_ms()
        )

    def _renew_one(self, run_id: RunId, guard: Guard, seen: int | None, timer: int | None) -> Answer:
        run = self._runs.get(run_id)
        if run is None:
            return Answer(AnswerKind.FENCED)
        row = run.row
        if _is_final(row) or (row.epoch, row.owner) != (guard.epoch, guard.owner):
            return Answer(AnswerKind.FENCED, row.posted)
        wake_at = timer if seen == row.posted else row.wake_at
        run.row = row._replace(heartbeat_at=self._beat_after(row), wake_at=wake_at)
        return Answer(AnswerKind.OK, row.posted)

    def _load_one(self, run_id: RunId) -> StoredRun | None:
        run = self._runs.get(run_id)
        return None if run is None else StoredRun(self._as_read(run.row), run.checkpoint, tuple(run.records))

    def _as_read(self, row: StoredRow) -> StoredRow:
        return row._replace(idle_ms=max(0, self._lease_us() - row.heartbeat_at) // 1000)

    def _beat_after(self, row: StoredRow) -> int:
        """Now on the lease clock, and never the same twice: a claim tells by it that the owner was heard meanwhile."""
        return max(self._lease_us(), row.heartbeat_at + 1)

    def _lease_us(self) -> int:
        return int(self._clock.monotonic() * 1_000_000)

    def _wall_ms(self) -> int:
        return self._clock.now_ms()


def _judge(stored: StoredRow | None, append: Append) -> AnswerKind | None:
    """What the stored row says to an append; None where it is to be written. Pure."""
    if append.guard is None:
        if stored is None:
            return None
        return AnswerKind.OK if _is_written(stored, append.row) else AnswerKind.FENCED
    if stored is None:
        return AnswerKind.FENCED
    if _is_written(stored, append.row):
        return AnswerKind.OK
    kind = _compare(stored, append.guard)
    if _is_final(stored):
        return None if kind is AnswerKind.OK and _only_settles(stored, append) else AnswerKind.FENCED
    if kind is AnswerKind.OK and append.row.step - stored.step not in (0, 1):
        return AnswerKind.MOVED
    return None if kind is AnswerKind.OK else kind


def _compare(stored: StoredRow, guard: Guard) -> AnswerKind:
    """Whether all that a guard names is still stored. Pure."""
    if (stored.epoch, stored.owner) != (guard.epoch, guard.owner):
        return AnswerKind.FENCED
    if (stored.number, stored.head) != (guard.number, guard.head):
        return AnswerKind.MOVED
    if guard.heartbeat_at is not None and stored.heartbeat_at != guard.heartbeat_at:
        return AnswerKind.FENCED  # somebody lives there: no alarm
    return AnswerKind.OK


def _is_written(stored: StoredRow, row: StoredRow) -> bool:
    return (stored.epoch, stored.owner, stored.number, stored.head) == (row.epoch, row.owner, row.number, row.head)


def _is_final(row: StoredRow) -> bool:
    return row.status >= RunStatus.DONE


def _only_settles(stored: StoredRow, append: Append) -> bool:
    row = append.row
    kept = (row.status, row.step, row.epoch, row.owner) == (stored.status, stored.step, stored.epoch, stored.owner)
    has_records = stored.status != RunStatus.DELETED
    return has_records and kept and all(record.kind in AFTER_THE_END for record in append.records)
