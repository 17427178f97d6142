"""The picture of a run in a terminal."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.cli.drawn import FINE, LABEL, LEAST, PLAIN, draw_text
from agent_runtime.picture import draw
from agent_runtime.timeline import Timeline
from tests.test_picture import crashed, drawn, timelines

CRASHED = """
                       ├─ 7@vm ─────────────────────✗////├─ 8@vm ──────────────┤
                decide ▓▓▓▓▓▓▓                      /////▫
              charge 0        ███████████████       /////▫
                decide                       ▓▓▓▓   /////▫
                mail 1                          ░░░░░////████████████████
                       0             +2.0 s         +4.0 s              +1 h

▓ decision  █ done  ▫ on record, not made again  ░ its worker was lost
✗ worker lost
"""


def test_the_crash_is_seen_and_what_was_not_made_again() -> None:
    assert ["", *draw_text(drawn(crashed()), width=80)] == CRASHED.splitlines()


def test_a_terminal_that_has_ascii_alone_gets_ascii_alone() -> None:
    assert "\n".join(draw_text(drawn(crashed()), width=80, ink=PLAIN)).isascii()


def test_colours_change_no_character() -> None:
    plain = draw_text(drawn(crashed()), width=80)
    coloured = draw_text(drawn(crashed()), width=80, colour=True)
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in coloured] == plain
    assert any("\x1b[" in line for line in coloured)


def test_no_control_character_of_a_tool_or_a_host_reaches_the_terminal() -> None:
    timeline = crashed()
    timeline.calls["0"].tool = "charge\x1b[2J\n"
    timeline.segments[0].host = "v\x1b]0;m"
    text = "".join(draw_text(drawn(timeline), width=80))
    assert text.isprintable()


def test_names_of_wide_characters_are_cut_and_stand_right_of_nothing() -> None:
    timeline = crashed()
    timeline.calls["0"].tool = "表" * 30
    [line] = [line for line in draw_text(drawn(timeline), width=80) if "表" in line]
    assert line.startswith(" " + "表" * 10 + "… ")


@given(timelines(), st.integers(10, 200), st.sampled_from([FINE, PLAIN]))
@settings(max_examples=60)
def test_no_line_is_wider_than_the_terminal(timeline: Timeline, width: int, ink: object) -> None:
    picture = draw(timeline, now_ms=0)
    if picture is None:
        return
    most = max(width, LABEL + 1 + LEAST)
    assert all(len(line) <= most for line in draw_text(picture, width=width, ink=FINE if ink is FINE else PLAIN))
