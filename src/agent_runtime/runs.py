"""Operating runs: list them, show one, release one from quarantine, verify what is stored. No tools and no model needed.

A row's seal is checked before anything is said of it. A run that is not as it was written is listed as corrupt, with why,
and hides no other. Lists are read page by page, so that no store is too long for them.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from agent_runtime.clock import moment
from agent_runtime.errors import (
    CheckpointConflict,
    CheckpointNotFound,
    CheckpointStoreCorrupt,
    InvalidSetting,
    NewerFormat,
)
from agent_runtime.ids import RunId, check_run_id
from agent_runtime.journal.records import NO_OWNER, RunStatus, StoredRecord, StoredRow
from agent_runtime.journal.seal import NO_SUCH_VALUES, CheckpointKey, KeyRing, Sealer, open_row
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.lease import ProcessMark, find_mark, seconds_held
from agent_runtime.recovery import read_reason, read_verified, release
from agent_runtime.run import Backing
from agent_runtime.timeline import Timeline, read_timeline

PAGE = 100
MOST_LISTED = 1000

CORRUPT, INTERRUPTED, IN_DOUBT = "corrupt", "interrupted", "in-doubt"
STATUSES = ("running", INTERRUPTED, "paused", IN_DOUBT, "quarantined", "done", "failed", "cancelled", CORRUPT)
"""What a run is shown as. Its own words, but for the dead (`interrupted`), the doubtful (`in-doubt`) and the corrupt."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as an operator sees it. Of a corrupt one nothing is said but its id and why."""

    run_id: str
    status: str
    why: str = ""
    """Why it is corrupt, or in quarantine."""
    kind: str = ""
    name: str = ""
    step: int = 0
    epoch: int = 0
    attempts: int = 0
    """How often it was claimed without progress."""
    owner: str = ""
    """The process that holds or last held it, as `pid@host`; empty where it was given back."""
    wake_at: datetime | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run that was verified as a whole, and what happened in it."""

    info: RunInfo
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Verified:
    """Whether a run is as it was written: `why` says what is not."""

    run_id: str
    records: int = 0
    why: str = ""

    @property
    def holds(self) -> bool:
        return not self.why


class Runs:
    """The runs of one store, for people and programs that operate them."""

    def __init__(self, store: CheckpointStore, *, checkpoint_key: CheckpointKey, tenant: str = "") -> None:
        self._backing = Backing(store, KeyRing.of(checkpoint_key), tenant)
        self._store = store

    async def list(
        self, *, status: str | None = None, limit: int = MOST_LISTED, after: str | None = None
    ) -> Sequence[RunInfo]:
        """Runs in the order of their ids, from the first one past `after`; no more than `limit`."""
        found: list[RunInfo] = []
        if limit > 0:
            async for info in self.each(status=status, after=after):
                found.append(info)
                if len(found) >= limit:
                    break
        return found

    async def each(self, *, status: str | None = None, after: str | None = None) -> AsyncIterator[RunInfo]:
        """The same, one after another and all of them, read page by page."""
        if status is not None and status not in STATUSES:
            raise InvalidSetting(f"status is one of {', '.join(STATUSES)}; found {status!r}")
        async for row in self._rows(after):
            info = await self._info(row)
            if status in (None, info.status):
                yield info

    async def show(self, run_id: str) -> RunReport:
        """What happened to a run, every seal checked. `CheckpointNotFound`, `CheckpointStoreCorrupt`."""
        found = await read_verified(self._backing, check_run_id(run_id))
        return RunReport(await self._info(found.stored.row), read_timeline(found.stored.records))

    async def release(self, run_id: str, *, by: str = "") -> bool:
        """Let a quarantined run go again; `by` is recorded. False, and no change, where it is in no quarantine."""
        return await release(self._backing, check_run_id(run_id), by=by)

    async def verify(self, run_id: str | None = None) -> Sequence[Verified]:
        """The run, or all runs that are not as they were written."""
        if run_id is not None:
            return [await self._verify(check_run_id(run_id))]
        return [verified async for verified in self.verify_each() if not verified.holds]

    async def verify_each(self) -> AsyncIterator[Verified]:
        """Every run, one after another, opened as a whole."""
        async for row in self._rows(None):
            with suppress(CheckpointNotFound, CheckpointConflict):  # deleted since it was listed
                yield await self._verify(row.run_id)

    async def _verify(self, run_id: RunId) -> Verified:
        try:
            found = await read_verified(self._backing, run_id)
        except (CheckpointStoreCorrupt, NewerFormat) as error:
            return Verified(run_id, why=str(error))
        return Verified(run_id, len(found.stored.records))

    async def _rows(self, after: str | None) -> AsyncIterator[StoredRow]:
        last = None if after is None else RunId(after)
        while page := await self._store.list_runs(limit=PAGE, after=last):
            for row in page:
                yield row
            last = page[-1].run_id

    async def _info(self, row: StoredRow) -> RunInfo:
        try:
            sealer = open_row(self._backing.ring, row, tenant=self._backing.tenant)
            mark = await find_mark(self._store, row) if row.owner != NO_OWNER else None
            return _describe(row, mark, await self._reason(row, sealer))
        except (CheckpointStoreCorrupt, NewerFormat) as error:
            return RunInfo(row.run_id, CORRUPT, str(error))

    async def _reason(self, row: StoredRow, sealer: Sealer) -> str:
        """Why a run is in quarantine: its last record says so, which the sealed row names, over the seal before it."""
        if row.status != RunStatus.QUARANTINED:
            return ""
        last = await self._store.calls(row.run_id, since=max(0, row.number - 2))
        if len(last) != 2 or not _is_head(row, sealer, *last):
            raise CheckpointStoreCorrupt(
                f"run {row.run_id!r} is not as it was written: its last record is not what its row names"
            )
        return read_reason(last[1])


def _is_head(row: StoredRow, sealer: Sealer, before: StoredRecord, record: StoredRecord) -> bool:
    """Whether the record is the one that the row names as its last."""
    place = (record.number, record.epoch, record.kind, record.call, record.attempt)
    try:
        return hmac.compare_digest(sealer.record(*place, before.seal, record.body), row.head)
    except NO_SUCH_VALUES:
        return False


def _describe(row: StoredRow, mark: ProcessMark | None, why: str) -> RunInfo:
    return RunInfo(
        run_id=row.run_id,
        status=_word(row, mark),
        why=why,
        kind=row.kind,
        name=row.name,
        step=row.step,
        epoch=row.epoch,
        attempts=row.attempts,
        owner="" if mark is None else f"{mark.pid}@{mark.host.split('/')[0]}",
        wake_at=_moment(row.wake_at),
        created_at=_moment(row.created_at),
        updated_at=_moment(row.updated_at),
    )


def _word(row: StoredRow, mark: ProcessMark | None) -> str:
    """The status as it is: a run whose worker is gone does not run, whatever its row says."""
    match RunStatus(row.status):
        case RunStatus.RUNNING:
            return INTERRUPTED if seconds_held(row, mark) is None else "running"
        case RunStatus.BLOCKED:
            return IN_DOUBT
        case status:
            return status.name.lower()


def _moment(milliseconds_utc: int | None) -> datetime | None:
    """An unsealed column: what no calendar holds is not shown."""
    try:
        return moment(milliseconds_utc) if milliseconds_utc else None
    except (ValueError, OverflowError, OSError, TypeError):
        return None
