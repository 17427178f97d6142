"""Shared reads: the runs that tasks ask for in one turn of the event loop are read by one call of the store.

Rules of this file:

* Nothing is kept: what a task gets was read after it asked.
* A read of many that fails is made again by each for itself, so that what ails one run is no other's trouble.
* A task that is cancelled stops nobody's read.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import TypeAlias

from agent_runtime.ids import RunId
from agent_runtime.journal.records import StoredRun
from agent_runtime.journal.store import CheckpointStore

MOST_AT_ONCE = 64
"""How many runs are read at once, with all that they hold."""

_Waiter: TypeAlias = "asyncio.Future[StoredRun | None]"


class _Failed(Exception):
    """The runs could not be read together."""


class GroupLoad:
    """The reads of whole runs that one event loop makes of one store."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._waiting: list[tuple[RunId, _Waiter]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self, store: CheckpointStore, run_id: RunId) -> StoredRun | None:
        """The whole run; None where there is none."""
        waiter: _Waiter = self.loop.create_future()
        if not self._waiting:
            self.loop.call_soon(self._flush, store)
        self._waiting.append((run_id, waiter))
        try:
            return await waiter
        except _Failed:
            [found] = await store.load_many([run_id])
            return found

    def _flush(self, store: CheckpointStore) -> None:
        waiting, self._waiting = self._waiting, []
        for at in range(0, len(waiting), MOST_AT_ONCE):
            task = self.loop.create_task(_carry(store, waiting[at : at + MOST_AT_ONCE]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _carry(store: CheckpointStore, waiting: Sequence[tuple[RunId, _Waiter]]) -> None:
    run_ids = list(dict.fromkeys(run_id for run_id, _ in waiting))
    try:
        found = dict(zip(run_ids, await store.load_many(run_ids), strict=True))
    except Exception as error:
        for _, waiter in waiting:
            if not waiter.done():
                waiter.set_exception(error if len(waiting) == 1 else _Failed())
    except BaseException:
        for _, waiter in waiting:
            waiter.cancel()
        raise
    else:
        for run_id, waiter in waiting:
            if not waiter.done():
                waiter.set_result(found[run_id])


async def load_run(store: CheckpointStore, run_id: RunId) -> StoredRun | None:
    """The whole run, read together with those that others ask for now; None where there is none."""
    group = _BY_STORE.get(store)
    if group is None or group.loop is not asyncio.get_running_loop():
        group = _BY_STORE[store] = GroupLoad()
    return await group.load(store, run_id)


_BY_STORE: weakref.WeakKeyDictionary[CheckpointStore, GroupLoad] = weakref.WeakKeyDictionary()
