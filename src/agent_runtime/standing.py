"""How a run stands, in words: its true status, why it stands so, who holds it, and what people left for its next worker.

A run whose worker is gone does not run, whatever its row says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from agent_runtime import codec
from agent_runtime.approvals import ApprovalRequest, Verdict
from agent_runtime.clock import moment
from agent_runtime.doubts import Case
from agent_runtime.errors import VerdictRefused
from agent_runtime.inbox import Message, MessageKind, find_cancel
from agent_runtime.journal.records import RunStatus, StoredRow
from agent_runtime.journal.states import IN_DOUBT as STATES_IN_DOUBT
from agent_runtime.journal.states import WAITING
from agent_runtime.lease import ProcessMark, seconds_held
from agent_runtime.recovery import Found, read_reason
from agent_runtime.settlements import said_from_plain
from agent_runtime.timeline import Call, Timeline

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
    """A run that was verified as a whole, and what happened in it."""

    info: RunInfo
    timeline: Timeline
    pending: Sequence[ApprovalRequest] = ()
    """The requests that may be answered now, as `Runs.pending` gives them."""
    left: Sequence[Left] = ()
    """What people have said and no worker has taken up yet."""
    stand: Stand | None = None


class Page(NamedTuple):
    """Some runs of a long list; `after`: from where it goes on, None where that was all.

    It may hold fewer runs than were asked for, or none, and yet go on: looking has its time.
    """

    runs: Sequence[RunInfo]
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """Whether a run is as it was written: `why` says what is not."""

    run_id: str
    records: int = 0
    why: str = ""

    @property
    def holds(self) -> bool:
        return not self.why


ROWS = {
    "running": RunStatus.RUNNING, "interrupted": RunStatus.RUNNING, "paused": RunStatus.PAUSED, IN_DOUBT: RunStatus.BLOCKED,
    "quarantined": RunStatus.QUARANTINED, "done": RunStatus.DONE, "failed": RunStatus.FAILED,
    "cancelled": RunStatus.CANCELLED,
}  # fmt: skip
"""What the row of a run says that is shown as such; a corrupt one may say anything."""
UNFINISHED = frozenset(word for word, status in ROWS.items() if not status.is_final)
ENDED = {word: int(status) for word, status in ROWS.items() if status.is_final}
TOLD = {RunStatus.PAUSED: "paused", RunStatus.BLOCKED: IN_DOUBT, RunStatus.CANCELLED: "cancelled"}
"""The runs of which a list says why they stand so, which their records tell."""


def may_be(row: StoredRow, status: str | None) -> bool:
    """Whether a run may turn out to be of that status: only a corrupt one is other than its row says."""
    return status not in ROWS or row.status == ROWS[status]


def may_wait(row: StoredRow, *, is_parked: bool) -> bool:
    """Whether a run may wait for somebody: parked as it is, or beside its worker."""
    return (row.status in (RunStatus.PAUSED, RunStatus.BLOCKED)) if is_parked else row.status == RunStatus.RUNNING


def why_so(found: Found, timeline: Timeline) -> str:
    """What it waits for, what is in doubt, or who ended it; empty where its status says all."""
    match found.status:
        case RunStatus.QUARANTINED:
            return read_reason(found.stored.records[-1])
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


def describe(row: StoredRow, mark: ProcessMark | None, why: str) -> RunInfo:
    """What a list says of a run."""
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


# What people left.


def read_left(case: Case) -> Iterator[Left]:
    """What was left, the first word about each call alone: that is the one which stands."""
    seen: set[str] = set()
    for message in case.messages:
        left = _verdict(case, message) or _settlement(case, message)
        if left is not None and left.call not in seen:
            seen.add(left.call)
            yield left
    cancel = find_cancel(case.messages)
    if cancel is not None and not RunStatus(case.row.status).is_final:
        yield Left("cancel", "", "cancel", cancel.by, cancel.why)


def _verdict(case: Case, message: Message) -> Left | None:
    if message.kind is not MessageKind.VERDICT:
        return None
    try:
        verdict = Verdict.from_plain(message.body)
    except VerdictRefused:
        return None
    life = case.history.lives.get(verdict.request)
    if life is None or life.state not in WAITING:
        return None
    return Left("verdict", verdict.request, verdict.decision.value, verdict.by, verdict.note)


def _settlement(case: Case, message: Message) -> Left | None:
    said = said_from_plain(message.body) if message.kind is MessageKind.SETTLE else None
    life = None if said is None else case.history.lives.get(said.call)
    if said is None or life is None or life.state not in STATES_IN_DOUBT or life.attempts != said.attempt:
        return None
    return Left("settlement", said.call, said.how.value.replace("_", " "), said.by, said.why)
