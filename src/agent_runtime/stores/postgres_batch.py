"""The appends of one Postgres statement, packed: a few long strings for the driver instead of many small values.

Integers travel as the text of one array, which the server casts; owners, seals and bodies as joined bytes, which the
statement cuts. What rows have in common travels once, as a shape. `postgres.sql` says what stands where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from agent_runtime.ids import RunId
from agent_runtime.journal.records import (
    AFTER_THE_END,
    NO_OWNER,
    NO_SEAL,
    OWNER_SIZE,
    SEAL_SIZE,
    RunStatus,
    StoredCheckpoint,
)
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
    if len({append.row.run_id for append in appends}) == len(appends):
        yield waiting
        return
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
    if len(placed) == 1:
        return [list(placed)]
    ordered = sorted(placed, key=_run_id)
    cut: list[list[Placed]] = []
    size = 0
    for each in ordered:
        append = each[1]
        more = sum([len(record.body) for record in append.records])
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
    """The values of `append`, with a line for each record."""
    row = append.row
    values: Values = (
        key, guard.epoch, guard.owner, guard.number, guard.head, row.step, row.number, row.head, row.attempts, row.seal,
        append.seen, row.wake_at, row.lease_ms, row.format, row.key_id,
    )  # fmt: skip
    for _, _, kind, call, attempt, body, seal in append.records:
        values += (kind, call, attempt, body, _sized(seal))
    return values


def pack_many(appends: Sequence[Append], keys: Mapping[RunId, int]) -> Values:
    """The values of `append_batch`; a guarded append's run has a key."""
    run_keys: list[int] = []
    numbers: list[int] = []
    marks: list[bytes] = []
    opened: list[str] = []
    shapes = _Shapes()
    records = _Records()
    first = 1
    for append in appends:
        row, guard = append.row, append.guard
        checkpoint = records.add(append)
        if guard is None:
            opened.append(row.run_id)
            run_keys.append(-len(opened))
            marks += (NO_OWNER, NO_SEAL, row.owner, row.head, row.seal)
        else:
            run_keys.append(keys[row.run_id])
            marks += (guard.owner, guard.head, row.owner, row.head, row.seal)
        count = len(append.records)
        numbers += (shapes.place(append, checkpoint), row.step, row.number, first, count)
        first += count
    joined, written, states = b"".join(marks), b"".join(records.bytes), b"".join(records.states)
    if (len(joined), len(written), len(states)) != (_MARKS * len(appends), *records.sizes):
        raise ValueError(f"an owner has {OWNER_SIZE} bytes, a seal {SEAL_SIZE}")
    return (
        _array(run_keys), _array(numbers), joined, opened, shapes.texts.all, _array(shapes.numbers),
        _array(records.numbers), written, _array(records.checkpoints), states,
    )  # fmt: skip


class _Shapes:
    """What rows have in common, kept once: of runs that run on, all but a few integers."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.texts = _Texts()
        self._places: dict[tuple[object, ...], int] = {}

    def place(self, append: Append, checkpoint: int) -> int:
        """Where the shape of this row stands, counted from 1."""
        row, guard, records, _, seen = append
        settles = row.status >= _FIRST_FINAL and all(record.kind in AFTER_THE_END for record in records)
        described = (row.tenant, row.kind, row.name) if guard is None else None
        was = (0, None) if guard is None else (guard.epoch, guard.heartbeat_at)
        shape = (
            was, settles, row.format, row.key_id, row.status, row.epoch, row.attempts, row.lease_ms, row.wake_at, seen,
            described, checkpoint,
        )  # fmt: skip
        found = self._places.get(shape)
        if found is None:
            found = self._places[shape] = len(self.numbers) + 1
            epoch, heard = was
            self.numbers += (
                epoch, _NOTHING if heard is None else heard, int(settles), row.format, self.texts.place(row.key_id),
                int(row.status), row.epoch, row.attempts, row.lease_ms, _NOTHING if row.wake_at is None else row.wake_at, seen,
                0 if described is None else self.texts.place(*described), checkpoint,
            )  # fmt: skip
        return found


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
    """Records and checkpoints, each one behind the other, and what stands where."""

    def __init__(self) -> None:
        self._end = 1
        self.numbers = [self._end]
        self.bytes: list[bytes] = []
        self._end_of_states = 1
        self.checkpoints: list[int] = []
        self.states: list[bytes] = []

    def add(self, append: Append) -> int:
        """Take what the append writes; the place of its checkpoint, counted from 1, or 0."""
        end = self._end
        for _, _, kind, call, attempt, body, seal in append.records:
            name = call.encode()
            size = len(name)
            end += size + len(body) + SEAL_SIZE
            self.numbers += (int(kind), attempt, size, end)
            self.bytes += (name, body, seal)
        self._end = end
        return 0 if append.checkpoint is None else self._keep(append.checkpoint)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many bytes records and checkpoints have, if each seal has as many as it should."""
        return self._end - 1, self._end_of_states - 1

    def _keep(self, checkpoint: StoredCheckpoint) -> int:
        step, body, seal = checkpoint
        self.checkpoints += (step, self._end_of_states, len(body))
        self.states += (body, seal)
        self._end_of_states += len(body) + SEAL_SIZE
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
