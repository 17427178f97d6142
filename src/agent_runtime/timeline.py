"""The read model: a run's records as what happened, for every face. Pure.

It takes records whose seals were checked, and reads all of them: nothing is left out, and what cannot be read is shown as
such. A face asks here and never reads a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from agent_runtime import codec
from agent_runtime.ids import is_reply
from agent_runtime.journal.records import RecordKind, StoredCheckpoint, StoredRecord
from agent_runtime.journal.states import IN_DOUBT, MOVES, SETTLEMENT_MOVES, WAITING, CallState, Settlement, after
from agent_runtime.redaction import Part, Redact, redact_mapping, shown, shown_args, shown_text


@dataclass(frozen=True, slots=True)
class Moment:
    """One record: what it says, about which call and attempt, and the details that its body holds."""

    number: int
    what: str
    call: str = ""
    attempt: int = 0
    details: Mapping[str, object] = field(default_factory=dict)
    at_ms: int | None = None
    """When it was written, in milliseconds UTC by its writer's clock; None where the record does not say."""


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
    began_ms: int | None = None
    last_ms: int | None = None
    """The last moment of which the owner wrote, or at which the next one says that it was heard."""

    @property
    def is_recovery(self) -> bool:
        """Whether a worker went on with what others had left."""
        return self.why in _RECOVERIES

    @property
    def is_work(self) -> bool:
        """Whether a worker held the run; else somebody wrote to it from outside."""
        return self.is_recovery or self.why == "start"


_RECOVERIES = ("recovery", "take over")


@dataclass(slots=True)
class Try:
    """One attempt at a call, from its intent to its ending."""

    attempt: int
    epoch: int
    started_ms: int | None = None
    ended_ms: int | None = None
    ended: str = ""
    """`done`, `unsent` or `unrecordable`; empty where its worker never said."""


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
    tries: list[Try] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)
    """The epochs of the workers that found its ending on record, and did not make it again."""
    asked_ms: int | None = None
    """When a person was asked."""
    decided_ms: int | None = None
    """When the verdict was written down."""
    settled_ms: int | None = None

    @property
    def usage(self) -> Mapping[str, int]:
        """What a decision cost, as its model tells."""
        usage = self.outcome.get("usage")
        return {name: n for name, n in usage.items() if type(n) is int} if isinstance(usage, dict) else {}

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


class Saved(NamedTuple):
    """What was on record and not done again: decisions of models, calls of tools, and what those decisions had cost."""

    decisions: int
    calls: int
    usage: Mapping[str, int]


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
    opened: Mapping[str, Any] = field(default_factory=dict)
    """What the run was given: its `input`, and the `namespace` of its keys. Whose it is, is not told."""
    graph: Mapping[str, Any] = field(default_factory=dict)
    """The graph of a flow as plain data, as it was described or migrated last; empty for a loop."""
    visits: Mapping[str, int] = field(default_factory=dict)
    """How often a flow has been at each node, at its last checkpoint."""
    frontier: Sequence[str] = ()
    """Where a flow goes on from its last checkpoint."""

    @property
    def model_requests(self) -> int:
        """How many requests to models were written down before they were made; a lost one counts."""
        return sum(len(call.tries) for call in self.decisions)

    @property
    def usage(self) -> Mapping[str, int]:
        """What all decisions cost, as their models tell."""
        return _summed(call.usage for call in self.decisions)

    @property
    def saved(self) -> Saved:
        """What those who recovered the run did not do again."""
        kept = [(call, len(call.replays)) for call in self.calls.values() if call.replays]
        tokens = _summed({name: n * times for name, n in call.usage.items()} for call, times in kept if call.is_decision)
        decisions = sum(times for call, times in kept if call.is_decision)
        return Saved(decisions, sum(times for _, times in kept) - decisions, tokens)

    @property
    def was_recovered(self) -> bool:
        """Whether a worker went on with what another had left."""
        return any(segment.is_recovery for segment in self.segments)

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


def read_timeline(
    records: Iterable[StoredRecord], checkpoint: StoredCheckpoint | None = None, *, redact: Redact | None = None
) -> Timeline:
    """Fold verified records into what happened, as it may be shown. The checkpoint tells how far a flow has come."""
    timeline = Timeline()
    for record in records:
        details, at_ms = _details(record)
        segment = _segment(timeline, record)
        if at_ms is not None:
            segment.last_ms = at_ms if segment.last_ms is None else max(at_ms, segment.last_ms)
            _end_decision(timeline, segment, at_ms)
        if record.call and record.kind != RecordKind.REKEYED:
            _live_on(timeline, record, details, at_ms)
            if record.kind == RecordKind.SETTLED and segment.why == "settlement":
                how = str(details.get("how", "")).replace("_", " ")
                segment.left = f"settled call {record.call} as {how}, by {_by(details)}"
        else:
            _note_own(timeline, segment, record, details)
        segment.moments.append(Moment(record.number, _what(record.kind), record.call, record.attempt, details, at_ms))
    _read_position(timeline, checkpoint)
    if redact is not None:
        _redact(timeline, redact)
    return timeline


def _redact(timeline: Timeline, redact: Redact) -> None:
    """After all was read, which needs the words as they are. Places, names of tools, numbers and times stay."""
    for segment in timeline.segments:
        segment.left = shown_text(redact, segment.left)
        segment.moments = [replace(each, details=redact_mapping(redact, each.details)) for each in segment.moments]
    for call in timeline.calls.values():
        call.args, call.outcome = shown_args(redact, call.args), redact_mapping(redact, call.outcome)
        call.verdict, call.settled = redact_mapping(redact, call.verdict), redact_mapping(redact, call.settled)
    timeline.quarantined = shown_text(redact, timeline.quarantined)
    timeline.cancelled = None if timeline.cancelled is None else redact_mapping(redact, timeline.cancelled)
    timeline.ended = None if timeline.ended is None else redact_mapping(redact, timeline.ended)
    given = _mapping(timeline.opened, "input")
    said = {name: part if name == "graph" else shown(redact, part, Part.MESSAGE) for name, part in given.items()}
    timeline.opened = {**timeline.opened, "input": said} if timeline.opened else timeline.opened


def _segment(timeline: Timeline, record: StoredRecord) -> Segment:
    if not timeline.segments or timeline.segments[-1].epoch != record.epoch:
        timeline.segments.append(Segment(record.epoch))
    return timeline.segments[-1]


def _note_own(timeline: Timeline, segment: Segment, record: StoredRecord, details: Mapping[str, Any]) -> None:
    match record.kind:
        case RecordKind.OPENED:
            timeline.opened = {name: part for name, part in _plain_object(record.body).items() if name != "context"}
            timeline.graph = _mapping(_mapping(timeline.opened, "input"), "graph")
        case RecordKind.MIGRATED:
            timeline.graph = _mapping(details, "graph") or timeline.graph
        case RecordKind.CLAIMED:
            segment.host = str(details.get("host", "")).split("/")[0]
            segment.pid, segment.why = details.get("pid"), str(details.get("why", ""))
            segment.began_ms = segment.last_ms
            _note_heard(timeline, details.get("heard"))
            if segment.is_recovery:
                _note_replays(timeline, segment.epoch)
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


def _end_decision(timeline: Timeline, segment: Segment, at_ms: int) -> None:
    """A reply's own record does not say when it came: what follows on it at once does."""
    last = segment.moments[-1] if segment.moments else None
    if last is None or last.what != "done" or last.at_ms is not None or last.call not in timeline.calls:
        return
    call = timeline.calls[last.call]
    if call.is_decision and call.tries and call.tries[-1].ended == "done" and call.tries[-1].ended_ms is None:
        call.tries[-1].ended_ms = at_ms


def _note_heard(timeline: Timeline, heard_ms: object) -> None:
    """The owner before was heard then: later than its last record tells, where it waited for something."""
    before = timeline.segments[-2] if len(timeline.segments) > 1 else None
    if before is not None and not before.left and type(heard_ms) is int:
        before.last_ms = max(heard_ms, before.last_ms or 0)


def _note_replays(timeline: Timeline, epoch: int) -> None:
    for call in timeline.calls.values():
        if call.state is CallState.DONE:
            call.replays.append(epoch)


def _live_on(timeline: Timeline, record: StoredRecord, details: Mapping[str, Any], at_ms: int | None) -> None:
    call = timeline.calls.setdefault(record.call, Call(record.call))
    match record.kind:
        case RecordKind.PENDING:
            call.tool, call.args = str(details.get("tool", "")), _mapping(details, "sent")
            call.asked_ms = at_ms
        case RecordKind.VERDICT:
            told = ("decision", "by", "note", "args")
            call.verdict = {name: details[name] for name in told if details.get(name) not in (None, "")}
            call.decided_ms = at_ms
        case RecordKind.STARTED:
            call.attempts = record.attempt
            call.tool, call.args = str(details.get("tool", "")), _mapping(details, "args")
            # A decision begins as what was before it ends: its own record does not say when.
            started_ms = timeline.segments[-1].last_ms if at_ms is None else at_ms
            call.tries.append(Try(record.attempt, record.epoch, started_ms))
        case RecordKind.SETTLED:
            call.settled = {name: details.get(name, "") for name in ("how", "by", "why")}
            call.outcome, call.settled_ms = _mapping(details, "ending"), at_ms
        case RecordKind.DONE:
            call.outcome = details
            _end_try(call, record, "done", at_ms)
        case RecordKind.UNSENT:
            _end_try(call, record, "unsent", at_ms)
        case RecordKind.UNRECORDABLE:
            _end_try(call, record, "unrecordable", at_ms)
        case _:
            pass
    call.state = _state_after(call.state, record.kind, details) or call.state


def _end_try(call: Call, record: StoredRecord, how: str, at_ms: int | None) -> None:
    for each in reversed(call.tries):
        if each.attempt == record.attempt:
            each.ended, each.ended_ms = how, at_ms
            return


def _read_position(timeline: Timeline, checkpoint: StoredCheckpoint | None) -> None:
    if checkpoint is None or not timeline.graph:
        return
    plain = _plain_object(checkpoint.body)
    visits, frontier = plain.get("visits"), plain.get("frontier")
    if isinstance(visits, dict) and isinstance(frontier, list):
        timeline.visits = {name: n for name, n in visits.items() if type(n) is int}
        timeline.frontier = [str(name) for name in frontier]


def _summed(usages: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total: dict[str, int] = {}
    for usage in usages:
        for name, n in usage.items():
            total[name] = total.get(name, 0) + n
    return total


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


def _details(record: StoredRecord) -> tuple[Mapping[str, object], int | None]:
    """The body as plain data, under a name of its own where it is no object; and when it was written."""
    if not record.body or record.kind in _OPAQUE:
        return {}, None
    try:
        plain = codec.decode(record.body)
    except (ValueError, RecursionError):
        return {"unreadable": f"{len(record.body)} bytes"}, None
    if not isinstance(plain, dict):
        return {"value": plain}, None
    at_ms = plain.pop("at", None)
    return plain, at_ms if type(at_ms) is int else None


def _plain_object(body: bytes) -> Mapping[str, Any]:
    try:
        plain = codec.decode(body)
    except (ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}
