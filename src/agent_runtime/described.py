"""How a run is shown: its status as it is true, and why it stands so; from its row and records, once these are verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from agent_runtime import codec
from agent_runtime.approvals import ApprovalRequest
from agent_runtime.clock import moment
from agent_runtime.journal.records import NO_OWNER, RunStatus, StoredRow
from agent_runtime.lease import ProcessMark, seconds_held
from agent_runtime.recovery import Found, read_reason
from agent_runtime.redaction import Redact, shown_text
from agent_runtime.timeline import Call, Timeline, read_timeline

CORRUPT, INTERRUPTED, IN_DOUBT = "corrupt", "interrupted", "in-doubt"
MOST_TOLD = 3
LONGEST_TOLD = 200

STATUSES = ("running", INTERRUPTED, "paused", IN_DOUBT, "quarantined", "done", "failed", "cancelled", CORRUPT)
"""What a run is shown as. Its own words, but for the dead (`interrupted`), the doubtful (`in-doubt`) and the corrupt."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as an operator sees it. Of a corrupt one nothing is said but its id and why."""

    run_id: str
    status: str
    why: str = ""
    """Why it is corrupt or in quarantine, what it waits for, what is in doubt, or by whom it was cancelled."""
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


class Left(NamedTuple):
    """What somebody left for whoever picks the run up, and no worker has taken up yet."""

    what: str
    """`verdict`, `settlement` or `cancel`."""
    call: str
    how: str
    """The decision of a verdict, or how the call was settled."""
    by: str
    why: str


class Stand(NamedTuple):
    """How a run stands: any change of it changes one of these."""

    status: str
    epoch: int
    number: int
    posted: int


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run that was verified as a whole, and what happened in it; of a corrupt one, as far as its records still hold."""

    info: RunInfo
    timeline: Timeline
    pending: Sequence[ApprovalRequest] = ()
    """The requests that may be answered now, as `Runs.pending` gives them."""
    left: Sequence[Left] = ()
    """What people have said and no worker has taken up yet."""
    stand: Stand | None = None
    sound: int = 0
    """Of a corrupt run: how many of its records hold, from the first on. The timeline is of these."""
    broken: int | None = None
    """Of a corrupt run: the number of the first record that does not hold; None where it is its row, its state or its end."""


def told_sound(report: RunReport) -> str:
    """How far a corrupt run holds, in words."""
    if report.broken is None:
        return f"each of the {report.sound} records that are there; its row, its state or its end does not"
    if not report.sound:
        return "no record: from record 1 on none can be believed"
    return f"records 1 to {report.sound}; from record {report.broken} on none can be believed"


def describe_found(found: Found, timeline: Timeline | None = None, *, redact: Redact | None = None) -> RunInfo:
    """What is to be said of a run that was verified as a whole; a timeline that is given is redacted already."""
    row = found.stored.row
    told = read_timeline(found.stored.records, redact=redact) if timeline is None else timeline
    return describe_row(row, found.mark if row.owner != NO_OWNER else None, _why(found, told, redact))


def describe_row(row: StoredRow, mark: ProcessMark | None, why: str) -> RunInfo:
    """What is to be said of a run whose row was verified."""
    return RunInfo(
        run_id=row.run_id,
        status=word_of(row, mark),
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


def word_of(row: StoredRow, mark: ProcessMark | None) -> str:
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


def _why(found: Found, timeline: Timeline, redact: Redact | None) -> str:
    match found.status:
        case RunStatus.QUARANTINED:
            return shown_text(redact, read_reason(found.stored.records[-1]))
        case RunStatus.PAUSED:
            return _tell("waiting for approval", timeline.pending)
        case RunStatus.BLOCKED:
            return _tell("in doubt", timeline.doubts)
        case RunStatus.CANCELLED:
            said = timeline.cancelled or {}
            doubts = _tell("; still in doubt", timeline.doubts)
            return f"cancelled by {said.get('by', '')}: {said.get('why', '')}{doubts}"
        case _:
            return ""


def _tell(what: str, calls: Sequence[Call]) -> str:
    """Calls in words: `waiting for approval: charge amount=100 (call 0)`."""
    if not calls:
        return ""
    more = f" and {len(calls) - MOST_TOLD} more" if len(calls) > MOST_TOLD else ""
    return f"{what}: " + "; ".join(told_call(call.tool, call.args, call.call) for call in calls[:MOST_TOLD]) + more


def told_call(tool: str, args: Mapping[str, object], call: str) -> str:
    """A call in words, with its arguments as far as a line takes them."""
    told = " ".join([tool, *(f"{name}={codec.encode_readable(codec.readable(value))}" for name, value in args.items())])
    shown = told if len(told) <= LONGEST_TOLD else f"{told[:LONGEST_TOLD]}…"
    return f"{shown} (call {call})"
