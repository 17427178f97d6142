"""Crowds: many writers and readers at once, on several connections, threads and event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

from agent_runtime.journal.records import StoredRun
from agent_runtime.journal.seal import open_run
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.testing.store_contract.draft import RING, TENANT, Draft
from agent_runtime.testing.store_contract.witness import (
    MOVED,
    OK,
    answer_to,
    demand,
    in_thread,
    land,
    opened,
    read_as,
    reopened,
)

T = TypeVar("T")

APPENDS = 40


class Crowding:
    """Cases of writing and reading at once."""

    async def test_commits_of_two_connections_at_once_all_land(self, store: CheckpointStore) -> None:
        async with reopened(store) as other:
            finals = await asyncio.gather(*(_walk((store, other)[i % 2], f"run-{i}", 6) for i in range(12)))
        for draft in finals:
            await read_as(store, draft)

    async def test_commits_of_two_threads_at_once_all_land(self, store: CheckpointStore) -> None:
        finals = await asyncio.gather(
            _walk(store, "here", 12),
            in_thread(store, lambda other: _walk(other, "there", 12)),
            in_thread(store, lambda other: _walk(other, "elsewhere", 12)),
        )
        for draft in finals:
            await read_as(store, draft)

    async def test_batches_that_share_runs_in_other_orders_do_not_block_each_other(self, store: CheckpointStore) -> None:
        drafts = [await opened(store, f"run-{i}") for i in range(8)]
        async with reopened(store) as other:
            for i in range(6):
                here = [draft.add(b"here %d" % i) for draft in drafts]
                there = [draft.add(b"there %d" % i) for draft in reversed(drafts)]
                answers, others = await asyncio.gather(store.commit(here), other.commit(there))
                for j, draft in enumerate(drafts):
                    mine, theirs = answers[j].kind, others[-1 - j].kind
                    assert {mine, theirs} == {OK, MOVED}, f"one of two writers lands, found {mine} and {theirs}"
                    drafts[j] = draft.after(here[j] if mine is OK else there[-1 - j])
        for draft in drafts:
            await read_as(store, draft)

    async def test_of_ten_forks_at_once_one_lands(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with reopened(store) as other:
            for _ in range(5):
                forks = [draft.add(b"fork %d" % i, b"its tail", checkpoint=b"state %d" % i) for i in range(10)]
                answers = await asyncio.gather(*(answer_to((store, other)[i % 2], fork) for i, fork in enumerate(forks)))
                assert answers.count(OK) == 1, f"one fork lands, found {answers}"
                assert answers.count(MOVED) == 9, f"the others are moved, found {answers}"
                fork = forks[answers.index(OK)]
                draft = draft.after(fork)
                assert (await read_as(store, draft)).checkpoint == fork.checkpoint

    async def test_the_same_append_from_two_sides_at_once_is_ok_for_both(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with reopened(store) as other:
            for i in range(10):
                append = draft.add(b"%d" % i)
                here, there = await asyncio.gather(answer_to(store, append), answer_to(other, append))
                assert (here, there) == (OK, OK)
                draft = draft.after(append)
                await read_as(store, draft)

    async def test_a_reader_sees_whole_appends_alone(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with _beside(in_thread(store, lambda other: _write_in_threes(other, draft))) as writer:
            while not writer.done():
                [loaded] = await store.load_many([draft.run_id])
                latest = await store.latest(draft.run_id)
                assert loaded is not None
                assert latest is not None
                open_run(RING, loaded, tenant=TENANT)
                assert _number_if_whole(latest) >= _number_if_whole(loaded), "what was read before does not go away"
                await asyncio.sleep(0)
        await read_as(store, writer.result())

    async def test_a_reader_sees_whole_openings_alone(self, store: CheckpointStore) -> None:
        drafts = [Draft.of(f"run-{i}") for i in range(APPENDS)]

        async def open_all(other: CheckpointStore) -> None:
            for draft in drafts:
                await land(other, draft, draft.open(b"one", b"two", checkpoint=b"3"))

        run_ids = [draft.run_id for draft in drafts]
        async with _beside(in_thread(store, open_all)) as writer:
            while not writer.done():
                for run in await store.load_many(run_ids):
                    if run is not None:
                        open_run(RING, run, tenant=TENANT)
                        assert run.checkpoint is not None
                        assert len(run.records) == 4
                await asyncio.sleep(0)
        assert None not in await store.load_many(run_ids)

    async def test_a_store_serves_two_event_loops(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await in_thread(store, lambda other: _go_on(other, draft))
        draft = await _go_on(store, draft)
        draft = await in_thread(store, lambda other: _go_on(other, draft))
        assert len((await read_as(store, draft)).records) == 4

    async def test_a_heartbeat_on_its_own_thread_disturbs_no_append(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        guard = draft.guard

        async def beat(other: CheckpointStore) -> None:
            for _ in range(APPENDS):
                demand(OK, await other.renew(draft.run_id, guard=guard))
                assert [answer.kind for answer in await other.renew_all([(draft.run_id, guard)])] == [OK]

        async with _beside(in_thread(store, beat)):
            last = await _write_in_threes(store, draft)
        await read_as(store, last)

    async def test_messages_posted_while_the_owner_writes_are_all_noticed(self, store: CheckpointStore) -> None:
        draft = await opened(store)

        async def post_all(other: CheckpointStore) -> None:
            for i in range(APPENDS):
                demand(OK, await other.post(draft.run_id, draft.message(b"%d" % i)))

        async with _beside(in_thread(store, post_all)):
            last = await _write_in_threes(store, draft)
        row = (await read_as(store, last)).row
        assert row.posted == len(await store.inbox(draft.run_id)) == APPENDS


@asynccontextmanager
async def _beside(work: Coroutine[object, object, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Work that goes on beside what happens inside, and has ended well when that has."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        await asyncio.wait([task])
    await task


async def _walk(store: CheckpointStore, run_id: str, steps: int) -> Draft:
    """Open a run and take it from step to step."""
    draft = await opened(store, run_id)
    for step in range(1, steps):
        draft = await land(store, draft, draft.step_on(b"%d" % step, checkpoint=b"state at %d" % step))
    return draft


async def _write_in_threes(store: CheckpointStore, draft: Draft) -> Draft:
    """Append three records at a time, with a checkpoint that names the last one's number."""
    for _ in range(APPENDS):
        checkpoint = b"%d" % (draft.row.number + 3)
        draft = await land(store, draft, draft.add(b"one", b"two", checkpoint=checkpoint))
    return draft


async def _go_on(store: CheckpointStore, draft: Draft) -> Draft:
    await read_as(store, draft)
    return await land(store, draft, draft.add(b"one"))


def _number_if_whole(run: StoredRun) -> int:
    """The number of a run that `_write_in_threes` is writing, as read at one moment."""
    number = run.row.number
    assert number % 3 == 1, f"appends of three records must be seen whole, found {number} records"
    body = b"1" if run.checkpoint is None else run.checkpoint.body
    assert body == b"%d" % number, f"row and checkpoint must be of one moment, found {number} and {body!r}"
    return number
