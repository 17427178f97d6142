"""Which runs go, by their age and status, and their removal one by one; each is archived first, where that is asked for.

Rules of this file:

* A run goes as it was read and verified, or it stays: its removal is guarded by what was read, and one that moved
  meanwhile, or is not as it was written, is left, and it is said why. One whose worker may be alive is no candidate.
* The age of a run is the time since it was last written, by the store's own clock.
* Runs that have ended go. One that somebody has still to decide about goes only where its status is named, and by force.
* What is removed leaves its mark in the store: its id, and so the keys of its calls, are not used again.
* Whoever is stopped in the middle has removed what was removed; asking again goes on. Of a run that is archived first,
  either the run is still there, or the archive is durable and was read back.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import IO, NamedTuple, TypeAlias

from agent_runtime.archive import Archived, archive_name, verify_archive, write_archive
from agent_runtime.clock import milliseconds, moment
from agent_runtime.described import IN_DOUBT, INTERRUPTED
from agent_runtime.errors import (
    CheckpointConflict,
    CheckpointStoreCorrupt,
    InvalidSetting,
    NewerFormat,
    StoreUnavailable,
)
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredRow, StoredRun
from agent_runtime.journal.store import AnswerKind, CheckpointStore, Guard
from agent_runtime.outside import is_held, is_taken_back, why_kept
from agent_runtime.recovery import Found, open_stored
from agent_runtime.run import Backing
from agent_runtime.settlements import require_text

_log = logging.getLogger("agent_runtime")

FINISHED = ("done", "failed", "cancelled")
"""The statuses of runs that go unless others are named."""
UNDECIDED = {INTERRUPTED: RunStatus.RUNNING, "paused": RunStatus.PAUSED, IN_DOUBT: RunStatus.BLOCKED,
             "quarantined": RunStatus.QUARANTINED}  # fmt: skip
"""Those of runs that go only where they are named, and by force."""
PAGE = 100
LOADED_AT_ONCE = 16
LONGEST_SECONDS = 1000 * 365 * 86_400.0
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

Age: TypeAlias = "timedelta | float"
"""A length of time: a `timedelta`, or seconds."""


class Purged(NamedTuple):
    """What became of one run that was old enough: it was removed, or would be; or `left` says why it stays."""

    run_id: str
    status: str
    updated_at: datetime
    records: int = 0
    size: int = 0
    """How many bytes of it were stored, in its records and its state."""
    left: str = ""
    archive: str = ""
    """The file that it is archived in."""


@dataclass(slots=True)
class PurgeReport:
    """What a purge came to."""

    dry_run: bool
    """Whether nothing was removed, and `removed` says what would be."""
    removed: list[Purged] = field(default_factory=list)
    left: list[Purged] = field(default_factory=list)
    """The runs that are old enough and stay, each with why."""

    @property
    def records(self) -> int:
        return sum(each.records for each in self.removed)

    @property
    def size(self) -> int:
        return sum(each.size for each in self.removed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which runs go, and how."""

    older_ms: int
    statuses: Mapping[RunStatus, str]
    name: str | None
    by: str
    dry_run: bool
    limit: int | None
    force: bool
    folder: str | None

    @staticmethod
    def of(
        older_than: Age,
        *,
        status: str | Collection[str],
        by: str,
        name: str | None,
        dry_run: bool,
        limit: int | None,
        force: bool,
        archive_to: str | os.PathLike[str] | None,
    ) -> Policy:
        """The policy, or `InvalidSetting` where it cannot be meant so."""
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidSetting(f"limit= is a whole number from 1, or None, found {limit!r}")
        return Policy(
            older_ms=round(seconds_of(older_than) * 1000),
            statuses=_check_statuses([status] if isinstance(status, str) else list(status), force=force),
            name=name,
            by=require_text("by", by),
            dry_run=dry_run,
            limit=limit,
            force=force,
            folder=None if archive_to is None else _check_folder(os.fspath(archive_to)),
        )


def parse_duration(text: str) -> float:
    """The seconds that `30d`, `12h`, `90m`, `45s` or `2w` stands for; `InvalidSetting` for anything else."""
    found = re.fullmatch(r"([0-9]{1,12})([smhdw])", text.strip(), re.ASCII)
    if found is None:
        raise InvalidSetting(
            f"a length of time is a whole number with its unit, s, m, h, d or w, as in 30d or 12h; found {text!r:.50}"
        )
    return seconds_of(float(found[1]) * _SECONDS[found[2]])


def seconds_of(age: Age) -> float:
    """The age in seconds; `InvalidSetting` for what no age can be."""
    if isinstance(age, timedelta):
        return seconds_of(age.total_seconds())
    if type(age) not in (int, float) or not 0 <= age <= LONGEST_SECONDS:
        raise InvalidSetting(f"an age is a timedelta or seconds, from 0 to a thousand years; found {age!r:.50}")
    return float(age)


def _check_statuses(words: Sequence[str], *, force: bool) -> Mapping[RunStatus, str]:
    known = {**{word: RunStatus[word.upper()] for word in FINISHED}, **UNDECIDED}
    for word in words:
        if word not in known:
            why = "; one that runs, or is corrupt, is never removed so" if word in ("running", "corrupt") else ""
            raise InvalidSetting(f"status is one or more of {', '.join(known)}; found {word!r:.50}{why}")
        if word in UNDECIDED and not force:
            raise InvalidSetting(
                f"somebody has still to decide about a run that is {word}; cancel it first, or remove it all the same by force"
            )
    if not words:
        raise InvalidSetting(f"status is one or more of {', '.join(known)}; found none")
    return {known[word]: word for word in words}


def _check_folder(path: str) -> str:
    if not os.path.isdir(path):
        raise InvalidSetting(f"archives go into a folder, and there is none at {path!r}; make it, or name another")
    return path


# Purging.


async def purge_each(
    backing: Backing, policy: Policy, *, is_own: Callable[[Found], bool], undo_of: Callable[[RunId], RunId]
) -> AsyncIterator[Purged]:
    """Every run that is old enough, in the order of statuses and ids, once it is removed or it is known why it stays."""
    before_ms = milliseconds(await backing.store.now()) - policy.older_ms
    left = policy.limit
    for status in sorted(policy.statuses):
        async for row, run in _due(backing.store, status, before_ms, policy.name):
            found = _opened(backing, row, run)
            if found is None or (isinstance(found, Found) and not is_own(found)):
                continue
            if isinstance(found, Found) and is_held(found):
                continue  # it has a worker that may be alive: it is not interrupted, it runs
            purged = await _purge(backing, policy, row, found, undo_of)
            yield purged
            if left is not None and not purged.left:
                left -= 1
                if left == 0:
                    return


async def _due(
    store: CheckpointStore, status: RunStatus, before_ms: int, name: str | None
) -> AsyncIterator[tuple[StoredRow, StoredRun | None]]:
    """The rows that are old enough, each with its run as it is now."""
    after: RunId | None = None
    while page := await store.list_runs(status=status, limit=PAGE, after=after):
        after = page[-1].run_id
        due = [row for row in page if _is_old(row, before_ms) and name in (None, row.name)]
        for first in range(0, len(due), LOADED_AT_ONCE):
            part = due[first : first + LOADED_AT_ONCE]
            for row, run in zip(part, await store.load_many([row.run_id for row in part]), strict=True):
                yield row, run


def _is_old(row: StoredRow, before_ms: int) -> bool:
    """By a column that is not sealed: what is no time there is no age either."""
    return type(row.updated_at) is int and 0 < row.updated_at <= before_ms


def _opened(backing: Backing, row: StoredRow, run: StoredRun | None) -> Found | str | None:
    """The run, verified; why it does not verify; None for one that is gone, or is not the one that was listed any more."""
    if run is None or (run.row.epoch, run.row.number, run.row.head) != (row.epoch, row.number, row.head):
        return None
    try:
        return open_stored(backing, run)
    except (CheckpointStoreCorrupt, NewerFormat) as error:
        return str(error)
    except CheckpointConflict:  # deleted since it was listed
        return None


async def _purge(
    backing: Backing, policy: Policy, row: StoredRow, found: Found | str, undo_of: Callable[[RunId], RunId]
) -> Purged:
    purged = Purged(row.run_id, policy.statuses[RunStatus(row.status)], moment(row.updated_at))
    if isinstance(found, str):
        return purged._replace(left=found)
    purged = purged._replace(records=len(found.stored.records), size=size_of(found.stored))
    if why := await _why_left(backing, policy, found, undo_of):
        return purged._replace(left=why)
    if policy.dry_run:
        return purged
    if policy.folder is not None and found.status.is_final:
        path = os.path.join(policy.folder, archive_name(row.run_id))
        if why := await _archive_first(backing, found, path):
            return purged._replace(left=why)
        purged = purged._replace(archive=path)
    purged = purged._replace(left=await _remove(backing.store, found.stored.row))
    if not purged.left:
        _log.info("run %r was purged by %s", row.run_id, policy.by)
    return purged


async def _why_left(backing: Backing, policy: Policy, found: Found, undo_of: Callable[[RunId], RunId]) -> str:
    if not policy.force and (why := why_kept(found)):
        return f"it {why}"
    if policy.folder is not None and not found.status.is_final:
        return "it has not ended, and only what has ended is archived"
    if await is_taken_back(backing, found, undo_of(RunId(found.stored.row.run_id))):
        return "it is being taken back, and that has not ended"
    return ""


async def _remove(store: CheckpointStore, row: StoredRow) -> str:
    """Remove the run if it still is what was read; else why it is left."""
    answer = await store.delete(row.run_id, guard=Guard(row.epoch, row.owner, row.number, row.head))
    match answer.kind:
        case AnswerKind.OK:
            return ""
        case AnswerKind.FENCED | AnswerKind.MOVED:
            return "it was written, or removed, by somebody else meanwhile"
        case AnswerKind.UNKNOWN:
            now = await store.latest(row.run_id)
            is_gone = now is None or now.row.status == RunStatus.DELETED
            return "" if is_gone else "the store did not say what became of its removal, and it is there"


def size_of(run: StoredRun) -> int:
    """How many bytes of a run are stored, in its records and its state."""
    state = 0 if run.checkpoint is None else len(run.checkpoint.body) + len(run.checkpoint.seal)
    return state + sum(len(record.body) + len(record.seal) for record in run.records)


# Archiving.


async def archive(backing: Backing, found: Found, target: str | os.PathLike[str] | IO[bytes]) -> Archived:
    """Write a run that has ended to a file; `CheckpointConflict` where it has not."""
    row = found.stored.row
    if not found.status.is_final:
        raise CheckpointConflict(
            f"run {row.run_id!r} is {found.status.name.lower()}; only a run that has ended is archived. Cancel it, if it is "
            "to end"
        )
    messages = await backing.store.inbox(row.run_id) if row.posted else []
    return await backing.offload.start(lambda: write_archive(target, found.sealed, messages, backing.ring)).outcome


async def _archive_first(backing: Backing, found: Found, path: str) -> str:
    """Have a durable archive of the run in the file, one that an earlier try left counts; else why there is none."""
    row = found.stored.row
    try:
        if not await backing.offload.start(lambda: os.path.lexists(path)).outcome:
            await archive(backing, found, path)
        work = backing.offload.start(lambda: verify_archive(path, checkpoint_key=backing.ring, tenant=backing.tenant))
        archived = await work.outcome
    except (InvalidSetting, StoreUnavailable, CheckpointStoreCorrupt, NewerFormat) as error:
        return f"it cannot be archived: {error}"
    if (archived.run_id, archived.head) != (row.run_id, row.head):
        return f"it cannot be archived: in {path!r} is another run, or an earlier state of it; move that file away"
    return ""
