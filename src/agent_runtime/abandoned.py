"""Which runs nobody works any more: the look at a store that finds them.

A run is free where it has no owner, where its owner's process is known to be gone, or where its lease has lapsed. It is
due where it is free, is to be worked, and no time that lies ahead is set for it. Nothing is claimed here and no seal is
opened: what is found is worth a worker, and the worker verifies it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from agent_runtime.clock import Clock, milliseconds
from agent_runtime.errors import CheckpointStoreCorrupt
from agent_runtime.ids import RunId
from agent_runtime.journal.records import NO_OWNER, RunStatus, StoredRow
from agent_runtime.journal.store import CheckpointStore, Sifting
from agent_runtime.lease import ProcessMark, find_mark, is_dead, seconds_held
from agent_runtime.run import LONGEST_WAKE_SECONDS

FEW_RUNS = 1000
"""So many unfinished runs are listed with every look; more than these only with every poll."""
PATIENCE = 50
"""So many times as long as a look takes, the next one waits, but for no longer than a poll."""
MOST_DUE = 10_000
PAGE = 500


class Seen(NamedTuple):
    """A run as listed, and which process holds it, where that can be told."""

    row: StoredRow
    mark: ProcessMark | None

    @property
    def claim(self) -> tuple[int, bytes]:
        return self.row.epoch, self.row.owner

    @property
    def is_free(self) -> bool:
        """Whether a claim may succeed."""
        return self.row.owner == NO_OWNER or seconds_held(self.row, self.mark) is None

    @property
    def is_dead(self) -> bool:
        """Whether its owner's process is known to be gone."""
        return self.row.owner != NO_OWNER and self.mark is not None and is_dead(self.mark, self.row.owner)


@dataclass(slots=True)
class Look:
    """What one look found: runs to start now, which are free, which have an owner, and how many were looked at."""

    due: list[Seen] = field(default_factory=list)
    free: set[RunId] = field(default_factory=set)
    held: dict[RunId, Seen] = field(default_factory=dict)
    unfinished: int = 0

    def forget(self, seen: Seen) -> None:
        """Somebody sees to the run: what was found of it is of no use any more."""
        self.due.remove(seen)
        self.held.pop(seen.row.run_id, None)


def is_due(seen: Seen, now_ms: int, *, trust_leases: bool = True) -> bool:
    """Whether the run is worth a worker now. Where leases are not to be trusted, only a dead owner is none."""
    row = seen.row
    if not seen.is_free or not may_wake(row, now_ms):
        return False
    if row.owner != NO_OWNER:
        return trust_leases or seen.is_dead
    return row.status != RunStatus.RUNNING or not _is_ahead(row.wake_at, now_ms)


def may_wake(row: StoredRow, now_ms: int) -> bool:
    """Whether the run is to be worked sooner or later, without anybody's doing: it runs, or its time has come."""
    if row.status in (RunStatus.PAUSED, RunStatus.BLOCKED):
        return row.wake_at is not None and row.wake_at <= now_ms
    return row.status == RunStatus.RUNNING


def _is_ahead(wake_at: int | None, now_ms: int) -> bool:
    """Whether a worker set a time that is still to come; one further ahead than any sets was set under another clock."""
    return wake_at is not None and 0 < wake_at - now_ms <= LONGEST_WAKE_SECONDS * 1000


class Lookout:
    """Looks at the runs of one name and kind. It remembers who holds what, which saves it reading that again."""

    def __init__(self, store: CheckpointStore, *, name: str, kind: str, poll_seconds: float, clock: Clock) -> None:
        self._store = store
        self._name = name
        self._kind = kind
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._looked_at = float("-inf")
        self._rest_seconds = 0.0
        self.last = Look()

    async def look(self, may_start: Callable[[RunId], bool], *, trust_leases: bool) -> Look:
        """Read all runs anew that may be worked; between two polls of a store with many, or a slow one, look at the owners of
        this host alone.

        `due` has no more than `MOST_DUE` runs, of those that may be started.
        """
        now = self._clock.monotonic()
        if now - self._looked_at < self._rest_seconds:
            dead = [seen for run_id, seen in self.last.held.items() if seen.is_dead and may_start(run_id)]
            self.last.due = dead + [seen for seen in self.last.due if seen.row.run_id not in self.last.held]
            return self.last
        look = Look()
        async for page, now_ms in self._pages():
            for row in page:
                seen = await self._see(look, row)
                if seen is not None and may_wake(row, now_ms) and seen.is_free:
                    look.free.add(row.run_id)
                    is_wanted = len(look.due) < MOST_DUE and may_start(row.run_id)
                    if is_wanted and is_due(seen, now_ms, trust_leases=trust_leases):
                        look.due.append(seen)
        self.last, self._looked_at = look, now
        took = self._clock.monotonic() - now
        self._rest_seconds = self._poll_seconds if look.unfinished > FEW_RUNS else min(self._poll_seconds, PATIENCE * took)
        return look

    async def look_again(self, seen: Seen, *, trust_leases: bool) -> bool:
        """Whether a run still stands as it was seen, and is due."""
        stored = await self._store.latest(seen.row.run_id)
        if stored is None or Seen(stored.row, None).claim != seen.claim:
            return False
        now_ms = milliseconds(await self._store.now())
        return is_due(Seen(stored.row, seen.mark), now_ms, trust_leases=trust_leases)

    async def _pages(self) -> AsyncIterator[tuple[list[StoredRow], int]]:
        """The runs page by page, each with the store's time before it: without those that only wait, where the store can."""
        store, after = self._store, None
        while True:
            now_ms = milliseconds(await store.now())
            if isinstance(store, Sifting):
                page = await store.list_awake(at=now_ms, name=self._name, limit=PAGE, after=after)
            else:
                page = await store.list_unfinished(name=self._name, limit=PAGE, after=after)
            if not page:
                return
            yield page, now_ms
            after = page[-1].run_id

    async def _see(self, look: Look, row: StoredRow) -> Seen | None:
        look.unfinished += 1
        if row.kind != self._kind:
            return None
        if row.owner == NO_OWNER:
            return Seen(row, None)
        seen = look.held[row.run_id] = Seen(row, await self._mark(row))
        return seen

    async def _mark(self, row: StoredRow) -> ProcessMark | None:
        """The process that holds the run. What was read once for a claim stays true of it."""
        before = self.last.held.get(row.run_id)
        if before is not None and before.mark is not None and before.claim == (row.epoch, row.owner):
            return before.mark
        try:
            return await find_mark(self._store, row)
        except CheckpointStoreCorrupt:  # of this run alone: its lease tells
            return None
