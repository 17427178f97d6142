"""The life of a call and of a run, as two tables. Pure.

Rules that the tables hold:

* A call ends once: no move leads out of `DONE`.
* An act has its own earlier `started`: `DONE` follows `NEW` only for a call that was refused before it was sent.
* What nobody knows is `STARTED` or `UNRECORDABLE`; only an ending, a settlement or another attempt leads out.
* A call that needs a verdict acts only after it: what leads from `PENDING` to `STARTED` passes through a `verdict`. It is
  asked about once, and before it acts; one that was sent unasked and did not happen may still be. While
  `ASKING`, its intent is written and the person is asked: nothing has gone out.
* A final status has no successor.

The diagrams of ARCHITECTURE.md are printed from these tables by `draw_call_life` and `draw_run_life`.
"""

from __future__ import annotations

from enum import Enum

from agent_runtime.journal.records import RecordKind, RunStatus


class CallState(Enum):
    """Where a call stands."""

    __hash__ = object.__hash__  # members are single; the one of Enum is Python, and loading a run asks for it all the time

    NEW = "new"
    PENDING = "pending"
    ASKING = "asking"
    DECIDED = "decided"
    STARTED = "started"
    UNSENT = "unsent"
    UNRECORDABLE = "unrecordable"
    REOPENED = "reopened"
    DONE = "done"


class CallMove(Enum):
    """What a record does to its call. `settled` does one of three things, so it is three moves."""

    __hash__ = object.__hash__  # members are single; the one of Enum is Python, and loading a run asks for it all the time

    PENDING = "pending"
    VERDICT = "verdict"
    STARTED = "started"
    UNSENT = "unsent"
    UNRECORDABLE = "unrecordable"
    DONE = "done"
    SETTLED_DONE = "settled: done"
    SETTLED_NOT_DONE = "settled: not done"
    SETTLED_RERUN = "settled: rerun"


class Settlement(Enum):
    """How a call in doubt was settled."""

    DONE = "done"
    NOT_DONE = "not_done"
    RERUN = "rerun"


CALL_LIFE: dict[tuple[CallState, CallMove], CallState] = {
    (CallState.NEW, CallMove.PENDING): CallState.PENDING,
    (CallState.NEW, CallMove.STARTED): CallState.STARTED,
    (CallState.NEW, CallMove.DONE): CallState.DONE,
    (CallState.PENDING, CallMove.VERDICT): CallState.DECIDED,
    (CallState.PENDING, CallMove.STARTED): CallState.ASKING,
    (CallState.PENDING, CallMove.DONE): CallState.DONE,
    (CallState.ASKING, CallMove.VERDICT): CallState.STARTED,
    (CallState.ASKING, CallMove.UNSENT): CallState.PENDING,
    (CallState.DECIDED, CallMove.STARTED): CallState.STARTED,
    (CallState.DECIDED, CallMove.DONE): CallState.DONE,
    (CallState.STARTED, CallMove.STARTED): CallState.STARTED,
    (CallState.STARTED, CallMove.UNSENT): CallState.UNSENT,
    (CallState.STARTED, CallMove.UNRECORDABLE): CallState.UNRECORDABLE,
    (CallState.STARTED, CallMove.DONE): CallState.DONE,
    (CallState.STARTED, CallMove.SETTLED_DONE): CallState.DONE,
    (CallState.STARTED, CallMove.SETTLED_NOT_DONE): CallState.REOPENED,
    (CallState.STARTED, CallMove.SETTLED_RERUN): CallState.REOPENED,
    (CallState.UNSENT, CallMove.PENDING): CallState.PENDING,
    (CallState.UNSENT, CallMove.STARTED): CallState.STARTED,
    (CallState.UNSENT, CallMove.DONE): CallState.DONE,
    (CallState.UNRECORDABLE, CallMove.STARTED): CallState.STARTED,
    (CallState.UNRECORDABLE, CallMove.SETTLED_DONE): CallState.DONE,
    (CallState.UNRECORDABLE, CallMove.SETTLED_NOT_DONE): CallState.REOPENED,
    (CallState.UNRECORDABLE, CallMove.SETTLED_RERUN): CallState.REOPENED,
    (CallState.REOPENED, CallMove.PENDING): CallState.PENDING,
    (CallState.REOPENED, CallMove.STARTED): CallState.STARTED,
    (CallState.REOPENED, CallMove.DONE): CallState.DONE,
}

IN_DOUBT = frozenset({CallState.STARTED, CallState.UNRECORDABLE})
"""Nobody knows whether the call happened, or what it gave."""

WAITING = frozenset({CallState.PENDING, CallState.ASKING})
"""Nothing has gone out, and nothing will until somebody says so."""

_OPEN = (RunStatus.RUNNING, RunStatus.PAUSED, RunStatus.BLOCKED, RunStatus.QUARANTINED)
_ENDS = (RunStatus.DONE, RunStatus.FAILED, RunStatus.CANCELLED)

RUN_LIFE: frozenset[tuple[RunStatus, RunStatus]] = frozenset(
    [(RunStatus.RUNNING, after) for after in (*_OPEN, *_ENDS)]
    + [(RunStatus.PAUSED, after) for after in (RunStatus.RUNNING, RunStatus.BLOCKED, RunStatus.CANCELLED)]
    + [(RunStatus.BLOCKED, after) for after in (RunStatus.RUNNING, RunStatus.PAUSED, RunStatus.CANCELLED)]
    + [(RunStatus.QUARANTINED, after) for after in (RunStatus.RUNNING, RunStatus.CANCELLED)]
    + [(parked, parked) for parked in (RunStatus.PAUSED, RunStatus.BLOCKED, RunStatus.QUARANTINED)]
)
"""(before, after): the steps that a run's status may take. Nothing leads out of a final one."""

MOVES: dict[int, CallMove] = {
    RecordKind.PENDING: CallMove.PENDING,
    RecordKind.VERDICT: CallMove.VERDICT,
    RecordKind.STARTED: CallMove.STARTED,
    RecordKind.UNSENT: CallMove.UNSENT,
    RecordKind.UNRECORDABLE: CallMove.UNRECORDABLE,
    RecordKind.DONE: CallMove.DONE,
}
"""The move that a call's record makes; `settled` has its own (`SETTLEMENT_MOVES`), the run's own records none."""

SETTLEMENT_MOVES: dict[Settlement, CallMove] = {
    Settlement.DONE: CallMove.SETTLED_DONE,
    Settlement.NOT_DONE: CallMove.SETTLED_NOT_DONE,
    Settlement.RERUN: CallMove.SETTLED_RERUN,
}


def after(state: CallState, move: CallMove) -> CallState | None:
    """The state that the move leads to, or None where the table does not allow it."""
    return CALL_LIFE.get((state, move))


def draw_call_life() -> str:
    """The life of a call as a Mermaid state diagram."""
    rows = [f"    {before.value} --> {ends.value}: {move.value}" for (before, move), ends in CALL_LIFE.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> new", *rows, "    done --> [*]"])


def draw_run_life() -> str:
    """The life of a run as a Mermaid state diagram."""
    steps = sorted((before, ends) for before, ends in RUN_LIFE if before != ends)
    rows = [f"    {before.name.lower()} --> {ends.name.lower()}" for before, ends in steps]
    finals = [f"    {status.name.lower()} --> [*]" for status in _ENDS]
    return "\n".join(["stateDiagram-v2", "    [*] --> running", *rows, *finals])
