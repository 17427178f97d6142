"""The read model: a run's records as what happened, for every face. Pure.

It takes records whose seals were checked, and reads all of them: nothing is left out, and what cannot be read is shown as
such. A face asks here and never reads a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_runtime import codec
from agent_runtime.ids import is_reply
from agent_runtime.journal.records import RecordKind, StoredRecord
from agent_runtime.journal.states import IN_DOUBT, MOVES, SETTLEMENT_MOVES, WAITING, CallState, Settlement, after


@dataclass(frozen=True, slots=True)
class Moment:
    """One record: what it says, about which call and attempt, and the details that its body holds."""

    number: int
    what: str
    call: str = ""
    attempt: int = 0
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Segment:
    """What one owner did: everything that was written under one epoch."""

    epoch: int
    host: str = ""
    pid: int | None = None
    why: str = ""
    left: str = ""
    """How the owner let the run go; empty where it never said."""
    moments: list[Moment] = field(default_factory=list)


@dataclass(slots=True)
class Call:
    """One call over all segments. A decision is the call of a model."""

    call: str
    tool: str = ""
    args: Mapping[str, object] = field(default_factory=dict)
    state: CallState = CallState.NEW
    attempts: int = 0
    outcome: Mapping[str, object] = field(default_factory=dict)
    """How it ended: its `result`, or the `error` it was answered with."""
    verdict: Mapping[str, object] = field(default_factory=dict)
    """What a person answered to its request: `decision`, `by`, `note`, and the `args` of an edit."""
    settled: Mapping[str, object] = field(default_factory=dict)
    """How it was settled last while it was in doubt: `how`, `by` (a person, its probe, its worker that was late), `why`."""

    @property
    def is_decision(self) -> bool:
        return is_reply(self.call)

    @property
    def is_in_doubt(self) -> bool:
        """Whether nobody knows if it happened. A decision never is: one that was lost is made again."""
        return self.state in IN_DOUBT and not self.is_decision

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a person's verdict: nothing has gone out."""
        return self.state in WAITING


@dataclass(slots=True)
class Timeline:
    """What happened to a run, from its first record to its last."""

    segments: list[Segment] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    quarantined: str = ""
    """Why the run was set aside last, and not released since."""
    cancelled: Mapping[str, object] | None = None
    """By whom and why the run was cancelled."""
    ended: Mapping[str, object] | None = None

    @property
    def decisions(self) -> Sequence[Call]:
        return [call for call in self.calls.values() if call.is_decision]

    @property
    def doubts(self) -> Sequence[Call]:
        return [call for call in self.calls.values() if call.is_in_doubt]

    @property
    def pending(self) -> Sequence[Call]:
        """The calls that wait for a verdict; none of a run that has ended does."""
        return [call for call in self.calls.values() if call.is_waiting and self.ended is None]


def read_timeline(records: Iterable[StoredRecord]) -> Timeline:
    """Fold verified records into what happened."""
    timeline = Timeline()
    for record in records:
        details = _details(record)
        segment = _segment(timeline, record)
        if record.call and record.kind != RecordKind.REKEYED:
            _live_on(timeline, record, details)
            if record.kind == RecordKind.SETTLED and segment.why == "settlement":
                how = str(details.get("how", "")).replace("_", " ")
                segment.left = f"settled call {record.call} as {how}, by {_by(details)}"
        else:
            _note_own(timeline, segment, record, details)
        segment.moments.append(Moment(record.number, _what(record.kind), record.call, record.attempt, details))
    return timeline


def _segment(timeline: Timeline, record: StoredRecord) -> Segment:
    if not timeline.segments or timeline.segments[-1].epoch != record.epoch:
        timeline.segments.append(Segment(record.epoch))
    return timeline.segments[-1]


def _note_own(timeline: Timeline, segment: Segment, record: StoredRecord, details: Mapping[str, Any]) -> None:
    match record.kind:
        case RecordKind.CLAIMED:
            segment.host = str(details.get("host", "")).split("/")[0]
            segment.pid, segment.why = details.get("pid"), str(details.get("why", ""))
        case RecordKind.RELEASED:
            by = details.get("by")
            segment.left = f"released by {by}" if by else f"gave it back: {details.get('why', '')}"
            timeline.quarantined = ""
        case RecordKind.QUARANTINED:
            timeline.quarantined = str(details.get("why", "")) or "no reason is recorded"
            if segment.why != "settlement":  # which leaves a run in quarantine where it is
                segment.left = f"set it aside: {timeline.quarantined}"
        case RecordKind.CANCELLED:
            timeline.cancelled = {name: details.get(name, "") for name in ("by", "why")}
            timeline.quarantined = ""
        case RecordKind.ENDED:
            timeline.ended = details
            who = "" if timeline.cancelled is None else f" by {_by(timeline.cancelled)}"
            segment.left = f"ended it: {details.get('status', '')}{who}"
        case _:
            return


def _live_on(timeline: Timeline, record: StoredRecord, details: Mapping[str, Any]) -> None:
    call = timeline.calls.setdefault(record.call, Call(record.call))
    match record.kind:
        case RecordKind.PENDING:
            call.tool, call.args = str(details.get("tool", "")), _mapping(details, "sent")
        case RecordKind.VERDICT:
            told = ("decision", "by", "note", "args")
            call.verdict = {name: details[name] for name in told if details.get(name) not in (None, "")}
        case RecordKind.STARTED:
            call.attempts = record.attempt
            call.tool, call.args = str(details.get("tool", "")), _mapping(details, "args")
        case RecordKind.SETTLED:
            call.settled = {name: details.get(name, "") for name in ("how", "by", "why")}
            call.outcome = _mapping(details, "ending")
        case RecordKind.DONE:
            call.outcome = details
        case _:
            pass
    call.state = _state_after(call.state, record.kind, details) or call.state


def _by(said: Mapping[str, object]) -> str:
    why = said.get("why")
    return f"{said.get('by', '')} ({why})" if why else str(said.get("by", ""))


def _mapping(details: Mapping[str, Any], name: str) -> Mapping[str, object]:
    value = details.get(name)
    return value if isinstance(value, dict) else {}


def _state_after(state: CallState, kind: int, details: Mapping[str, Any]) -> CallState | None:
    if kind != RecordKind.SETTLED:
        move = MOVES.get(kind)
        return None if move is None else after(state, move)
    try:
        return after(state, SETTLEMENT_MOVES[Settlement(details.get("how"))])
    except ValueError:
        return None


_OPAQUE = (RecordKind.CHECKPOINT, RecordKind.OPENED, RecordKind.FIELD)
"""A digest; what the run was given, which a face shows by itself; a part of its state."""


def _what(kind: int) -> str:
    return RecordKind(kind).name.lower() if kind in RecordKind._value2member_map_ else f"kind {kind}"


def _details(record: StoredRecord) -> Mapping[str, object]:
    """The body as plain data, under a name of its own where it is no object."""
    if not record.body or record.kind in _OPAQUE:
        return {}
    try:
        plain = codec.decode(record.body)
    except (ValueError, RecursionError):
        return {"unreadable": f"{len(record.body)} bytes"}
    return plain if isinstance(plain, dict) else {"value": plain}
