"""Where nobody listens, telemetry costs next to nothing: counted, not timed."""

from __future__ import annotations

import re

from bench.opcodes import count, per_step

TELLING = re.compile(
    r"agent_runtime\.(events|telemetry\w*)\.|.*\.(announce\w*|_announce_(asked|pending|left)|_tell_watchers)$"
)
SHARE = 0.01
"""Of a step's instructions."""


def test_without_a_sink_telemetry_takes_less_than_one_in_a_hundred_instructions_of_a_step() -> None:
    every, telling = per_step(few=2, many=10)
    assert 0 < telling < SHARE * every, f"{telling} of {every}"


def test_without_a_sink_no_event_is_made_and_no_hook_is_called() -> None:
    entered = count(3).entered
    assert "agent_runtime.executor.call" in entered, "the count sees the package"
    assert {name for name in entered if TELLING.match(name)} == set()


def test_with_a_sink_the_same_count_sees_the_events() -> None:
    entered = count(3, [lambda event: None]).entered
    told = {name for name in entered if TELLING.match(name)}
    assert {
        "agent_runtime.events.emit",
        "agent_runtime.executor.announce_started",
        "agent_runtime.loop._announce_asked",
    } <= told
