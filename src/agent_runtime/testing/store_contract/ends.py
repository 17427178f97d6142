"""The end of a run: what a final run still takes, and what a deleted one leaves behind."""

from __future__ import annotations

from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.testing.store_contract.draft import ALICE, BOB, Draft, Entry
from agent_runtime.testing.store_contract.witness import (
    FENCED,
    MOVED,
    OK,
    answer_to,
    demand,
    ended,
    land,
    opened,
    read_as,
    read_row,
    untouched,
)

FINAL = (RunStatus.DONE, RunStatus.FAILED, RunStatus.CANCELLED)
OTHER_HEAD = b"\x55" * 32


class Ending:
    """Cases of final runs."""

    async def test_the_append_that_ends_a_run_is_ok_again(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        end = draft.end()
        draft = await land(store, draft, end)
        async with untouched(store, draft.run_id):
            demand(OK, await answer_to(store, end))

    async def test_a_final_run_takes_no_common_record(self, store: CheckpointStore) -> None:
        for status in FINAL:
            draft = await opened(store, status.name)
            draft = await land(store, draft, draft.end(status))
            async with untouched(store, draft.run_id):
                demand(FENCED, await answer_to(store, draft.add(b"more", checkpoint=b"state")))
                demand(FENCED, await answer_to(store, draft.step_on(b"more")))

    async def test_a_final_run_is_not_claimed(self, store: CheckpointStore) -> None:
        for status in FINAL:
            draft = await opened(store, status.name)
            draft = await land(store, draft, draft.end(status))
            async with untouched(store, draft.run_id):
                demand(FENCED, await answer_to(store, draft.claim(BOB)))

    async def test_a_final_run_takes_settled_records_and_stays_as_it_is(self, store: CheckpointStore) -> None:
        for status in FINAL:
            draft = await opened(store, status.name)
            draft = await land(store, draft, draft.end(status))
            for body in (b"it happened", b"it did not"):
                draft = await land(store, draft, draft.settle(body))
            run = await read_as(store, draft)
            assert (run.row.status, run.row.number) == (status, 4)

    async def test_the_same_settled_record_again_is_ok(self, store: CheckpointStore) -> None:
        draft = await ended(store)
        settle = draft.settle()
        draft = await land(store, draft, settle)
        async with untouched(store, draft.run_id):
            demand(OK, await answer_to(store, settle))

    async def test_a_final_run_goes_on_to_another_key_and_stays_as_it_is(self, store: CheckpointStore) -> None:
        for status in FINAL:
            draft = await opened(store, status.name)
            draft = await land(store, draft, draft.end(status))
            rekey = draft.rekey()
            draft = await land(store, draft, rekey)
            async with untouched(store, draft.run_id):
                demand(OK, await answer_to(store, rekey))
            draft = await land(store, draft, draft.settle())
            run = await read_as(store, draft)
            assert (run.row.status, run.row.key_id, run.row.number) == (status, draft.sealer.key_id, 4)

    async def test_a_run_goes_on_to_another_key_with_its_claim(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.rekey(BOB))
        draft = await land(store, draft, draft.add(b"more"))
        run = await read_as(store, draft)
        assert (run.row.key_id, run.row.epoch) == (draft.sealer.key_id, 2)

    async def test_a_settled_record_brings_no_other_into_a_final_run(self, store: CheckpointStore) -> None:
        draft = await ended(store)
        settled, done = Entry(RecordKind.SETTLED, b"yes", "0", 1), Entry(RecordKind.DONE, b"result", "0", 1)
        async with untouched(store, draft.run_id):
            for entries in ((settled, done), (done, settled)):
                demand(FENCED, await answer_to(store, draft.append(draft.row, *entries)))

    async def test_a_settled_record_changes_nothing_else_of_a_final_run(self, store: CheckpointStore) -> None:
        draft = await ended(store)
        row, settled = draft.row, Entry(RecordKind.SETTLED, b"yes", "0", 1)
        async with untouched(store, draft.run_id):
            for changed in (
                row._replace(status=RunStatus.FAILED),
                row._replace(status=RunStatus.RUNNING),
                row._replace(step=row.step + 1),
                row._replace(epoch=row.epoch + 1),
                row._replace(owner=ALICE),
            ):
                answer = await answer_to(store, draft.append(changed, settled))
                demand(FENCED, answer)

    async def test_a_settled_record_is_guarded_in_a_final_run(self, store: CheckpointStore) -> None:
        draft = await ended(store)
        settle = draft.settle()
        async with untouched(store, draft.run_id):
            for guard in (
                draft.guard._replace(epoch=2),
                draft.guard._replace(owner=ALICE),
                draft.guard._replace(head=OTHER_HEAD),
            ):
                demand(FENCED, await answer_to(store, settle._replace(guard=guard)))

    async def test_of_two_settled_records_for_one_place_the_second_is_fenced(self, store: CheckpointStore) -> None:
        draft = await ended(store)
        first, second = draft.settle(b"it happened"), draft.settle(b"it did not")
        draft = await land(store, draft, first)
        async with untouched(store, draft.run_id):
            demand(FENCED, await answer_to(store, second))

    async def test_a_settled_record_is_an_append_like_any_other_before_the_end(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.settle())
        draft = await land(store, draft, draft.step_on(b"one"))
        await read_as(store, draft)


class Deleting:
    """Cases of removal, and of the mark that stays."""

    async def test_a_deleted_run_leaves_a_mark_and_nothing_else(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.step_on(b"one", checkpoint=b"state"))
        await store.post(draft.run_id, draft.message())
        demand(OK, await store.delete(draft.run_id, guard=draft.guard))
        mark = await store.latest(draft.run_id)
        assert mark is not None, "a deleted run leaves a mark"
        assert (mark.row.status, mark.row.number) == (RunStatus.DELETED, 0)
        assert (mark.checkpoint, mark.records) == (None, ())
        assert await store.calls(draft.run_id) == []
        assert await store.inbox(draft.run_id) == []
        [loaded] = await store.load_many([draft.run_id])
        assert loaded is not None
        assert (loaded.row.status, loaded.checkpoint, loaded.records) == (RunStatus.DELETED, None, ())

    async def test_the_id_of_a_deleted_run_is_not_used_again(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        opening = draft.open()
        draft = await land(store, draft, opening)
        await store.delete(draft.run_id, guard=draft.guard)
        async with untouched(store, draft.run_id):
            demand(FENCED, await answer_to(store, opening))
            demand(FENCED, await answer_to(store, Draft.of(owner=BOB).open(b"new", checkpoint=b"state")))

    async def test_a_final_run_may_be_deleted(self, store: CheckpointStore) -> None:
        draft = await ended(store)
        demand(OK, await store.delete(draft.run_id, guard=draft.guard))
        assert await store.calls(draft.run_id) == []

    async def test_a_deletion_is_guarded_like_any_append(self, store: CheckpointStore) -> None:
        before = await opened(store)
        draft = await land(store, before, before.add(b"one"))
        guard = draft.guard
        async with untouched(store, draft.run_id):
            for wrong, expected in (
                (guard._replace(epoch=2), FENCED),
                (guard._replace(owner=BOB), FENCED),
                (guard._replace(head=OTHER_HEAD), MOVED),
                (before.guard, MOVED),
            ):
                answer = await store.delete(draft.run_id, guard=wrong)
                demand(expected, answer)

    async def test_a_run_is_deleted_once(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await store.delete(draft.run_id, guard=draft.guard)
        demand(FENCED, await store.delete(draft.run_id, guard=draft.guard))
        mark = await read_row(store, draft.run_id)
        again = draft.guard._replace(epoch=mark.epoch, owner=mark.owner, number=mark.number, head=mark.head)
        demand(FENCED, await store.delete(draft.run_id, guard=again))

    async def test_to_delete_no_run_is_fenced(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        demand(FENCED, await store.delete(draft.run_id, guard=draft.guard))
        assert await store.latest(draft.run_id) is None

    async def test_a_deleted_run_takes_nothing_more(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await store.delete(draft.run_id, guard=draft.guard)
        async with untouched(store, draft.run_id):
            demand(FENCED, await answer_to(store, draft.add(b"late")))
            demand(FENCED, await answer_to(store, draft.settle()))
            demand(FENCED, await answer_to(store, draft.claim(BOB)))
            demand(FENCED, await store.renew(draft.run_id, guard=draft.guard))
            demand(FENCED, await store.post(draft.run_id, draft.message()))
            demand(FENCED, await store.post(draft.run_id, draft.message(kind="settlement")))

    async def test_what_knows_the_mark_of_a_deleted_run_adds_nothing_to_it(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await store.delete(draft.run_id, guard=draft.guard)
        mark = await read_row(store, draft.run_id)
        knowing = Draft(mark, draft.sealer)
        settle = knowing.append(mark, Entry(RecordKind.SETTLED, b"yes", "0", 1))._replace(guard=knowing.guard)
        async with untouched(store, draft.run_id):
            demand(FENCED, await answer_to(store, settle))
            demand(FENCED, await store.renew(draft.run_id, guard=knowing.guard))

    async def test_a_deleted_run_is_listed_only_where_asked_for(self, store: CheckpointStore) -> None:
        await opened(store, "kept")
        draft = await opened(store, "gone")
        await store.delete(draft.run_id, guard=draft.guard)
        assert [row.run_id for row in await store.list_unfinished()] == ["kept"]
        assert [row.run_id for row in await store.list_runs()] == ["kept"]
        assert [row.run_id for row in await store.list_runs(status=RunStatus.DELETED)] == ["gone"]

    async def test_a_deletion_touches_no_other_run(self, store: CheckpointStore) -> None:
        near = [await opened(store, run_id) for run_id in ("run-1", "run-", "run-11", "RUN-2")]
        for other in near:
            await store.post(other.run_id, other.message())
        draft = await opened(store, "run-2")
        async with untouched(store, *(other.run_id for other in near)):
            await store.delete(draft.run_id, guard=draft.guard)
        fresh = await opened(store, "run-3")
        assert len((await read_as(store, fresh)).records) == 1
        assert await store.inbox(RunId("run-3")) == []
