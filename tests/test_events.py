"""Events and their sinks: what is told, in what form, and that telling disturbs nothing."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.events import Event, emit
from agent_runtime.telemetry import HistorySink, LogSink, log_line


def lines_of(name: str, data: dict[str, object], **options: object) -> list[str]:
    stream = io.StringIO()
    given: dict[str, Any] = {"payloads": True, **options}
    LogSink(stream, **given)(Event(name, "run", data))
    return stream.getvalue().splitlines()


CALL: dict[str, object] = {"step": 1, "call": "2.1", "tool": "charge", "key": "run:2.1", "attempt": 3}
DECISION: dict[str, object] = {"seq": 0, "calls": [{"tool": "charge", "args": {"amount": 5}}], "llm_calls": 1}


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        ("run.started", {"kind": "loop", "step": 0}, "INFO started run=run"),
        ("run.claimed", {"step": 3, "epoch": 2, "why": "recovery"}, "INFO claimed run=run epoch=2 why=recovery"),
        ("run.recovered", {"kind": "loop", "step": 3, "replayed": 4, "rerun": 1}, "INFO recovered run=run replayed=4 rerun=1"),
        ("decision.made", DECISION, 'INFO decided run=run seq=0 tool=charge args={"amount": 5} llm_calls=1'),
        ("decision.replayed", DECISION, 'INFO replayed run=run seq=0 tool=charge args={"amount": 5} llm_calls=1'),
        ("call.started", CALL, "INFO calling run=run seq=2 tool=charge key=run:2.1 attempt=3"),
        ("call.done", {**CALL, "result": "fine"}, "INFO confirmed run=run seq=2 key=run:2.1 result=fine"),
        (
            "call.done",
            {**CALL, "error": "ToolError: no seats"},
            'INFO answered run=run seq=2 tool=charge key=run:2.1 error="ToolError: no seats"',
        ),
        (
            "call.in_doubt",
            {**CALL, "why": "it died"},
            'INFO in_doubt run=run seq=2 tool=charge key=run:2.1 attempt=3 why="it died"',
        ),
        ("run.done", {"kind": "loop", "step": 9, "steps": 3, "llm_calls": 4}, "INFO done run=run steps=3 llm_calls=4"),
        ("run.failed", {"kind": "loop", "step": 9, "steps": 3, "llm_calls": 4}, "INFO failed run=run steps=3 llm_calls=4"),
        ("run.blocked", {"kind": "loop", "step": 9}, "INFO blocked run=run"),
        ("run.fenced", {"kind": "loop", "step": 9}, "INFO fenced run=run"),
    ],
)  # fmt: skip
def test_each_event_is_one_line_of_a_fixed_form(name: str, data: dict[str, object], line: str) -> None:
    assert lines_of(name, data) == [line]


@pytest.mark.parametrize("name", ["checkpoint.saved", "recovery.progress", "something.new"])
def test_what_has_no_line_says_nothing(name: str) -> None:
    assert lines_of(name, {"kind": "loop"}) == []


def test_a_decision_for_several_calls_is_a_line_for_each() -> None:
    data = {**DECISION, "calls": [{"tool": "a", "args": {}}, {"tool": "b", "args": {}}]}
    assert [line.split("tool=")[1][0] for line in lines_of("decision.made", data)] == ["a", "b"]
    assert lines_of("decision.made", {**DECISION, "calls": []}) == []


def test_a_description_of_ones_own_stands_for_the_result() -> None:
    lines = lines_of("call.done", {**CALL, "result": {"secret": 1, "id": "i-1"}}, describe=lambda result: {"id": "i-1"})
    assert lines == ["INFO confirmed run=run seq=2 key=run:2.1 id=i-1"]
    lines = lines_of(
        "call.done", {**CALL, "result": {"secret": 1, "id": "i-1"}}, payloads=False, describe=lambda result: {"id": "i-1"}
    )
    assert lines == ["INFO confirmed run=run seq=2 tool=charge key=run:2.1 id=i-1"]


@given(
    st.text(max_size=20),
    st.dictionaries(st.sampled_from(["a", "b"]), st.text(max_size=20) | st.integers() | st.none(), max_size=2),
)
def test_no_value_breaks_a_line_or_reaches_the_terminal_as_a_control(run_id: str, fields: dict[str, object]) -> None:
    line = log_line("verb", run_id, fields)
    assert "\n" not in line
    assert "\r" not in line
    assert line.isprintable()
    line.encode()


@pytest.mark.parametrize(
    "value", ["\x1b[31mred", "a\nINFO done run=run", "\u202egnp", "\ud83d", "\u2028", "a\tb", "\x07", "", " ", '"']
)
def test_hostile_text_is_written_as_json(value: str) -> None:
    line = log_line("answered", "run", {"error": value})
    assert line.isprintable()
    assert json.loads(line.split("error=", 1)[1]) == value


class Odd:
    def __repr__(self) -> str:
        return "an odd\x1b[31m one"


def test_a_value_that_json_does_not_know_is_shown_and_disturbs_nothing() -> None:
    assert log_line("verb", "run", {"value": Odd()}).isprintable()
    assert "an odd" in log_line("verb", "run", {"value": {"deep": [Odd()]}})


def test_sinks_are_told_in_order_and_a_broken_one_stops_neither_the_others_nor_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []

    def broken(event: Event) -> None:
        told.append("broken")
        raise RuntimeError("broken")

    history = HistorySink()
    with caplog.at_level(logging.ERROR, logger="agent_runtime"):
        emit([lambda event: told.append("first"), broken, history], "run.done", "run", {"steps": 1})
    assert told == ["first", "broken"]
    assert history.events == [Event("run.done", "run", {"steps": 1})]
    with caplog.at_level(logging.ERROR, logger="agent_runtime"):
        emit([broken, history], "run.done", "run", {"steps": 1})
    assert len(caplog.records) == 1, "said once of each sink"


def test_a_history_gives_names_and_the_events_of_one() -> None:
    history = HistorySink()
    emit([history], "a", "run", {})
    emit([history], "b", "run", {})
    emit([history], "a", "other", {})
    assert history.names() == ["a", "b", "a"]
    assert [event.run_id for event in history.of("a")] == ["run", "other"]
