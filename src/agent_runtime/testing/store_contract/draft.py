"""What a writer hands to a store, as the contract's cases need it: genuinely sealed rows, records and messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple

from agent_runtime.ids import RunId
from agent_runtime.journal.records import (
    FORMAT,
    NO_OWNER,
    NO_SEAL,
    OWNER_SIZE,
    RecordKind,
    RunStatus,
    StoredCheckpoint,
    StoredMessage,
    StoredRecord,
    StoredRow,
)
from agent_runtime.journal.seal import KeyRing, Sealer, checkpoint_digest, sealer_for
from agent_runtime.journal.store import Append, Guard

TENANT = "contract"
RING = KeyRing({"contract": b"a key for tests, which guards nothing"}, "contract")
NEXT_RING = KeyRing({**RING.keys, "next": b"another key for tests, as harmless"}, "next")


def owner_named(name: str) -> bytes:
    """The owner value that stands for a worker of that name."""
    return sha256(name.encode()).digest()[:OWNER_SIZE]


ALICE, BOB = owner_named("Alice"), owner_named("Bob")


class Entry(NamedTuple):
    """A record before it has a number and a seal."""

    kind: RecordKind
    body: bytes = b""
    call: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """One run as a writer believes it to be stored. Its verbs draft what comes next, and change nothing.

    `after` gives the draft that follows once an append has landed. Two appends drafted from one draft are a fork.
    """

    row: StoredRow
    sealer: Sealer

    @classmethod
    def of(
        cls,
        run_id: str = "run-1",
        *,
        name: str = "orders",
        kind: str = "flow",
        owner: bytes = ALICE,
        epoch: int = 1,
        attempts: int = 0,
        lease_ms: int = 30_000,
    ) -> Draft:
        """A run that is not stored yet."""
        sealer = sealer_for(RING, tenant=TENANT, run_id=run_id)
        status, step, number = RunStatus.RUNNING, 0, 0
        return cls(
            StoredRow(
                RunId(run_id), FORMAT, sealer.key_id, TENANT, kind, name, status, step, epoch, owner, number, NO_SEAL,
                attempts, NO_SEAL, lease_ms,
            ),
            sealer,
        )  # fmt: skip

    @property
    def run_id(self) -> RunId:
        return self.row.run_id

    @property
    def guard(self) -> Guard:
        """What is stored, without the heartbeat: the guard of an owner."""
        return Guard(self.row.epoch, self.row.owner, self.row.number, self.row.head)

    def after(self, append: Append) -> Draft:
        """The draft once that append has landed."""
        ring = NEXT_RING if append.row.key_id == NEXT_RING.active else RING
        return Draft(append.row, sealer_for(ring, tenant=TENANT, run_id=self.run_id))

    def open(self, *bodies: bytes, checkpoint: bytes | None = None) -> Append:
        """Make the run: an `opened`, then a record for each of `bodies`."""
        entries = (Entry(RecordKind.OPENED, b"input"), *_results(bodies))
        return self.append(self.row, *entries, checkpoint=checkpoint)

    def add(self, *bodies: bytes, checkpoint: bytes | None = None, seen: int = 0) -> Append:
        """A record for each of `bodies`, at the same step."""
        return self.append(self.row, *_results(bodies), checkpoint=checkpoint, seen=seen)

    def step_on(self, *bodies: bytes, checkpoint: bytes | None = None, steps: int = 1) -> Append:
        """The same, `steps` further."""
        return self.append(self.row._replace(step=self.row.step + steps), *_results(bodies), checkpoint=checkpoint)

    def claim(self, owner: bytes, *, heartbeat_at: int | None = None) -> Append:
        """Take the run over: the next epoch, under another owner."""
        row = self.row._replace(
            status=RunStatus.RUNNING,
            step=self.row.step + 1,
            epoch=self.row.epoch + 1,
            owner=owner,
            attempts=self.row.attempts + 1,
            wake_at=None,
        )
        return self.append(row, Entry(RecordKind.CLAIMED, b"who and why"), heartbeat_at=heartbeat_at)

    def park(self, status: RunStatus = RunStatus.PAUSED, *, wake_at: int | None = None, seen: int = 0) -> Append:
        """Give the run back under that status, to be claimed from `wake_at` on."""
        row = self.row._replace(status=status, owner=NO_OWNER, wake_at=wake_at)
        return self.append(row, Entry(RecordKind.RELEASED), seen=seen)

    def end(self, status: RunStatus = RunStatus.DONE) -> Append:
        """End the run and give it back."""
        row = self.row._replace(status=status, owner=NO_OWNER, wake_at=None)
        return self.append(row, Entry(RecordKind.ENDED, b"result"))

    def settle(self, body: bytes = b"it happened") -> Append:
        """Say afterwards what became of a call."""
        return self.append(self.row, Entry(RecordKind.SETTLED, body, "0", 1))

    def rekey(self, owner: bytes | None = None) -> Append:
        """Move the run to another key: as it stands, or with a claim."""
        moved = replace(self, sealer=sealer_for(NEXT_RING, tenant=TENANT, run_id=self.run_id))
        row = self.row._replace(key_id=moved.sealer.key_id)
        if owner is not None:
            row = row._replace(epoch=row.epoch + 1, step=row.step + 1, owner=owner)
        return moved.append(row, Entry(RecordKind.REKEYED, b"", self.row.key_id))

    def append(
        self,
        row: StoredRow,
        *entries: Entry,
        checkpoint: bytes | None = None,
        seen: int = 0,
        heartbeat_at: int | None = None,
    ) -> Append:
        """Any append: `entries` numbered, chained and sealed after what is stored, under `row` as it is wished."""
        if checkpoint is not None:
            named = Entry(RecordKind.CHECKPOINT, checkpoint_digest(row.step, checkpoint))
            at = 1 if entries[0].kind is RecordKind.OPENED else 0
            entries = (*entries[:at], named, *entries[at:])
        records = self._chain(row.epoch, entries)
        # `posted` in a row handed in is what its writer has seen: `save` and `record_call` have no other place for it.
        row = row._replace(number=records[-1].number, head=records[-1].seal, posted=seen)
        row = row._replace(seal=self.sealer.row(row))
        guard = self.guard._replace(heartbeat_at=heartbeat_at) if self.row.number else None
        return Append(row, guard, records, self._checkpoint(row.step, checkpoint), seen)

    def message(self, body: bytes = b"approved", *, kind: str = "verdict") -> StoredMessage:
        """A message to the run, named by the digest of what it says."""
        digest = sha256(kind.encode() + b"\0" + body).digest()
        return StoredMessage(digest, kind, body, self.sealer.message(kind, body))

    def _chain(self, epoch: int, entries: tuple[Entry, ...]) -> tuple[StoredRecord, ...]:
        records: list[StoredRecord] = []
        number, previous = self.row.number, self.row.head
        for kind, body, call, attempt in entries:
            number += 1
            previous = self.sealer.record(number, epoch, kind, call, attempt, previous, body)
            records.append(StoredRecord(number, epoch, kind, call, attempt, body, previous))
        return tuple(records)

    def _checkpoint(self, step: int, body: bytes | None) -> StoredCheckpoint | None:
        return None if body is None else StoredCheckpoint(step, body, self.sealer.checkpoint(step, body))


def _results(bodies: tuple[bytes, ...]) -> tuple[Entry, ...]:
    return tuple(Entry(RecordKind.DONE, body, "0", 1) for body in bodies)
