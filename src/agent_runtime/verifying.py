"""Whether stored runs are as they were written, and what can still be read of one that is not."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from agent_runtime.described import CORRUPT, RunInfo, RunReport
from agent_runtime.errors import CheckpointNotFound, CheckpointStoreCorrupt, NewerFormat
from agent_runtime.ids import RunId
from agent_runtime.journal.records import NO_SEAL, StoredRecord
from agent_runtime.journal.seal import NO_SUCH_VALUES, Sealer, read_sound, sealer_for
from agent_runtime.journal.store import CheckpointStore, Searching
from agent_runtime.recovery import read_verified
from agent_runtime.redaction import Redact
from agent_runtime.run import Backing
from agent_runtime.timeline import read_timeline

NAMELESS = "(a run without a name)"


@dataclass(frozen=True, slots=True)
class Verified:
    """Whether a run is as it was written: `why` says what is not."""

    run_id: str
    records: int = 0
    why: str = ""
    key_id: str = ""
    """The key it is under; empty where that cannot be believed."""

    @property
    def holds(self) -> bool:
        return not self.why


async def verify_run(backing: Backing, run_id: RunId) -> Verified:
    """The run, opened as a whole. `CheckpointNotFound`, `CheckpointConflict` where it was deleted."""
    try:
        found = await read_verified(backing, run_id)
    except (CheckpointStoreCorrupt, NewerFormat) as error:
        return Verified(run_id, why=str(error))
    return Verified(run_id, len(found.stored.records), key_id=found.stored.row.key_id)


async def verify_named(backing: Backing, run_id: RunId) -> Verified:
    """The same for a run that somebody names: where it is not there, its records may be."""
    try:
        return await verify_run(backing, run_id)
    except CheckpointNotFound:
        sealers = [sealer_for(backing.ring, tenant=backing.tenant, run_id=run_id, key_id=key_id)
                   for key_id in backing.ring.keys]  # fmt: skip
        if not any(_is_first(stray, sealer) for stray in await read_strays(backing.store) for sealer in sealers):
            raise
        return Verified(run_id, why=f"run {run_id!r} is not as it was written: its records are there, and its row is gone")


async def read_strays(store: CheckpointStore) -> Sequence[StoredRecord]:
    """Records of runs whose row is gone, where the store can tell: they do not name their run, but are sealed for it."""
    return await store.strays() if isinstance(store, Searching) else []


async def inspect_corrupt(
    backing: Backing, run_id: RunId, error: CheckpointStoreCorrupt, *, redact: Redact | None = None
) -> RunReport | None:
    """What still holds of a run that `error` is about: the timeline of its records up to the first that does not.

    None where it is gone by now. Of its row nothing is told, since that may be what was changed.
    """
    [stored] = await backing.store.load_many([run_id])
    if stored is None:
        return None
    sound = read_sound(backing.ring, stored, tenant=backing.tenant)
    timeline = read_timeline(sound.records, sound.checkpoint, redact=redact)
    return RunReport(RunInfo(run_id, CORRUPT, str(error)), timeline, sound=len(sound.records), broken=sound.broken)


def _is_first(record: StoredRecord, sealer: Sealer) -> bool:
    """Whether the record is the first of the sealer's run."""
    place = (record.number, record.epoch, record.kind, record.call, record.attempt)
    try:
        return record.number == 1 and hmac.compare_digest(sealer.record(*place, NO_SEAL, record.body), record.seal)
    except NO_SUCH_VALUES:
        return False
