"""Calls in doubt: what may be done about each, and who decides it.

A call in doubt runs again where its tool's rule says so, or where somebody permits it; else a person must say what
happened. Permissions are records, so that each one is seen in the journal.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from agent_runtime import codec
from agent_runtime.clock import Clock
from agent_runtime.errors import Doubt
from agent_runtime.ids import RunId, build_key, is_reply, key_prefix
from agent_runtime.journal.replay import CallLife, Move, next_move
from agent_runtime.journal.states import CallState
from agent_runtime.tools import ToolRegistry

MOST_UNRECORDABLE = 2
"""After so many results of one call that could not be stored, it is not run again by its rule."""

Rerun: TypeAlias = "bool | Sequence[Doubt]"
"""True for every call in doubt, or the doubts that an error named."""


class Decisions(NamedTuple):
    """What a program says about the calls in doubt: those that a person permits to rerun, and those nobody decided."""

    permitted: Sequence[CallLife] = ()
    undecided: Sequence[Doubt] = ()
    rerun: int = 0
    """How many calls in doubt will run again, by rule or by permission."""


class Decider:
    """Decides the calls in doubt of a run: by its tool's rule, by a permission to rerun, or not at all."""

    def __init__(self, run_id: RunId, registry: ToolRegistry, rerun: Rerun, clock: Clock) -> None:
        self._run_id = run_id
        self._registry = registry
        self._rerun = rerun
        self._clock = clock

    def __call__(self, lives: Sequence[CallLife], opened: Mapping[str, Any]) -> Decisions:
        prefix = key_prefix(self._run_id, opened["namespace"])
        by_rule, permitted, undecided = 0, [], []
        now = self._clock.now_ms()
        for life in lives:
            if is_reply(life.call):
                continue  # a lost reply was never acted upon: it is asked for again, and counted again
            name, args, at_ms = read_asked(life.asked)
            tool = self._registry.find(name)
            may_repeat = tool is not None and tool.rule.may_repeat and life.unrecordable < MOST_UNRECORDABLE
            if next_move(life, may_repeat=may_repeat) is Move.RERUN:
                by_rule += 1
            elif tool is not None and is_permitted(self._rerun, self._run_id, life.call):
                permitted.append(life)
            else:
                why = _why(life, is_known=tool is not None)
                key = build_key(prefix, life.call)
                undecided.append(make_doubt(self._run_id, life.call, key, name, life.attempts, why, args, now - at_ms))
        return Decisions(permitted, undecided, by_rule + len(permitted))


def is_permitted(rerun: Rerun, run_id: RunId, call: str) -> bool:
    """Whether somebody said that this call in doubt may run again."""
    if isinstance(rerun, bool):
        return rerun
    return any((doubt.run_id, doubt.call) == (run_id, call) for doubt in rerun)


def _why(life: CallLife, *, is_known: bool) -> str:
    if not is_known:
        return "it was started and has no ending, and no tool of its name is registered here"
    if life.state is CallState.UNRECORDABLE:
        return "it ran, and what it gave could not be stored"
    return "it was started and has no ending: its worker stopped before it could write one"


class Asked(NamedTuple):
    """What a `started` record of a tool call says: the tool, its arguments, and when (milliseconds UTC of the worker)."""

    tool: str
    args: dict[str, object]
    at_ms: int


def read_asked(body: bytes) -> Asked:
    """What the body of a `started` record says."""
    plain = codec.decode(body)
    return Asked(plain["tool"], plain["args"], plain["at"])


def make_doubt(
    run_id: str, call: str, key: str, tool: str, attempt: int, why: str, args: Mapping[str, object], age_ms: int
) -> Doubt:
    """A call in doubt, with what may be done about it."""
    return Doubt(run_id, call, key, tool, attempt, why, ("rerun",), args, max(0.0, age_ms / 1000))
