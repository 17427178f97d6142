"""The one write: what the guard lets through, what it refuses, and that a refusal leaves nothing behind."""

from __future__ import annotations

from agent_runtime.ids import RunId, Step
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.testing.store_contract.draft import BOB, Draft
from agent_runtime.testing.store_contract.witness import (
    FENCED,
    MOVED,
    OK,
    answer_to,
    demand,
    land,
    opened,
    read,
    read_as,
    reopened,
    untouched,
)

OTHER_HEAD = b"\x55" * 32


class Writing:
    """Cases of the guarded append."""

    async def test_a_new_run_is_stored_whole(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        opening = draft.open(b"first", b"second", checkpoint=b"state at 0")
        draft = await land(store, draft, opening)
        run = await read_as(store, draft)
        assert run.records == opening.records
        assert run.checkpoint == opening.checkpoint

    async def test_a_new_run_needs_no_checkpoint(self, store: CheckpointStore) -> None:
        run = await read_as(store, await opened(store))
        assert run.checkpoint is None

    async def test_a_new_run_is_fenced_where_another_has_its_id(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with untouched(store, draft.run_id):
            demand(FENCED, await answer_to(store, Draft.of(owner=BOB).open(b"mine", checkpoint=b"state")))

    async def test_a_new_run_is_fenced_once_the_first_has_gone_on(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        opening = draft.open()
        draft = await land(store, draft, opening)
        draft = await land(store, draft, draft.add(b"more"))
        async with untouched(store, draft.run_id):
            demand(FENCED, await answer_to(store, opening))

    async def test_the_same_new_run_again_is_ok_and_adds_nothing(self, store: CheckpointStore) -> None:
        opening = Draft.of().open(b"first", checkpoint=b"state")
        demand(OK, await answer_to(store, opening))
        async with untouched(store, opening.row.run_id):
            demand(OK, await answer_to(store, opening))

    async def test_an_append_adds_its_records_and_sets_the_row(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        first, second = draft.add(b"one", b"two"), draft.after(draft.add(b"one", b"two")).add(b"three")
        draft = await land(store, draft, first)
        draft = await land(store, draft, second)
        run = await read_as(store, draft)
        assert run.records[1:] == first.records + second.records

    async def test_the_same_append_again_is_ok_and_adds_nothing(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        append = draft.step_on(b"one", b"two", checkpoint=b"state")
        draft = await land(store, draft, append)
        async with untouched(store, draft.run_id):
            demand(OK, await answer_to(store, append))

    async def test_the_same_append_again_is_ok_on_a_fresh_connection(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        append = draft.add(b"one")
        draft = await land(store, draft, append)
        async with reopened(store) as other, untouched(store, draft.run_id):
            demand(OK, await answer_to(other, append))

    async def test_an_append_is_ok_again_after_a_renewal(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        append = draft.add(b"one")
        draft = await land(store, draft, append)
        await store.renew(draft.run_id, guard=draft.guard)
        demand(OK, await answer_to(store, append))
        await read_as(store, draft)

    async def test_an_append_that_others_have_followed_is_moved(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        early = draft.add(b"early")
        draft = await land(store, draft, early)
        draft = await land(store, draft, draft.add(b"late"))
        async with untouched(store, draft.run_id):
            demand(MOVED, await answer_to(store, early))

    async def test_an_append_to_no_run_is_fenced(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        demand(FENCED, await answer_to(store, draft.after(draft.open()).add(b"one")))
        assert await store.load_many([draft.run_id]) == [None]
        assert await store.calls(draft.run_id) == []

    async def test_an_append_under_another_epoch_is_fenced(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for epoch in (0, 2):
            async with untouched(store, draft.run_id):
                append = draft.add(b"one", checkpoint=b"state")
                demand(FENCED, await answer_to(store, append._replace(guard=draft.guard._replace(epoch=epoch))))

    async def test_an_append_under_another_owner_is_fenced(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with untouched(store, draft.run_id):
            append = draft.add(b"one", checkpoint=b"state")
            demand(FENCED, await answer_to(store, append._replace(guard=draft.guard._replace(owner=BOB))))

    async def test_an_append_past_another_number_is_moved(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        lost = draft.after(draft.add(b"lost"))
        skipping = Draft(draft.row._replace(number=2), draft.sealer)
        for longer in (lost, skipping):
            async with untouched(store, draft.run_id):
                demand(MOVED, await answer_to(store, longer.add(b"one", checkpoint=b"state")))

    async def test_an_append_onto_another_head_is_moved(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with untouched(store, draft.run_id):
            append = draft.add(b"one", checkpoint=b"state")
            demand(MOVED, await answer_to(store, append._replace(guard=draft.guard._replace(head=OTHER_HEAD))))

    async def test_who_owns_a_run_is_judged_before_what_it_holds(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for guard in (draft.guard._replace(owner=BOB), draft.guard._replace(epoch=2)):
            append = draft.add(b"one")._replace(guard=guard._replace(head=OTHER_HEAD))
            async with untouched(store, draft.run_id):
                demand(FENCED, await answer_to(store, append))

    async def test_of_two_appends_from_one_place_the_second_is_moved(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        first, fork = draft.add(b"one"), draft.add(b"other", b"and more", checkpoint=b"state")
        draft = await land(store, draft, first)
        async with untouched(store, draft.run_id):
            demand(MOVED, await answer_to(store, fork))

    async def test_a_run_stays_at_its_step_or_goes_one_on(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for _ in range(3):
            draft = await land(store, draft, draft.add(b"at the same step"))
            draft = await land(store, draft, draft.step_on(b"one on"))
        assert (await read_as(store, draft)).row.step == 3

    async def test_a_run_that_skips_a_step_is_moved(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with untouched(store, draft.run_id):
            demand(MOVED, await answer_to(store, draft.step_on(b"one", checkpoint=b"state", steps=2)))

    async def test_a_run_that_goes_back_a_step_is_moved(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.step_on(b"one"))
        async with untouched(store, draft.run_id):
            demand(MOVED, await answer_to(store, draft.step_on(b"back", checkpoint=b"state", steps=-1)))

    async def test_save_moves_a_run_from_step_to_step(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        opening = draft.open(checkpoint=b"state at 0")
        answer = await store.save(
            draft.run_id, Step(0), opening.checkpoint, row=opening.row, guard=None, records=opening.records
        )
        demand(OK, answer)
        draft = draft.after(opening)
        move = draft.step_on(b"one", b"two", checkpoint=b"state at 1")
        answer = await store.save(draft.run_id, Step(1), move.checkpoint, row=move.row, guard=move.guard, records=move.records)
        demand(OK, answer)
        run = await read_as(store, draft.after(move))
        assert (run.records, run.checkpoint) == (opening.records + move.records, move.checkpoint)

    async def test_save_is_guarded_like_any_append(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        move = draft.step_on(b"one", checkpoint=b"state at 1")
        for guard, expected in (
            (draft.guard._replace(owner=BOB), FENCED),
            (draft.guard._replace(head=OTHER_HEAD), MOVED),
        ):
            async with untouched(store, draft.run_id):
                answer = await store.save(
                    draft.run_id, Step(1), move.checkpoint, row=move.row, guard=guard, records=move.records
                )
                demand(expected, answer)

    async def test_record_call_adds_one_record_at_the_same_step(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        append = draft.add(b"one")
        answer = await store.record_call(draft.run_id, append.records[0], row=append.row, guard=draft.guard)
        demand(OK, answer)
        assert (await read_as(store, draft.after(append))).records[1:] == append.records

    async def test_record_call_is_guarded_like_any_append(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        append = draft.add(b"one")
        for guard, expected in (
            (draft.guard._replace(owner=BOB), FENCED),
            (draft.guard._replace(head=OTHER_HEAD), MOVED),
        ):
            async with untouched(store, draft.run_id):
                answer = await store.record_call(draft.run_id, append.records[0], row=append.row, guard=guard)
                demand(expected, answer)

    async def test_three_hundred_records_land_in_one_append(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        append = draft.add(*(b"%d" % i for i in range(300)))
        draft = await land(store, draft, append)
        assert (await read_as(store, draft)).records[1:] == append.records

    async def test_three_hundred_refused_records_leave_nothing(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        fork = draft.add(*(b"%d" % i for i in range(300)))
        draft = await land(store, draft, draft.add(b"first"))
        async with untouched(store, draft.run_id):
            demand(MOVED, await answer_to(store, fork))


class Batching:
    """Cases of many appends in one commit."""

    async def test_an_empty_commit_has_no_answers(self, store: CheckpointStore) -> None:
        assert await store.commit([]) == []

    async def test_appends_to_one_run_land_in_their_order(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        appends = []
        for i in range(5):
            append = draft.step_on(b"%d" % i, checkpoint=b"state %d" % i)
            appends.append(append)
            draft = draft.after(append)
        assert [answer.kind for answer in await store.commit(appends)] == [OK] * 5
        run = await read_as(store, draft)
        assert run.checkpoint == appends[-1].checkpoint

    async def test_a_run_may_be_opened_and_ended_in_one_commit(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        opening = draft.open()
        end = draft.after(opening).end()
        assert [answer.kind for answer in await store.commit([opening, end])] == [OK, OK]
        await read_as(store, draft.after(end))

    async def test_what_builds_on_a_refused_append_is_refused(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        bad = draft.step_on(b"two steps", steps=2)
        async with untouched(store, draft.run_id):
            answers = await store.commit([bad, draft.after(bad).add(b"after it")])
            assert [answer.kind for answer in answers] == [MOVED, MOVED]

    async def test_the_same_append_twice_in_one_commit_lands_once(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        append = draft.add(b"one")
        assert [answer.kind for answer in await store.commit([append, append])] == [OK, OK]
        await read_as(store, draft.after(append))

    async def test_of_a_fork_in_one_commit_the_first_lands(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        first, fork = draft.add(b"one"), draft.add(b"other", b"more")
        assert [answer.kind for answer in await store.commit([first, fork])] == [OK, MOVED]
        await read_as(store, draft.after(first))

    async def test_each_run_of_a_commit_is_guarded_by_itself(self, store: CheckpointStore) -> None:
        drafts = [await opened(store, f"run-{i}") for i in range(6)]
        appends = [draft.step_on(b"one", b"two", checkpoint=b"state") for draft in drafts]
        appends[1] = appends[1]._replace(guard=drafts[1].guard._replace(owner=BOB))
        appends[4] = appends[4]._replace(guard=drafts[4].guard._replace(head=OTHER_HEAD))
        async with untouched(store, drafts[1].run_id, drafts[4].run_id):
            answers = [answer.kind for answer in await store.commit(appends)]
        assert answers == [OK, FENCED, OK, OK, MOVED, OK]
        for i in (0, 2, 3, 5):
            assert (await read_as(store, drafts[i].after(appends[i]))).checkpoint == appends[i].checkpoint

    async def test_answers_come_in_the_order_of_the_appends(self, store: CheckpointStore) -> None:
        drafts = [await opened(store, run_id) for run_id in ("m", "z", "a")]
        appends = [draft.add(b"one") for draft in drafts]
        appends[1] = appends[1]._replace(guard=drafts[1].guard._replace(owner=BOB))
        assert [answer.kind for answer in await store.commit(appends)] == [OK, FENCED, OK]

    async def test_three_hundred_runs_share_one_commit(self, store: CheckpointStore) -> None:
        openings = [Draft.of(f"run-{i}").open(b"one", checkpoint=b"state") for i in range(300)]
        assert {answer.kind for answer in await store.commit(openings)} == {OK}
        run_ids = [opening.row.run_id for opening in openings]
        for run, opening in zip(await store.load_many(run_ids), openings, strict=True):
            assert run is not None
            assert (run.row.run_id, run.records) == (opening.row.run_id, opening.records)
        await read(store, run_ids[-1])

    async def test_an_append_to_one_run_touches_no_other(self, store: CheckpointStore) -> None:
        near = [await opened(store, run_id) for run_id in ("run-1", "run-10", "run", "run-1 ")]
        draft = await opened(store, "run-11")
        async with untouched(store, *(other.run_id for other in near)):
            draft = await land(store, draft, draft.step_on(b"one", checkpoint=b"state"))
            await store.post(draft.run_id, draft.message())
            await store.renew(draft.run_id, guard=draft.guard)
            await land(store, draft, draft.end())
        assert await store.load_many([RunId("run-2")]) == [None]
