"""Every unfinished run of a flow, found page by page and picked up a bounded number side by side.

One bad run never stops the rest: what keeps it from its end is what it is reported with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from agent_runtime.errors import CheckpointConflict, RunQuarantined
from agent_runtime.events import emit as announce
from agent_runtime.ids import RunId
from agent_runtime.run import Backing
from agent_runtime.side_by_side import run_all

R = TypeVar("R")

PAGE = 500
LOOK_SECONDS = 0.25
"""Between two looks at a run whose owner lives, while there is time to wait for it."""


class Unfinished(Generic[R]):
    """Picks up the unfinished runs of one flow."""

    def __init__(self, backing: Backing, kind: str, name: str, recover: Callable[[RunId], Awaitable[R]]) -> None:
        self._backing = backing
        self._kind = kind
        self._name = name
        self._recover = recover
        self._found = 0
        self._results: dict[RunId, R | Exception] = {}

    async def recover_all(self, *, at_once: int, wait_seconds: float) -> dict[RunId, R | Exception]:
        """The result of each run, or the error that stopped it, in the order of their ids."""
        deadline = self._backing.clock.monotonic() + wait_seconds
        runs = self._runs()
        turn = asyncio.Lock()

        async def work() -> None:
            while True:
                async with turn:
                    run_id = await anext(runs, None)
                if run_id is None:
                    return
                self._results[run_id] = result = await self._end_of(run_id, deadline)
                self._tell(run_id, result)

        await run_all([work() for _ in range(at_once)])
        return dict(sorted(self._results.items()))

    async def _runs(self) -> AsyncIterator[RunId]:
        after: RunId | None = None
        while page := await self._backing.store.list_unfinished(name=self._name, limit=PAGE, after=after):
            wanted = [row.run_id for row in page if row.kind == self._kind]
            self._found += len(wanted)
            for run_id in wanted:
                yield run_id
            after = page[-1].run_id

    async def _end_of(self, run_id: RunId, deadline: float) -> R | Exception:
        while True:
            try:
                return await self._recover(run_id)
            except RunQuarantined as error:
                return error
            except CheckpointConflict as error:
                left = deadline - self._backing.clock.monotonic()
                if left <= 0:
                    return error
                await self._backing.clock.sleep(min(LOOK_SECONDS, left))
            except Exception as error:  # whatever it is, it is this run's alone
                return error

    def _tell(self, run_id: RunId, result: R | Exception) -> None:
        outcome = type(result).__name__ if isinstance(result, Exception) else str(getattr(result, "status", ""))
        data = {"flow": self._name, "outcome": outcome, "recovered": len(self._results), "found": self._found}
        progress = {"kind": self._kind, **data}
        announce(self._backing.sinks, "recovery.progress", run_id, progress, tenant=self._backing.tenant)
