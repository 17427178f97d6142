"""A run as a drawing: every bar has its place, in order, whatever the times say."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.journal.states import CallState
from agent_runtime.picture import MOST_ROWS, Look, Picture, draw, told_span
from agent_runtime.timeline import Call, Segment, Timeline, Try
from agent_runtime.viewer.graph import draw_graph

SECOND = 1000
HOUR = 3600 * SECOND


def crashed() -> Timeline:
    """Two decisions and two calls; the first worker is lost inside the second call, another comes an hour later."""
    segments = [
        Segment(1, "vm", 7, "start", began_ms=0, last_ms=4 * SECOND),
        Segment(2, "vm", 8, "recovery", "ended it: done", began_ms=HOUR, last_ms=HOUR + 3 * SECOND),
    ]
    calls = [
        Call("0/model", state=CallState.DONE, tries=[Try(1, 1, 0, SECOND, "done")], replays=[2]),
        Call("0", "charge", state=CallState.DONE, tries=[Try(1, 1, SECOND, 3 * SECOND, "done")], replays=[2]),
        Call("1/model", state=CallState.DONE, tries=[Try(1, 1, 3 * SECOND, 3500, "done")], replays=[2]),
        Call("1", "mail", state=CallState.DONE, tries=[Try(1, 1, 3500), Try(2, 2, HOUR, HOUR + 2 * SECOND, "done")]),
    ]
    return Timeline(segments, {call.call: call for call in calls}, ended={"status": "done"})


def drawn(timeline: Timeline, *, now_ms: int = HOUR * 2, is_running: bool = False) -> Picture:
    picture = draw(timeline, now_ms=now_ms, is_running=is_running)
    assert picture is not None
    return picture


def test_a_crash_is_a_gap_and_the_hour_until_the_next_worker_is_squeezed() -> None:
    picture = drawn(crashed())
    [gap] = picture.gaps
    assert (gap.is_crash, gap.told) == (True, "the worker was lost; 59 min until the next")
    assert 0.05 < gap.width < 0.2
    first, second = picture.bands
    assert (first.is_cut, second.is_cut) == (True, False)
    assert (first.owner, second.owner, first.colour, second.colour) == ("7@vm", "8@vm", 0, 1)
    assert abs(first.x + first.width - gap.x) < 1e-9
    assert abs(gap.x + gap.width - second.x) < 1e-9


def test_what_was_found_on_record_is_told_apart_from_what_was_made_again() -> None:
    rows = {row.call: [bar.look for bar in row.bars] for row in drawn(crashed()).rows}
    assert rows["0"] == [Look.DONE, Look.REPLAYED]
    assert rows["1"] == [Look.LOST, Look.DONE]


def test_a_lost_attempt_reaches_to_the_last_that_was_heard_of_its_worker() -> None:
    lost = drawn(crashed()).rows[3].bars[0]
    band = drawn(crashed()).bands[0]
    assert abs(lost.x + lost.width - (band.x + band.width)) < 1e-9


def test_a_call_that_nobody_knows_the_outcome_of_is_in_doubt_and_one_that_is_worked_on_is_on_its_way() -> None:
    timeline = crashed()
    del timeline.segments[1:], timeline.calls["1"].tries[1:]
    timeline.ended, timeline.calls["1"].state = None, CallState.STARTED
    for call in timeline.calls.values():
        call.replays.clear()
    assert drawn(timeline).rows[3].bars[0].look is Look.DOUBT
    running = drawn(timeline, now_ms=5 * SECOND, is_running=True)
    bar = running.rows[3].bars[0]
    assert (bar.look, round(bar.x + bar.width, 9)) == (Look.OPEN, 1.0)
    assert not running.bands[0].is_cut


def test_many_calls_share_rows_and_no_two_that_overlap_share_one() -> None:
    calls = [Call(str(i), "charge", state=CallState.DONE, tries=[Try(1, 1, i * 10, i * 10 + 15, "done")]) for i in range(500)]
    timeline = Timeline([Segment(1, "vm", 7, "start", "ended it: done", began_ms=0, last_ms=5005)])
    timeline.calls = {call.call: call for call in calls}
    picture = drawn(timeline)
    assert len(picture.rows) == 2
    for row in picture.rows:
        ends = [(bar.x, bar.x + bar.width) for bar in row.bars]
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(ends))


def test_so_many_calls_that_they_are_no_wider_than_a_line_are_drawn_as_one() -> None:
    calls = [Call(str(i), "charge", state=CallState.DONE, tries=[Try(1, 1, i * 2, i * 2 + 1, "done")]) for i in range(5000)]
    timeline = Timeline([Segment(1, "vm", 7, "start", "ended it: done", began_ms=0, last_ms=10_000)])
    timeline.calls = {call.call: call for call in calls}
    [row] = drawn(timeline).rows
    assert len(row.bars) < MOST_ROWS
    assert "calls: done" in row.bars[0].told


def test_a_run_whose_records_do_not_say_when_has_no_drawing() -> None:
    timeline = Timeline([Segment(1, "vm", 7, "start")], {"0": Call("0", "charge", tries=[Try(1, 1)])})
    assert draw(timeline, now_ms=0) is None


times = st.integers(0, 10**13)


@st.composite
def timelines(make: st.DrawFn) -> Timeline:
    """Any times at all: clocks jump, and what is not recorded is missing."""
    maybe = st.none() | times
    segments = [
        Segment(epoch, "vm", make(st.integers(1, 3)), make(st.sampled_from(["start", "recovery", "settlement"])),
                make(st.sampled_from(["", "gave it back"])), began_ms=make(maybe), last_ms=make(maybe))
        for epoch in range(1, make(st.integers(1, 4)) + 1)
    ]  # fmt: skip
    calls = []
    for number in range(make(st.integers(0, 60))):
        tries = [
            Try(1, make(st.integers(1, 6)), make(maybe), make(maybe), make(st.sampled_from(["", "done", "unsent"])))
            for _ in range(make(st.integers(0, 2)))
        ]
        asked = make(maybe)
        replays = [make(st.integers(1, len(segments)))] if make(st.booleans()) else []
        state = make(st.sampled_from(list(CallState)))
        calls.append(Call(str(number), "charge", state=state, tries=tries, replays=replays, asked_ms=asked))
    return Timeline(segments, {call.call: call for call in calls})


@given(timelines(), times, st.booleans())
def test_whatever_the_times_say_every_place_is_within_the_frame(timeline: Timeline, now_ms: int, is_running: bool) -> None:
    picture = draw(timeline, now_ms=now_ms, is_running=is_running)
    if picture is None:
        return
    bars = [(bar.x, bar.width) for row in picture.rows for bar in row.bars]
    for x, width in [*bars, *((gap.x, gap.width) for gap in picture.gaps), *((tick.x, 0.0) for tick in picture.ticks)]:
        assert -1e-9 <= x <= 1 + 1e-9
        assert -1e-9 <= width <= 1 + 1e-9
        assert x + width <= 1 + 1e-6


def test_a_length_of_time_is_told_as_people_say_it() -> None:
    told = [told_span(each) for each in (0, 12, 999, 3400, 61_000, 600_000, HOUR, 2 * HOUR + 600_000, 76 * HOUR)]
    assert told == ["0 ms", "12 ms", "999 ms", "3.4 s", "1 min 1 s", "10 min", "1 h", "2 h 10 min", "3 d 4 h"]


def test_a_graph_has_a_box_for_each_node_and_shows_the_way_that_was_gone() -> None:
    graph = {
        "nodes": {
            "hold": {"kind": "call", "tool": "hold_seats"},
            "pay": {"kind": "call", "tool": "charge", "on_error": "sorry"},
            "sorry": {"kind": "code"},
        },
        "order": ["hold", "pay", "sorry"],
        "edges": ["hold → pay", "pay → hold when"],
    }
    drawing = draw_graph(graph, {"hold": 2, "pay": 1}, ["sorry"])
    assert drawing is not None
    assert [(box.name, box.under, box.visits, box.is_next) for box in drawing.boxes] == [
        ("hold", "hold_seats", 2, False),
        ("pay", "charge", 1, False),
        ("sorry", "code", 0, True),
    ]
    assert [(arrow.label, arrow.is_walked) for arrow in drawing.arrows] == [("", True), ("when", True), ("error", False)]
    assert len({(box.x, box.y) for box in drawing.boxes}) == 3


@given(st.recursive(st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_a_graph_that_is_not_what_it_should_be_is_drawn_as_far_as_it_goes(part: object) -> None:
    for name in ("nodes", "order", "edges"):
        draw_graph({"nodes": {"a": {"kind": "code"}}, "order": ["a"], "edges": [], name: part}, {}, [])
