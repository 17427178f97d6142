"""Sinks for what a run announces: lines of a fixed form, log records, JSON lines, and a kept history.

What tools are given and give, and what models say, is payload, and is told by no sink unless it is asked to.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO, TypeAlias

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.events import Event
from agent_runtime.ids import seq_of
from agent_runtime.redaction import Redact, by_name

Describe: TypeAlias = Callable[[object], Mapping[str, object]]
"""From a tool's result to the fields of its `confirmed` line."""

PAYLOAD = frozenset({"args", "result", "note"})
"""Fields that hold what tools are given and give, and what people say to a model."""


def tell(event: Event, *, payloads: bool, redact: Redact | None = None) -> dict[str, object]:
    """What may be told of an event. Without payloads an error is told by its type alone."""
    data = dict(event.data)
    if isinstance(calls := data.get("calls"), Sequence):
        data["calls"] = [_tell_fields(call, payloads=payloads, redact=redact) for call in calls]
    if event.name in _WHY_QUOTES and not payloads:
        data.pop("why", None)
    return _tell_fields(data, payloads=payloads, redact=redact)


_WHY_QUOTES = frozenset({"call.in_doubt", "approval.refused"})
"""Events whose `why` quotes what an exception said."""


def _tell_fields(data: Mapping[str, object], *, payloads: bool, redact: Redact | None) -> dict[str, object]:
    if not payloads:
        shown = {name: value for name, value in data.items() if name not in PAYLOAD}
        return {**shown, "error": type_of(shown["error"])} if "error" in shown else shown
    if redact is None:
        return dict(data)
    return {name: by_name(redact, name, value) if name in _REDACTED else value for name, value in data.items()}


_REDACTED = PAYLOAD | {"error", "why"}


def type_of(error: object) -> str:
    """The type of an error that an event tells as `Type: message`."""
    return str(error).partition(":")[0]


def describe_result(result: object) -> Mapping[str, object]:
    """The whole result as one field."""
    return {"result": result}


class LogSink:
    """One event a line, `INFO verb run=… seq=… name=value …`, for people and programs to read.

    Without `payloads` no arguments, results and messages of errors are written; `describe` says what of a result is
    written all the same, and with `payloads` instead of the whole.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        payloads: bool = False,
        describe: Describe | None = None,
        redact: Redact | None = None,
    ) -> None:
        self._stream = stream
        self._payloads = payloads
        self._describe = describe
        self._redact = redact

    def __call__(self, event: Event) -> None:
        for line in self.lines(event):
            print(line, file=self._stream or sys.stdout, flush=True)

    def lines(self, event: Event) -> list[str]:
        """The lines of an event; none for one that has none."""
        if event.name not in _LINES and event.name not in ("decision.made", "decision.replayed", "call.done"):
            return []
        data = tell(event, payloads=self._payloads, redact=self._redact)
        match event.name:
            case "decision.made":
                return _decisions("decided", event.run_id, data)
            case "decision.replayed":
                return _decisions("replayed", event.run_id, data)
            case "call.done":
                return [self._done(event, data)]
            case _:
                verb, fields = _LINES[event.name]
                return [log_line(verb, event.run_id, {**_place(data), **_some(data, *fields)})]

    def _done(self, event: Event, data: Mapping[str, object]) -> str:
        if "error" in data:
            return log_line("answered", event.run_id, {**_place(data), **_some(data, "tool", "key", "error")})
        shown = _some(data, "result") if self._describe is None else self._describe(event.data["result"])
        named = () if self._payloads else ("tool",)
        return log_line("confirmed", event.run_id, {**_place(data), **_some(data, *named, "key"), **shown})


def _decisions(verb: str, run_id: str, data: Mapping[str, object]) -> list[str]:
    calls, seq, count = data["calls"], data["seq"], data["llm_calls"]
    assert isinstance(calls, list)
    return [log_line(verb, run_id, {"seq": seq, **call, "llm_calls": count}) for call in calls]


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
    return _as_json(value)


def _as_json(value: object) -> str:
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


class LoggingSink:
    """One record of `logging` an event: its message is the event's name and run, and `extra` holds the rest.

    A record has the attributes `event`, `run_id`, `tenant`, `epoch` and `data`. What stops a run is a warning, what ends it
    as failed an error, what has no log line is for debugging, and the rest is information.
    """

    def __init__(
        self, logger: logging.Logger | str = "agent_runtime.events", *, payloads: bool = False, redact: Redact | None = None
    ) -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._payloads = payloads
        self._redact = redact

    def __call__(self, event: Event) -> None:
        level = _LEVELS.get(event.name, logging.INFO)
        if not self._logger.isEnabledFor(level):
            return
        data = tell(event, payloads=self._payloads, redact=self._redact)
        told = {"event": event.name, "run_id": event.run_id, "tenant": event.tenant, "epoch": event.epoch, "data": data}
        self._logger.log(level, "%s run=%s", event.name, _word(event.run_id), extra=told)


_QUIET = ("checkpoint.saved", "decision.asked", "decision.returned", "call.returned", "run.left", "recovery.progress")
_WARNINGS = ("call.in_doubt", "approval.refused", "run.blocked", "run.fenced", "run.quarantined")
_LEVELS: Mapping[str, int] = {
    **dict.fromkeys(_QUIET, logging.DEBUG),
    **dict.fromkeys(_WARNINGS, logging.WARNING),
    "run.failed": logging.ERROR,
}


class JsonLinesSink:
    """One JSON object a line for each event: `at`, `event`, `run`, `tenant`, `epoch`, and the event's data."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        payloads: bool = False,
        redact: Redact | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._stream = stream
        self._payloads = payloads
        self._redact = redact
        self._clock = clock

    def __call__(self, event: Event) -> None:
        at = self._clock.now().isoformat(timespec="milliseconds")
        place = {"at": at, "event": event.name, "run": event.run_id, "tenant": event.tenant, "epoch": event.epoch}
        data = tell(event, payloads=self._payloads, redact=self._redact)
        print(_as_json({**data, **place}), file=self._stream or sys.stdout, flush=True)


class HistorySink:
    """Keeps every event, in order, with all that it holds."""

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
