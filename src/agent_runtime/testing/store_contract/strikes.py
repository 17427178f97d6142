"""Strikes: callers that are cancelled in the middle of a verb, and connections that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.errors import StoreUnavailable
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.store import Answer, AnswerKind, Append, CheckpointStore
from agent_runtime.testing.store_contract.draft import Draft
from agent_runtime.testing.store_contract.witness import OK, demand, demand_as, opened, read, read_as, read_row

TURNS = (0, 1, 3, 10)
"""After so many turns of the event loop whoever called a verb is cancelled."""
PATIENCE_SECONDS = 20.0


class Striking:
    """Cases of verbs that do not come to their end."""

    async def cut_off(self, store: CheckpointStore) -> None:
        """The hook for a fault: override it to end, from outside, every connection of the store that is open now.

        A store without connections has nothing to lose here. What it loses must be back by itself at the next verb.
        """

    async def test_an_append_that_is_cancelled_has_landed_whole_or_not_at_all(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for turns in TURNS:
            append = draft.add(b"one", b"two", checkpoint=b"state %d" % turns)
            await _cancelled(store.commit([append]), turns)
            run = await read(store, draft.run_id)
            assert run.row.number in (draft.row.number, append.row.number), "whole, or not at all"
            await _lands(partial(_commit, store, append))
            draft = draft.after(append)
            assert (await read_as(store, draft)).checkpoint == append.checkpoint

    async def test_a_commit_of_many_runs_that_is_cancelled_leaves_each_run_whole(self, store: CheckpointStore) -> None:
        for turns in TURNS:
            drafts = [Draft.of(f"run-{turns}-{i}") for i in range(8)]
            openings = [draft.open(b"one", b"two", checkpoint=b"state") for draft in drafts]
            await _cancelled(store.commit(openings), turns)
            for run in await store.load_many([draft.run_id for draft in drafts]):
                assert run is None or (len(run.records) == 4 and run.checkpoint is not None), "whole, or not at all"
            await _lands(partial(_commit, store, *openings))
            for draft, opening in zip(drafts, openings, strict=True):
                await read_as(store, draft.after(opening))

    async def test_a_message_whose_posting_is_cancelled_counts_once_when_it_is_posted_again(
        self, store: CheckpointStore
    ) -> None:
        draft = await opened(store)
        for count, turns in enumerate(TURNS, start=1):
            message = draft.message(b"%d" % turns)
            await _cancelled(store.post(draft.run_id, message), turns)
            await _lands(partial(store.post, draft.run_id, message))
            assert (await read_row(store, draft.run_id)).posted == count
            assert (await store.inbox(draft.run_id))[count - 1 :] == [message]

    async def test_a_deletion_that_is_cancelled_leaves_the_run_or_its_mark(self, store: CheckpointStore) -> None:
        for turns in TURNS:
            draft = await opened(store, f"run-{turns}")
            await _cancelled(store.delete(draft.run_id, guard=draft.guard), turns)
            [found] = await store.load_many([draft.run_id])  # one look: it may land after it
            if found is None or found.row.status != RunStatus.DELETED:
                demand_as(draft, found)
                await _answered(partial(store.delete, draft.run_id, guard=draft.guard))
            assert (await read_row(store, draft.run_id)).status == RunStatus.DELETED
            assert await store.calls(draft.run_id) == []

    async def test_readers_that_are_cancelled_cost_nobody_else_a_read(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for turns in TURNS:
            for _ in range(5):  # more than any store has connections for reading
                await _cancelled(store.load_many([draft.run_id]), turns)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await read_as(store, draft)

    async def test_a_store_that_lost_its_connections_reads_on(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for _ in range(2):
            await self.cut_off(store)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    try:
                        await read_as(store, draft)
                        break
                    except StoreUnavailable:
                        await SYSTEM_CLOCK.sleep(0.01)

    async def test_a_write_over_lost_connections_lands_once(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for i in range(2):
            await self.cut_off(store)
            append, message = draft.add(b"%d" % i), draft.message(b"%d" % i)
            await _lands(partial(_commit, store, append))
            await self.cut_off(store)
            await _lands(partial(store.post, draft.run_id, message))
            draft = draft.after(append)
            run = await read_as(store, draft)
            assert (len(run.records), run.row.posted) == (i + 2, i + 1)


async def _commit(store: CheckpointStore, *appends: Append) -> Answer:
    """The answer that all of them have in common; as long as they have not, it is not known."""
    answers = await store.commit(appends)
    return answers[0] if len({answer.kind for answer in answers}) == 1 else Answer(AnswerKind.UNKNOWN)


async def _cancelled(work: Awaitable[object], turns: int) -> None:
    """Begin it, and be cancelled after so many turns of the loop, unless it has ended by then."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _answered(send: Callable[[], Awaitable[Answer]]) -> Answer:
    """Send a write until there is an answer to it: one that is unknown, or failed for certain, is sent again."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                answer = await send()
            except StoreUnavailable:
                answer = Answer(AnswerKind.UNKNOWN)
            if answer.kind is not AnswerKind.UNKNOWN:
                return answer
            await SYSTEM_CLOCK.sleep(0.01)


async def _lands(send: Callable[[], Awaitable[Answer]]) -> None:
    demand(OK, await _answered(send))
