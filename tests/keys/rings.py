"""What the tests of keys share: two rings with the same keys, workers that die after so many commits, and places to look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_runtime.ids import RunId
from agent_runtime.journal.keys import KeyRing
from agent_runtime.journal.records import RecordKind, StoredRun
from agent_runtime.journal.seal import open_run
from agent_runtime.journal.store import Answer, Append
from agent_runtime.runs import Runs
from tests.bench import Killed, Place, Worker

OLD_KEY, NEW_KEY = b"the old key, of thirty-two bytes", b"the new key, of thirty-two bytes"
KEYS = {"old": OLD_KEY, "new": NEW_KEY}
OLD, NEW = KeyRing({"old": OLD_KEY}, "old"), KeyRing({"new": NEW_KEY}, "new")
STILL_OLD, NEXT = KeyRing(KEYS, "old"), KeyRing(KEYS, "new")
"""Before and after the change: both know both keys."""
HIDING = KeyRing(KEYS, "new", encrypts={"new"})
"""The new key encrypts."""
BACK = KeyRing(KEYS, "old", encrypts={"new"})
"""From the key that encrypts back to the one that does not."""
REVOKING = KeyRing(KEYS, "new", revoked={"old"})
ALL_HIDING = KeyRing(KEYS, "old", encrypts=set(KEYS))


class DiesAfter(Worker):
    """A worker whose process ends once so many of its commits are durable."""

    def __init__(self, place: Place, commits: int) -> None:
        super().__init__(place)
        self.left = commits

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        answers = await super().commit(appends)
        self.left -= 1
        if self.left == 0:
            self.is_dead = True
            raise Killed("after a commit")
        return answers


def runs_of(place: Place, ring: KeyRing, **options: Any) -> Runs:
    return Runs(place.open(), checkpoint_key=ring, **options)


async def load(place: Place, ring: KeyRing, run_id: str = "run") -> StoredRun:
    """A run that verifies under the ring, as it is stored."""
    [run] = await place.open().load_many([RunId(run_id)])
    assert run is not None, f"run {run_id!r} is not there"
    open_run(ring, run, tenant="")
    return run._replace(row=run.row._replace(idle_ms=0))


def keys_of(run: StoredRun) -> list[str]:
    """The keys that a run has been under, the first one first."""
    return [*(record.call for record in run.records if record.kind == RecordKind.REKEYED), run.row.key_id]
