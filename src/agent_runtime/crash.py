"""The seven crash points and the stall points; does nothing unless told to.

The calls to these points stand on the normal path of every run. `CRASH_AT` names a point and `CRASH_SEQ` a decision
(default 0): the process ends there by `os._exit(1)`, as a kill would end it. `STALL_AT` with `STALL_MS` sleeps there
instead. `CRASH_IN=recovery` arms the points in recovered runs only.
"""

import os
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from agent_runtime.clock import Clock
from agent_runtime.errors import InvalidSetting


class CrashPoint(Enum):
    """A named place where the process may be told to die."""

    BEFORE_DECIDE = "before_decide"
    AFTER_DECIDE_BEFORE_JOURNAL = "after_decide_before_journal"
    AFTER_DECIDE = "after_decide"
    BEFORE_INTENT = "before_intent"
    AFTER_INTENT = "after_intent"
    AFTER_CALL = "after_call"
    AFTER_CONFIRM = "after_confirm"


class CrashPlan(NamedTuple):
    """Where to die and where to stall."""

    die_at: CrashPoint | None = None
    stall_at: CrashPoint | None = None
    stall_ms: int = 0
    seq: int = 0
    in_recovery: bool = False

    @property
    def is_armed(self) -> bool:
        return self.die_at is not None or self.stall_at is not None

    async def reach(self, point: CrashPoint, seq: int, *, recovering: bool, clock: Clock) -> None:
        """Die or stall here, if this is the place."""
        if seq != self.seq or (self.in_recovery and not recovering):
            return
        if point is self.die_at:
            print(f"!!! CRASH_AT={point.value} seq={seq} -- os._exit(1)", flush=True)
            os._exit(1)
        if point is self.stall_at:
            print(f"!!! STALL_AT={point.value} seq={seq} -- {self.stall_ms} ms", flush=True)
            await clock.sleep(self.stall_ms / 1000)


UNARMED = CrashPlan()


def plan_from(environ: Mapping[str, str]) -> CrashPlan:
    """The plan that the environment asks for; `InvalidSetting` for a point or a number that cannot be."""
    plan = CrashPlan(
        die_at=_point(environ, "CRASH_AT"),
        stall_at=_point(environ, "STALL_AT"),
        stall_ms=_number(environ, "STALL_MS", 0),
        seq=_number(environ, "CRASH_SEQ", 0),
        in_recovery=_in_recovery(environ),
    )
    return plan if plan.is_armed else UNARMED


def _point(environ: Mapping[str, str], setting: str) -> CrashPoint | None:
    name = environ.get(setting, "")
    if not name:
        return None
    try:
        return CrashPoint(name)
    except ValueError:
        points = ", ".join(point.value for point in CrashPoint)
        raise InvalidSetting(f"{setting} is one of {points}; found {name!r}") from None


def _number(environ: Mapping[str, str], setting: str, default: int) -> int:
    text = environ.get(setting, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise InvalidSetting(f"{setting} is a whole number from 0; found {text!r}")
    return int(text)


def _in_recovery(environ: Mapping[str, str]) -> bool:
    where = environ.get("CRASH_IN", "")
    if where not in ("", "recovery"):
        raise InvalidSetting(f"CRASH_IN is 'recovery' or unset; found {where!r}")
    return where == "recovery"
