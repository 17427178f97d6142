"""Reading: single runs, many runs, lists, the store's clock, and what reopening and closing do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from agent_runtime.clock import milliseconds
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.testing.store_contract.draft import Draft
from agent_runtime.testing.store_contract.witness import (
    OK,
    answer_to,
    ended,
    land,
    opened,
    read_as,
    read_row,
    reopened,
    sealed_part,
    snapshot,
    untouched,
)

SLACK_MS = 60_000


class Reading:
    """Cases of reading one run, or many."""

    async def test_nothing_is_found_of_a_run_that_is_not_there(self, store: CheckpointStore) -> None:
        absent = RunId("absent")
        assert await store.latest(absent) is None
        assert await store.calls(absent) == []
        assert await store.calls(absent, since=5) == []
        assert await store.inbox(absent) == []
        assert await store.load_many([absent]) == [None]

    async def test_latest_gives_the_row_and_the_checkpoint_without_records(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        append = draft.step_on(b"one", checkpoint=b"state at 1")
        draft = await land(store, draft, append)
        run = await store.latest(draft.run_id)
        assert run is not None
        assert sealed_part(run.row) == sealed_part(draft.row)
        assert (run.checkpoint, run.records) == (append.checkpoint, ())

    async def test_latest_and_load_many_agree(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.step_on(b"one", checkpoint=b"state"))
        await store.post(draft.run_id, draft.message())
        found = await snapshot(store, draft.run_id)
        assert found.loaded is not None
        assert found.latest == found.loaded._replace(records=())

    async def test_a_checkpoint_replaces_the_one_before(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for step in range(1, 12):
            append = draft.step_on(b"%d" % step, checkpoint=b"state at %d" % step)
            draft = await land(store, draft, append)
            assert (await read_as(store, draft)).checkpoint == append.checkpoint

    async def test_a_checkpoint_may_replace_one_of_the_same_step(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        for body in (b"first", b"second"):
            append = draft.add(b"one", checkpoint=body)
            draft = await land(store, draft, append)
            assert (await read_as(store, draft)).checkpoint == append.checkpoint

    async def test_an_append_without_a_checkpoint_keeps_the_last_one(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        opening = draft.open(checkpoint=b"state at 0")
        draft = await land(store, draft, opening)
        draft = await land(store, draft, draft.step_on(b"one"))
        draft = await land(store, draft, draft.add(b"two"))
        assert (await read_as(store, draft)).checkpoint == opening.checkpoint

    async def test_calls_gives_all_records_in_order(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        opening = draft.open()
        draft, written = await land(store, draft, opening), list(opening.records)
        for i in range(24):
            append = draft.add(b"%d" % i)
            draft = await land(store, draft, append)
            written += append.records
        assert await store.calls(draft.run_id) == written

    async def test_calls_gives_the_records_past_a_number(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        opening = draft.open(*(b"%d" % i for i in range(11)))
        draft = await land(store, draft, opening)
        for since in (0, 1, 9, 11, 12, 13, 2**40):
            assert await store.calls(draft.run_id, since=since) == list(opening.records[since:])

    async def test_load_many_gives_each_run_in_its_place(self, store: CheckpointStore) -> None:
        drafts = {}
        for run_id in ("b", "a", "c"):
            draft = await opened(store, run_id)
            drafts[run_id] = await land(store, draft, draft.step_on(b"of " + run_id.encode(), checkpoint=b"state"))
        asked = [RunId(run_id) for run_id in ("c", "absent", "a", "b", "c")]
        found = await store.load_many(asked)
        assert [None if run is None else run.row.run_id for run in found] == ["c", None, "a", "b", "c"]
        for run in found:
            if run is not None:
                assert run.records[-1].body == b"of " + run.row.run_id.encode()
                assert sealed_part(run.row) == sealed_part(drafts[run.row.run_id].row)

    async def test_loading_no_runs_gives_none(self, store: CheckpointStore) -> None:
        assert await store.load_many([]) == []

    async def test_what_a_reader_does_to_a_list_changes_nothing_stored(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        await store.post(draft.run_id, draft.message())
        async with untouched(store, draft.run_id):
            (await store.calls(draft.run_id)).clear()
            (await store.inbox(draft.run_id)).clear()
            (await store.load_many([draft.run_id])).clear()
            (await store.list_unfinished()).clear()
            (await store.list_runs()).clear()
        assert len(await store.list_unfinished()) == 1
        await read_as(store, draft)

    async def test_a_row_keeps_when_it_was_made_and_when_it_last_changed(self, store: CheckpointStore) -> None:
        now = milliseconds(await store.now())
        draft = await opened(store)
        first = await read_row(store, draft.run_id)
        draft = await land(store, draft, draft.step_on(b"one"))
        second = await read_row(store, draft.run_id)
        assert abs(first.created_at - now) < SLACK_MS, "milliseconds UTC"
        assert second.created_at == first.created_at
        assert second.updated_at >= first.updated_at >= first.created_at

    async def test_an_owner_says_how_long_its_word_holds(self, store: CheckpointStore) -> None:
        draft = Draft.of(lease_ms=12_345)
        await land(store, draft, draft.open())
        assert (await read_row(store, draft.run_id)).lease_ms == 12_345


class Listing:
    """Cases of the lists."""

    async def test_an_empty_store_lists_nothing(self, store: CheckpointStore) -> None:
        assert await store.list_unfinished() == []
        assert await store.list_runs() == []
        assert await store.list_runs(status=RunStatus.DELETED) == []

    async def test_unfinished_runs_are_those_that_are_not_final(self, store: CheckpointStore) -> None:
        for status in (RunStatus.PAUSED, RunStatus.BLOCKED, RunStatus.QUARANTINED):
            draft = await opened(store, status.name)
            await land(store, draft, draft.park(status))
        for status in (RunStatus.DONE, RunStatus.FAILED, RunStatus.CANCELLED):
            draft = await opened(store, status.name)
            await land(store, draft, draft.end(status))
        await opened(store, "RUNNING")
        found = [row.run_id for row in await store.list_unfinished()]
        assert found == ["BLOCKED", "PAUSED", "QUARANTINED", "RUNNING"]

    async def test_unfinished_runs_come_in_the_order_of_their_ids(self, store: CheckpointStore) -> None:
        ids = ["b", "B", "a", "a ", "a-b", "ab", "10", "9", "é", "z", "Z", "~", "_", "☃", "\U0001d54f"]
        for run_id in ids:
            await opened(store, run_id)
        assert [row.run_id for row in await store.list_unfinished()] == sorted(ids), "by code point"
        assert [row.run_id for row in await store.list_runs()] == sorted(ids), "by code point"

    async def test_unfinished_runs_are_read_page_by_page(self, store: CheckpointStore) -> None:
        ids = [f"run-{i:02}" for i in range(11)]
        for run_id in reversed(ids):
            await opened(store, run_id)
        pages: list[list[str]] = []
        after: RunId | None = None
        while rows := await store.list_unfinished(limit=4, after=after):
            pages.append([row.run_id for row in rows])
            after = rows[-1].run_id
        assert pages == [ids[:4], ids[4:8], ids[8:]]

    async def test_a_page_begins_past_an_id_that_need_not_be_there(self, store: CheckpointStore) -> None:
        for run_id in ("a", "c", "e"):
            await opened(store, run_id)
        assert [row.run_id for row in await store.list_unfinished(after=RunId("b"))] == ["c", "e"]
        assert [row.run_id for row in await store.list_unfinished(after=RunId("e"))] == []
        assert [row.run_id for row in await store.list_runs(after=RunId("c"), limit=5)] == ["e"]

    async def test_a_hundred_runs_are_listed_where_no_limit_is_named(self, store: CheckpointStore) -> None:
        ids = [f"run-{i:03}" for i in range(103)]
        assert {a.kind for a in await store.commit([Draft.of(run_id).open() for run_id in ids])} == {OK}
        assert [row.run_id for row in await store.list_unfinished()] == ids[:100]
        assert [row.run_id for row in await store.list_runs()] == ids[:100]
        assert len(await store.list_unfinished(limit=1000)) == 103

    async def test_unfinished_runs_are_listed_by_name(self, store: CheckpointStore) -> None:
        names = {"1": "orders", "2": "Orders", "3": "orders%", "4": "order_", "5": "orders", "6": "", "7": "orders "}
        for run_id, name in names.items():
            await opened(store, run_id, name=name)
        await ended(store, "8", name="orders")
        for name in set(names.values()):
            found = [row.run_id for row in await store.list_unfinished(name=name)]
            assert found == [run_id for run_id, its in names.items() if its == name], f"runs of name {name!r}"
        assert await store.list_unfinished(name="absent") == []

    async def test_a_name_and_a_page_go_together(self, store: CheckpointStore) -> None:
        for i in range(8):
            await opened(store, f"run-{i}", name=("even", "odd")[i % 2])
        rows = await store.list_unfinished(name="odd", limit=2, after=RunId("run-1"))
        assert [row.run_id for row in rows] == ["run-3", "run-5"]

    async def test_all_runs_are_listed_final_ones_too(self, store: CheckpointStore) -> None:
        await opened(store, "b")
        await ended(store, "a")
        draft = await opened(store, "c")
        await land(store, draft, draft.end(RunStatus.FAILED))
        assert [row.run_id for row in await store.list_runs()] == ["a", "b", "c"]
        assert [row.run_id for row in await store.list_runs(limit=1, after=RunId("a"))] == ["b"]

    async def test_runs_are_listed_by_status(self, store: CheckpointStore) -> None:
        statuses = (RunStatus.PAUSED, RunStatus.BLOCKED, RunStatus.DONE, RunStatus.CANCELLED)
        for status in statuses:
            for i in range(3):
                draft = await opened(store, f"{status.name} {i}")
                await land(store, draft, draft.end(status) if status.is_final else draft.park(status))
        for status in statuses:
            found = [row.run_id for row in await store.list_runs(status=status, limit=2, after=RunId(f"{status.name} 0"))]
            assert found == [f"{status.name} 1", f"{status.name} 2"]
        assert await store.list_runs(status=RunStatus.FAILED) == []

    async def test_a_row_in_a_list_is_the_row_as_stored(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.step_on(b"one", checkpoint=b"state"))
        await store.post(draft.run_id, draft.message())
        stored = (await read_row(store, draft.run_id))._replace(idle_ms=0)
        for rows in (await store.list_unfinished(), await store.list_runs()):
            assert [row._replace(idle_ms=0) for row in rows] == [stored]


class Standing:
    """Cases of the store itself: its clock, its connections, its end."""

    async def test_the_store_tells_an_aware_time_in_utc(self, store: CheckpointStore) -> None:
        now = await store.now()
        assert isinstance(now, datetime)
        assert now.tzinfo is not None
        assert now.utcoffset() == timedelta(0)
        assert now.astimezone(UTC) == now

    async def test_the_time_of_the_store_does_not_go_back(self, store: CheckpointStore) -> None:
        moments = [await store.now() for _ in range(20)]
        assert moments == sorted(moments)

    async def test_a_reopened_store_holds_the_same_runs(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        draft = await land(store, draft, draft.step_on(b"one", checkpoint=b"state"))
        await store.post(draft.run_id, draft.message())
        async with reopened(store) as other:
            assert await snapshot(other, draft.run_id) == await snapshot(store, draft.run_id)
            assert [row.run_id for row in await other.list_runs()] == [draft.run_id]

    async def test_what_one_connection_writes_the_other_reads(self, store: CheckpointStore) -> None:
        async with reopened(store) as other:
            draft = await opened(store)
            for i in range(5):
                draft = await land(store, draft, draft.add(b"here %d" % i))
                await read_as(other, draft)
                draft = await land(other, draft, draft.step_on(b"there %d" % i, checkpoint=b"state %d" % i))
                await read_as(store, draft)
                await other.post(draft.run_id, draft.message(b"%d" % i))
                assert len(await store.inbox(draft.run_id)) == i + 1

    async def test_a_reopened_store_is_closed_by_itself(self, store: CheckpointStore) -> None:
        draft = await opened(store)
        async with reopened(store) as other:
            await read_as(other, draft)
        draft = await land(store, draft, draft.add(b"one"))
        async with reopened(store) as another:
            await read_as(another, draft)

    async def test_a_store_may_be_closed_twice(self, store: CheckpointStore) -> None:
        await opened(store)
        await store.close()
        await store.close()

    async def test_a_store_may_be_closed_before_it_was_used(self, store: CheckpointStore) -> None:
        await store.close()

    async def test_a_new_run_is_taken_right_after_a_refusal(self, store: CheckpointStore) -> None:
        draft = Draft.of()
        await answer_to(store, draft.after(draft.open()).add(b"one"))
        draft = await land(store, draft, draft.open())
        await read_as(store, draft)
