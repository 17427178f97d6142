"""Time: the port that everything asks, and the system's clock; no other module reads time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Protocol


class Clock(Protocol):
    """Where time comes from. Tests and simulations bring their own."""

    def now(self) -> datetime:
        """The wall clock, aware, in UTC: for display and timers, never for safety."""

    def now_ms(self) -> int:
        """The same as whole milliseconds since 1970."""

    def monotonic(self) -> float:
        """Seconds that only grow while this host is up, also while it is suspended."""

    async def sleep(self, seconds: float) -> None:
        """Let others run for that long."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Block this thread until the event is set (true) or the time is over (false)."""


def _since_boot() -> Callable[[], float]:
    boottime = getattr(time, "CLOCK_BOOTTIME", None)  # Linux; it counts a suspended host's time too
    if boottime is None:
        return time.monotonic
    return partial(time.clock_gettime, boottime)


class SystemClock:
    """This machine's clock."""

    def __init__(self) -> None:
        self.monotonic = _since_boot()

    def now(self) -> datetime:
        return datetime.now(UTC)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)


SYSTEM_CLOCK: Clock = SystemClock()


def wall_ns() -> int:
    """This machine's wall clock in nanoseconds since 1970, as traces and log lines tell it: for display, never for safety."""
    return time.time_ns()


def milliseconds(moment: datetime) -> int:
    """Whole milliseconds since 1970 of an aware moment: the form in which stores keep time."""
    return int(moment.timestamp() * 1000)


def moment(milliseconds_utc: int) -> datetime:
    """The aware moment that `milliseconds` came from."""
    return datetime.fromtimestamp(milliseconds_utc / 1000, UTC)
