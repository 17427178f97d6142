"""Ears: whoever listens hears of every message, however it was posted, and learns how many there were."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.ids import RunId
from agent_runtime.journal.store import Answer, CheckpointStore, Ear
from agent_runtime.testing.store_contract.draft import Draft
from agent_runtime.testing.store_contract.witness import OK, demand, ended, in_thread, opened

LONG_SECONDS = 10.0


class Listener:
    """One who listens, as the doorbell does: asks when it rings, or when the ear says that it is time."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self.ear: Ear

    def ring(self) -> None:
        self._rung.set()

    async def hears(self, run_ids: Sequence[RunId]) -> None:
        """Each of the runs must be named, or every run be due, before long."""
        missing = set(run_ids)
        give_up_at = SYSTEM_CLOCK.monotonic() + LONG_SECONDS
        while missing:
            await self._next(give_up_at, missing)
            heard = await self.ear.heard()
            missing = set() if heard is None else missing - set(heard)

    async def _next(self, give_up_at: float, missing: set[RunId]) -> None:
        ask_at = SYSTEM_CLOCK.monotonic() + self.ear.every
        while not self._rung.is_set() and SYSTEM_CLOCK.monotonic() < ask_at:
            assert SYSTEM_CLOCK.monotonic() < give_up_at, f"runs {sorted(missing)} got messages that nobody heard of"
            await SYSTEM_CLOCK.sleep(0.002)
        assert SYSTEM_CLOCK.monotonic() < give_up_at, f"runs {sorted(missing)} got messages that nobody heard of"
        self._rung.clear()


@asynccontextmanager
async def listening(store: CheckpointStore) -> AsyncIterator[Listener]:
    """Somebody who listens to what comes from now on, and has taken note of what came before."""
    listener = Listener()
    listener.ear = await store.listen(listener.ring)
    try:
        await listener.ear.heard()
        yield listener
    finally:
        await listener.ear.close()


class Listening:
    """Cases of the ear."""

    async def test_whoever_listens_hears_of_a_message(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with listening(store) as listener:
            for body in (b"one", b"two", b"three"):
                demand(OK, await store.post(draft.run_id, draft.message(body)))
                await listener.hears([draft.run_id])

    async def test_a_message_that_comes_just_before_the_first_question_is_heard(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        listener = Listener()
        listener.ear = await store.listen(listener.ring)
        await store.post(draft.run_id, draft.message())
        await listener.hears([draft.run_id])
        await listener.ear.close()

    async def test_messages_through_other_connections_are_heard(self, store: CheckpointStore) -> None:
        drafts = [await opened(store, f"run-{i}") for i in range(8)]

        def poster(draft: Draft) -> Callable[[CheckpointStore], Awaitable[Answer]]:
            return lambda other: other.post(draft.run_id, draft.message())

        async with listening(store) as listener:
            await asyncio.gather(*(in_thread(store, poster(draft)) for draft in drafts))
            await listener.hears([draft.run_id for draft in drafts])

    async def test_all_who_listen_hear_the_same(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with listening(store) as one, listening(store) as another:
            await store.post(draft.run_id, draft.message())
            await one.hears([draft.run_id])
            await another.hears([draft.run_id])

    async def test_a_message_after_the_newest_was_deleted_with_its_run_is_heard(self, store: CheckpointStore) -> None:
        gone, stays = await opened(store, "gone"), await opened(store, "stays")
        await store.post(stays.run_id, stays.message(b"first"))
        await store.post(gone.run_id, gone.message())
        async with listening(store) as listener:
            await listener.ear.heard()
            demand(OK, await store.delete(gone.run_id, guard=gone.guard))
            await store.post(stays.run_id, stays.message(b"second"))
            await listener.hears([stays.run_id])

    async def test_a_settlement_of_a_run_that_ended_is_heard(self, store: CheckpointStore) -> None:
        draft = await ended(store)
        async with listening(store) as listener:
            await store.post(draft.run_id, draft.message(kind="settlement"))
            await listener.hears([draft.run_id])

    async def test_an_ear_tells_how_many_messages_each_run_has_had(self, store: CheckpointStore) -> None:
        drafts = [await opened(store, run_id) for run_id in ("none", "two", "gone")]
        _, two, gone = drafts
        async with listening(store) as listener:
            for body in (b"one", b"two"):
                await store.post(two.run_id, two.message(body))
            await store.post(gone.run_id, gone.message())
            demand(OK, await store.delete(gone.run_id, guard=gone.guard))
            asked = [two.run_id, RunId("never"), gone.run_id, RunId("none"), two.run_id]
            assert await listener.ear.posted(asked) == [2, None, None, 0, 2]
            assert await listener.ear.posted([]) == []

    async def test_an_ear_may_be_closed_twice_and_leaves_the_others_alone(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with listening(store) as stays:
            async with listening(store) as goes:
                pass
            await goes.ear.close()
            demand(OK, await store.post(draft.run_id, draft.message()))
            await stays.hears([draft.run_id])
