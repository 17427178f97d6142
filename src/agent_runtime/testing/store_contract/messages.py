"""Messages: they land once and in order, count, and wake the run; an owner notices them in every answer."""

from __future__ import annotations

import asyncio

from agent_runtime.clock import milliseconds
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.testing.store_contract.draft import BOB, Draft
from agent_runtime.testing.store_contract.witness import (
    FENCED,
    OK,
    demand,
    ended,
    in_thread,
    land,
    opened,
    read_as,
    read_row,
    reopened,
    untouched,
)

SLACK_MS = 1_000
LATER_MS = 4_102_444_800_000
"""A timer that no test lives to see."""


class Posting:
    """Cases of the inbox."""

    async def test_a_message_is_found_in_the_inbox(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        message = draft.message()
        answer = await store.post(draft.run_id, message)
        assert (answer.kind, answer.posted) == (OK, 1)
        assert await store.inbox(draft.run_id) == [message]

    async def test_a_message_to_no_run_is_fenced(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        demand(FENCED, await store.post(draft.run_id, draft.message()))
        assert await store.inbox(draft.run_id) == []
        draft = await opened(store)
        assert await store.inbox(draft.run_id) == []

    async def test_the_same_message_again_is_ok_and_changes_nothing(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await store.post(draft.run_id, draft.message())
        async with untouched(store, draft.run_id):
            answer = await store.post(draft.run_id, draft.message())
            assert (answer.kind, answer.posted) == (OK, 1)

    async def test_the_first_message_of_a_digest_stays(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        first = draft.message(b"first")
        await store.post(draft.run_id, first)
        await store.post(draft.run_id, draft.message(b"second")._replace(digest=first.digest))
        assert await store.inbox(draft.run_id) == [first]

    async def test_messages_that_differ_in_kind_alone_are_two(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        messages = [draft.message(b"same", kind=kind) for kind in ("verdict", "cancel", "settlement", "signal")]
        for count, message in enumerate(messages, start=1):
            assert (await store.post(draft.run_id, message)).posted == count
        assert await store.inbox(draft.run_id) == messages

    async def test_messages_keep_the_order_in_which_they_came(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        messages = [draft.message(b"%d" % i) for i in range(40)]
        for message in messages:
            await store.post(draft.run_id, message)
        assert await store.inbox(draft.run_id) == messages

    async def test_a_message_leaves_the_guard_of_the_run_alone(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        heard = (await read_row(store, draft.run_id)).heartbeat_at
        await store.post(draft.run_id, draft.message())
        await read_as(store, draft)
        draft = await land(store, draft, draft.claim(BOB, heartbeat_at=heard))

    async def test_messages_stay_when_a_run_is_claimed(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await store.post(draft.run_id, draft.message())
        draft = await land(store, draft, draft.claim(BOB))
        assert await store.inbox(draft.run_id) == [draft.message()]
        assert (await read_row(store, draft.run_id)).posted == 1

    async def test_the_same_digest_may_be_posted_to_two_runs(self, store: CheckpointStore) -> None:
        drafts = [await opened(store, run_id) for run_id in ("a", "b")]
        message = drafts[0].message()
        for draft in drafts:
            assert (await store.post(draft.run_id, message)).posted == 1
            assert await store.inbox(draft.run_id) == [message]

    async def test_a_final_run_takes_no_common_message(self, store: CheckpointStore) -> None:
        draft = await ended(store)
        async with untouched(store, draft.run_id):
            for kind in ("verdict", "cancel", "signal", "late"):
                demand(FENCED, await store.post(draft.run_id, draft.message(kind=kind)))

    async def test_a_final_run_takes_a_settlement(self, store: CheckpointStore) -> None:
        draft = await ended(store)
        message = draft.message(kind="settlement")
        answer = await store.post(draft.run_id, message)
        assert (answer.kind, answer.posted) == (OK, 1)
        assert await store.inbox(draft.run_id) == [message]

    async def test_a_message_that_landed_is_ok_again_after_the_end(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await store.post(draft.run_id, draft.message())
        draft = await land(store, draft, draft.end())
        async with untouched(store, draft.run_id):
            demand(OK, await store.post(draft.run_id, draft.message()))

    async def test_messages_from_many_sides_at_once_all_count(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        messages = [draft.message(b"%d" % i) for i in range(24)]
        async with reopened(store) as other:
            posts = [(store, other)[i % 2].post(draft.run_id, message) for i, message in enumerate(messages)]
            answers = await asyncio.gather(*posts)
        assert sorted(answer.posted for answer in answers) == list(range(1, 25))
        assert sorted(await store.inbox(draft.run_id)) == sorted(messages)
        assert (await read_row(store, draft.run_id)).posted == 24

    async def test_the_same_message_from_many_sides_counts_once(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await asyncio.gather(*(in_thread(store, lambda other: other.post(draft.run_id, draft.message())) for _ in range(4)))
        assert await store.inbox(draft.run_id) == [draft.message()]
        assert (await read_row(store, draft.run_id)).posted == 1


class Noticing:
    """Cases of `posted` and `wake_at`: how a message reaches whoever owns the run."""

    async def test_a_new_run_has_had_no_messages(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        opening = draft.open()
        await land(store, draft, opening._replace(row=opening.row._replace(posted=7)))
        assert (await read_row(store, draft.run_id)).posted == 0

    async def test_an_append_does_not_change_how_many_messages_came(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await store.post(draft.run_id, draft.message())
        for seen in (0, 1, 9):
            draft = await land(store, draft, draft.add(b"%d" % seen, seen=seen))
            assert (await read_row(store, draft.run_id)).posted == 1

    async def test_every_answer_to_an_owner_says_how_many_messages_came(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        other = await opened(store, "run-2")
        append = draft.add(b"one")
        for count in (1, 2, 3):
            await store.post(draft.run_id, draft.message(b"%d" % count))
            append = draft.add(b"record %d" % count)
            answers = await store.commit([append, other.add(b"%d" % count)])
            assert [answer.posted for answer in answers] == [count, 0]
            draft, other = draft.after(append), other.after(other.add(b"%d" % count))
            assert (await store.renew(draft.run_id, guard=draft.guard)).posted == count
            guards = [(other.run_id, other.guard), (draft.run_id, draft.guard)]
            assert [answer.posted for answer in await store.renew_all(guards)] == [0, count]
        assert (await store.commit([append]))[0].posted == 3, "also where the append had landed before"

    async def test_a_message_wakes_a_parked_run_now(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.park(wake_at=LATER_MS))
        assert (await read_row(store, draft.run_id)).wake_at == LATER_MS
        before = milliseconds(await store.now())
        await store.post(draft.run_id, draft.message())
        await _wakes_at_once(store, draft.run_id, before)

    async def test_a_message_wakes_a_running_run_too(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        before = milliseconds(await store.now())
        await store.post(draft.run_id, draft.message())
        await _wakes_at_once(store, draft.run_id, before)

    async def test_a_run_parked_without_a_timer_is_not_woken(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for status in (RunStatus.PAUSED, RunStatus.BLOCKED):
            draft = await land(store, draft, draft.park(status))
            assert (await read_row(store, draft.run_id)).wake_at is None

    async def test_a_run_parked_over_an_unseen_message_wakes_at_once(self, store: CheckpointStore) -> None:
        for run_id, wake_at in (("no timer", None), ("a timer", LATER_MS)):
            draft = await opened(store, run_id)
            before = milliseconds(await store.now())
            await store.post(draft.run_id, draft.message())
            draft = await land(store, draft, draft.park(wake_at=wake_at, seen=0))
            await _wakes_at_once(store, draft.run_id, before)

    async def test_a_run_parked_over_a_message_it_has_seen_keeps_its_timer(self, store: CheckpointStore) -> None:
        for run_id, wake_at in (("no timer", None), ("a timer", LATER_MS)):
            draft = await opened(store, run_id)
            await store.post(draft.run_id, draft.message())
            draft = await land(store, draft, draft.park(wake_at=wake_at, seen=1))
            assert (await read_row(store, draft.run_id)).wake_at == wake_at

    async def test_an_append_that_has_seen_the_messages_takes_back_the_waking(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await store.post(draft.run_id, draft.message())
        draft = await land(store, draft, draft.add(b"one", seen=1))
        assert (await read_row(store, draft.run_id)).wake_at is None

    async def test_a_reader_that_found_nothing_lets_the_run_sleep_again(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.park())
        await store.post(draft.run_id, draft.message())
        answer = await store.renew(draft.run_id, guard=draft.guard, seen=1)
        assert (answer.kind, answer.posted) == (OK, 1)
        assert (await read_row(store, draft.run_id)).wake_at is None
        assert await store.inbox(draft.run_id) == [draft.message()]

    async def test_a_reader_that_missed_a_message_leaves_the_run_awake(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.park())
        before = milliseconds(await store.now())
        for body in (b"one", b"two"):
            await store.post(draft.run_id, draft.message(body))
        answer = await store.renew(draft.run_id, guard=draft.guard, seen=1)
        assert (answer.kind, answer.posted) == (OK, 2)
        await _wakes_at_once(store, draft.run_id, before)

    async def test_a_renewal_that_saw_nothing_leaves_the_run_awake(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        before = milliseconds(await store.now())
        await store.post(draft.run_id, draft.message())
        await store.renew(draft.run_id, guard=draft.guard)
        await store.renew_all([(draft.run_id, draft.guard)])
        await _wakes_at_once(store, draft.run_id, before)


async def _wakes_at_once(store: CheckpointStore, run_id: RunId, before_ms: int) -> None:
    """The run must have been woken between then and now, by the store's wall clock."""
    wake_at = (await read_row(store, run_id)).wake_at
    after_ms = milliseconds(await store.now())
    assert wake_at is not None, "a message wakes the run"
    assert before_ms - SLACK_MS <= wake_at <= after_ms + SLACK_MS, f"now is {after_ms}, and wake_at is {wake_at}"
