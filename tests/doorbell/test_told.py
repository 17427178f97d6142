"""Those who wait for messages to runs are told of each."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from agent_runtime import doorbell as doorbells
from agent_runtime.doorbell import doorbell
from agent_runtime.errors import CheckpointNotFound
from agent_runtime.ids import RunId
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.witness import opened
from tests.bench import until
from tests.doorbell.waiting import RUN, SECONDS, bell_tasks, post, until_nobody_listens, until_told, wait
from tests.processes.posting import post_elsewhere


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
