"""The appends of one Postgres statement, packed: a few long strings for the driver instead of many small values.

Integers travel as the text of one array, which the server casts; owners, seals and bodies as joined bytes, which the
statement cuts. `postgres.sql` says what stands where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from agent_runtime.ids import RunId
from agent_runtime.journal.records import AFTER_THE_END, NO_OWNER, NO_SEAL, OWNER_SIZE, SEAL_SIZE, RunStatus
from agent_runtime.journal.store import Append, Guard

MOST_APPENDS = 256
MOST_BYTES = 16 * 2**20
_MARKS = 2 * OWNER_SIZE + 3 * SEAL_SIZE
_RUNNING, _FIRST_FINAL = int(RunStatus.RUNNING), int(RunStatus.DONE)
_NOTHING = -1

Values: TypeAlias = tuple[object, ...]
Placed: TypeAlias = tuple[int, Append]
"""An append and its place among those that were handed in together."""


def rounds(appends: Sequence[Append]) -> Iterator[list[Placed]]:
    """All appends, in as few rounds as may be: a run stands once in a round, and its appends keep their order."""
    waiting = list(enumerate(appends))
    while waiting:
        seen: set[RunId] = set()
        now: list[Placed] = []
        later: list[Placed] = []
        for placed in waiting:
            run_id = placed[1].row.run_id
            (later if run_id in seen else now).append(placed)
            seen.add(run_id)
        yield now
        waiting = later


def batches(placed: Sequence[Placed]) -> list[list[Placed]]:
    """A round in the order of run ids, cut into statements of no more than one may carry."""
    ordered = sorted(placed, key=_run_id)
    cut: list[list[Placed]] = []
    size = 0
    for each in ordered:
        append = each[1]
        more = sum(len(record.body) for record in append.records)
        more += 0 if append.checkpoint is None else len(append.checkpoint.body)
        if not cut or len(cut[-1]) >= MOST_APPENDS or size + more > MOST_BYTES:
            cut.append([])
            size = 0
        cut[-1].append(each)
        size += more
    return cut


def _run_id(placed: Placed) -> str:
    return placed[1].row.run_id


def runs_on(append: Append) -> bool:
    """Whether a run shall be running under the owner it has, and nothing but its row and records are written."""
    row, guard = append.row, append.guard
    return (
        guard is not None
        and row.status == _RUNNING
        and row.epoch == guard.epoch
        and row.owner == guard.owner
        and append.checkpoint is None
    )


def pack_one(append: Append, guard: Guard, key: int) -> Values:
    """The values of `append`."""
    row = append.row
    records = _Records()
    records.add(append)
    return (
        key, guard.epoch, guard.owner, guard.number, guard.head, row.step, row.number, row.head, row.attempts, row.seal,
        append.seen, row.wake_at, len(append.records), _array(records.numbers), b"".join(records.bytes),
    )  # fmt: skip


def pack_many(appends: Sequence[Append], keys: Mapping[RunId, int]) -> Values:
    """The values of `append_batch`; a guarded append's run has a key."""
    run_keys: list[int] = []
    numbers: list[int] = []
    marks: list[bytes] = []
    opened: list[str] = []
    texts = _Texts()
    records = _Records()
    for append in appends:
        row, guard = append.row, append.guard
        first = len(records.numbers) // 5 + 1
        checkpoint = records.add(append)
        settles = row.status >= _FIRST_FINAL and all(record.kind in AFTER_THE_END for record in append.records)
        if guard is None:
            opened.append(row.run_id)
            run_keys.append(-len(opened))
            described = texts.place(row.tenant, row.kind, row.name)
            was, was_owner, was_head = (0, 0, _NOTHING), NO_OWNER, NO_SEAL
        else:
            run_keys.append(keys[row.run_id])
            described = 0
            heard = _NOTHING if guard.heartbeat_at is None else guard.heartbeat_at
            was, was_owner, was_head = (guard.epoch, guard.number, heard), guard.owner, guard.head
        numbers += was
        numbers += (
            int(settles), row.format, texts.place(row.key_id), int(row.status), row.step, row.epoch, row.number, row.attempts,
            row.lease_ms, _NOTHING if row.wake_at is None else row.wake_at, append.seen, described, first,
            len(append.records), checkpoint,
        )  # fmt: skip
        marks += (was_owner, was_head, row.owner, row.head, row.seal)
    joined = b"".join(marks)
    if len(joined) != _MARKS * len(appends):
        raise ValueError(f"an owner has {OWNER_SIZE} bytes, a seal {SEAL_SIZE}")
    return (
        _array(run_keys), _array(numbers), joined, opened, texts.all, _array(records.numbers), _array(records.checkpoints),
        b"".join(records.bytes),
    )  # fmt: skip


class _Texts:
    """Texts that many rows share, each kept once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._places: dict[tuple[str, ...], int] = {}

    def place(self, *texts: str) -> int:
        """Where the first of these stands, counted from 1; the others follow it."""
        found = self._places.get(texts)
        if found is None:
            found = self._places[texts] = len(self.all) + 1
            self.all += texts
        return found


class _Records:
    """Records and checkpoints, one behind the other, and what stands where."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.checkpoints: list[int] = []
        self.bytes: list[bytes] = []
        self._end = 1

    def add(self, append: Append) -> int:
        """Take what the append writes; the place of its checkpoint, counted from 1, or 0."""
        for record in append.records:
            call = record.call.encode()
            self.numbers += (int(record.kind), record.attempt, len(call), len(record.body), self._end)
            self.bytes += (call, record.body, _sized(record.seal))
            self._end += len(call) + len(record.body) + SEAL_SIZE
        if append.checkpoint is None:
            return 0
        step, body, seal = append.checkpoint
        self.checkpoints += (step, self._end, len(body))
        self.bytes += (body, _sized(seal))
        self._end += len(body) + SEAL_SIZE
        return len(self.checkpoints) // 3


def _sized(seal: bytes) -> bytes:
    if len(seal) != SEAL_SIZE:
        raise ValueError(f"a seal has {SEAL_SIZE} bytes, found {len(seal)}")
    return seal


def _array(numbers: Sequence[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"


def pack_guards(guards: Sequence[tuple[int, Guard]]) -> Values:
    """The values of `renew_all`, from keys and guards."""
    return (
        _array([key for key, _ in guards]),
        _array([guard.epoch for _, guard in guards]),
        b"".join(guard.owner for _, guard in guards),
    )
