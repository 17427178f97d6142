"""What a run announces: frozen events, and the sinks they go to.

A sink is a function of one event. It is called on the event loop and must be quick; one that raises is reported once on
the logger `agent_runtime` and never disturbs a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

_log = logging.getLogger("agent_runtime")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a run.

    | name | data |
    |---|---|
    | `run.started` | `kind`, `step` |
    | `run.claimed` | `kind`, `step`, `epoch`, `why` |
    | `run.recovered` | `kind`, `step`, `replayed` (calls), `rerun` (calls in doubt) |
    | `checkpoint.saved` | `kind` (`flow` or `loop`), `step`, `status`, `stage` or `flow`, `unreplayed` |
    | `recovery.progress` | `kind`, `flow`, `outcome`, `recovered`, `found` |
    | `decision.made`, `decision.replayed` | `seq`, `calls` (tool and args of each), `llm_calls` |
    | `call.started`, `call.done`, `call.in_doubt`, `call.settled` | `step`, `call`, `tool`, `key`, `attempt`, `duration`, … |
    | `approval.requested`, `approval.decided`, `approval.refused` | `step`, `call`, `tool`, `args`, `digest`, … |
    | `run.quarantined` | `kind`, `step`, `attempts`, `why` |
    | `run.done`, `run.failed`, `run.blocked`, `run.paused`, `run.cancelled`, `run.fenced` | `kind`, `step`, … |
    """

    name: str
    run_id: str
    data: Mapping[str, object] = field(default_factory=dict)


Sink: TypeAlias = Callable[[Event], None]


def emit(sinks: Sequence[Sink], name: str, run_id: str, data: Mapping[str, object]) -> None:
    """Tell every sink."""
    event = Event(name, run_id, data)
    for sink in sinks:
        try:
            sink(event)
        except Exception:  # a broken sink is no reason to stop a run: no call depends on it
            _log.exception("sink %r failed on %s", sink, name)
