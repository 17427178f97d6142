"""A store of one's own: a folder with one JSON file a run. It passes the contract that every store passes.

    python examples/own_store.py

Simple, and so it pays: each append writes the run's whole file again, and one process at a time may use the folder.
"""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import NamedTuple

from agent_runtime.clock import SYSTEM_CLOCK, milliseconds
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
from agent_runtime.journal.store import Answer, AnswerKind, Append, BatchStore, CheckpointStore, Guard, check_append
from agent_runtime.testing.store_contract import StoreContract, cases, run_contract


class Kept(NamedTuple):
    """What one file holds."""

    row: StoredRow
    checkpoint: StoredCheckpoint | None = None
    records: tuple[StoredRecord, ...] = ()
    messages: tuple[StoredMessage, ...] = ()


class FolderStore(BatchStore):
    """Runs in a folder. Every verb is one critical section, so that it is one atomic move."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        """`durable=False` leaves out the fsync: quick, and safe against a killed process, not against a power cut."""
        self._folder = folder
        self._durable = durable
        self._lock = threading.Lock()

    # Writing.

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        for append in appends:
            check_append(append)
        with self._lock:
            return [self._append_one(append) for append in appends]

    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        with self._lock:
            kept = self._read(run_id)
            if kept is None or kept.row.status >= RunStatus.DONE or not is_owner(kept.row, guard):
                return Answer(AnswerKind.FENCED, kept.row.posted if kept else 0)
            row = kept.row._replace(heartbeat_at=beat(kept.row))
            if seen == row.posted:
                row = row._replace(wake_at=wake_at)
            self._write(kept._replace(row=row))
            return Answer(AnswerKind.OK, row.posted)

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        with self._lock:
            kept = self._read(run_id)
            if kept is None or kept.row.status == RunStatus.DELETED:
                return Answer(AnswerKind.FENCED)
            if any(known.digest == message.digest for known in kept.messages):
                return Answer(AnswerKind.OK, kept.row.posted)
            if kept.row.status >= RunStatus.DONE and message.kind != "settlement":
                return Answer(AnswerKind.FENCED, kept.row.posted)
            row = kept.row._replace(posted=kept.row.posted + 1, wake_at=wall())
            self._write(kept._replace(row=row, messages=(*kept.messages, message)))
            return Answer(AnswerKind.OK, row.posted)

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        with self._lock:
            kept = self._read(run_id)
            if kept is None or kept.row.status == RunStatus.DELETED:
                return Answer(AnswerKind.FENCED)
            kind = compare(kept.row, guard)
            if kind is AnswerKind.OK:
                row = kept.row._replace(status=RunStatus.DELETED, number=0, owner=NO_OWNER, head=NO_SEAL, wake_at=None)
                self._write(Kept(row))
            return Answer(kind, kept.row.posted)

    # Reading.

    async def latest(self, run_id: RunId) -> StoredRun | None:
        with self._lock:
            kept = self._read(run_id)
            return None if kept is None else StoredRun(as_read(kept.row), kept.checkpoint)

    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        with self._lock:
            kept = self._read(run_id)
            return [] if kept is None else list(kept.records[since:])

    async def inbox(self, run_id: RunId) -> list[StoredMessage]:
        with self._lock:
            kept = self._read(run_id)
            return [] if kept is None else list(kept.messages)

    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        return self._list(lambda row: row.status < RunStatus.DONE and name in (None, row.name), limit, after)

    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        if status is None:
            return self._list(lambda row: row.status != RunStatus.DELETED, limit, after)
        return self._list(lambda row: row.status == status, limit, after)

    async def now(self) -> datetime:
        return SYSTEM_CLOCK.now()

    # Below, the lock is held.

    def _append_one(self, append: Append) -> Answer:
        kept = self._read(append.row.run_id)
        answer = judge(None if kept is None else kept.row, append)
        if answer is not None:
            return answer
        now, before = wall(), None if kept is None else kept.row
        row = append.row._replace(
            heartbeat_at=beat(before),
            idle_ms=0,
            posted=before.posted if before else 0,
            created_at=before.created_at if before else now,
            updated_at=now,
        )
        if row.posted > append.seen:
            row = row._replace(wake_at=now)
        kept = (kept or Kept(row))._replace(row=row)
        kept = kept._replace(checkpoint=append.checkpoint or kept.checkpoint, records=kept.records + append.records)
        self._write(kept)
        return Answer(AnswerKind.OK, row.posted)

    def _list(self, is_wanted: Callable[[StoredRow], bool], limit: int, after: RunId | None) -> list[StoredRow]:
        with self._lock:
            rows = [from_json(file.read_text()).row for file in self._folder.glob("*.json")]
        found = sorted(row for row in rows if is_wanted(row) and (after is None or row.run_id > after))
        return [as_read(row) for row in found[:limit]]

    def _file(self, run_id: RunId) -> Path:
        return self._folder / f"{sha256(run_id.encode()).hexdigest()}.json"

    def _read(self, run_id: RunId) -> Kept | None:
        try:
            return from_json(self._file(run_id).read_text())
        except FileNotFoundError:
            return None

    def _write(self, kept: Kept) -> None:
        """Beside it first, then in its place: a reader, and a killed process, finds the old file or the new one."""
        file = self._file(kept.row.run_id)
        beside = file.with_suffix(".new")
        with beside.open("w") as stream:
            stream.write(json.dumps(kept, default=lambda data: {"hex": data.hex()}))
            if self._durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(beside, file)
        if self._durable:
            folder = os.open(self._folder, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)


# What the guards say. Pure.


def judge(stored: StoredRow | None, append: Append) -> Answer | None:
    """Why an append is not written, or is there already; None where it is to be written."""
    row, guard = append.row, append.guard
    if stored is None:
        return None if guard is None else Answer(AnswerKind.FENCED)
    if (stored.epoch, stored.owner, stored.number, stored.head) == (row.epoch, row.owner, row.number, row.head):
        return Answer(AnswerKind.OK, stored.posted)
    if guard is None:
        return Answer(AnswerKind.FENCED, stored.posted)
    kind = compare(stored, guard)
    if stored.status >= RunStatus.DONE:
        return None if kind is AnswerKind.OK and only_settles(stored, append) else Answer(AnswerKind.FENCED, stored.posted)
    if kind is AnswerKind.OK and row.step not in (stored.step, stored.step + 1):
        kind = AnswerKind.MOVED
    return None if kind is AnswerKind.OK else Answer(kind, stored.posted)


def compare(stored: StoredRow, guard: Guard) -> AnswerKind:
    if not is_owner(stored, guard):
        return AnswerKind.FENCED
    if (stored.number, stored.head) != (guard.number, guard.head):
        return AnswerKind.MOVED
    was_heard = guard.heartbeat_at is not None and guard.heartbeat_at != stored.heartbeat_at
    return AnswerKind.FENCED if was_heard else AnswerKind.OK


def is_owner(stored: StoredRow, guard: Guard) -> bool:
    return (stored.epoch, stored.owner) == (guard.epoch, guard.owner)


def only_settles(stored: StoredRow, append: Append) -> bool:
    """Whether a final run, which is not a deleted one, may take the append."""
    row = append.row
    is_same = (row.status, row.step, row.epoch, row.owner) == (stored.status, stored.step, stored.epoch, stored.owner)
    return is_same and stored.status != RunStatus.DELETED and all(r.kind in AFTER_THE_END for r in append.records)


# Time, and values as text.


def wall() -> int:
    return milliseconds(SYSTEM_CLOCK.now())


def beat(before: StoredRow | None) -> int:
    """Now on the lease clock, in microseconds, and never the same twice."""
    return max(int(SYSTEM_CLOCK.monotonic() * 1_000_000), before.heartbeat_at + 1 if before else 0)


def as_read(row: StoredRow) -> StoredRow:
    return row._replace(idle_ms=(int(SYSTEM_CLOCK.monotonic() * 1_000_000) - row.heartbeat_at) // 1000)


def from_json(text: str) -> Kept:
    row, checkpoint, records, messages = json.loads(text, object_hook=lambda data: bytes.fromhex(data["hex"]))
    return Kept(
        StoredRow._make(row),
        None if checkpoint is None else StoredCheckpoint._make(checkpoint),
        tuple(StoredRecord._make(record) for record in records),
        tuple(StoredMessage._make(message) for message in messages),
    )


class ForgetfulStore(FolderStore):
    """The same with one guard left out: a claim lands although its owner was heard meanwhile."""

    def _append_one(self, append: Append) -> Answer:
        guard = append.guard
        return super()._append_one(append if guard is None else append._replace(guard=guard._replace(heartbeat_at=None)))


async def main() -> None:
    with TemporaryDirectory() as folder:

        async def make_store() -> CheckpointStore:
            return FolderStore(Path(mkdtemp(dir=folder)), durable=False)

        print("FolderStore:", await run_contract(make_store))

        name = "a claim that names the heartbeat is fenced by a renewal"
        try:
            await cases()[name](StoreContract(), ForgetfulStore(Path(mkdtemp(dir=folder)), durable=False))
        except AssertionError as found:
            print(f"ForgetfulStore: '{name}' fails: {found}")


asyncio.run(main())
