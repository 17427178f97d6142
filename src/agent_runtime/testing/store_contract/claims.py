"""Claims and leases: how a run passes from one owner to the next, and how an owner says that it lives."""

from __future__ import annotations

import asyncio

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.ids import RunId
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.testing.store_contract.draft import BOB, Draft, Entry, owner_named
from agent_runtime.testing.store_contract.witness import (
    FENCED,
    MOVED,
    OK,
    answer_to,
    demand,
    ended,
    in_thread,
    land,
    opened,
    read_as,
    read_row,
    reopened,
    sealed_part,
    untouched,
)

RACES = 20
PATIENCE_SECONDS = 1.0
IDLE_ENOUGH_MS = 40


async def until_idle(store: CheckpointStore, run_id: RunId) -> None:
    """Wait until the store says of a run that it has been silent for a while."""
    give_up_at = SYSTEM_CLOCK.monotonic() + PATIENCE_SECONDS
    while (await read_row(store, run_id)).idle_ms < IDLE_ENOUGH_MS:
        assert SYSTEM_CLOCK.monotonic() < give_up_at, "idle_ms must grow while nobody writes"
        await SYSTEM_CLOCK.sleep(0.005)


class Claiming:
    """Cases of the append that takes a run over."""

    async def test_a_claim_sets_another_owner_under_the_next_epoch(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.claim(BOB))
        row = (await read_as(store, draft)).row
        assert (row.epoch, row.owner, row.step, row.attempts) == (2, BOB, 1, 1)

    async def test_a_claim_fences_the_appends_of_the_owner_before(self, store: CheckpointStore) -> None:
        before = await opened(store)
        draft = await land(store, before, before.claim(BOB))
        async with untouched(store, draft.run_id):
            demand(FENCED, await answer_to(store, before.add(b"late", checkpoint=b"state")))
            demand(FENCED, await answer_to(store, before.end()))

    async def test_a_claim_fences_the_heartbeat_of_the_owner_before(self, store: CheckpointStore) -> None:
        before = await opened(store)
        draft = await land(store, before, before.claim(BOB))
        async with untouched(store, draft.run_id):
            demand(FENCED, await store.renew(before.run_id, guard=before.guard))

    async def test_a_claim_fences_what_the_owner_before_would_delete(self, store: CheckpointStore) -> None:
        before = await opened(store)
        draft = await land(store, before, before.claim(BOB))
        async with untouched(store, draft.run_id):
            demand(FENCED, await store.delete(before.run_id, guard=before.guard))

    async def test_the_same_claim_again_is_ok(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        claim = draft.claim(BOB, heartbeat_at=(await read_row(store, draft.run_id)).heartbeat_at)
        draft = await land(store, draft, claim)
        async with untouched(store, draft.run_id):
            demand(OK, await answer_to(store, claim))

    async def test_a_claim_that_comes_second_is_fenced_and_leaves_nothing(self, store: CheckpointStore) -> None:
        before = await opened(store)
        draft = await land(store, before, before.claim(BOB))
        async with untouched(store, draft.run_id):
            demand(FENCED, await answer_to(store, before.claim(owner_named("Carol"))))

    async def test_a_claim_that_names_the_heartbeat_lands_where_nobody_was_heard(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        heard = (await read_row(store, draft.run_id)).heartbeat_at
        draft = await land(store, draft, draft.claim(BOB, heartbeat_at=heard))
        await read_as(store, draft)

    async def test_a_claim_that_names_the_heartbeat_is_fenced_by_a_renewal(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for _ in range(RACES):
            heard = (await read_row(store, draft.run_id)).heartbeat_at
            demand(OK, await store.renew(draft.run_id, guard=draft.guard))
            async with untouched(store, draft.run_id):
                demand(FENCED, await answer_to(store, draft.claim(BOB, heartbeat_at=heard)))

    async def test_a_claim_that_names_the_heartbeat_is_moved_by_an_append(self, store: CheckpointStore) -> None:
        before = await opened(store)
        heard = (await read_row(store, before.run_id)).heartbeat_at
        draft = await land(store, before, before.add(b"alive"))
        async with untouched(store, draft.run_id):
            demand(MOVED, await answer_to(store, before.claim(BOB, heartbeat_at=heard)))

    async def test_a_claim_that_names_no_heartbeat_lands_after_a_renewal(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await store.renew(draft.run_id, guard=draft.guard)
        draft = await land(store, draft, draft.claim(BOB))
        await read_as(store, draft)

    async def test_no_two_renewals_leave_the_same_heartbeat(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        beats = [(await read_row(store, draft.run_id)).heartbeat_at]
        for _ in range(50):
            await store.renew(draft.run_id, guard=draft.guard)
            beats.append((await read_row(store, draft.run_id)).heartbeat_at)
        assert len(set(beats)) == len(beats), "a claim tells by the heartbeat alone that the owner was heard meanwhile"

    async def test_of_two_claimants_at_once_one_wins(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with reopened(store) as other:
            for i in range(RACES):
                bids = [draft.claim(owner_named(f"{i} here")), draft.claim(owner_named(f"{i} there"))]
                answers = await asyncio.gather(answer_to(store, bids[0]), answer_to(other, bids[1]))
                assert sorted(answer.value for answer in answers) == ["fenced", "ok"], f"race {i}: found {answers}"
                draft = draft.after(bids[answers.index(OK)])
                await read_as(store, draft)

    async def test_of_many_claimants_on_threads_one_wins(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        bids = [draft.claim(owner_named(f"worker {i}")) for i in range(6)]

        def bidder(i: int) -> asyncio.Task[AnswerKind]:
            return asyncio.create_task(in_thread(store, lambda other: answer_to(other, bids[i])))

        answers = await asyncio.gather(*(bidder(i) for i in range(len(bids))))
        assert answers.count(OK) == 1, f"one claim lands, found {answers}"
        assert answers.count(FENCED) == len(bids) - 1, f"the others are fenced, found {answers}"
        await read_as(store, draft.after(bids[answers.index(OK)]))

    async def test_a_run_given_back_has_no_owner_and_may_be_claimed(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.park(RunStatus.RUNNING))
        assert (await read_as(store, draft)).row.owner == NO_OWNER
        draft = await land(store, draft, draft.claim(BOB))
        await read_as(store, draft)

    async def test_who_gave_a_run_back_is_fenced(self, store: CheckpointStore) -> None:
        before = await opened(store)
        draft = await land(store, before, before.park())
        async with untouched(store, draft.run_id):
            demand(FENCED, await answer_to(store, before.add(b"late")))
            demand(FENCED, await store.renew(before.run_id, guard=before.guard))

    async def test_a_run_that_is_not_final_may_be_claimed_whatever_its_status(self, store: CheckpointStore) -> None:
        for status in (RunStatus.PAUSED, RunStatus.BLOCKED, RunStatus.QUARANTINED):
            draft = await opened(store, status.name)
            draft = await land(store, draft, draft.park(status))
            assert (await read_as(store, draft)).row.status == status
            draft = await land(store, draft, draft.claim(BOB))
            assert (await read_as(store, draft)).row.status == RunStatus.RUNNING

    async def test_a_claim_may_seal_the_run_under_another_key_and_lease(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        claim = draft.claim(BOB)
        row = claim.row._replace(key_id="next", lease_ms=5_000)
        row = row._replace(seal=draft.sealer.row(row))
        demand(OK, await answer_to(store, claim._replace(row=row)))
        stored = await read_row(store, draft.run_id)
        assert sealed_part(stored) == sealed_part(row)
        assert stored.lease_ms == 5_000

    async def test_an_owner_may_change_the_status_and_stay(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        blocked = draft.append(draft.row._replace(status=RunStatus.BLOCKED), Entry(RecordKind.UNRECORDABLE))
        draft = await land(store, draft, blocked)
        draft = await land(store, draft, draft.append(draft.row._replace(status=RunStatus.RUNNING, attempts=3), _DONE))
        row = (await read_as(store, draft)).row
        assert (row.status, row.attempts) == (RunStatus.RUNNING, 3)


_DONE = Entry(RecordKind.DONE, b"result")


class Renewing:
    """Cases of the heartbeat."""

    async def test_the_owner_may_renew(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        demand(OK, await store.renew(draft.run_id, guard=draft.guard))

    async def test_a_renewal_is_fenced_for_another_owner_or_epoch(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with untouched(store, draft.run_id):
            for guard in (draft.guard._replace(owner=BOB), draft.guard._replace(epoch=2)):
                demand(FENCED, await store.renew(draft.run_id, guard=guard))

    async def test_a_renewal_is_fenced_where_there_is_no_run(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        demand(FENCED, await store.renew(draft.run_id, guard=draft.guard))
        assert await store.latest(draft.run_id) is None

    async def test_a_renewal_asks_for_no_number_and_no_head(self, store: CheckpointStore) -> None:
        before = await opened(store)
        draft = await land(store, before, before.step_on(b"one"))
        demand(OK, await store.renew(draft.run_id, guard=before.guard))

    async def test_a_renewal_touches_hints_alone(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.step_on(b"one", checkpoint=b"state"))
        before = await read_row(store, draft.run_id)
        await store.renew(draft.run_id, guard=draft.guard)
        run = await read_as(store, draft)
        hints = ("heartbeat_at", "idle_ms", "updated_at")
        kept = [name for name in run.row._fields if name not in hints]
        assert [getattr(run.row, name) for name in kept] == [getattr(before, name) for name in kept]
        assert (len(run.records), run.checkpoint is not None) == (3, True)
        draft = await land(store, draft, draft.add(b"two"))

    async def test_renewals_of_many_runs_are_answered_each_in_its_place(self, store: CheckpointStore) -> None:
        drafts = [await opened(store, f"run-{i}") for i in range(4)]
        guards = [(draft.run_id, draft.guard) for draft in drafts]
        guards[1] = (drafts[1].run_id, drafts[1].guard._replace(owner=BOB))
        guards[2] = (RunId("absent"), drafts[2].guard)
        beats = [(await read_row(store, draft.run_id)).heartbeat_at for draft in drafts]
        answers = await store.renew_all(guards)
        assert [answer.kind for answer in answers] == [OK, FENCED, FENCED, OK]
        after = [(await read_row(store, draft.run_id)).heartbeat_at for draft in drafts]
        assert [now != then for now, then in zip(after, beats, strict=True)] == [True, False, False, True]

    async def test_renewing_nothing_has_no_answers(self, store: CheckpointStore) -> None:
        assert await store.renew_all([]) == []

    async def test_a_run_that_has_ended_is_not_renewed(self, store: CheckpointStore) -> None:
        draft = await ended(store)
        async with untouched(store, draft.run_id):
            demand(FENCED, await store.renew(draft.run_id, guard=draft.guard))

    async def test_a_run_grows_idle_until_it_is_renewed(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await until_idle(store, draft.run_id)
        started = SYSTEM_CLOCK.monotonic()
        await store.renew(draft.run_id, guard=draft.guard)
        await _was_heard_after(store, draft.run_id, started)

    async def test_a_run_grows_idle_until_it_is_written(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await until_idle(store, draft.run_id)
        started = SYSTEM_CLOCK.monotonic()
        draft = await land(store, draft, draft.add(b"one"))
        await _was_heard_after(store, draft.run_id, started)

    async def test_reading_a_run_is_no_sign_of_its_owner(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        before = await read_row(store, draft.run_id)
        await store.load_many([draft.run_id])
        [listed] = await store.list_unfinished()
        assert listed.heartbeat_at == before.heartbeat_at
        assert listed.idle_ms >= before.idle_ms


async def _was_heard_after(store: CheckpointStore, run_id: RunId, started: float) -> None:
    idle_ms = (await read_row(store, run_id)).idle_ms
    passed_ms = (SYSTEM_CLOCK.monotonic() - started) * 1000
    assert 0 <= idle_ms <= passed_ms + IDLE_ENOUGH_MS / 2, f"heard {passed_ms:.0f} ms ago, and idle_ms is {idle_ms}"
