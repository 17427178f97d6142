"""Those who wait for messages to runs, and stores whose ears are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from agent_runtime.doorbell import Doorbell
from agent_runtime.ids import RunId
from agent_runtime.journal.store import CheckpointStore, Ear, Store
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.store_contract import Draft
from tests.bench import Delegate, until

RUN = RunId("run-1")
SECONDS = 10
"""Less than `LOOK_SECONDS`: nobody is told only because everybody is looked at from time to time."""


def wait(bell: Doorbell, run_id: str = RUN, *, seen: int = 0) -> asyncio.Task[int]:
    return asyncio.create_task(bell.wait(RunId(run_id), seen=seen), name=f"waits for {run_id}")


async def post(store: CheckpointStore, draft: Draft, body: bytes = b"approved") -> None:
    await store.post(draft.run_id, draft.message(body))


def bell_tasks() -> list[asyncio.Task[object]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "agent-runtime-doorbell"]


async def until_told(told: list[int], count: int) -> None:
    await until(lambda: told[-1:] == [count])


async def until_nobody_listens() -> None:
    await until(lambda: not bell_tasks())


# Trouble.


class Minimal(MemoryCheckpointStore):
    """A store with the least that must be written: what it has of ears is the port's."""

    listen = Store.listen


class CountingEars(Delegate):
    """Counts how often somebody begins to listen."""

    listened = 0

    async def listen(self, ring: Callable[[], None]) -> Ear:
        self.listened += 1
        return await super().listen(ring)


async def until_listened(store: CountingEars, times: int) -> None:
    await until(lambda: store.listened == times)


class PassingEar:
    def __init__(self, ear: Ear) -> None:
        self._ear = ear
        self.every = ear.every

    async def heard(self) -> Collection[RunId] | None:
        return await self._ear.heard()

    async def posted(self, run_ids: Sequence[RunId]) -> list[int | None]:
        return await self._ear.posted(run_ids)

    async def close(self) -> None:
        await self._ear.close()
