"""Moves stored runs to the ring's active key, by somebody's word and with a record that says so.

Rules of this file:

* Only a run that nobody may be working is moved; one that is held moves by itself when it is picked up the next time.
* What is moved was verified as a whole, in the state that the append's guard names. A run that has ended stays as it is.
* A run under a revoked key is moved only where somebody says that it is genuine: whoever has that key can seal, too.
* A run that is under the active key already is left alone, so that to begin again is to go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from agent_runtime import codec
from agent_runtime.errors import CheckpointStoreCorrupt, RevokedKey
from agent_runtime.ids import RunId
from agent_runtime.journal.journal import Journal
from agent_runtime.journal.records import RecordKind
from agent_runtime.journal.seal import sealer_for
from agent_runtime.outside import Admit, append_to_ended, by_claim, is_held, once_it_stands, stay
from agent_runtime.recovery import Found
from agent_runtime.run import Backing
from agent_runtime.settlements import require_text

HELD = "a worker that may be alive holds it; it moves when it is picked up the next time"


@dataclass(frozen=True, slots=True)
class Resealed:
    """What became of a run that was to go on to the active key."""

    run_id: str
    was: str = ""
    """The key it was under; empty where that cannot be believed."""
    now: str = ""
    """The key it is under. The same as `was`, with no `why`: there was nothing to do."""
    why: str = ""
    """Why it was left alone."""

    @property
    def moved(self) -> bool:
        return not self.why and self.was != self.now


async def reseal(backing: Backing, run_id: RunId, *, by: str, even_revoked: bool, admit: Admit) -> Resealed:
    """Move a run to the active key. `CheckpointStoreCorrupt` where it is not as it was written, and `RevokedKey`."""
    body = codec.timed(codec.encode({"by": require_text("by", by)}), backing.clock.now_ms())
    if even_revoked:
        backing = backing._replace(ring=backing.ring.trusting_revoked())
    active = backing.ring.active

    async def write(found: Found) -> Resealed:
        was = found.stored.row.key_id
        if was == active:
            return Resealed(run_id, was, was)
        if found.status.is_final:
            sealer = sealer_for(backing.ring, tenant=backing.tenant, run_id=run_id)
            await append_to_ended(
                backing, found, sealer, lambda journal: journal.note(RecordKind.REKEYED, was, body=body)
            )  # fmt: skip
        elif is_held(found):
            return Resealed(run_id, was, was, HELD)
        else:
            await by_claim(backing, found, "reseal", partial(_leave_as_it_was, found), rekeyed=body)
        return Resealed(run_id, was, active)

    return await once_it_stands(backing, run_id, admit, write, "sealed anew")


def _leave_as_it_was(found: Found, journal: Journal) -> None:
    wake_at = found.stored.row.wake_at
    stay(found, found.status, journal)
    journal.wake_at = wake_at


async def try_to_reseal(backing: Backing, run_id: RunId, *, by: str, even_revoked: bool, admit: Admit) -> Resealed:
    """The same for one of many: a run that cannot be moved is reported, and hinders no other."""
    try:
        return await reseal(backing, run_id, by=by, even_revoked=even_revoked, admit=admit)
    except RevokedKey as error:
        return Resealed(run_id, why=f"it is under a revoked key: {error}")
    except CheckpointStoreCorrupt as error:
        return Resealed(run_id, why=str(error))
