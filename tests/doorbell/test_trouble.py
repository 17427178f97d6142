"""A store that is away, lost or broken ends no wait for messages: it is asked less and less often until it is back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from agent_runtime.doorbell import doorbell
from agent_runtime.errors import StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.store import Ear
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.store_contract.witness import land, opened
from tests.bench import until
from tests.doorbell.waiting import RUN, SECONDS, CountingEars, PassingEar, bell_tasks, post, until_listened, until_told, wait


class Away(CountingEars):
    """Is away where `where` says so: when one begins to listen, asks what was heard, or looks."""

    where = ""
    failed = 0

    async def listen(self, ring: Callable[[], None]) -> Ear:
        ear = await super().listen(ring)
        self.fail("listen")
        return AwayEar(ear, self)

    def fail(self, where: str) -> None:
        if self.where in (where, "all"):
            self.failed += 1
            raise StoreUnavailable("expected here")
        if self.where == "broken":
            raise TypeError("a mistake in the store")


async def until_failed(store: Away, times: int) -> None:
    await until(lambda: store.failed == times)


class AwayEar(PassingEar):
    def __init__(self, ear: Ear, store: Away) -> None:
        super().__init__(ear)
        self._store = store

    async def heard(self) -> Collection[RunId] | None:
        self._store.fail("heard")
        return await super().heard()

    async def posted(self, run_ids: Sequence[RunId]) -> list[int | None]:
        self._store.fail("posted")
        return await super().posted(run_ids)


class Still(ManualClock):
    """A clock that nobody moves but the test; `begun`: how often a thread began to wait for it."""

    begun = 0

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.begun += 1
        return super().wait(event, seconds)

    def waits_again(self, begun: int) -> bool:
        """Whether somebody waits who began since `begun`."""
        return self.begun > begun and self.sleepers == 1


@pytest.fixture
def still() -> Iterator[Still]:
    """At the end it lets the threads go that wait for it."""
    clock = Still()
    yield clock
    clock.advance(1000)


@pytest.mark.parametrize("where", ["listen", "heard", "posted"])
async def test_a_store_that_is_away_is_waited_for_and_asked_less_and_less_often(where: str, still: Still) -> None:
    store = Away(MemoryCheckpointStore())
    draft = await opened(store)
    store.where = where
    waiting = wait(doorbell(store, still))
    for tries, pause in enumerate((0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0), start=1):
        await until(lambda: still.sleepers == 1)
        still.advance(pause - 0.05)
        begun = still.begun
        other = wait(doorbell(store, still), "nobody")
        # The pause is interrupted, and its rest is waited for from the time that the clock shows then.
        await until(partial(still.waits_again, begun))
        other.cancel()
        assert store.listened == tries, "whoever comes meanwhile has to wait too"
        still.advance(0.06)
        await until_listened(store, tries + 1)
    await post(store, draft)
    store.where = ""
    assert not waiting.done()
    await until(lambda: still.sleepers == 1)
    still.advance(5.0)
    assert await asyncio.wait_for(waiting, SECONDS) == 1


async def test_a_store_that_came_back_is_asked_soon_when_it_is_away_again(still: ManualClock) -> None:
    store = Away(MemoryCheckpointStore())
    draft = await opened(store)
    bell, told = doorbell(store, still), list[int]()
    bell.watch(RUN, told.append)
    for count in (1, 2, 3):
        store.where, before = "heard", store.failed
        await post(store, draft, b"%d" % count)
        for tries, pause in enumerate((0.1, 0.2, 0.4), start=1):
            await until_failed(store, before + tries)
            await until(lambda: still.sleepers == 1)
            store.where = "" if tries == 3 else "heard"
            still.advance(pause)
        await until_told(told, count)
    bell.unwatch(RUN, told.append)


async def test_a_bell_whose_loop_ends_keeps_no_thread(still: ManualClock) -> None:
    store = MemoryCheckpointStore()
    await opened(store)
    told: list[int] = []
    doorbell(store, still).watch(RUN, told.append)
    await until(lambda: still.sleepers == 1)
    for task in bell_tasks():
        task.cancel()
    await until(lambda: still.sleepers == 0)
    assert store._ears == []


async def test_what_is_posted_while_the_ear_is_lost_is_told_once_there_is_another() -> None:
    store = Away(MemoryCheckpointStore())
    drafts = [await opened(store, f"run-{i}") for i in range(3)]
    waiting = [wait(doorbell(store), draft.run_id) for draft in drafts]
    await until(lambda: store.listened == 1 and not doorbell(store)._due)
    store.where = "all"
    for draft in drafts:
        await post(store, draft)
    await until(lambda: store.listened >= 2)
    store.where = ""
    assert await asyncio.wait_for(asyncio.gather(*waiting), SECONDS) == [1, 1, 1]


async def test_a_store_that_breaks_its_promise_ends_no_wait() -> None:
    store = Away(MemoryCheckpointStore())
    draft = await opened(store)
    store.where = "broken"
    waiting = wait(doorbell(store))
    await until(lambda: store.listened >= 2)
    store.where = ""
    await post(store, draft)
    assert await asyncio.wait_for(waiting, SECONDS) == 1


async def test_a_file_whose_newest_message_went_with_its_run_is_looked_at_anew(tmp_path: Path) -> None:
    store = SQLiteCheckpointStore(tmp_path / "runs.db")
    stays, goes = await opened(store, "stays"), await opened(store, "goes")
    await post(store, goes)
    ear = await store.listen(lambda: None)
    assert await ear.heard() is None, "what came before it listened is not known"
    assert await ear.heard() == ()
    await store.delete(goes.run_id, guard=goes.guard)
    await post(store, stays)
    assert await ear.heard() is None
    await post(store, stays, b"again")
    assert list(await ear.heard() or ()) == [stays.run_id]
    await land(store, stays, stays.add(b"no message"))
    assert list(await ear.heard() or ()) == []
    await store.close()
