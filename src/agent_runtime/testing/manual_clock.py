"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from agent_runtime.clock import milliseconds

LOOK_AGAIN_SECONDS = 0.002
"""How often, in real time, a thread in `wait` looks at the clock: nothing but its event can wake it."""


class _Sleeper(NamedTuple):
    due_us: int
    loop: asyncio.AbstractEventLoop
    woken: asyncio.Future[None]


class ManualClock:
    """A `Clock` for tests: `advance` moves it and wakes who is due; nothing else does. May be moved from any thread.

    With `auto=True` a coroutine that sleeps moves the clock itself and goes on at once. A thread that waits never moves
    it: a heartbeat would drive the clock ahead of everybody.
    """

    def __init__(self, start: datetime = datetime(2030, 1, 1, tzinfo=UTC), *, auto: bool = False) -> None:
        if start.tzinfo is None:
            raise ValueError(f"the clock starts at an aware moment, found {start!r}; add tzinfo=UTC")
        self._wall = start.astimezone(UTC)
        self._auto = auto
        self._passed_us = 0  # whole numbers, so that ten tenths are one second
        self._lock = threading.Lock()
        self._order = itertools.count()
        self._sleepers: dict[int, _Sleeper] = {}
        self._waiting = 0
        _MADE.add(self)

    @property
    def sleepers(self) -> int:
        """How many coroutines and threads wait for this clock: a test looks here before it moves on."""
        with self._lock:
            return len(self._sleepers) + self._waiting

    def now(self) -> datetime:
        with self._lock:
            return self._wall

    def now_ms(self) -> int:
        return milliseconds(self.now())

    def monotonic(self) -> float:
        with self._lock:
            return self._passed_us / 1_000_000

    async def sleep(self, seconds: float) -> None:
        if self._auto:
            self.advance(max(seconds, 0))
        if self._auto or seconds <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        number = next(self._order)
        with self._lock:
            self._sleepers[number] = _Sleeper(self._passed_us + _microseconds(seconds), loop, woken)
        try:
            await woken
        finally:
            with self._lock:
                self._sleepers.pop(number, None)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        with self._lock:
            due_us = self._passed_us + _microseconds(seconds)
            self._waiting += 1
        try:
            while not event.is_set() and self._is_before(due_us):
                event.wait(LOOK_AGAIN_SECONDS)
            return event.is_set()
        finally:
            with self._lock:
                self._waiting -= 1

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks, and wake who is due, the earliest first.

        A coroutine that is woken runs at the next turn of its own loop: this call does not wait for it.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back, found {seconds}; jump_wall() sets the wall clock alone")
        with self._lock:
            self._passed_us += _microseconds(seconds)
            self._wall += timedelta(microseconds=_microseconds(seconds))
            due = sorted((s.due_us, number) for number, s in self._sleepers.items() if s.due_us <= self._passed_us)
            woken = [self._sleepers.pop(number) for _, number in due]
        for sleeper in woken:
            with contextlib.suppress(RuntimeError):  # its loop is closed, and nobody sleeps there any more
                sleeper.loop.call_soon_threadsafe(_wake, sleeper.woken)

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator or a time server does; no time passes and nobody wakes."""
        with self._lock:
            self._wall += timedelta(microseconds=_microseconds(seconds))

    def _is_before(self, due_us: int) -> bool:
        with self._lock:
            return self._passed_us < due_us


_MADE: weakref.WeakSet[ManualClock] = weakref.WeakSet()


def let_everybody_go(seconds: float = 100_000) -> None:
    """Let so much time pass on every clock there is: for the end of a test, whose threads would wait for ever."""
    for clock in list(_MADE):
        clock.advance(seconds)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
