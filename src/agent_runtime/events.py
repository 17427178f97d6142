"""What a run announces: frozen events, and the sinks they go to.

A sink is a function of one event. It is called on the event loop and must be quick; one that raises is reported once on
the logger `agent_runtime` and never disturbs a run.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

_log = logging.getLogger("agent_runtime")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a run.

    | name | data |
    |---|---|
    | `run.started` | `kind`, `step`, `name`, `thread` |
    | `run.claimed` | `kind`, `step`, `name`, `thread`, `epoch`, `why`, `trace` |
    | `run.recovered` | `kind`, `step`, `replayed` (calls), `rerun` (calls in doubt) |
    | `checkpoint.saved` | `kind` (`flow` or `loop`), `step`, `status`, `stage` or `flow`, `unreplayed` |
    | `recovery.progress` | `kind`, `flow`, `outcome`, `recovered`, `found` |
    | `decision.asked`, `decision.returned` | `step`, `seq`, `attempt`, `model`, `error` |
    | `decision.made`, `decision.replayed` | `seq`, `calls` (tool and args of each), `llm_calls`, `usage`, `duration` |
    | `call.started`, `call.returned`, `call.done`, `call.in_doubt` | `step`, `call`, `tool`, `key`, `attempt`, `duration`, … |
    | `call.settled` | `kind`, `step`, `call`, `key`, `attempt`, `how`, `by`, `why` |
    | `approval.requested`, `approval.decided`, `approval.refused` | `step`, `call`, `tool`, `args`, `digest`, … |
    | `run.quarantined` | `kind`, `step`, `attempts`, `why` |
    | `run.done`, `run.failed`, `run.blocked`, `run.paused`, `run.cancelled`, `run.fenced` | `kind`, `step`, … |
    | `run.left` | `kind`, `step`, `status`, `error` |
    """

    name: str
    run_id: str
    data: Mapping[str, object] = field(default_factory=dict)
    tenant: str = ""
    epoch: int = 0
    """Which of the run's owners tells it, counted from 1; 0 where nobody has claimed it."""


Sink: TypeAlias = Callable[[Event], None]


def emit(
    sinks: Sequence[Sink], name: str, run_id: str, data: Mapping[str, object], *, tenant: str = "", epoch: int = 0
) -> None:
    """Tell every sink."""
    event = Event(name, run_id, data, tenant, epoch)
    for sink in sinks:
        try:
            sink(event)
        except Exception:  # a broken sink is no reason to stop a run: no call depends on it
            report_once(sink, name)


def find_trace(sinks: Sequence[Sink], run_id: str, *, tenant: str, epoch: int, kind: str, name: str) -> str:
    """Where in a trace an owner's work on a run stands, to be written down with its claim: what the first sink says that
    has a method `trace` with these arguments; empty where none does."""
    for sink in sinks:
        ask = getattr(sink, "trace", None)
        if ask is None:
            continue
        try:
            return str(ask(run_id, tenant=tenant, epoch=epoch, kind=kind, name=name))
        except Exception:  # as in `emit`
            report_once(sink, "trace")
    return ""


_reported: weakref.WeakSet[Sink] = weakref.WeakSet()


def report_once(sink: Sink, name: str) -> None:
    """Say that a sink failed, unless that was said of it before. To be called while its error is handled."""
    try:
        is_known = sink in _reported
        _reported.add(sink)
    except TypeError:  # it cannot be remembered: said each time
        is_known = False
    if not is_known:
        _log.exception("sink %r failed on %s; it is not said again of this sink", sink, name)
