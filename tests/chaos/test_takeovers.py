"""How long a run waited after its worker was hit."""

from __future__ import annotations

from agent_runtime.runs import RunInfo, RunReport
from agent_runtime.timeline import Segment, Timeline
from tests.chaos.faults import Hit
from tests.chaos.logs import Heard
from tests.chaos.plan import Kind
from tests.chaos.takeovers import Takeover, find_takeovers, times_of

RUN = "run-1"


def report(*segments: tuple[int, int, str]) -> RunReport:
    return RunReport(RunInfo(RUN, "done"), Timeline([Segment(epoch, "host", pid, why) for epoch, pid, why in segments]))


TAKEN = {RUN: report((1, 100, "start"), (2, 200, "recovery"), (3, 300, "recovery"))}


def heard_of(*lines: tuple[float, str]) -> Heard:
    heard = Heard()
    for at, line in lines:
        heard.take(line, at)
    return heard


HEARD = heard_of(
    (2.0, "INFO claimed run=run-1 epoch=2 why=recovery"),
    (7.0, "INFO claimed run=run-1 epoch=3 why=recovery"),
)


def test_it_lasts_from_the_hit_to_the_claim_after_that_of_the_worker_hit() -> None:
    hits = [Hit(Kind.KILL, RUN, 100, 1.5), Hit(Kind.FREEZE, RUN, 200, 5.0)]
    found = find_takeovers(hits, TAKEN, HEARD, [])
    assert found == [Takeover(hits[0], 0.5, True), Takeover(hits[1], 2.0, True)]
    assert (times_of(found, Kind.KILL).worst, times_of(found, Kind.FREEZE).worst) == (0.5, 2.0)
    assert times_of(found, Kind.STOP).count == 0


def test_a_worker_that_had_no_claim_or_that_nobody_followed_counts_for_nothing() -> None:
    hits = [Hit(Kind.KILL, RUN, 999, 1.0), Hit(Kind.KILL, RUN, 300, 8.0), Hit(Kind.KILL, "unknown", 100, 1.0)]
    assert find_takeovers(hits, TAKEN, HEARD, []) == []


def test_a_worker_that_was_hit_when_its_run_was_already_taken_counts_for_nothing() -> None:
    assert find_takeovers([Hit(Kind.KILL, RUN, 100, 3.0)], TAKEN, HEARD, []) == []


def test_a_takeover_in_the_middle_of_another_trouble_or_of_a_pause_is_told_apart() -> None:
    hits = [Hit(Kind.KILL, RUN, 100, 1.5)]
    assert [each.is_undisturbed for each in find_takeovers(hits, TAKEN, HEARD, [(1.0, 1.6)])] == [False]
    assert [each.is_undisturbed for each in find_takeovers(hits, TAKEN, HEARD, [(0.0, 1.4), (2.1, 3.0)])] == [True]
    paused = heard_of(
        (1.0, "INFO pausing run=run-1 seconds=0.5 exits=2"), (2.0, "INFO claimed run=run-1 epoch=2 why=recovery")
    )
    found = find_takeovers(hits, TAKEN, paused, [])
    assert times_of(found, Kind.KILL, undisturbed=True).count == 0
    assert times_of(found, Kind.KILL).count == 1


def test_a_run_is_at_work_from_its_start_or_claim_until_it_is_done() -> None:
    lines = ("INFO started run=a", "INFO claimed run=b epoch=2 why=recovery", "INFO done run=a steps=3 llm_calls=4")
    assert heard_of(*((0.0, line) for line in lines)).at_work == {"b"}
