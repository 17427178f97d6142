"""The port behind which every store stands: about a dozen verbs, each one atomic move, and the four answers.

What a store promises, and all that it promises:

* **One write.** `save`, `record_call` and each element of `commit` are the same guarded append: *if the stored row still
  has the guard's epoch, owner, number and head (and `heartbeat_at`, where the guard names one), and is not final, then*
  insert the records, replace the checkpoint if one is given, and set the row, all or nothing. A final run takes records
  of kind `settled` and `rekeyed` only, and keeps its status. Without a guard the run must be new, which an id that was
  deleted is not.
* **Four answers.** `OK`: durable; also when the row already is what this append writes. `FENCED`: another epoch or owner,
  a final run, none, or an owner heard since `heartbeat_at`. `MOVED`: epoch and owner are the guard's, and number, head or
  step are not. `UNKNOWN`: nobody knows; the store has dropped the connection, and the next read goes through a fresh one.
* **Raising `StoreUnavailable`** says that nothing was written, for certain. Anything else a store raises out of a write
  is taken as `UNKNOWN`.
* A store compares numbers and keeps bytes. It never parses, reorders or re-encodes a body, and gives back copies.
* A store judges idleness by its own clock, inside the statement that reads it.

A minimal store implements the abstract verbs of `Store`; the others have a correct, slower form here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from enum import Enum
from heapq import nlargest
from typing import NamedTuple, Protocol, runtime_checkable

from agent_runtime.errors import StoreRefused
from agent_runtime.ids import RunId, Step
from agent_runtime.journal.records import (
    RunStatus,
    StoredCheckpoint,
    StoredMessage,
    StoredRecord,
    StoredRow,
    StoredRun,
)

PAGE = 500


class AnswerKind(Enum):
    """What became of a write."""

    OK = "ok"
    FENCED = "fenced"
    MOVED = "moved"
    UNKNOWN = "unknown"


class Answer(NamedTuple):
    """What became of a write, and how many messages the run has had (0 where there is no run)."""

    kind: AnswerKind
    posted: int = 0


class Guard(NamedTuple):
    """What must still be stored for a write to land. `heartbeat_at` is named by a claim alone."""

    epoch: int
    owner: bytes
    number: int
    head: bytes
    heartbeat_at: int | None = None


class Append(NamedTuple):
    """One guarded append to one run. `seen` is the `posted` that a row which parks the run has taken into account.

    A row that runs on, under the epoch and the owner that its guard names, has the format, the key id and the lease that are
    stored: another key comes with a claim.
    """

    row: StoredRow
    guard: Guard | None
    records: tuple[StoredRecord, ...]
    checkpoint: StoredCheckpoint | None = None
    seen: int = 0


class Ear(Protocol):
    """Hears to which runs messages come, whoever posts them. It belongs to the event loop that it was made on."""

    every: float
    """How many seconds after the last time to ask `heard` again, where it does not ring before. Infinite: it always rings."""

    async def heard(self) -> Collection[RunId] | None:
        """The runs that got messages since this was last asked; None: that cannot be told, look at each by `posted`.

        Too many may be named, and never too few. Raises once it hears no more: what came meanwhile is then not known.
        """

    async def posted(self, run_ids: Sequence[RunId]) -> list[int | None]:
        """How many messages each run has had; None where there is no run, or a deleted one."""

    async def close(self) -> None:
        """Hear no more, and let go of the connection."""


class CheckpointStore(Protocol):
    """The verbs that the runtime calls. Inherit from `Store`, or match its shape."""

    async def save(
        self,
        run_id: RunId,
        step: Step,
        checkpoint: StoredCheckpoint | None,
        *,
        row: StoredRow,
        guard: Guard | None = None,
        records: Sequence[StoredRecord] = (),
    ) -> Answer:
        """Move a run to `step`: 0 for a new run (no guard), else one past what is stored."""

    async def latest(self, run_id: RunId) -> StoredRun | None:
        """The row and the last checkpoint, read at one moment, without the records; None where there is no run."""

    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        """Rows of runs that are not final, in the order of their ids, from the first id past `after`."""

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        """Remove all of a run, final or not, but for a mark that keeps its id from being used again."""

    async def record_call(self, run_id: RunId, record: StoredRecord, *, row: StoredRow, guard: Guard) -> Answer:
        """Append one record without moving to another step."""

    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        """The records past number `since`, in order."""

    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        """Say that the owner lives. Guarded by epoch and owner alone, touches hints alone.

        With `seen`, where no message came since, also set `wake_at` back from the messages that were nothing to the
        run's own timer, or to None.
        """

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        """Leave a message, once by its digest; raise `posted` and wake the run. `FENCED` where there is no run."""

    async def inbox(self, run_id: RunId) -> list[StoredMessage]:
        """The messages of a run in the order they came."""

    async def now(self) -> datetime:
        """The store's wall clock, aware, in UTC: for display and timers."""

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        """Carry many appends, each guarded by itself, in as few durable writes as may be; an answer for each."""

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        """Runs with all their records, each read at one moment."""

    async def renew_all(self, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        """`renew` for many runs at once."""

    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        """Rows of all runs, final ones too, in the order of their ids; deleted ones only where asked for."""

    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        """Rows of all runs, the one last changed first; deleted ones only where asked for. The next page is `before` what
        `recency` says of the last row: pages of runs that stand still neither overlap nor leave one out.
        """

    async def listen(self, ring: Callable[[], None]) -> Ear:
        """Hear of every message from now on, through one connection. `ring` may be called from any thread: then `heard`
        has something to tell."""

    def reopen(self) -> "CheckpointStore":
        """The same store through connections of its own, for another thread and event loop."""

    async def close(self) -> None:
        """Let go of every connection and thread. The store may not be used afterwards."""


class AtOnce(Protocol):
    """What a store may offer besides: a lone append without a task and a thread in between."""

    def commit_at_once(self, append: Append) -> Answer | None:
        """Carry one append without waiting for anybody; None, and nothing written, where that cannot be done now."""


@runtime_checkable
class Roomy(Protocol):
    """What a store may offer besides: room that was used, and is not given back by itself."""

    async def vacuum(self) -> int:
        """Give the room of what was removed back; how many bytes. It may hold up writers for as long as it takes."""


@runtime_checkable
class Sifting(Protocol):
    """What a store may offer besides: a listing that passes over what only waits, however much of that there is."""

    async def list_awake(
        self, *, at: int, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        """What `list_unfinished` lists, but for quarantined runs, and parked ones whose `wake_at` has not come by `at`."""


MOST_STRAYS = 100


@runtime_checkable
class Searching(Protocol):
    """What a store may offer besides, whose records do not name their run: records that no row leads to."""

    async def strays(self) -> list[StoredRecord]:
        """The first record that is left of each run whose row is gone, of some of them. It goes through all runs."""


class Store(ABC):
    """Inherit from this: eleven verbs to write, and the rest is correct, if not yet fast."""

    may_lose_writes: bool = False
    """Whether what it acknowledged can be gone later: then a tool without a repeat rule is called only if that is accepted."""
    max_body_bytes: int | None = None
    """How large a body it takes; None: any. What is larger is refused by whoever would write it, before anything acts."""
    lanes: int = 1
    """How many `commit`s it gains by carrying at the same time. They never share a run."""

    @abstractmethod
    async def save(
        self,
        run_id: RunId,
        step: Step,
        checkpoint: StoredCheckpoint | None,
        *,
        row: StoredRow,
        guard: Guard | None = None,
        records: Sequence[StoredRecord] = (),
    ) -> Answer: ...

    @abstractmethod
    async def latest(self, run_id: RunId) -> StoredRun | None: ...

    @abstractmethod
    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]: ...

    @abstractmethod
    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer: ...

    @abstractmethod
    async def record_call(self, run_id: RunId, record: StoredRecord, *, row: StoredRow, guard: Guard) -> Answer: ...

    @abstractmethod
    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]: ...

    @abstractmethod
    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer: ...

    @abstractmethod
    async def post(self, run_id: RunId, message: StoredMessage) -> Answer: ...

    @abstractmethod
    async def inbox(self, run_id: RunId) -> list[StoredMessage]: ...

    @abstractmethod
    async def now(self) -> datetime: ...

    @abstractmethod
    async def list_runs(
        self, *, status: int | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]: ...

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        """One write after another. An append may hold several records: all of them land, or none."""
        return [await self._append(append) for append in appends]

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        """Each run by row, records, row again, until both rows are one."""
        return [await self._load(run_id) for run_id in run_ids]

    async def renew_all(self, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        return [await self.renew(run_id, guard=guard) for run_id, guard in guards]

    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        """Goes through all runs, and keeps the newest."""
        newest: list[StoredRow] = []
        after: RunId | None = None
        while limit > 0 and (page := await self.list_runs(status=status, limit=PAGE, after=after)):
            after = page[-1].run_id
            newest += [row for row in page if before is None or recency(row) < before]
            newest = nlargest(limit, newest, key=recency)
        return newest

    def commit_at_once(self, append: Append) -> Answer | None:
        """Carry one append without waiting for anybody; None, and nothing written, where that cannot be done now."""
        return None

    async def listen(self, ring: Callable[[], None]) -> Ear:
        """An ear that asks: it never rings, and has each run looked at."""
        return AskingEar(self)

    def reopen(self) -> CheckpointStore:
        """Itself: right for a store that may be used from several threads."""
        return self

    async def close(self) -> None:
        return None

    async def _append(self, append: Append) -> Answer:
        row = append.row._replace(posted=append.seen)
        if append.guard is not None and append.checkpoint is None and len(append.records) == 1:
            stored = await self.latest(row.run_id)
            if stored is not None and stored.row.step == row.step:
                return await self.record_call(row.run_id, append.records[0], row=row, guard=append.guard)
        return await self.save(
            row.run_id, Step(row.step), append.checkpoint, row=row, guard=append.guard, records=append.records
        )

    async def _load(self, run_id: RunId) -> StoredRun | None:
        while True:
            before = await self.latest(run_id)
            if before is None:
                return None
            records = await self.calls(run_id)
            again = await self.latest(run_id)
            if again is not None and again.row.head == before.row.head and again.row.epoch == before.row.epoch:
                return again._replace(records=tuple(records))


class BatchStore(Store):
    """A store whose one write is `commit`."""

    @abstractmethod
    async def commit(self, appends: Sequence[Append]) -> list[Answer]: ...

    async def save(
        self,
        run_id: RunId,
        step: Step,
        checkpoint: StoredCheckpoint | None,
        *,
        row: StoredRow,
        guard: Guard | None = None,
        records: Sequence[StoredRecord] = (),
    ) -> Answer:
        if row.run_id != run_id or row.step != step:
            raise ValueError(f"the row is of run {row.run_id!r} step {row.step}, the call of {run_id!r} step {step}")
        [answer] = await self.commit([Append(row, guard, tuple(records), checkpoint, row.posted)])
        return answer

    async def record_call(self, run_id: RunId, record: StoredRecord, *, row: StoredRow, guard: Guard) -> Answer:
        if row.run_id != run_id:
            raise ValueError(f"the row is of run {row.run_id!r}, the call of {run_id!r}")
        [answer] = await self.commit([Append(row, guard, (record,), None, row.posted)])
        return answer


class AskingEar:
    """The ear of a store that does not tell by itself which runs got messages."""

    every = 0.25

    def __init__(self, store: Store) -> None:
        self._store = store

    async def heard(self) -> Collection[RunId] | None:
        return None

    async def posted(self, run_ids: Sequence[RunId]) -> list[int | None]:
        return [await self._posted(run_id) for run_id in run_ids]

    async def close(self) -> None:
        return None

    async def _posted(self, run_id: RunId) -> int | None:
        run = await self._store.latest(run_id)
        return None if run is None or run.row.status == RunStatus.DELETED else run.row.posted


def recency(row: StoredRow) -> tuple[int, RunId]:
    """By what `list_recent` orders rows: when they last changed, and of those at the same moment by their ids."""
    return row.updated_at, row.run_id


def check_append(append: Append) -> None:
    """Refuse an append that no guard could make right: a mistake of the caller, not of the world."""
    row, guard, records, _, _ = append
    assert records, "an append holds a record"
    first, last = records[0], records[-1]
    before = guard.number if guard is not None else 0
    assert first.number == before + 1, f"record {first.number} stands where {before + 1} belongs"
    assert last.number == row.number == before + len(records), f"{len(records)} records do not lead {before} to {row.number}"
    assert first.epoch == last.epoch == row.epoch, "records are of the row's epoch"
    assert row.head == last.seal, "the row names the last record"
    assert guard is not None or row.step == 0, "a new run starts at step 0"


def check_bytes(append: Append, most: int, technology: str) -> None:
    """Refuse an append that is larger than a store takes at once; nothing is written then, nor will the same ever be."""
    size = sum([len(record.body) for record in append.records])
    if append.checkpoint is not None:
        size += len(append.checkpoint.body)
    if size > most:
        raise StoreRefused(
            f"run {append.row.run_id!r}: an append of {size:,} bytes, and {technology} takes {most:,}; nothing was written: "
            "record less in one call"
        )
