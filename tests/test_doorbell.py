"""Those who wait for messages to runs: they are told of each, and cost next to nothing while none comes."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from agent_runtime import doorbell as doorbells
from agent_runtime.doorbell import Doorbell, doorbell
from agent_runtime.errors import CheckpointNotFound, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.store import CheckpointStore, Ear, Store
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.stores.sqlite_ear import SQLiteEar
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.witness import land, opened
from tests.bench import Delegate, until
from tests.processes.posting import post_elsewhere

RUN = RunId("run-1")
SECONDS = 10
"""Less than `LOOK_SECONDS`: nobody is told only because everybody is looked at from time to time."""


class Minimal(MemoryCheckpointStore):
    """A store with the least that must be written: what it has of ears is the port's."""

    listen = Store.listen


@pytest.fixture(params=["memory", "sqlite", "minimal"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CheckpointStore]:
    stores: dict[str, Callable[[], CheckpointStore]] = {
        "memory": MemoryCheckpointStore,
        "minimal": Minimal,
        "sqlite": lambda: SQLiteCheckpointStore(tmp_path / "runs.db"),
    }
    opened_store = stores[request.param]()
    yield opened_store
    await opened_store.close()


@pytest.fixture(autouse=True)
def _brief_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbells, "LINGER_SECONDS", 0.05)


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


# Being told.


async def test_whoever_waits_is_told_how_many_messages_there_are(store: CheckpointStore) -> None:
    draft = await opened(store)
    bell = doorbell(store)
    for count in (1, 2, 3):
        waiting = wait(bell, seen=count - 1)
        await asyncio.sleep(0)
        await post(store, draft, b"%d" % count)
        assert await asyncio.wait_for(waiting, SECONDS) == count


async def test_a_message_that_came_before_anybody_waited_is_told_at_once(store: CheckpointStore) -> None:
    draft = await opened(store)
    await post(store, draft)
    assert await asyncio.wait_for(doorbell(store).wait(RUN, seen=0), SECONDS) == 1


async def test_a_message_that_came_while_others_waited_is_told_at_once_to_who_comes_later(store: CheckpointStore) -> None:
    others, draft = await opened(store, "another"), await opened(store)
    bell, told = doorbell(store), list[int]()
    bell.watch(others.run_id, told.append)
    await until(lambda: not bell._due)
    await post(store, draft)
    await post(store, others)
    await until_told(told, 1)  # so what came before was heard too, and meant nothing to anybody
    assert await asyncio.wait_for(bell.wait(RUN, seen=0), SECONDS) == 1
    bell.unwatch(others.run_id, told.append)


async def test_only_the_run_that_got_a_message_is_told(store: CheckpointStore) -> None:
    drafts = [await opened(store, f"run-{i}") for i in range(3)]
    waiting = [wait(doorbell(store), draft.run_id) for draft in drafts]
    await post(store, drafts[1])
    assert await asyncio.wait_for(waiting[1], SECONDS) == 1
    assert [task.done() for task in waiting] == [False, True, False]
    for task in waiting:
        task.cancel()


async def test_a_thousand_who_wait_share_one_task_and_all_are_told(store: CheckpointStore) -> None:
    drafts = [Draft.of(f"run-{i}") for i in range(200)]
    await store.commit([draft.open() for draft in drafts])
    threads = threading.active_count()
    waiting = [wait(doorbell(store), draft.run_id) for draft in drafts for _ in range(5)]
    await until(lambda: bool(bell_tasks()))
    assert len(bell_tasks()) == 1
    assert threading.active_count() <= threads + 3
    for draft in drafts:
        await post(store, draft)
    assert await asyncio.wait_for(asyncio.gather(*waiting), SECONDS) == [1] * 1000


async def test_whoever_watches_is_called_each_time_until_it_does_not_watch(store: CheckpointStore) -> None:
    draft = await opened(store)
    bell, told = doorbell(store), list[int]()
    bell.watch(RUN, told.append)
    for count in (1, 2):
        await post(store, draft, b"%d" % count)
        await until_told(told, count)
    bell.unwatch(RUN, told.append)
    await post(store, draft, b"3")
    assert await asyncio.wait_for(bell.wait(RUN, seen=2), SECONDS) == 3
    assert told == [1, 2]


async def test_who_watches_is_not_told_of_what_it_has_seen(store: CheckpointStore) -> None:
    draft = await opened(store)
    await post(store, draft, b"1")
    bell, told = doorbell(store), list[int]()
    bell.watch(RUN, told.append, seen=1)
    await post(store, draft, b"2")
    await until(lambda: bool(told))
    assert told == [2]
    bell.unwatch(RUN, told.append)


async def test_one_who_fails_when_told_does_not_keep_the_others_from_it(store: CheckpointStore) -> None:
    def fail(posted: int) -> None:
        raise RuntimeError("expected here")

    draft = await opened(store)
    bell, found = doorbell(store), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: found.append(context["exception"]))
    bell.watch(RUN, fail)
    await post(store, draft, b"1")
    assert await asyncio.wait_for(bell.wait(RUN, seen=0), SECONDS) == 1
    await post(store, draft, b"2")
    assert await asyncio.wait_for(bell.wait(RUN, seen=1), SECONDS) == 2
    await until(lambda: len(found) == 2)
    bell.unwatch(RUN, fail)


async def test_a_run_that_is_not_there_is_not_waited_for(store: CheckpointStore) -> None:
    await opened(store)
    with pytest.raises(CheckpointNotFound, match="'nobody' is not there"):
        await asyncio.wait_for(doorbell(store).wait(RunId("nobody"), seen=0), SECONDS)


async def test_a_run_that_is_deleted_ends_the_wait_with_the_next_look_at_everybody(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbells, "LOOK_SECONDS", 0.1)
    draft = await opened(store)
    told: list[int] = []
    doorbell(store).watch(RUN, told.append)
    waiting = wait(doorbell(store))
    await until(lambda: bool(bell_tasks()) and not doorbell(store)._due)
    await store.delete(RUN, guard=draft.guard)
    with pytest.raises(CheckpointNotFound, match="deleted"):
        await asyncio.wait_for(waiting, SECONDS)
    assert told == []
    await until_nobody_listens()


async def test_another_process_that_posts_is_heard(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store = SQLiteCheckpointStore(path)
    await opened(store)
    waiting = [wait(doorbell(store), seen=seen) for seen in (0, 2)]
    await post_elsewhere(str(path), RUN, "one", "two", "three")
    assert await asyncio.wait_for(waiting[1], SECONDS) == 3
    assert await asyncio.wait_for(waiting[0], SECONDS) in (1, 2, 3)
    await store.close()


# What it costs.


async def test_nobody_waits_and_nothing_is_left(store: CheckpointStore, tmp_path: Path) -> None:
    draft = await opened(store)
    await post(store, draft)
    files = []
    for _ in range(3):
        assert await asyncio.wait_for(doorbell(store).wait(RUN, seen=0), SECONDS) == 1
        await until_nobody_listens()
        files.append(open_files(tmp_path))
        assert [ear for ear in vars(store)["_ears"] if not is_closed(ear)] == []
    assert files[0] == files[2], "SQLite keeps one for the next connection"


async def test_one_connection_to_the_file_is_enough_for_all_who_wait(tmp_path: Path) -> None:
    store = SQLiteCheckpointStore(tmp_path / "runs.db")
    drafts = [await opened(store, f"run-{i}") for i in range(20)]
    before = open_files(tmp_path).count(str(store.path))
    waiting = [wait(doorbell(store), draft.run_id) for draft in drafts]
    await until(lambda: open_files(tmp_path).count(str(store.path)) > before)
    assert open_files(tmp_path).count(str(store.path)) == before + 1
    for task in waiting:
        task.cancel()
    await until_nobody_listens()
    await store.close()
    assert open_files(tmp_path) == []


async def test_a_wait_that_is_cancelled_leaves_nothing(store: CheckpointStore) -> None:
    await opened(store)
    bell = doorbell(store)
    waiting = [wait(bell) for _ in range(10)]
    await until(lambda: len(bell_tasks()) == 1)
    for task in waiting:
        task.cancel()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    assert bell._guests == {}
    await until_nobody_listens()


async def test_somebody_who_comes_back_at_once_finds_the_same_ear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbells, "LINGER_SECONDS", 5.0)
    store = CountingEars(MemoryCheckpointStore())
    draft = await opened(store)
    for count in range(1, 6):
        await post(store, draft, b"%d" % count)
        assert await asyncio.wait_for(doorbell(store).wait(RUN, seen=count - 1), SECONDS) == count
    assert store.listened == 1


async def test_a_closed_store_lets_go_of_its_ear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbells, "LINGER_SECONDS", 5.0)
    store = SQLiteCheckpointStore(tmp_path / "runs.db")
    draft = await opened(store)
    await post(store, draft)
    await asyncio.wait_for(doorbell(store).wait(RUN, seen=0), SECONDS)
    assert bell_tasks(), "the ear is kept for a moment"
    await store.close()
    assert open_files(tmp_path) == []


async def test_a_bell_is_one_of_its_store_and_keeps_no_store_that_nobody_uses() -> None:
    store = MemoryCheckpointStore()
    assert doorbell(store) is doorbell(store)
    assert doorbell(store) is not doorbell(store.reopen())
    known = weakref.ref(store)
    del store
    gc.collect()
    assert known() is None


def test_each_event_loop_has_a_bell_of_its_own_and_those_of_loops_that_ended_are_forgotten(tmp_path: Path) -> None:
    store = SQLiteCheckpointStore(tmp_path / "runs.db")
    seen = []

    async def use(count: int) -> None:
        draft = await opened(store, f"run-{count}")
        waiting = wait(doorbell(store), draft.run_id)
        await asyncio.sleep(0.01)
        await post(store, draft)
        assert await asyncio.wait_for(waiting, SECONDS) == 1
        seen.append(doorbell(store))

    for count in range(3):
        asyncio.run(use(count))
    assert len(set(map(id, seen))) == 3
    assert len(doorbells._BELLS[store]) == 1
    asyncio.run(store.close())


async def test_a_bell_does_not_drive_a_clock_that_sleepers_move(clock: ManualClock) -> None:
    store = Minimal()
    draft = await opened(store)
    waiting = wait(doorbell(store, clock))
    await until(lambda: clock.sleepers == 1)
    assert clock.monotonic() == 0
    await post(store, draft)
    await clock.sleep(1)
    assert await asyncio.wait_for(waiting, SECONDS) == 1
    assert clock.monotonic() == 1


async def test_a_store_that_has_to_be_asked_is_asked_less_often_the_longer_it_takes(clock: ManualClock) -> None:
    store = Slow(Minimal(), clock, seconds=0.5)
    await opened(store)
    waiting = wait(doorbell(store, clock))
    await until(lambda: clock.sleepers == 1)
    asked = store.asked
    clock.advance(doorbells.RESTS * 0.5 - 0.1)
    await asyncio.sleep(0.05)
    assert store.asked == asked
    clock.advance(0.2)
    await until(lambda: store.asked > asked)
    waiting.cancel()


# Trouble.


class CountingEars(Delegate):
    """Counts how often somebody begins to listen."""

    listened = 0

    async def listen(self, ring: Callable[[], None]) -> Ear:
        self.listened += 1
        return await super().listen(ring)


async def until_listened(store: CountingEars, times: int) -> None:
    await until(lambda: store.listened == times)


class Slow(CountingEars):
    """Takes its time, by a clock, to say how many messages there are."""

    def __init__(self, inner: CheckpointStore, clock: ManualClock, seconds: float) -> None:
        super().__init__(inner)
        self.asked = 0
        self._clock, self._seconds = clock, seconds

    async def listen(self, ring: Callable[[], None]) -> Ear:
        ear = await super().listen(ring)
        return SlowEar(ear, self)

    def take_time(self) -> None:
        self.asked += 1
        self._clock.advance(self._seconds)


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


class SlowEar(PassingEar):
    def __init__(self, ear: Ear, store: Slow) -> None:
        super().__init__(ear)
        self._store = store

    async def posted(self, run_ids: Sequence[RunId]) -> list[int | None]:
        self._store.take_time()
        return await super().posted(run_ids)


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


def is_closed(ear: SQLiteEar) -> bool:
    try:
        ear._db.execute("SELECT 1")
    except sqlite3.ProgrammingError:
        return True
    return False


def open_files(folder: Path) -> list[str]:
    """The files of the folder that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return sorted(found)
