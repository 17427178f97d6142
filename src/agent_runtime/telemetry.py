"""Sinks for what a run announces: log lines of a fixed form, and a kept history."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

from agent_runtime.events import Event
from agent_runtime.ids import seq_of

Describe = Callable[[object], Mapping[str, object]]
"""From a tool's result to the fields of its `confirmed` line."""


def describe_result(result: object) -> Mapping[str, object]:
    """The whole result as one field."""
    return {"result": result}


class LogSink:
    """One event a line, `INFO verb run=… seq=… name=value …`, for people and programs to read.

    Arguments and results are written as they are: give your own sink where they may hold secrets.
    """

    def __init__(self, stream: TextIO | None = None, *, describe: Describe = describe_result) -> None:
        self._stream = stream
        self._describe = describe

    def __call__(self, event: Event) -> None:
        for line in self._lines(event):
            print(line, file=self._stream or sys.stdout, flush=True)

    def _lines(self, event: Event) -> list[str]:
        match event.name:
            case "decision.made":
                return self._decisions("decided", event)
            case "decision.replayed":
                return self._decisions("replayed", event)
            case "call.done":
                return [self._done(event)]
            case name if name in _LINES:
                verb, fields = _LINES[name]
                return [log_line(verb, event.run_id, {**_place(event.data), **_some(event.data, *fields)})]
            case _:
                return []

    def _done(self, event: Event) -> str:
        data = event.data
        if "error" in data:
            return log_line("answered", event.run_id, {**_place(data), **_some(data, "tool", "key", "error")})
        return log_line("confirmed", event.run_id, {**_place(data), **_some(data, "key"), **self._describe(data["result"])})

    def _decisions(self, verb: str, event: Event) -> list[str]:
        calls = event.data["calls"]
        assert isinstance(calls, list)
        seq, count = event.data["seq"], event.data["llm_calls"]
        return [log_line(verb, event.run_id, {"seq": seq, **call, "llm_calls": count}) for call in calls]


def log_line(verb: str, run_id: str, fields: Mapping[str, object]) -> str:
    """A line of the fixed form about a run."""
    return plain_line(verb, {"run": run_id, **fields})


def plain_line(verb: str, fields: Mapping[str, object]) -> str:
    """A line of the fixed form. Values are plain words, or JSON; control characters never reach the terminal."""
    words = "".join(f" {name}={_word(value)}" for name, value in fields.items())
    return f"INFO {verb}{words}"


def _word(value: object) -> str:
    if isinstance(value, str) and value.isprintable() and value and " " not in value and '"' not in value:
        return value
    return json.dumps(value, default=repr).replace("\x7f", "\\u007f")  # the one control that JSON leaves as it is


_LINES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "call.started": ("calling", ("tool", "key", "attempt")),
    "call.in_doubt": ("in_doubt", ("tool", "key", "attempt", "why")),
    "call.settled": ("settled", ("key", "attempt", "how", "by", "why")),
    "approval.requested": ("asking", ("tool", "args")),
    "approval.decided": ("verdict", ("decision", "by", "note")),
    "approval.refused": ("no-verdict", ("tool", "why")),
    "run.started": ("started", ()),
    "run.claimed": ("claimed", ("epoch", "why")),
    "run.recovered": ("recovered", ("replayed", "rerun")),
    "run.blocked": ("blocked", ()),
    "run.paused": ("paused", ("pending",)),
    "run.quarantined": ("quarantined", ("attempts", "why")),
    "run.fenced": ("fenced", ()),
    "run.done": ("done", ("steps", "llm_calls")),
    "run.failed": ("failed", ("steps", "llm_calls", "error")),
    "run.cancelled": ("cancelled", ("by", "why")),
}
"""Of each event that has a line: its verb, and what is said after the run and the decision that a call belongs to."""


def _place(data: Mapping[str, object]) -> dict[str, object]:
    return {"seq": seq_of(str(data["call"]))} if "call" in data else {}


def _some(data: Mapping[str, object], *names: str) -> dict[str, object]:
    return {name: data[name] for name in names if name in data}


class HistorySink:
    """Keeps every event, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        """The names of the events, in order."""
        return [event.name for event in self.events]

    def of(self, name: str) -> list[Event]:
        """The events of one name, in order."""
        return [event for event in self.events if event.name == name]
