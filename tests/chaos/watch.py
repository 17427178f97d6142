"""Looks at the store while everything goes on: how each run stands, and whether anything ever goes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredRow
from agent_runtime.journal.store import CheckpointStore

PAGE = 500


class Stand(NamedTuple):
    """How a run stands."""

    status: int
    epoch: int
    number: int
    head: bytes

    @staticmethod
    def of(row: StoredRow) -> Stand:
        return Stand(row.status, row.epoch, row.number, row.head)

    @property
    def is_final(self) -> bool:
        return self.status >= RunStatus.DONE


class Watch:
    """What was ever seen of the runs of a store."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self.stands: dict[str, Stand] = {}
        self.went_back: dict[str, str] = {}
        """Runs whose stored row ever was an older one than before, and how."""

    async def look(self) -> None:
        """Read every row. Whatever the store raises comes out, and nothing is changed."""
        seen: dict[str, Stand] = {}
        after: RunId | None = None
        while page := await self._store.list_runs(limit=PAGE, after=after):
            seen.update((row.run_id, Stand.of(row)) for row in page)
            after = page[-1].run_id
        self.take(seen)

    def take(self, seen: Mapping[str, Stand]) -> None:
        """Compare with what was seen before."""
        for run, before in self.stands.items():
            why = "it is gone" if run not in seen else _why_back(before, seen[run])
            if why:
                self.went_back.setdefault(run, why)
        self.stands = dict(seen)

    def of(self, status: RunStatus) -> list[str]:
        return [run for run, stand in self.stands.items() if stand.status == status]

    def unfinished(self) -> list[str]:
        return [run for run, stand in self.stands.items() if not stand.is_final]


def _why_back(before: Stand, now: Stand) -> str:
    if now.epoch < before.epoch:
        return f"epoch {now.epoch} after {before.epoch}"
    if now.number < before.number:
        return f"{now.number} records after {before.number}"
    if now.number == before.number and now.head != before.head:
        return f"another record {now.number} than before"
    if before.is_final and now != before:
        return f"it had ended, and was changed: {before[:3]} became {now[:3]}"
    return ""
