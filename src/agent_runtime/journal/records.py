"""What is stored of a run: its row, its records, its checkpoint, its messages. Frozen values. Pure.

Bodies are bytes, sealed as they are; no store and nothing in this file knows what they mean.
All are tuples: they are made many times a step, and a tuple costs a third of a frozen dataclass.
"""

from enum import IntEnum
from typing import NamedTuple

from agent_runtime.ids import RunId

new_tuple = tuple.__new__
"""Makes a named tuple of all its fields at once, without the call that its class has in between."""

FORMAT = 1
"""The form of rows, records and seals that this version writes. A higher one is refused."""

OWNER_SIZE = 16
SEAL_SIZE = 32
NO_OWNER = bytes(OWNER_SIZE)
"""Stands in the row of a run that nobody holds."""
NO_SEAL = bytes(SEAL_SIZE)
"""The seal before the first record."""


class RecordKind(IntEnum):
    """What a record of the journal says."""

    OPENED = 1
    CLAIMED = 2
    STARTED = 3
    DONE = 4
    UNRECORDABLE = 5
    UNSENT = 6
    PENDING = 7
    VERDICT = 8
    SETTLED = 9
    CHECKPOINT = 10
    CANCELLED = 11
    QUARANTINED = 12
    RELEASED = 13
    MIGRATED = 14
    REKEYED = 15
    ENDED = 16
    FIELD = 17
    """A large part of a program's state that did not change: kept once, named by its checkpoints."""


AFTER_THE_END = frozenset({RecordKind.SETTLED, RecordKind.REKEYED})
"""All that a run takes once it is final: neither changes how it ended."""


class RunStatus(IntEnum):
    """Where a run stands. From `DONE` on a status is final."""

    RUNNING = 1
    PAUSED = 2
    BLOCKED = 3
    QUARANTINED = 4
    DONE = 8
    FAILED = 9
    CANCELLED = 10
    DELETED = 11

    @property
    def is_final(self) -> bool:
        return self >= RunStatus.DONE


class LostBody(bytes):
    """Stands where a store cannot give a body back: `why` names what is missing. No seal holds over it."""

    why: str

    @classmethod
    def of(cls, stub: bytes, why: str) -> "LostBody":
        lost = cls(stub)
        lost.why = why
        return lost


class StoredRecord(NamedTuple):
    """One record of the journal. `number` counts from 1 without a gap; `call` is "" for the run's own records."""

    number: int
    epoch: int
    kind: int
    call: str
    attempt: int
    body: bytes
    seal: bytes


class StoredRow(NamedTuple):
    """The run's row. Everything down to `seal` is sealed; what follows are hints that the store keeps."""

    run_id: RunId
    format: int
    key_id: str
    tenant: str
    kind: str
    name: str
    status: int
    step: int
    epoch: int
    owner: bytes
    number: int
    head: bytes
    attempts: int
    seal: bytes
    lease_ms: int = 0
    """How long the owner's word holds after a heartbeat: written by the owner."""
    wake_at: int | None = None
    """When a parked run may be claimed again, in milliseconds UTC: as the writer wishes it."""
    heartbeat_at: int = 0
    """When the owner was last heard, on the store's own lease clock: compare for equality only."""
    idle_ms: int = 0
    """How long ago that was when the row was read, judged by the store."""
    posted: int = 0
    """How many messages were ever posted to the run."""
    created_at: int = 0
    updated_at: int = 0


class StoredCheckpoint(NamedTuple):
    """The state of a program at a step; of each run the latest is kept."""

    step: int
    body: bytes
    seal: bytes


class StoredMessage(NamedTuple):
    """Something on its way to whoever owns the run; `digest` names it, so that it lands once."""

    digest: bytes
    kind: str
    body: bytes
    seal: bytes


class StoredRun(NamedTuple):
    """A run as read at one moment. `records` is empty where they were not asked for."""

    row: StoredRow
    checkpoint: StoredCheckpoint | None = None
    records: tuple[StoredRecord, ...] = ()
