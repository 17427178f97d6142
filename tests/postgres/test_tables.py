"""The tables: made once by many at a time, or by hand; those of others are refused, and names keep tenants apart."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from agent_runtime.errors import (
    AgentRuntimeError,
    ForeignStore,
    InvalidSetting,
    NewerFormat,
    StoreRefused,
    StoreUnavailable,
)
from agent_runtime.ids import RunId
from agent_runtime.journal.store import AnswerKind, Guard
from agent_runtime.stores.postgres import MOST_BEATS, MOST_RECORDS, PostgresCheckpointStore
from agent_runtime.stores.postgres_link import Connection
from agent_runtime.stores.postgres_schema import schema_sql
from agent_runtime.testing.store_contract import Draft
from tests.postgres.bench import PATIENCE_SECONDS, fresh_store, land, opened, session
from tests.servers import Server, fresh_schema

TOP = Path(__file__).resolve().parent.parent.parent
SCHEMA = TOP / "schema.sql"
CATALOG = """
SELECT 'column', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity::text,
       coalesce(pg_get_expr(d.adbin, d.adrelid), ''), coalesce(l.collname, ''), coalesce(c.reloptions::text, '')
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum LEFT JOIN pg_collation l ON l.oid = a.attcollation
WHERE c.relnamespace = $1::text::regnamespace AND c.relkind = 'r'
UNION ALL
SELECT 'index', tablename, indexname, replace(indexdef, $1::text, ''), true, '', '', '', '' FROM pg_indexes
WHERE schemaname = $1::text
UNION ALL
SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid), true, '', '', '', ''
FROM pg_constraint WHERE connamespace = $1::text::regnamespace AND contype <> 'n'
ORDER BY 1, 2, 3
"""


async def catalog(server: Server, schema: str) -> list[tuple[object, ...]]:
    """All that the server says of the tables in a schema."""
    async with session(server.url) as connection:
        await connection.execute(f"SET search_path = {schema}")
        return [tuple(row) for row in await connection.fetch(CATALOG, schema)]


def test_schema_sql_is_what_the_store_would_make() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema_sql(), "write what schema_sql() gives into schema.sql"


async def test_tables_loaded_by_hand_equal_those_that_the_store_makes_and_are_accepted(postgres: Server) -> None:
    async with fresh_store(postgres) as made, fresh_schema(postgres.url) as by_hand:
        await made.now()
        postgres.sql(f"CREATE SCHEMA {by_hand}")
        postgres.psql_file(SCHEMA, schema=by_hand)
        loaded = await catalog(postgres, by_hand)
        assert loaded == await catalog(postgres, made._schema)
        assert len(loaded) > 40
        store = PostgresCheckpointStore(postgres.url, schema=by_hand)
        await opened(store)
        await store.close()
        assert await catalog(postgres, by_hand) == loaded


def test_the_server_to_try_things_out_with_listens_on_port_5433_of_this_machine_alone() -> None:
    said = (TOP / "compose.yaml").read_text(encoding="utf-8")
    assert '- "127.0.0.1:5433:5432"' in said
    assert "image: postgres:18\n" in said
    assert [said.count(f"POSTGRES_{name}: durable\n") for name in ("USER", "PASSWORD", "DB")] == [1, 1, 1]


async def test_a_store_whose_tables_are_there_makes_none(postgres: Server) -> None:
    """Its user may not, so it would fail if it tried."""
    user = postgres.user()
    async with fresh_store(postgres) as owner:
        await owner.now()
        postgres.sql(
            f"GRANT USAGE ON SCHEMA {owner._schema} TO {user}; GRANT SELECT ON ALL TABLES IN SCHEMA {owner._schema} TO {user}"
        )
        store = PostgresCheckpointStore(postgres.url_as(user), schema=owner._schema)
        assert await store.list_runs() == []
        await store.close()


CREATES = """
import asyncio, sys
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.testing.store_contract import Draft

async def main(url, schema, name):
    store = PostgresCheckpointStore(url, schema=schema)
    print("ready", flush=True)
    sys.stdin.readline()
    [answer] = await store.commit([Draft.of(name).open()])
    print(answer.kind.value)
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


def start_at_once(words: list[str]) -> list[str]:
    """What eight processes say that were all let go at one moment."""
    pipe = subprocess.PIPE
    workers = [subprocess.Popen([*words, f"run-{i}"], stdin=pipe, stdout=pipe, text=True) for i in range(8)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    return [worker.communicate(timeout=60)[0] for worker in workers]


async def test_eight_processes_make_the_tables_at_once(postgres: Server) -> None:
    async with fresh_schema(postgres.url) as schema:
        said = await asyncio.to_thread(start_at_once, [sys.executable, "-c", CREATES, postgres.url, schema])
        assert said == ["ok\n"] * 8
        store = PostgresCheckpointStore(postgres.url, schema=schema)
        assert len(await store.list_runs()) == 8
        await store.close()


# Those of others.


@pytest.mark.parametrize(
    "made_by_another",
    [
        "CREATE TABLE {at}runs (id serial, started timestamptz)",
        "CREATE TABLE {at}store (format text)",
        "CREATE TABLE {at}store (shelf integer)",
        "CREATE VIEW {at}journal AS SELECT 1 AS number",
    ],
)
async def test_tables_of_another_program_under_our_names_are_refused_and_left_alone(
    made_by_another: str, postgres: Server
) -> None:
    async with fresh_schema(postgres.url) as schema:
        postgres.sql(f"CREATE SCHEMA {schema}; " + made_by_another.format(at=f"{schema}.agent_runtime_"))
        before = await catalog(postgres, schema)
        store = PostgresCheckpointStore(postgres.url, schema=schema)
        with pytest.raises(ForeignStore, match=f"schema '{schema}'.*not ours"):
            await store.list_runs()
        await store.close()
        assert await catalog(postgres, schema) == before


async def test_a_table_that_is_missing_or_changed_is_refused(postgres: Server) -> None:
    for damage in ("DROP TABLE {at}inbox", "ALTER TABLE {at}runs ADD COLUMN extra text", "DELETE FROM {at}store"):
        async with fresh_store(postgres) as store:
            await store.now()
            postgres.sql(damage.format(at=f"{store._schema}.agent_runtime_"))
            other = PostgresCheckpointStore(postgres.url, schema=store._schema)
            with pytest.raises(ForeignStore):
                await other.list_runs()
            await other.close()


async def test_a_store_of_a_newer_format_is_refused_by_name(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        await store.now()
        at = f"{store._schema}.agent_runtime_"
        postgres.sql(f"UPDATE {at}store SET format = 3; ALTER TABLE {at}runs ADD COLUMN new_in_3 text")
        other = PostgresCheckpointStore(postgres.url, schema=store._schema)
        with pytest.raises(NewerFormat, match="layout 3, and this version knows 2"):
            await other.list_runs()
        await other.close()


# Names.


async def test_stores_in_two_schemas_or_under_two_prefixes_do_not_see_each_other(postgres: Server) -> None:
    async with fresh_schema(postgres.url) as one, fresh_schema(postgres.url) as two:
        places = [(one, "a_"), (one, "b_"), (two, "a_"), (one, "")]
        stores = [PostgresCheckpointStore(postgres.url, schema=schema, prefix=prefix) for schema, prefix in places]
        for i, store in enumerate(stores):
            draft = Draft.of("the same")
            [answer] = await store.commit([draft.open(b"of %d" % i)])
            assert answer.kind is AnswerKind.OK
            assert (await store.post(draft.run_id, draft.message(b"%d" % i))).posted == 1
        for i, store in enumerate(stores):
            assert [record.body for record in await store.calls(Draft.of("the same").run_id)] == [b"input", b"of %d" % i]
            assert [message.body for message in await store.inbox(Draft.of("the same").run_id)] == [b"%d" % i]
            await store.close()


HOSTILE = (
    'x"; DROP TABLE runs; --',
    "a b",
    "a.b",
    "UPPER",
    "ünï",
    "1st",
    "a-b",
    "a\0b",
    "a\n",
    "$1",
    "{runs}",
    "x" * 64,
    "a'b",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_schema_or_prefix_that_is_no_plain_name_is_refused_at_the_door(name: str) -> None:
    with pytest.raises(InvalidSetting, match="schema= is a plain name"):
        PostgresCheckpointStore("postgresql://localhost/runs", schema=name)
    with pytest.raises(InvalidSetting, match="prefix= is a plain name"):
        PostgresCheckpointStore("postgresql://localhost/runs", prefix=name)


@pytest.mark.parametrize("schema", ["", "pg_catalog", "pg_mine", "information_schema"])
def test_a_schema_that_is_none_or_the_servers_own_is_refused_at_the_door(schema: str) -> None:
    with pytest.raises(InvalidSetting):
        PostgresCheckpointStore("postgresql://localhost/runs", schema=schema)


# What cannot be stored.


async def test_a_value_that_postgres_cannot_hold_hurts_no_other_run(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        good = Draft.of("good")
        for bad in (Draft.of("bad", name="a\0b"), Draft.of("bad", epoch=0)):
            with pytest.raises(AgentRuntimeError, match="nothing was written"):
                await store.commit([good.open(), bad.open()])
            assert await store.list_runs() == []
        [answer] = await store.commit([good.open()])
        assert answer.kind is AnswerKind.OK


async def test_a_run_with_as_many_records_as_there_are_places_takes_no_more_and_hurts_no_other(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        long, other = await opened(store, "long"), await opened(store, "other")
        postgres.sql(f"UPDATE {store._sql.table('runs')} SET number = {MOST_RECORDS - 1} WHERE run_id = 'long'")
        long = replace(long, row=long.row._replace(number=MOST_RECORDS - 1))
        long = await land(store, long, long.add(b"the last"))
        assert [record.number for record in await store.calls(long.run_id)] == [1, MOST_RECORDS]
        assert [record.body for record in await store.calls(long.run_id, since=1)] == [b"the last"]
        assert await store.calls(long.run_id, since=MOST_RECORDS) == []
        assert await store.calls(long.run_id, since=2**40) == []
        for appends in ([long.add(b"one more")], [other.add(b"fits"), long.add(b"one more")]):
            with pytest.raises(StoreRefused, match=r"'long' would have 16,777,216 records.*go on in a new run"):
                await store.commit(appends)
        await land(store, other, other.add(b"fits"))
        assert [len(await store.calls(draft.run_id)) for draft in (long, other)] == [2, 2]


async def test_the_last_key_that_a_run_can_have_is_used_and_then_new_runs_are_refused_by_name(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        before = await opened(store, "before")
        postgres.sql(f"ALTER TABLE {store._sql.table('runs')} ALTER COLUMN key RESTART WITH {2**39 - 1}")
        last = await opened(store, "last")
        last = await land(store, last, last.add(b"result"))
        runs = await store.load_many([last.run_id, before.run_id])
        assert [run and len(run.records) for run in runs] == [2, 1]
        with pytest.raises(StoreRefused, match="as many runs as it can ever hold"):
            await store.commit([Draft.of("one too many").open()])
        await land(store, last, last.add(b"more"))
        assert len(await store.calls(last.run_id)) == 3


# Speed that other things rest on.


async def test_lists_are_read_by_index(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        for start in range(0, 4000, 1000):
            await store.commit([Draft.of(f"run-{i:05}").open() for i in range(start, start + 1000)])
        runs = store._sql.table("runs")
        postgres.sql(f"UPDATE {runs} SET status = 8 WHERE key % 50 <> 0")
        postgres.sql(f"ANALYZE {runs}")
        listing = {"list_unfinished": "agent_runtime_unfinished", "list_runs": "agent_runtime_runs_run_id_key"}
        for name, index in listing.items():
            plan = await store._link.read(partial(explained, sql=store._sql[name]))
            assert f"Index Scan using {index}" in plan
        plan = await store._link.read(partial(explained, sql=store._sql["list_awake"], values="('run-01000', NULL, 10, 0)"))
        assert "Index Scan using agent_runtime_unfinished" in plan


async def test_the_list_by_time_is_read_by_index_and_reads_no_more_than_a_page_of_each_status(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        for start in range(0, 4000, 1000):
            await store.commit([Draft.of(f"run-{i:05}").open() for i in range(start, start + 1000)])
        runs = store._sql.table("runs")
        postgres.sql(f"UPDATE {runs} SET status = 8 + key % 3 WHERE key % 50 <> 0; ANALYZE {runs}")
        values = f"('{{1,2,3,4,8,9,10}}', {2**63 - 1}, '', 10)"
        plan = await store._link.read(partial(explained, sql=store._sql["list_recent"], values=values))
        assert "Index Scan Backward using agent_runtime_ended" in plan
        assert "Index Scan using agent_runtime_unfinished" in plan
        assert "Seq Scan" not in plan


async def test_an_append_of_a_run_that_runs_changes_no_index(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        draft = await opened(store)
        for n in range(40):
            draft = await land(store, draft, draft.step_on(b"%d" % n))
        changed, in_place = await counted_updates(postgres, store, least=40)
        assert in_place >= changed - 2, "all but those whose page was full"


async def test_neither_a_heartbeat_of_all_runs_nor_a_batch_of_neighbours_moves_a_row_out_of_its_page(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        drafts = [Draft.of(f"run-{i:03}") for i in range(200)]
        openings = [draft.open() for draft in drafts]
        await store.commit(openings)
        drafts = [draft.after(opening) for draft, opening in zip(drafts, openings, strict=True)]
        renewed = await store.renew_all([(draft.run_id, draft.guard) for draft in drafts])
        answers = await store.commit([draft.add(b"result") for draft in drafts])
        assert {answer.kind for answer in renewed + answers} == {AnswerKind.OK}
        changed, in_place = await counted_updates(postgres, store, least=400)
        assert in_place == changed == 400


async def counted_updates(server: Server, store: PostgresCheckpointStore, *, least: int) -> tuple[int, int]:
    """How many rows were updated, and how many of them changed no index: heap-only tuples, as Postgres counts them."""
    runs = store._sql.table("runs")
    await store.close()  # a session that ends tells its counts at once, an idle one after ten seconds
    counts = f"SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = '{runs}'::regclass"
    give_up_at = monotonic() + PATIENCE_SECONDS
    while True:
        changed, in_place = (int(number) for number in server.sql(counts).split("|"))
        if changed >= least:
            return changed, in_place
        assert monotonic() < give_up_at, "the server counts its updates in the end"
        await asyncio.sleep(0.05)


async def test_the_records_of_runs_are_read_in_order_by_the_one_index_of_the_journal(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        await store.commit([Draft.of(f"run-{i:03}").open(b"one", b"two") for i in range(200)])
        postgres.sql(f"ANALYZE {store._sql.table('journal')}")
        for name, values in {"select_records": "('run-100', 1)", "select_all_records": "('{3,4}')"}.items():
            plan = await store._link.read(partial(explained, sql=store._sql[name], values=values))
            assert "Index Scan using agent_runtime_numbers" in plan
            assert "Index Cond: ((place >=" in plan
            assert "Sort" not in plan


async def explained(db: Connection, sql: str, values: str = "('run-01000', NULL, 10)") -> str:
    """How the server reads rows, planned as the store has it planned; by default the first page of a list."""
    await db.execute(f"PREPARE reading AS {sql}")
    plan = await db.fetch(f"EXPLAIN EXECUTE reading {values}")
    await db.execute("DEALLOCATE reading")
    return "\n".join(row[0] for row in plan)


async def test_ten_thousand_heartbeats_pass_over_a_row_that_somebody_holds(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        guards = await guards_of_many(store, 10_000)
        async with session(postgres.url) as holder:
            await holder.execute(f"BEGIN; SELECT FROM {store._sql.table('runs')} WHERE run_id = 'run-00007' FOR UPDATE")
            answers = await asyncio.wait_for(store.renew_all(guards), 30)
            held = answers.pop(7)
        assert {answer.kind for answer in answers} == {AnswerKind.OK}
        assert held.kind is AnswerKind.UNKNOWN, "nobody heard it, so nobody says so"
        assert {answer.kind for answer in await store.renew_all(guards)} == {AnswerKind.OK}


async def test_heartbeats_that_the_server_refuses_silence_only_those_of_their_own_statement(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        guards = await guards_of_many(store, MOST_BEATS + 10)
        at = store._schema
        postgres.sql(
            f"CREATE FUNCTION {at}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$; "
            f"CREATE TRIGGER refuse BEFORE UPDATE ON {store._sql.table('runs')} FOR EACH ROW "
            f"WHEN (OLD.run_id = 'run-00007') EXECUTE FUNCTION {at}.refuse()"
        )
        answers = [answer.kind for answer in await store.renew_all(guards)]
        assert answers == [AnswerKind.UNKNOWN] * MOST_BEATS + [AnswerKind.OK] * 10
        with pytest.raises(StoreUnavailable, match="not this one"):
            await store.renew_all(guards[:10])


async def guards_of_many(store: PostgresCheckpointStore, count: int) -> list[tuple[RunId, Guard]]:
    """So many fresh runs, and what their owners show."""
    drafts = [Draft.of(f"run-{i:05}") for i in range(count)]
    openings = [draft.open() for draft in drafts]
    for start in range(0, count, 2000):
        await store.commit(openings[start : start + 2000])
    return [(draft.run_id, draft.after(opening).guard) for draft, opening in zip(drafts, openings, strict=True)]
