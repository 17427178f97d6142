"""Server-sent events: that a run, or a list, is not any more as the page shows it. Nothing is read while nobody watches."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable

from agent_runtime.clock import Clock
from agent_runtime.errors import AgentRuntimeError, StoreRefused, StoreUnavailable
from agent_runtime.runs import Runs, Stand

RETRY = b"retry: 1000\n\n"
"""So soon a browser asks again when the viewer itself is gone."""
AWAY_SECONDS = 1.0
LIST_SECONDS = 1.0
LIST_PATIENCE = 10
"""A list that takes long to read is read less often: it rests for so many times what it took."""


def stamp(stand: Stand) -> str:
    """A run's stand as a page holds it, to be compared with what comes."""
    return f"{stand.status}.{stand.epoch}.{stand.number}.{stand.posted}"


def digest(value: object) -> str:
    """The same for a list."""
    return hashlib.sha256(repr(value).encode("utf-8", "replace")).hexdigest()[:16]


def event(name: str, data: str = "") -> bytes:
    """One event, whose data is one line."""
    return f"event: {name}\ndata: {' '.join(data.split())}\n\n".encode()


async def follow_run(runs: Runs, run_id: str, *, clock: Clock, tell: Callable[[Exception], str]) -> AsyncIterator[bytes]:
    """`changed` with the stamp of each new stand; `away` and `back` with the store; `gone` at the end, with why."""
    yield RETRY
    is_away = False
    while True:
        try:
            async for stand in runs.watch(run_id):
                if is_away:
                    yield event("back")
                    is_away = False
                yield event("changed", stamp(stand))
        except (StoreUnavailable, StoreRefused) as error:
            is_away = True
            yield event("away", tell(error))
            await clock.sleep(AWAY_SECONDS)
        except AgentRuntimeError as error:
            yield event("gone", tell(error))
            return


async def follow_list(
    read: Callable[[], Awaitable[object]], *, clock: Clock, tell: Callable[[Exception], str]
) -> AsyncIterator[bytes]:
    """`changed` each time what `read` gives is another; `away` and `back` with the store."""
    yield RETRY
    last, is_away = "", False
    while True:
        began = clock.monotonic()
        try:
            now = digest(await read())
        except AgentRuntimeError as error:
            is_away = True
            yield event("away", tell(error))
        else:
            if is_away:
                yield event("back")
            if now != last:
                yield event("changed", now)
            last, is_away = now, False
        await clock.sleep(max(LIST_SECONDS, LIST_PATIENCE * (clock.monotonic() - began)))
