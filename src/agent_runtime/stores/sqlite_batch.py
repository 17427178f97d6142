"""The appends of one SQLite transaction, sorted by statement: each statement runs once, over all runs that need it.

A statement over many rows costs a fraction of as many single ones. A row that its guard does not let through shows in the
count of changed rows; then nothing of the batch may stand, and each append is looked at by itself.

Bytes go to the driver as `bytearray`: for bytes it looks up who may convert them, each time, which takes it twice as long as
binding them. Where a value is most often NULL, which it looks up as well, the common statement does not have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from agent_runtime.journal.records import AFTER_THE_END, RunStatus, StoredRecord, StoredRow
from agent_runtime.journal.store import Append, Guard
from agent_runtime.stores.sqlite_file import SQL, Database

_RUNNING, _FIRST_FINAL = int(RunStatus.RUNNING), int(RunStatus.DONE)

Row = tuple[object, ...]

_SIZES = (64, 16, 4, 1)
"""How many lines of values a statement may have: a few sizes, so that each is prepared once."""


def _by_size(name: str, columns: int) -> dict[int, str]:
    """A statement with so many lines of values, each of which stands for what would be a statement of its own."""
    line = f"({', '.join('?' * columns)})"
    assert line in SQL[name], f"{name} has a line of {columns} values"
    return {size: SQL[name].replace(line, ", ".join([line] * size)) for size in _SIZES}


_RUN_COLUMNS, _RECORD_COLUMNS = 11, 8
_APPEND_MANY = _by_size("append_many", _RUN_COLUMNS)
_INSERT_RECORDS = _by_size("insert_record", _RECORD_COLUMNS)


class Batch:
    """Appends to different runs, on their way into one transaction."""

    __slots__ = (
        "_checkpoints",
        "_expects_running",
        "_now",
        "_opens",
        "_records",
        "_runs_on",
        "_settled",
        "_turns",
        "_uptime",
        "keys",
        "newest_key",
    )

    def __init__(self, uptime: int, now: int, *, expects_running: bool) -> None:
        """`expects_running`: take a run that shall be running to be so already, which is quicker where it is true."""
        self._expects_running = expects_running
        self._uptime = uptime
        self._now = now
        self._opens: list[Row] = []
        self._runs_on: list[Row] = []
        self._turns: list[Row] = []
        self._settled: list[Row] = []
        self._records: list[object] = []
        self._checkpoints: list[Row] = []
        self.keys: dict[int, None] = {}
        """The keys of the runs, in the order of their appends."""
        self.newest_key: int | None = None
        """The highest key in use, once somebody asked for it."""

    def take(self, key: int, append: Append) -> bool:
        """Add an append; false where its run is in the batch already."""
        if key in self.keys:
            return False
        self.keys[key] = None
        row, guard, records, checkpoint, _ = append
        add_values(self._records, key, records)
        if checkpoint is not None:
            self._checkpoints.append((key, *checkpoint))
        if guard is None:
            self._opens.append((
                key, *row[:6], int(row.status), row.step, row.epoch, bytearray(row.owner), row.number, bytearray(row.head),
                row.attempts, bytearray(row.seal), row.lease_ms, row.wake_at, self._uptime, self._now, self._now,
            ))  # fmt: skip
        elif self._expects_running and runs_on(row, guard):
            self._runs_on.append((
                key, guard.epoch, bytearray(guard.owner), guard.number, bytearray(guard.head), row.step, row.number,
                bytearray(row.head), row.attempts, bytearray(row.seal), append.seen,
            ))  # fmt: skip
        elif row.status >= _FIRST_FINAL and all(record.kind in AFTER_THE_END for record in records):
            as_written = (row.key_id, row.number, row.head, row.seal, self._now)
            self._settled.append((*as_written, key, row.epoch, row.owner, *guard[:4], row.step, int(row.status)))
        else:
            turn = (row.format, row.key_id, int(row.status), row.epoch, row.lease_ms, bytearray(row.owner))
            self._turns.append((*turn, *changes(key, append, guard, self._uptime, self._now), guard.heartbeat_at))
        return True

    def write(self, db: Database) -> bool:
        """Write all of it; false where a guard did not hold. Then rows of others may have been written: roll back."""
        if not self._write_runs_on(db):
            return False
        for statement, rows in self._row_statements():
            if rows and db.executemany(SQL[statement], rows).rowcount != len(rows):
                return False
        insert_records(db, self._records)
        if self._checkpoints:
            db.executemany(SQL["keep_checkpoint"], self._checkpoints)
        return True

    def _write_runs_on(self, db: Database) -> bool:
        left = self._runs_on
        for size, statement in _APPEND_MANY.items():
            while len(left) >= size:
                values = [self._now, self._uptime, *chain.from_iterable(left[:size])]
                if db.execute(statement, values).rowcount != size:
                    return False
                left = left[size:]
        return True

    def _row_statements(self) -> Iterator[tuple[str, list[Row]]]:
        yield "open_run", self._opens
        yield "append_any", self._turns
        yield "append_settled", self._settled


def runs_on(row: StoredRow, guard: Guard) -> bool:
    """Whether the row leaves status, epoch and owner as they are in a run that is running: the common append."""
    is_same = row.status == _RUNNING and row.epoch == guard.epoch and row.owner == guard.owner
    return is_same and row.wake_at is None


def add_values(values: list[object], key: int, records: Sequence[StoredRecord]) -> list[object]:
    """The values, and behind them the parameters of `insert_record` for each record of a run."""
    for number, epoch, kind, call, attempt, body, seal in records:
        values += (key, number, epoch, kind, call, attempt, bytearray(body), bytearray(seal))
    return values


def insert_records(db: Database, values: list[object]) -> None:
    """Write the records whose parameters these are, in as few statements as may be."""
    at = 0
    for size, statement in _INSERT_RECORDS.items():
        width = size * _RECORD_COLUMNS
        while len(values) - at >= width:
            db.execute(statement, values[at : at + width])
            at += width


def on_values(key: int, append: Append, guard: Guard, uptime: int, now: int) -> Row:
    """The parameters of `append`."""
    _, _, _, _, _, _, _, step, _, _, number, head, attempts, seal, *_ = append.row
    return (
        step, number, bytearray(head), attempts, bytearray(seal), append.seen, now, uptime, now, key, guard.epoch,
        bytearray(guard.owner), guard.number, bytearray(guard.head), step, step,
    )  # fmt: skip


def changes(key: int, append: Append, guard: Guard, uptime: int, now: int) -> Row:
    """The parameters of `append_any`, from `step` on."""
    _, _, _, _, _, _, _, step, _, _, number, head, attempts, seal, _, wake_at, *_ = append.row
    return (
        step, number, bytearray(head), attempts, bytearray(seal), append.seen, now, wake_at, uptime, now, key, guard.epoch,
        bytearray(guard.owner), guard.number, bytearray(guard.head), step, step,
    )  # fmt: skip
