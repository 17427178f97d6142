"""What a commit answers while sessions die under it: ok is there, a definite failure is not, and the rest is unknown."""

from __future__ import annotations

import asyncio
from collections import Counter

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.errors import StoreUnavailable
from agent_runtime.journal.records import RecordKind
from agent_runtime.journal.seal import open_run
from agent_runtime.journal.store import Answer, AnswerKind, Append
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.testing.store_contract import Draft, Entry
from agent_runtime.testing.store_contract.draft import NEXT_RING, RING, TENANT
from tests.postgres.bench import fresh_store, opened, session
from tests.servers import Server, fresh_schema

OK, UNKNOWN = AnswerKind.OK, AnswerKind.UNKNOWN


async def tell(store: PostgresCheckpointStore, appends: list[Append]) -> list[AnswerKind | None]:
    """The answers to a commit; None for each append where it raised that nothing was written."""
    try:
        return [answer.kind for answer in await store.commit(appends)]
    except StoreUnavailable:
        return [None] * len(appends)


async def test_an_answer_is_true_even_while_sessions_are_ended_all_the_time(postgres: Server) -> None:
    ended = asyncio.Event()

    async def terminate() -> int:
        """End every session of the store, over and over."""
        count = 0
        async with session(postgres.url) as watcher:
            while not ended.is_set():
                count += await watcher.fetchval(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'agent-runtime'"
                )
                await SYSTEM_CLOCK.sleep(0.01)
        return count

    told: dict[str, AnswerKind | None] = {}
    async with fresh_store(postgres) as store:
        await store.now()
        terminating = asyncio.create_task(terminate())
        for i in range(0, 4000, 20):
            drafts = [Draft.of(f"run-{i + j:05}") for j in range(20)]
            answers = await tell(store, [draft.open(b"x" * 100) for draft in drafts])
            told |= dict(zip((draft.run_id for draft in drafts), answers, strict=True))
        ended.set()
        assert await terminating > 20
        there = {row.run_id for row in await store.list_runs(limit=5000)}
    for run_id, answer in told.items():
        assert answer in (OK, UNKNOWN, None)
        if answer is not UNKNOWN:
            assert (run_id in there) is (answer is OK), f"{run_id}: {answer}"
    counted = Counter(told.values())
    assert counted[OK] > 0, counted
    assert counted[UNKNOWN] > 0, counted


async def test_after_the_first_appends_of_a_commit_have_landed_a_failure_is_unknown_and_no_denial(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        draft = await opened(store)
        good = draft.add(b"one")
        bad = draft.after(good).append(good.row, Entry(RecordKind.DONE, b"two", "a\0b", 1))  # Postgres keeps no such text
        assert await tell(store, [good, bad]) == [OK, UNKNOWN]
        assert len(await store.calls(draft.run_id)) == 2


async def test_a_commit_whose_server_takes_too_long_is_unknown_and_may_have_landed(postgres: Server) -> None:
    async with fresh_schema(postgres.url) as schema:
        store = PostgresCheckpointStore(postgres.url, schema=schema, timeout_seconds=0.5)
        draft = await opened(store)
        append = draft.add(b"one")
        async with session(postgres.url) as holder:
            await holder.execute(f"BEGIN; SELECT FROM {store._sql.table('runs')} FOR UPDATE")
            [answer] = await store.commit([append])
            assert answer == Answer(UNKNOWN)
        [again] = await store.commit([append])
        assert again.kind is OK
        await store.close()


async def test_a_commit_that_is_cancelled_gives_its_session_up(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        draft = await opened(store)
        append = draft.add(b"one")
        async with session(postgres.url) as holder:
            await holder.execute(f"BEGIN; SELECT FROM {store._sql.table('runs')} FOR UPDATE")
            commit = asyncio.create_task(store.commit([append]))
            await SYSTEM_CLOCK.sleep(0.1)
            commit.cancel()
            await asyncio.wait([commit])
            assert commit.cancelled()
        [again] = await store.commit([append])
        assert again.kind is OK
        assert len(await store.calls(draft.run_id)) == 2


async def test_appends_go_by_index_also_where_the_plan_was_made_while_the_tables_were_empty(postgres: Server) -> None:
    async with fresh_schema(postgres.url) as schema:
        store = PostgresCheckpointStore(postgres.url, schema=schema)
        drafts = [Draft.of(f"run-{i:05}") for i in range(3000)]
        first = [draft.open() for draft in drafts]
        for start in range(0, 3000, 200):
            await store.commit(first[start : start + 200])
        drafts = [draft.after(append) for draft, append in zip(drafts, first, strict=True)]
        for start in range(0, 3000, 100):
            await store.commit([draft.add(b"one") for draft in drafts[start : start + 100]])
        await store.renew_all([(draft.run_id, draft.guard) for draft in drafts])
        await store.close()  # the server counts what a session read when that ends
        sql = f"SELECT seq_tup_read FROM pg_stat_user_tables WHERE schemaname = '{schema}' AND relname LIKE '%_runs'"
        read_in_full = int(postgres.sql(sql))
    assert read_in_full < 3000


async def test_an_append_is_stored_alike_alone_and_among_others_however_many_records_it_has(postgres: Server) -> None:
    bodies = [b"", b"x", b"y" * 300, b"\0\xff", b"z" * 70_000, b"", b"last"]
    async with fresh_store(postgres) as store:
        alone, *together = [await opened(store, f"run-{i}") for i in range(4)]
        for count in range(1, len(bodies) + 1):
            entries = [Entry(RecordKind.DONE, body, f"{at}/gr\u00f6\u00dfe", at) for at, body in enumerate(bodies[:count])]
            state = b"state" * count if count % 2 else None
            lone = alone.append(alone.row, *entries)
            batch = [
                together[0].append(together[0].row, *entries),
                together[1].append(together[1].row, *entries, checkpoint=state),
                together[2].append(together[2].row._replace(step=together[2].row.step + 1), *entries),
            ]
            fresh = Draft.of(f"fresh-{count}")
            opening = fresh.append(fresh.row, Entry(RecordKind.OPENED, b"input"), *entries, checkpoint=b"first")
            assert await tell(store, [lone]) == [OK]
            assert await tell(store, [*batch, opening]) == [OK] * 4
            alone = alone.after(lone)
            together = [draft.after(append) for draft, append in zip(together, batch, strict=True)]
            together_and_alone = [alone, *together, fresh.after(opening)]
            for draft, append in zip(together_and_alone, [lone, *batch, opening], strict=True):
                [run] = await store.load_many([draft.run_id])
                assert run is not None
                assert run.records[-len(append.records) :] == append.records
                open_run(RING, run, tenant=TENANT)


async def test_a_run_goes_on_to_another_key_and_another_lease_alone_and_among_others(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        drafts = [await opened(store, f"run-{i}") for i in range(3)]
        rekeyed = [draft.rekey() for draft in drafts]
        assert await tell(store, rekeyed[:1]) + await tell(store, rekeyed[1:]) == [OK] * 3
        drafts = [draft.after(append) for draft, append in zip(drafts, rekeyed, strict=True)]
        leases = [draft.append(draft.row._replace(lease_ms=5_000), Entry(RecordKind.DONE, b"", "0", 1)) for draft in drafts]
        assert await tell(store, leases[:1]) + await tell(store, leases[1:]) == [OK] * 3
        for run in await store.load_many([draft.run_id for draft in drafts]):
            assert run is not None
            open_run(NEXT_RING, run, tenant=TENANT)
            assert run.row.lease_ms == 5_000
