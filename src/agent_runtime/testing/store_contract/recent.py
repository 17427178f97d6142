"""The list of runs by when they last changed: its order, its pages, and what moves a run in it."""

from __future__ import annotations

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredRow
from agent_runtime.journal.store import CheckpointStore, recency
from agent_runtime.testing.store_contract.draft import Draft
from agent_runtime.testing.store_contract.witness import OK, ended, land, opened

PATIENCE_SECONDS = 20.0


async def tick(store: CheckpointStore) -> None:
    """Wait until the store's clock shows another millisecond."""
    begun = (await store.now()).timestamp()
    give_up_at = SYSTEM_CLOCK.monotonic() + PATIENCE_SECONDS
    while (await store.now()).timestamp() < begun + 0.002:
        assert SYSTEM_CLOCK.monotonic() < give_up_at, "the store's clock stands still"
        await SYSTEM_CLOCK.sleep(0.001)


async def listed(store: CheckpointStore, status: int | None = None) -> list[str]:
    """The ids of the runs that changed last, in that order."""
    return [row.run_id for row in await store.list_recent(status=status)]


class Recency:
    """Cases of the list of runs by time."""

    async def test_the_run_that_changed_last_is_listed_first(self, store: CheckpointStore) -> None:
        assert await store.list_recent() == []
        first = await opened(store, "b")
        await tick(store)
        await ended(store, "a")
        await tick(store)
        await opened(store, "c")
        assert await listed(store) == ["c", "a", "b"]
        await tick(store)
        await land(store, first, first.add(b"one"))
        assert await listed(store) == ["b", "c", "a"]
        assert [row.run_id for row in await store.list_recent(limit=2)] == ["b", "c"]
        assert await store.list_recent(limit=0) == []

    async def test_runs_by_time_are_those_of_a_status_where_one_is_named(self, store: CheckpointStore) -> None:
        for status in (RunStatus.PAUSED, RunStatus.DONE, RunStatus.FAILED, RunStatus.CANCELLED):
            draft = await opened(store, status.name)
            await land(store, draft, draft.end(status) if status.is_final else draft.park(status))
        gone = await ended(store, "DELETED")
        await store.delete(gone.run_id, guard=gone.guard)
        assert set(await listed(store)) == {"PAUSED", "DONE", "FAILED", "CANCELLED"}
        for status in RunStatus:
            expected = [status.name] if status not in (RunStatus.RUNNING, RunStatus.BLOCKED, RunStatus.QUARANTINED) else []
            assert await listed(store, status) == expected

    async def test_runs_of_one_moment_are_listed_page_by_page_each_once(self, store: CheckpointStore) -> None:
        drafts = [Draft.of(f"run-{i:02}") for i in range(14)]
        opening = [draft.open() for draft in drafts]
        assert {answer.kind for answer in await store.commit(opening)} == {OK}
        drafts = [draft.after(append) for draft, append in zip(drafts, opening, strict=True)]
        await store.commit([draft.end() for draft in drafts[:8]])
        expected = sorted(await store.list_runs(), key=recency, reverse=True)
        assert len(expected) == 14
        pages: list[StoredRow] = []
        before: tuple[int, RunId] | None = None
        while rows := await store.list_recent(before=before, limit=3):
            pages += rows
            before = recency(rows[-1])
        assert [row.run_id for row in pages] == [row.run_id for row in expected]
        assert [row._replace(idle_ms=0) for row in pages] == [row._replace(idle_ms=0) for row in expected]

    async def test_a_settled_record_brings_a_run_that_ended_to_the_front(self, store: CheckpointStore) -> None:
        first = await ended(store, "a")
        await tick(store)
        await ended(store, "b")
        await tick(store)
        await land(store, first, first.settle())
        assert await listed(store) == ["a", "b"]
        assert await listed(store, RunStatus.DONE) == ["a", "b"]

    async def test_a_sign_of_life_or_a_message_moves_no_run_in_the_list_by_time(self, store: CheckpointStore) -> None:
        first = await opened(store, "a")
        await tick(store)
        await opened(store, "b")
        await tick(store)
        await store.renew(first.run_id, guard=first.guard)
        await store.post(first.run_id, first.message())
        assert await listed(store) == ["b", "a"]
