"""One open run's journal: note a record, stand at a barrier until it is durable, and keep the row that guards it all.

Rules of this file:

* A record is numbered when it is noted, chained and sealed when its commit is taken; noting is not yet writing.
* A barrier returns once everything noted before it is committed under the present epoch, and raises if that is not so.
  Nothing acts on the outside world, and nothing waits for it, between a note and its barrier.
* After one failure (`Fenced`, corrupt, unavailable) every note and every barrier raises it again.
* A copy of this process made by `fork` is not the owner: it is fenced at its first barrier, and writes nothing.
* With `commits="each"` every note has a barrier of its own; with "grouped" they share the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from os import getpid
from typing import Protocol

from agent_runtime.clock import Clock
from agent_runtime.errors import CheckpointStoreCorrupt, Fenced
from agent_runtime.ids import RunId
from agent_runtime.journal.commits import GroupCommit
from agent_runtime.journal.records import (
    FORMAT,
    NO_OWNER,
    NO_SEAL,
    RecordKind,
    RunStatus,
    StoredCheckpoint,
    StoredRow,
    new_tuple,
)
from agent_runtime.journal.seal import Noted, Sealer, checkpoint_digest
from agent_runtime.journal.states import RUN_LIFE
from agent_runtime.journal.store import Answer, AnswerKind, Append, Guard


class Commits(Enum):
    """When records are written: several with one barrier, or each by itself."""

    GROUPED = "grouped"
    EACH = "each"


PROGRESS = frozenset({int(RecordKind.DONE), int(RecordKind.SETTLED), int(RecordKind.VERDICT)})
"""After one of these the count of claims without progress begins anew."""

_OK = AnswerKind.OK
"""Kept, as whatever each step needs of an enum is: its class takes longer to find a member than to do anything with it."""

TRUSTED_SHARE = 2 / 3
"""A worker trusts itself for this share of its lease after the last sign that reached the store."""


def new_row(sealer: Sealer, *, run_id: RunId, kind: str, name: str, owner: bytes, lease_ms: int) -> StoredRow:
    """The row of a run that is to be opened: step 0, epoch 1, no records yet."""
    return StoredRow(
        run_id, FORMAT, sealer.key_id, sealer.tenant, kind, name, RunStatus.RUNNING, 0, 1, owner, 0, NO_SEAL, 0, NO_SEAL,
        lease_ms,
    )  # fmt: skip


def claim_row(row: StoredRow, *, owner: bytes, lease_ms: int) -> StoredRow:
    """The row of a stored run under its next owner: one epoch, one step and one attempt further, and running."""
    return row._replace(
        status=RunStatus.RUNNING,
        step=row.step + 1,
        epoch=row.epoch + 1,
        owner=owner,
        attempts=row.attempts + 1,
        lease_ms=lease_ms,
        wake_at=None,
    )


def guard_of(row: StoredRow, *, even_if_alive: bool = False) -> Guard:
    """What must still be stored for a claim to land: all of what was read, unless a living owner is taken over."""
    return Guard(row.epoch, row.owner, row.number, row.head, None if even_if_alive else row.heartbeat_at)


class Listener(Protocol):
    """Whoever wants to know of messages to a run."""

    def hear(self) -> None:
        """Somebody has posted."""


class Journal:
    """The appender of one run under one epoch; its first append opens the run (`new_row`) or claims it (`claim_row`)."""

    __slots__ = (
        "_buffer",
        "_checkpoint",
        "_claimed_epoch",
        "_clock",
        "_commits",
        "_enrolled",
        "_failure",
        "_flying",
        "_guard",
        "_loop",
        "_lost",
        "_next_guard",
        "_pid",
        "_released",
        "_sealer",
        "_taken_step",
        "_waiters",
        "attempts",
        "epoch",
        "head",
        "is_each",
        "kind",
        "lease_ms",
        "listener",
        "name",
        "number",
        "opened_seal",
        "owner",
        "posted",
        "run_id",
        "seen",
        "status",
        "step",
        "trust_seconds",
        "trusted_until",
        "wake_at",
        "written_at",
    )

    def __init__(
        self,
        commits: GroupCommit,
        sealer: Sealer,
        *,
        clock: Clock,
        row: StoredRow,
        guard: Guard | None,
        mode: Commits,
    ) -> None:
        """The journal from `row` on, which is as the writer wants it; `guard` is what the store has now."""
        self._commits = commits
        commits.runs += 1
        self._sealer = sealer
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._pid = getpid()
        self._guard = guard
        self._claimed_epoch = 0
        self._buffer: list[Noted] | None = None  # an open run mostly waits, and an empty list is not free
        self._checkpoint: StoredCheckpoint | None = None
        self._flying: Append | None = None
        self._enrolled = False
        self._released = False
        self._taken_step = row.step - 1
        self._next_guard = guard
        """What the store's row holds once the append in flight has landed."""
        self._waiters: tuple[tuple[int, asyncio.Future[None]], ...] = ()
        self._failure: BaseException | None = None
        self._lost: Sequence[Noted] = ()
        self.opened_seal = NO_SEAL
        """The seal of the run's first record, once it is known."""
        self.run_id: RunId = row.run_id
        self.kind, self.name = row.kind, row.name
        self.status = row.status if isinstance(row.status, RunStatus) else RunStatus(row.status)
        self.step, self.epoch, self.number, self.head = row.step, row.epoch, row.number, row.head
        self.attempts, self.posted, self.wake_at = row.attempts, row.posted, row.wake_at
        self.seen = row.posted
        """How many messages were read; a row that parks the run while there are more wakes it at once."""
        self.listener: Listener | None = None
        """Told on the loop once the store has told of a message that was not there before."""
        self.owner, self.lease_ms = row.owner, row.lease_ms
        self.is_each = mode is Commits.EACH
        """Whether every note is to have a barrier of its own."""
        self.trust_seconds = row.lease_ms / 1000 * TRUSTED_SHARE
        """How long after a sign of life the worker believes that the run is still its own."""
        self.written_at = clock.monotonic()
        self.trusted_until = self.written_at + self.trust_seconds

    @property
    def failure(self) -> BaseException | None:
        """What stopped this journal, if anything did."""
        return self._failure

    @property
    def guard(self) -> Guard | None:
        """What the store's row holds, as far as is known; None before a new run is written."""
        return self._guard

    @property
    def is_claimed(self) -> bool:
        """Whether the store holds this journal's epoch: false until its first append has landed."""
        return self._claimed_epoch == self.epoch

    @property
    def is_released(self) -> bool:
        """Whether the run has been given back: no further record is written."""
        return self._released

    def note(self, kind: RecordKind, call: str = "", attempt: int = 0, body: bytes = b"") -> None:
        """Add a record to what the next barrier commits."""
        code = int(kind)
        if self._failure is not None:
            self._lost = [*self._lost, (code, call, attempt, body)]
            raise self._failure
        assert not self._released, f"run {self.run_id!r} was given back; nothing is written after that"
        self.number += 1
        if self._buffer is None:
            self._buffer = [(code, call, attempt, body)]
        else:
            self._buffer.append((code, call, attempt, body))
        if code in PROGRESS:
            self.attempts = 0

    def move_to_next_step(self) -> None:
        """The next commit is a checkpoint: it moves the run one step on, however often this is called before it."""
        self.step = self._taken_step + 1

    def keep_state(self, body: bytes) -> None:
        """Store `body` as the program's state at the present step, and its digest in the journal, with the next commit."""
        checkpoint = self._sealer.keep(self.step, body)
        self.note(RecordKind.CHECKPOINT, body=checkpoint_digest(self.step, checkpoint.body))
        self._checkpoint = checkpoint

    def set_status(self, status: RunStatus, *, wake_at: int | None = None) -> None:
        """The run's status from the next commit on, as the table of `states` allows."""
        assert status is self.status or (self.status, status) in RUN_LIFE, f"{self.status!r} to {status!r}"
        self.status = status
        self.wake_at = wake_at

    def give_back(self) -> None:
        """The next commit frees the run: it has no owner from then on."""
        self._released = True

    async def barrier(self) -> None:
        """Wait until everything noted so far is committed. Raises `Fenced`, or what else keeps it from being so."""
        waiter = self.stand(is_alone=False)
        if waiter is not None:
            await waiter

    def stand(self, *, is_alone: bool) -> asyncio.Future[None] | None:
        """What a barrier waits for; None where all is committed already.

        `is_alone`: no other task of this run is about to note something that this commit could carry too.
        """
        if self._failure is not None or getpid() != self._pid:
            raise self._why_stopped()
        if self._flying is None and not self._enrolled:
            if not self._buffer:
                return None
            if is_alone and self._commits.carry_now(self):
                if self._failure is not None:
                    raise self._failure
                return None
            if self._flying is None:  # an append that was to go at once may be on its way all the same
                self._enrolled = True
                self._commits.enroll(self)
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters += ((self.number, waiter),)
        return waiter

    @property
    def sealer(self) -> Sealer:
        """What seals for this run."""
        return self._sealer

    def leave(self) -> None:
        """Nothing more is written through this journal."""
        self._commits.runs -= 1

    def fail(self, error: BaseException) -> None:
        """Stop this journal: every waiter and every later call gets the error."""
        if self._failure is None:
            self._failure = error
            flying = () if self._flying is None else map(self._sealer.show_record, self._flying.records)
            self._lost = [*((each.kind, each.call, each.attempt, each.body) for each in flying), *(self._buffer or ())]
        waiters, self._waiters = self._waiters, ()
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(self._failure)

    def heard(self, sent_at: float, posted: int) -> None:
        """The store took a sign of life that was sent then. May be called from any thread."""
        self.trusted_until = max(self.trusted_until, sent_at + self.trust_seconds)
        if posted > self.posted:
            self.posted = posted
            self._call_on_loop(self._tell_posted)

    def lost(self) -> Sequence[Noted]:
        """What was noted and is not known to be stored, once this journal has stopped."""
        return self._lost

    def fail_from_thread(self, error: BaseException) -> None:
        """`fail`, called from another thread than the loop's."""
        self._call_on_loop(partial(self.fail, error))

    def _call_on_loop(self, action: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            return  # the loop is closed: nothing is left to stop, or to tell

    def _tell_posted(self) -> None:
        if self.listener is not None and not self._released and self._failure is None:
            self.listener.hear()

    # What the group commit calls.

    def take(self) -> Append:
        if getpid() != self._pid:
            raise self._why_stopped()
        self._enrolled = False
        noted, self._buffer = self._buffer or [], None
        records = self._sealer.chain(noted, number=self.number - len(noted), epoch=self.epoch, previous=self.head)
        self.head = records[-1].seal
        if self._guard is None:
            self.opened_seal = records[0].seal
        owner = NO_OWNER if self._released else self.owner
        append = new_tuple(Append, (self._row(owner), self._guard, records, self._checkpoint, self.seen))
        self._checkpoint = None
        self._flying, self._taken_step = append, self.step
        self._next_guard = new_tuple(Guard, (self.epoch, owner, self.number, self.head, None))
        return append

    def landed(self, answer: Answer, sent_at: float) -> None:
        append, guard = self._flying, self._next_guard
        assert append is not None
        assert guard is not None
        kind, posted = answer
        if kind is not _OK:
            self._refused(append.row, kind)
            self._flying = None
            return
        self._flying = None
        self._guard = guard
        self._claimed_epoch = self.epoch
        self.written_at = sent_at
        if posted > self.posted:
            self.posted = posted
            self._tell_posted()
        trusted_until = sent_at + self.trust_seconds
        if trusted_until > self.trusted_until:
            self.trusted_until = trusted_until
        waiters, self._waiters = self._waiters, ()
        number = guard.number
        for noted, waiter in waiters:
            if noted > number:
                self._waiters += ((noted, waiter),)
            elif not waiter.done():
                waiter.set_result(None)
        if self._waiters:
            self._enrolled = True
            self._commits.enroll(self)

    def _refused(self, row: StoredRow, kind: AnswerKind) -> None:
        match kind:
            case AnswerKind.MOVED if row.epoch != self._claimed_epoch:
                self.fail(Fenced(f"run {self.run_id!r} was claimed by another owner first"))
            case AnswerKind.FENCED:
                self.fail(Fenced(f"run {self.run_id!r} is held by another owner, has ended, or is gone"))
            case AnswerKind.MOVED:
                self.fail(
                    CheckpointStoreCorrupt(
                        f"run {self.run_id!r} moved under its owner: the store holds other records than this worker "
                        "wrote. A copy of this process writes too, or the store lost acknowledged writes; stop both "
                        "and look at the journal before anything goes on."
                    )
                )
            case AnswerKind.OK | AnswerKind.UNKNOWN:
                raise AssertionError("what landed is no refusal, and what is unknown is settled before it is handed out")

    def failed(self, error: BaseException) -> None:
        self.fail(error)
        self._flying = None

    def may_settle(self, now: float) -> bool:
        return now < self.trusted_until

    def _why_stopped(self) -> BaseException:
        if self._failure is not None:
            return self._failure
        return Fenced(f"run {self.run_id!r} belongs to process {self._pid}, and this is a copy of it")

    def _row(self, owner: bytes) -> StoredRow:
        """The row as the next commit sets it, sealed."""
        sealer, status = self._sealer, int(self.status)
        seal = sealer.row_of(self.kind, self.name, status, self.step, self.epoch, owner, self.number, self.head, self.attempts)
        return new_tuple(StoredRow, (
            self.run_id, FORMAT, sealer.key_id, sealer.tenant, self.kind, self.name, status, self.step, self.epoch, owner,
            self.number, self.head, self.attempts, seal, self.lease_ms, self.wake_at, 0, 0, 0, 0, 0,
        ))  # fmt: skip
