"""What happened to a run as a drawing: its calls as bars on a time axis, its owners as bands. Pure.

Rules of this file:

* `x` and `width` are shares of the whole width, from 0 to 1: a page multiplies them by pixels, a terminal by columns.
* Time in which nothing was on its way is squeezed where it is long, and marked as a break: after a night of waiting the
  rest would be too small to see.
* A bar is one attempt, from intent to ending. An attempt without an ending reaches to the last that was heard of its worker.
* Where there are too many calls for a row each, those that overlap share as few rows as they can, and bars too narrow to
  be told apart are drawn as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise

from agent_runtime.timeline import Call, Segment, Timeline, Try

MOST_ROWS = 40
"""With more calls than these a row is shared."""
SQUEEZED = 0.12
"""A stretch in which nothing was on its way takes no more than this share of all that in which something was."""
LONG = 3
"""It is squeezed only where it is so many times longer than that."""
NARROW = 0.002
"""Bars of one row and one look that are no wider, and no further apart, are drawn as one."""
TICKS = 7


class Look(Enum):
    """What a bar stands for."""

    DONE = "done"
    ERROR = "error"
    """The tool answered with an error."""
    UNSENT = "unsent"
    UNRECORDABLE = "unrecordable"
    LOST = "lost"
    """Its worker never said how it ended; the call is known by now, or was made again."""
    DOUBT = "doubt"
    """Nobody knows whether it happened."""
    OPEN = "open"
    """On its way."""
    REPLAYED = "replayed"
    """Found on record by a later worker, and not made again. Its width is 0."""
    WAITING = "waiting"
    """A person was asked."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One attempt at a call, or several that are too narrow to be told apart."""

    x: float
    width: float
    look: Look
    call: str
    told: str
    """In words: which attempt, how long, how it ended."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Something that was said at a moment: a verdict, a settlement, a release, a cancel."""

    x: float
    told: str


@dataclass(frozen=True, slots=True)
class Row:
    """The bars of one call; or of several, where there are too many for a row each."""

    label: str
    call: str
    """The call's place; empty where the row is shared."""
    is_decision: bool
    bars: Sequence[Bar]
    flags: Sequence[Flag] = ()


@dataclass(frozen=True, slots=True)
class Band:
    """What one owner had of the time."""

    x: float
    width: float
    epoch: int
    owner: str
    """The process, as `pid@host`."""
    why: str
    left: str
    colour: int
    """The number of the owner: a process that claims twice keeps its colour."""
    is_cut: bool
    """Whether its owner never let go: it died, or was cut off."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which nothing was on its way: squeezed where it was long."""

    x: float
    width: float
    told: str
    is_crash: bool
    """Whether it lies between a worker that was lost and the next that came."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on the axis, counted from the beginning of the run."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is drawn of a run."""

    began_ms: int
    ended_ms: int
    bands: Sequence[Band]
    gaps: Sequence[Gap]
    rows: Sequence[Row]
    flags: Sequence[Flag]
    """What was said from outside, such as a release."""
    ticks: Sequence[Tick]


def draw(timeline: Timeline, *, now_ms: int, is_running: bool = False) -> Picture | None:
    """The drawing of a run; None where no record of it says when it was written.

    `is_running`: a worker holds it, and what it has begun is on its way up to now.
    """
    spans = list(_spans(timeline, now_ms if is_running else None))
    times = [time for span in spans for time in (span.start, span.end)]
    times += [time for each in timeline.segments for time in (each.began_ms, each.last_ms) if time is not None]
    if not times:
        return None
    if is_running:
        times.append(now_ms)
    scale = _Scale(times, [span for span in spans if span.look is not Look.WAITING])
    return Picture(
        scale.began,
        scale.ended,
        list(_bands(timeline, scale, is_running)),
        list(_gaps(timeline, scale)),
        _rows(timeline, spans, scale),
        [Flag(scale.x(each.began_ms), each.left or each.why) for each in timeline.segments if _is_said(each)],
        scale.ticks(),
    )


def told_span(milliseconds: float) -> str:
    """A length of time as people say it: `12 ms`, `3.4 s`, `5 min`, `2 h 10 min`, `3 d 4 h`."""
    seconds = milliseconds / 1000
    if seconds < 1:
        return f"{milliseconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        rest = int(seconds % 60)
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


@dataclass(frozen=True, slots=True)
class _Span:
    """A bar before it has its place."""

    call: Call
    start: int
    end: int
    look: Look
    told: str


def _spans(timeline: Timeline, now_ms: int | None) -> Iterable[_Span]:
    """Every attempt, every wait for a person, and every replay; `now_ms` where the run is worked now."""
    by_epoch = {segment.epoch: segment for segment in timeline.segments}
    last = timeline.segments[-1].epoch if timeline.segments else 0
    for call in timeline.calls.values():
        if call.asked_ms is not None:
            end = call.decided_ms if call.decided_ms is not None else _end_of_wait(timeline, call, now_ms)
            waited = f"waited for {told_span(max(0, end - call.asked_ms))}"
            yield _Span(call, call.asked_ms, max(call.asked_ms, end), Look.WAITING, waited)
        for each in call.tries:
            if each.started_ms is None:
                continue
            look = _look(call, each, is_open=now_ms is not None and each.epoch == last)
            end = now_ms if look is Look.OPEN and now_ms is not None else _end(each, by_epoch.get(each.epoch))
            yield _Span(call, each.started_ms, max(each.started_ms, end), look, _told(each, look, end))
        for epoch in call.replays:
            began = by_epoch[epoch].began_ms
            if began is not None:
                yield _Span(call, began, began, Look.REPLAYED, f"found on record in epoch {epoch}: not made again")


def _end_of_wait(timeline: Timeline, call: Call, now_ms: int | None) -> int:
    assert call.asked_ms is not None
    known = [each.last_ms for each in timeline.segments if each.last_ms is not None]
    return now_ms if now_ms is not None and call.is_waiting else max([call.asked_ms, *known[-1:]])


def _look(call: Call, each: Try, *, is_open: bool) -> Look:
    match each.ended:
        case "done":
            return Look.ERROR if "error" in call.outcome else Look.DONE
        case "unsent":
            return Look.UNSENT
        case "unrecordable":
            return Look.DOUBT if call.is_in_doubt else Look.UNRECORDABLE
        case _ if is_open:
            return Look.OPEN
        case _:
            return Look.DOUBT if call.is_in_doubt and each is call.tries[-1] else Look.LOST


def _end(each: Try, segment: Segment | None) -> int:
    assert each.started_ms is not None
    if each.ended_ms is not None:
        return each.ended_ms
    return each.started_ms if segment is None or segment.last_ms is None else segment.last_ms


_TOLD = {
    Look.DONE: "done",
    Look.ERROR: "answered with an error",
    Look.UNSENT: "nothing went out",
    Look.UNRECORDABLE: "happened, and its result could not be recorded",
    Look.LOST: "its worker never said how it ended",
    Look.DOUBT: "in doubt: nobody knows whether it happened",
    Look.OPEN: "on its way",
}


def _told(each: Try, look: Look, end: int) -> str:
    assert each.started_ms is not None
    return f"attempt {each.attempt}: {_TOLD[look]}, {told_span(max(0, end - each.started_ms))}"


class _Scale:
    """From a time to its place, with long idle stretches squeezed."""

    def __init__(self, times: Sequence[int], spans: Sequence[_Span]) -> None:
        self.began, self.ended = min(times), max(times)
        self._times = sorted({*times, *(time for span in spans for time in (span.start, span.end))})
        busy = _busy(self._times, spans)
        lengths = [after - before for before, after in pairwise(self._times)]
        most = SQUEEZED * (sum(length for length, at_work in zip(lengths, busy, strict=True) if at_work) or 1)
        drawn = [
            most if not at_work and length > LONG * most else length for length, at_work in zip(lengths, busy, strict=True)
        ]
        self.squeezed = [(i, lengths[i]) for i in range(len(lengths)) if drawn[i] < lengths[i]]
        self._drawn = drawn
        total = sum(drawn) or 1
        self._places = [0.0]
        for length in drawn:
            self._places.append(min(1.0, self._places[-1] + length / total))

    def x(self, time: int | None) -> float:
        """The place of a time; of one before or after the run, its edge."""
        if time is None or time <= self.began:
            return 0.0
        if time >= self.ended:
            return self._places[-1]
        at = bisect_right(self._times, time) - 1
        before, after = self._times[at], self._times[at + 1]
        share = (time - before) / (after - before)
        return self._places[at] + share * (self._places[at + 1] - self._places[at])

    def stretches(self) -> Iterable[tuple[int, int]]:
        """The squeezed stretches, from when to when."""
        return [(self._times[at], self._times[at + 1]) for at, _ in self.squeezed]

    def ticks(self) -> Sequence[Tick]:
        """Round marks, none in a squeezed stretch, none too close to the one before."""
        step = _round_step(sum(self._drawn) / TICKS)
        idle, found, offset = self.stretches(), [Tick(0.0, "0")], step
        edges = [end for _, end in idle]
        while self.began + offset <= self.ended and len(found) < 3 * TICKS:
            time = self.began + offset
            inside = next((end for start, end in idle if start < time < end), None)
            if inside is not None:
                offset = (inside - self.began) // step * step + step
                continue
            place = self.x(time)
            if place - found[-1].x >= 0.6 / TICKS:
                found.append(Tick(place, f"+{told_span(offset)}"))
            offset += step
            if len(edges) > 200:  # so many breaks that round marks say nothing
                break
        return found


def _busy(times: Sequence[int], spans: Sequence[_Span]) -> list[bool]:
    """For each stretch between two times, whether anything was on its way."""
    change = dict.fromkeys(times, 0)
    for span in spans:
        if span.end > span.start:
            change[span.start] += 1
            change[span.end] -= 1
    running, found = 0, []
    for time in times[:-1]:
        running += change[time]
        found.append(running > 0)
    return found


_STEPS: list[int] = [
    *(digit * int(10**power) for power in range(4) for digit in (1, 2, 5)),
    *(seconds * 1000 for seconds in (10, 20, 30, 60, 120, 300, 600, 1800)),
]


def _round_step(milliseconds: float) -> int:
    """The next rounder length of time."""
    for step in _STEPS:
        if milliseconds <= step:
            return step
    hour = 3_600_000
    return int(max(1, -(-milliseconds // hour))) * hour


def _is_said(segment: Segment) -> bool:
    return not segment.is_work and segment.began_ms is not None


def _bands(timeline: Timeline, scale: _Scale, is_running: bool) -> Iterable[Band]:
    owners: dict[tuple[str, int | None], int] = {}
    for segment in timeline.segments:
        if not segment.is_work or segment.began_ms is None:
            continue
        is_last = segment is timeline.segments[-1]
        end = scale.ended if is_last and is_running else segment.last_ms
        x = scale.x(segment.began_ms)
        colour = owners.setdefault((segment.host, segment.pid), len(owners))
        yield Band(
            x, max(0.0, scale.x(end) - x), segment.epoch, f"{segment.pid}@{segment.host}", segment.why, segment.left, colour,
            is_cut=not segment.left and not (is_last and (is_running or timeline.ended is not None)),
        )  # fmt: skip


def _gaps(timeline: Timeline, scale: _Scale) -> Iterable[Gap]:
    crashes = []
    for before, after in pairwise(timeline.segments):
        if before.is_work and not before.left and before.last_ms is not None and after.began_ms is not None:
            x = scale.x(before.last_ms)
            lasted = told_span(max(0, after.began_ms - before.last_ms))
            crashes.append((before.last_ms, after.began_ms))
            yield Gap(x, max(0.0, scale.x(after.began_ms) - x), f"the worker was lost; {lasted} until the next", is_crash=True)
    for start, end in scale.stretches():
        if not any(lost <= start and end <= came for lost, came in crashes):
            yield Gap(scale.x(start), scale.x(end) - scale.x(start), told_span(end - start), is_crash=False)


def _rows(timeline: Timeline, spans: Sequence[_Span], scale: _Scale) -> Sequence[Row]:
    bars: dict[str, list[Bar]] = {}
    for span in spans:
        x = scale.x(span.start)
        bars.setdefault(span.call.call, []).append(Bar(x, scale.x(span.end) - x, span.look, span.call.call, span.told))
    rows = [
        Row(_label(call), call.call, call.is_decision, bars.get(call.call, ()), list(_flags(timeline, call, scale)))
        for call in timeline.calls.values()
    ]
    return rows if len(rows) <= MOST_ROWS else _share(rows)


def _label(call: Call) -> str:
    return "decide" if call.is_decision else call.tool or call.call


def _flags(timeline: Timeline, call: Call, scale: _Scale) -> Iterable[Flag]:
    if call.verdict and call.decided_ms is not None:
        yield Flag(scale.x(call.decided_ms), f"{call.verdict.get('decision', '')} by {call.verdict.get('by', '')}")
    if call.settled:
        how = str(call.settled.get("how", "")).replace("_", " ")
        at_ms = call.settled_ms if call.settled_ms is not None else _settled_ms(timeline, call)
        yield Flag(scale.x(at_ms), f"settled as {how} by {call.settled.get('by', '') or 'its rule'}")


def _settled_ms(timeline: Timeline, call: Call) -> int | None:
    """When the claim was made with which a call was settled."""
    for segment in reversed(timeline.segments):
        if any(moment.what == "settled" and moment.call == call.call for moment in segment.moments):
            return segment.began_ms
    return None


@dataclass(slots=True)
class _Lane:
    end: float = 0.0
    bars: list[Bar] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)


def _share(rows: Sequence[Row]) -> Sequence[Row]:
    """The same bars in few rows: the decisions in one, calls that overlap in different ones."""
    shared = []
    for is_decision, label in ((True, "decide"), (False, "calls")):
        lanes: list[_Lane] = []
        mine = [row for row in rows if row.is_decision is is_decision and row.bars]
        for row in sorted(mine, key=lambda row: min(bar.x for bar in row.bars)):
            own = [bar for bar in row.bars if bar.look is not Look.REPLAYED]
            start, end = min(bar.x for bar in own or row.bars), max(bar.x + bar.width for bar in own or row.bars)
            lane = next((lane for lane in lanes if lane.end <= start), None)
            if lane is None:
                lane = _Lane()
                lanes.append(lane)
            lane.end = end
            lane.bars += row.bars
            lane.flags += row.flags
        shared += [Row(label, "", is_decision, _merged(lane.bars), lane.flags) for lane in lanes]
    return shared


def _merged(bars: Sequence[Bar]) -> Sequence[Bar]:
    """Neighbours of one look that are too narrow to be told apart, as one."""
    found: list[Bar] = []
    many = 1
    for bar in sorted(bars, key=lambda bar: (bar.look is Look.REPLAYED, bar.x)):
        last = found[-1] if found else None
        is_near = last is not None and bar.look is last.look and bar.x - (last.x + last.width) < NARROW
        if last is not None and is_near and bar.width < NARROW:
            many += 1
            width = max(last.x + last.width, bar.x + bar.width) - last.x
            found[-1] = replace(last, width=width, told=f"{many} calls: {_TOLD.get(bar.look, bar.look.value)}")
        else:
            many = 1
            found.append(bar)
    return found
