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
from agent_runtime.journal.states import IN_DOUBT, MOVES, SETTLEMENT_MOVES, CallState, Settlement, after


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

    @property
    def is_decision(self) -> bool:
        return is_reply(self.call)

    @property
    def is_in_doubt(self) -> bool:
        """Whether nobody knows if it happened. A decision never is: one that was lost is made again."""
        return self.state in IN_DOUBT and not self.is_decision


@dataclass(slots=True)
class Timeline:
    """What happened to a run, from its first record to its last."""

    segments: list[Segment] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    quarantined: str = ""
    """Why the run was set aside last, and not released since."""
    ended: Mapping[str, object] | None = None

    @property
    def decisions(self) -> Sequence[Call]:
        return [call for call in self.calls.values() if call.is_decision]

    @property
    def doubts(self) -> Sequence[Call]:
        return [call for call in self.calls.values() if call.is_in_doubt]


def read_timeline(records: Iterable[StoredRecord]) -> Timeline:
    """Fold verified records into what happened."""
    timeline = Timeline()
    for record in records:
        details = _details(record)
        segment = _segment(timeline, record)
        if record.call and record.kind != RecordKind.REKEYED:
            _live_on(timeline, record, details)
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
            segment.left = f"set it aside: {timeline.quarantined}"
        case RecordKind.ENDED:
            timeline.ended = details
            segment.left = f"ended it: {details.get('status', '')}"
        case _:
            return


def _live_on(timeline: Timeline, record: StoredRecord, details: Mapping[str, Any]) -> None:
    call = timeline.calls.setdefault(record.call, Call(record.call))
    if record.kind == RecordKind.STARTED:
        call.attempts = record.attempt
        call.tool, call.args = str(details.get("tool", "")), details.get("args", {})
    if record.kind == RecordKind.DONE:
        call.outcome = details
    call.state = _state_after(call.state, record.kind, details) or call.state


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
