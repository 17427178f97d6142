"""Faults to inject: a worker's life that ends at a chosen moment, and stores that fail in the ways real ones do.

    life = Life(Moment(Where.AFTER_WRITE, 3))                       # the worker dies once its third write is durable
    store = FaultyStore(inner, life=life)
    store = FaultyStore(inner, LosesReply(at=2))                    # write 2 lands, and says "connection lost"
    store = FaultyStore(inner, Refuses(at=holds(RecordKind.DONE, "0"), times=2))

A write is one `commit`, whatever it carries: one durable write. `at` is its number, from 1, or a function of it such as
`holds(kind)`; the first write that fits is struck, and it alone unless the fault says otherwise.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import NamedTuple, TypeAlias

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.errors import StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, StoredMessage, StoredRecord, StoredRow, StoredRun
from agent_runtime.journal.store import Answer, AnswerKind, Append, BatchStore, CheckpointStore, Ear, Guard

# Dying.


class SimulatedCrash(BaseException):
    """The worker is dead. Not an `Exception`, so that nothing on the way cleans up as a living worker would."""


class Where(Enum):
    """The moments at which a worker can die and leave different things behind."""

    BEFORE_WRITE = "before write"
    AFTER_WRITE = "after write"
    AFTER_ACT = "after act"
    AFTER_ANSWER = "after answer"


class Moment(NamedTuple):
    """The `number`-th time, from 1, that a worker is there."""

    where: Where
    number: int

    def __str__(self) -> str:
        return f"{self.where.value} {self.number}"


class Life:
    """One worker's life. It ends at a moment, if one is given; then whatever of the worker reaches out is stopped."""

    def __init__(self, ends: Moment | None = None) -> None:
        self.ends = ends
        self.is_over = False
        self.reached: Counter[Where] = Counter()

    def check(self) -> None:
        """Raise `SimulatedCrash` if this worker is dead."""
        if self.is_over:
            raise SimulatedCrash("this worker is dead and does nothing more")

    def reach(self, where: Where) -> None:
        """Be there, and die if this is the moment."""
        self.check()
        self.reached[where] += 1
        if self.ends == (where, self.reached[where]):
            self.is_over = True
            raise SimulatedCrash(f"the worker died {self.ends}")

    def ends_next(self, where: Where) -> bool:
        """Whether it ends the next time it is there."""
        return self.ends == (where, self.reached[where] + 1)

    def moments(self) -> list[Moment]:
        """Every moment of this life, by kind: those at which another like it can be told to end."""
        return [Moment(where, number + 1) for where in Where for number in range(self.reached[where])]


# Faults of a store.


class Write:
    """One commit on its way: `land` performs it."""

    def __init__(self, number: int, appends: Sequence[Append], inner: CheckpointStore, counts: Counts) -> None:
        self.number = number
        self.appends = appends
        self._inner = inner
        self._counts = counts

    async def land(self) -> list[Answer]:
        """Give it to the store behind, and count what got durable."""
        answers = await self._inner.commit(self.appends)
        self._counts.add_write(self.appends, answers)
        return answers

    @property
    def heads(self) -> list[bytes]:
        """What tells this write from every other one, and not from itself sent again."""
        return [append.row.head for append in self.appends]


Chosen: TypeAlias = "int | Callable[[Write], bool]"


def holds(kind: RecordKind, call: str | None = None) -> Callable[[Write], bool]:
    """Choose the first write with a record of that kind, of that call if one is named."""

    def fits(write: Write) -> bool:
        records = (record for append in write.appends for record in append.records)
        return any(record.kind == kind and (call is None or record.call == call) for record in records)

    return fits


class Fault:
    """No trouble at all. Inherit from it and override what is to go wrong."""

    async def carry(self, write: Write) -> list[Answer]:
        """Answer a commit, and let it land or not."""
        return await write.land()

    def read(self) -> None:
        """Raise what a read is to raise."""

    def renew(self) -> None:
        """Raise what a heartbeat, a message or a deletion is to raise."""


class _Strike(Fault):
    """A fault of one write."""

    def __init__(self, at: Chosen) -> None:
        self._at = at
        self.struck: Write | None = None
        """The write that met it, once one has."""

    def strikes(self, write: Write) -> bool:
        if self.struck is not None or not (write.number == self._at if isinstance(self._at, int) else self._at(write)):
            return False
        self.struck = write
        return True


class _Unknown(_Strike):
    """A write of which nobody learns whether it landed: it raises, or with `answers=True` says `UNKNOWN`.

    The next `reads` reads fail too, as they do where the connection is gone.
    """

    def __init__(self, at: Chosen, *, answers: bool = False, reads: int = 0) -> None:
        super().__init__(at)
        self._answers = answers
        self._reads_to_fail = reads

    def read(self) -> None:
        if self.struck is not None and self._reads_to_fail:
            self._reads_to_fail -= 1
            raise ConnectionError("connection lost")

    def lose(self, write: Write) -> list[Answer]:
        if not self._answers:
            raise ConnectionError("connection lost")
        return [Answer(AnswerKind.UNKNOWN)] * len(write.appends)


class LosesReply(_Unknown):
    """The write lands, and its answer is lost."""

    async def carry(self, write: Write) -> list[Answer]:
        if not self.strikes(write):
            return await write.land()
        await write.land()
        return self.lose(write)


class LosesRequest(_Unknown):
    """The write never arrives, and nobody is told."""

    async def carry(self, write: Write) -> list[Answer]:
        return self.lose(write) if self.strikes(write) else await write.land()


class LandsLate(_Unknown):
    """The write is thought lost, and lands all the same: just before it is sent again, or behind so many later writes."""

    def __init__(self, at: Chosen, *, behind: int = 0, answers: bool = False, reads: int = 0) -> None:
        super().__init__(at, answers=answers, reads=reads)
        self._behind = behind
        self._later = 0
        self.late_answers: list[Answer] = []
        """What the store said to the late one."""

    async def carry(self, write: Write) -> list[Answer]:
        if self.strikes(write):
            return self.lose(write)
        if self.struck is None or self.late_answers:
            return await write.land()
        self._later += 1
        if self._behind == 0:
            self.late_answers = await self.struck.land()
        answers = await write.land()
        if self._later == self._behind:
            self.late_answers = await self.struck.land()
        return answers


class Refuses(_Strike):
    """The store is unavailable for the write and for what follows, `times` in all, and then works."""

    def __init__(self, at: Chosen, *, times: int = 2) -> None:
        super().__init__(at)
        self._left = times

    async def carry(self, write: Write) -> list[Answer]:
        self.strikes(write)
        if self.struck is not None and self._left:
            self._left -= 1
            raise StoreUnavailable("the store is not there just now; nothing was written")
        return await write.land()


class RefusesFrom(_Strike):
    """From the write on nothing can be written, as on a full disk; reads go on. `mend` ends it."""

    def __init__(self, at: Chosen) -> None:
        super().__init__(at)
        self._is_mended = False

    def mend(self) -> None:
        """From now on the store works."""
        self._is_mended = True

    async def carry(self, write: Write) -> list[Answer]:
        self.strikes(write)
        self.renew()
        return await write.land()

    def renew(self) -> None:
        if self.struck is not None and not self._is_mended:
            raise StoreUnavailable("the disk is full; nothing was written")


class Slow(Fault):
    """Each write takes so many seconds of the clock before it lands."""

    def __init__(self, seconds: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._seconds = seconds
        self._clock = clock

    async def carry(self, write: Write) -> list[Answer]:
        await self._clock.sleep(self._seconds)
        return await write.land()


class Stops(_Strike):
    """The write stands still, before it lands or (`landed=True`) after, until it is let go: await `reached`, then act."""

    def __init__(self, at: Chosen, *, landed: bool = False) -> None:
        super().__init__(at)
        self._landed = landed
        self.reached = asyncio.Event()
        self._go = asyncio.Event()

    def let_go(self) -> None:
        """Let the write go on."""
        self._go.set()

    async def carry(self, write: Write) -> list[Answer]:
        if not self.strikes(write):
            return await write.land()
        answers = await write.land() if self._landed else []
        self.reached.set()
        await self._go.wait()
        return answers or await write.land()


# The store that has them.


@dataclass(slots=True)
class Counts:
    """What went through a store. Bytes are those of bodies, seals and the names of calls."""

    writes: int = 0
    """Commits of which something got durable."""
    appends: int = 0
    rows: int = 0
    """Rows written: runs, records and states."""
    bytes: int = 0
    renewals: int = 0
    reads: int = 0
    rows_read: int = 0

    def add_write(self, appends: Sequence[Append], answers: Sequence[Answer]) -> None:
        """Count the appends that landed."""
        landed = [each for each, answer in zip(appends, answers, strict=True) if answer.kind is AnswerKind.OK]
        self.writes += bool(landed)
        self.appends += len(landed)
        for append in landed:
            self.rows += 1 + len(append.records) + (append.checkpoint is not None)
            self.bytes += len(append.row.seal) + (len(append.checkpoint.body) if append.checkpoint else 0)
            self.bytes += sum(len(record.body) + len(record.seal) + len(record.call) for record in append.records)

    def add_read(self, rows: int) -> None:
        """Count one read."""
        self.reads += 1
        self.rows_read += rows


class FaultyStore(BatchStore):
    """A worker's way to a store, with a fault in it, and with the worker's life: once that is over, nothing passes.

    Every verb then raises `SimulatedCrash`, but for `renew_all` and `listen`, which say `StoreUnavailable`: they are called
    in the background, where nobody could catch the other. `counts` tells what passed, also through what `reopen` gives.
    """

    def __init__(self, inner: CheckpointStore, fault: Fault | None = None, *, life: Life | None = None) -> None:
        self.inner = inner
        self.fault = fault or Fault()
        self.life = life or Life()
        self.counts = Counts()
        self._sent = 0

    # Writes.

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        self.life.reach(Where.BEFORE_WRITE)
        self._sent += 1
        answers = await self.fault.carry(Write(self._sent, appends, self.inner, self.counts))
        self.life.reach(Where.AFTER_WRITE)
        return answers

    def commit_at_once(self, append: Append) -> Answer | None:
        """As the store behind does, if it can; where there is a fault or a death ahead, the write is carried."""
        self.life.check()
        at_once = getattr(self.inner, "commit_at_once", None)
        if at_once is None or type(self.fault) is not Fault or self.life.ends_next(Where.BEFORE_WRITE):
            return None
        answer: Answer | None = at_once(append)
        if answer is not None:
            self._sent += 1
            self.counts.add_write([append], [answer])
            self.life.reach(Where.BEFORE_WRITE)  # it was not to end there, as just asked: this counts it
            self.life.reach(Where.AFTER_WRITE)
        return answer

    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        self._renew()
        return await self.inner.renew(run_id, guard=guard, seen=seen, wake_at=wake_at)

    async def renew_all(self, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        if self.life.is_over:
            raise StoreUnavailable("this worker is dead; nobody hears its heart")
        self._renew()
        return await self.inner.renew_all(guards)

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        self._renew()
        return await self.inner.post(run_id, message)

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        self._renew()
        return await self.inner.delete(run_id, guard=guard)

    def _renew(self) -> None:
        self.life.check()
        self.fault.renew()
        self.counts.renewals += 1

    # Reads.

    async def latest(self, run_id: RunId) -> StoredRun | None:
        self._read()
        found = await self.inner.latest(run_id)
        self.counts.add_read(found is not None)
        return found

    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        self._read()
        found = await self.inner.calls(run_id, since=since)
        self.counts.add_read(len(found))
        return found

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        self._read()
        found = await self.inner.load_many(run_ids)
        self.counts.add_read(sum(1 + len(run.records) for run in found if run is not None))
        return found

    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        self._read()
        found = await self.inner.list_unfinished(name=name, limit=limit, after=after)
        self.counts.add_read(len(found))
        return found

    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        self._read()
        found = await self.inner.list_runs(status=status, limit=limit, after=after)
        self.counts.add_read(len(found))
        return found

    async def inbox(self, run_id: RunId) -> list[StoredMessage]:
        self._read()
        found = await self.inner.inbox(run_id)
        self.counts.add_read(len(found))
        return found

    async def now(self) -> datetime:
        self._read()
        return await self.inner.now()

    async def listen(self, ring: Callable[[], None]) -> Ear:
        """An ear of the store behind: it hears in the background, where nobody could catch a fault."""
        if self.life.is_over:
            raise StoreUnavailable("this worker is dead; it hears nothing")
        return await self.inner.listen(ring)

    def _read(self) -> None:
        self.life.check()
        self.fault.read()

    def reopen(self) -> FaultyStore:
        """The same store, fault, life and counts, through connections of its own."""
        again = FaultyStore(self.inner.reopen(), self.fault, life=self.life)
        again.counts = self.counts
        return again

    async def close(self) -> None:
        """Close the store behind, as the system does for a process that is gone: also where the worker is dead."""
        await self.inner.close()
