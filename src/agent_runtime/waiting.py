"""A worker's patience: how long it waits beside a parked run for what a person says, before it lets the run be.

The run is parked in the store all the same: any other worker may pick it up, and the death of this one changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from agent_runtime.clock import milliseconds
from agent_runtime.doorbell import doorbell
from agent_runtime.errors import CheckpointNotFound, InvalidSetting, RecoveryNeedsDecision
from agent_runtime.ids import RunId
from agent_runtime.run import Backing
from agent_runtime.working import Parked

SHORTEST_WAIT_SECONDS = 0.05
"""Between two looks at a run that is due all the time."""


class HasStatus(Protocol):
    """What a run came to."""

    @property
    def status(self) -> str: ...


T = TypeVar("T", bound=HasStatus)


def check_patience(seconds: float) -> float:
    """How long to wait, or `InvalidSetting`."""
    if type(seconds) not in (int, float) or not seconds >= 0:
        raise InvalidSetting(f"wait_seconds= is a number of seconds from 0, found {seconds!r}")
    return seconds


async def until_decided(
    first: Callable[[], Awaitable[T]], again: Callable[[], Awaitable[T]], backing: Backing, run_id: RunId, seconds: float
) -> T:
    """What the first gives; once it is parked, what looking at the run again gives.

    A run that waits for a person is waited beside, for so many seconds each time.
    """
    step, cause = first, None
    while True:
        try:
            result = await step()
        except Parked as parked:
            step, cause = again, parked.__cause__
            continue
        except RecoveryNeedsDecision as needed:
            if not seconds:
                raise needed from needed.__cause__ or cause  # what the tool raised, where nothing came meanwhile
        else:
            if result.status != "paused" or not seconds:
                return result
        if not await _is_decided(backing, run_id, seconds):
            seconds = 0  # a last look: another worker may have gone on with it
        step = again


async def _is_decided(backing: Backing, run_id: RunId, seconds: float) -> bool:
    """Whether there is reason to look at the run again, waiting for one up to so many seconds.

    What is posted makes the run due, and so it stays until somebody has read all of it.
    """
    stored = await backing.store.latest(run_id)
    if stored is None:
        return False
    left = seconds
    if stored.row.wake_at is not None:
        due = (stored.row.wake_at - milliseconds(await backing.store.now())) / 1000
        left = min(seconds, max(due, SHORTEST_WAIT_SECONDS))
    with suppress(CheckpointNotFound):
        if await _rings(backing, run_id, stored.row.posted, left):
            return True
    return left < seconds


async def _rings(backing: Backing, run_id: RunId, seen: int, seconds: float) -> bool:
    """Whether another message comes in that time."""
    ringing = asyncio.ensure_future(doorbell(backing.store, backing.clock, backing.offload).wait(run_id, seen=seen))
    pausing = asyncio.ensure_future(backing.clock.sleep(seconds))
    try:
        await asyncio.wait({ringing, pausing}, return_when=asyncio.FIRST_COMPLETED)
        if ringing.done():
            ringing.result()  # a run that is gone is told of
        return ringing.done()
    finally:
        for task in (ringing, pausing):
            task.cancel()
