"""What a store asks of the engines, drivers and loops that SQLAlchemy gives it, and what it leaves to them."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import stat
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from agent_runtime.errors import (
    AgentRuntimeError,
    ForeignStore,
    InvalidSetting,
    ReadOnlyStore,
    StoreRefused,
    StoreUnavailable,
)
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.stores import open_store, shown_url
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.witness import snapshot
from tests.crash.test_unknown import Stage, die_after_the_act
from tests.postgres.bench import PATIENCE_SECONDS, land, opened, session
from tests.postgres.test_sessions import watch_durability
from tests.postgres.test_unknown import eventually
from tests.processes.job import Job
from tests.servers import Server, free_port, fresh_schema

SECRET = "s3cret-pa55"
WAITING = "FROM pg_stat_activity WHERE application_name = 'agent-runtime' AND wait_event_type = 'Lock'"
POSTGRES = ("asyncpg", "psycopg")

by_postgres_driver = pytest.mark.parametrize("driver", POSTGRES)


def by(driver: str, url: str) -> str:
    return url.replace("postgresql:", f"postgresql+{driver}:", 1)


@asynccontextmanager
async def fresh_store(server: Server, driver: str, **options: Any) -> AsyncIterator[SQLAlchemyCheckpointStore]:
    """A store in a schema of its own."""
    async with fresh_schema(server.url) as schema:
        store = SQLAlchemyCheckpointStore(by(driver, server.url), schema=schema, **options)
        yield store
        await store.close()


async def refusal(store: CheckpointStore) -> AgentRuntimeError:
    """What a store that must not open says to it."""
    try:
        with pytest.raises(AgentRuntimeError) as caught:
            await store.list_runs()
    finally:
        await store.close()
    return caught.value


# One database, two ways in.


@asynccontextmanager
async def two_ways(way: str, server: Server, folder: Path) -> AsyncIterator[tuple[CheckpointStore, CheckpointStore]]:
    """The same tables by the native store and by SQLAlchemy."""
    async with fresh_schema(server.url) as schema:
        if way == "aiosqlite":
            native: CheckpointStore = SQLiteCheckpointStore(folder / "runs.db")
            other = SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{folder}/runs.db")
        else:
            native = PostgresCheckpointStore(server.url, schema=schema)
            other = SQLAlchemyCheckpointStore(by(way, server.url), schema=schema)
        yield native, other
        await native.close()
        await other.close()


@pytest.mark.parametrize("way", [*POSTGRES, "aiosqlite"])
@pytest.mark.parametrize("native_first", [True, False], ids=["native first", "SQLAlchemy first"])
async def test_a_run_that_was_killed_on_one_store_is_recovered_on_the_other(
    one_postgres: Server, tmp_path: Path, way: str, native_first: bool
) -> None:
    async with two_ways(way, one_postgres, tmp_path) as (native, other):
        first, second = (native, other) if native_first else (other, native)
        stage = Stage(first)
        stage.registry = stage.idempotent
        await die_after_the_act(stage)
        result = await stage.recover(second)
        assert (result.status, result.output, result.llm_calls) == ("done", "sent", 2)
        assert (stage.remote.count(), stage.remote.count_requests()) == (1, 2)
        await stage.close()


@pytest.mark.parametrize("way", [*POSTGRES, "aiosqlite"])
async def test_appends_of_both_stores_take_turns_on_one_run(one_postgres: Server, tmp_path: Path, way: str) -> None:
    async with two_ways(way, one_postgres, tmp_path) as (native, other):
        draft = await opened(native)
        for n in range(6):
            draft = await land((other, native)[n % 2], draft, draft.add(b"%d" % n, checkpoint=b"state %d" % n))
        assert await snapshot(native, draft.run_id) == await snapshot(other, draft.run_id)


@pytest.mark.parametrize("way", ["asyncpg", "aiosqlite"])
def test_a_main_job_that_died_on_one_store_is_finished_on_the_other(one_postgres: Server, tmp_path: Path, way: str) -> None:
    native = "sqlite:///agent_runtime.db"
    if way == "asyncpg":
        native = one_postgres.url_as("postgres", database=one_postgres.database())
    job = Job(tmp_path, url=native)
    assert job.run(RUN_ID="r", CRASH_AT="after_call", DATABASE_URL=native.replace(":", f"+{way}:", 1)).code == 1
    ended = job.run(RUN_ID="r")
    assert ended.code == 0, ended.err
    assert "INFO done run=r steps=3 llm_calls=4" in ended.lines
    assert set(job.saw().kinds.values()) == {1}


# Engines of the user's.


@asynccontextmanager
async def engine_at(url: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url, **options)
    yield engine
    await engine.dispose()


@by_postgres_driver
async def test_an_engine_that_is_handed_in_lends_its_connections_and_is_left_open(one_postgres: Server, driver: str) -> None:
    async with engine_at(by(driver, one_postgres.url), pool_size=2) as engine, fresh_schema(one_postgres.url) as schema:
        seen: list[str] = []
        event.listen(engine.sync_engine, "before_cursor_execute", lambda _c, _cu, statement, *_: seen.append(statement))
        store = SQLAlchemyCheckpointStore(engine=engine, schema=schema)
        draft = await opened(store)
        draft = await land(store, draft, draft.add(b"one"))
        assert any("UPDATE" in statement for statement in seen), "what listens to the engine hears the store"
        pool: Any = engine.sync_engine.pool
        assert pool.checkedout() == 0, "none is held between two statements"
        await store.close()
        async with engine.connect() as connection:
            assert (await connection.exec_driver_sql("SELECT 1")).scalar() == 1
            level = await connection.run_sync(lambda inner: inner.get_isolation_level())
            assert level == "READ COMMITTED", "it is as its owner set it"


@by_postgres_driver
async def test_writes_through_an_engine_are_durable_and_its_sessions_stay_as_they_were(
    one_postgres: Server, driver: str
) -> None:
    user = one_postgres.user(options="SUPERUSER")
    one_postgres.sql(f"ALTER ROLE {user} SET synchronous_commit = off")
    async with (
        engine_at(by(driver, one_postgres.url_as(user)), pool_size=1) as engine,
        fresh_schema(one_postgres.url) as schema,
    ):
        store = SQLAlchemyCheckpointStore(engine=engine, schema=schema)
        await store.now()  # the tables are made
        watch_durability(one_postgres, schema)
        draft = await opened(store)
        draft = await land(store, draft, draft.add(b"one"))
        await land(store, draft, draft.add(b"two", checkpoint=b"state"))
        assert set(one_postgres.sql(f"SELECT level FROM {schema}.seen").split()) == {"on"}
        async with engine.connect() as connection:
            assert (await connection.exec_driver_sql("SHOW synchronous_commit")).scalar() == "off"
        await store.close()


@by_postgres_driver
async def test_an_engine_that_has_no_connection_free_is_waited_for_and_then_named(one_postgres: Server, driver: str) -> None:
    async with engine_at(by(driver, one_postgres.url), pool_size=1, max_overflow=0) as engine, fresh_schema(one_postgres.url):
        store = SQLAlchemyCheckpointStore(engine=engine, timeout_seconds=0.2)
        async with engine.connect():
            with pytest.raises(StoreUnavailable, match="no connection"):
                await store.now()
        await store.now()
        await store.close()


async def test_an_engine_for_a_file_is_set_up_as_the_store_needs_it(tmp_path: Path) -> None:
    async with engine_at(f"sqlite+aiosqlite:///{tmp_path}/runs.db") as engine:
        store = SQLAlchemyCheckpointStore(engine=engine)
        draft = await opened(store)
        async with engine.connect() as connection:
            assert (await connection.exec_driver_sql("PRAGMA synchronous")).scalar() == 2
            # While SQLite waits for a lock, whoever collects a cursor of the connection waits too, its own transaction open.
            assert (await connection.exec_driver_sql("PRAGMA busy_timeout")).scalar() == 0
        await land(store.reopen(), draft, draft.add(b"one"))
        await store.close()


async def test_a_store_has_a_url_or_an_engine_and_not_both() -> None:
    async with engine_at("sqlite+aiosqlite:///runs.db") as engine:
        for url, given in ((None, None), ("sqlite+aiosqlite:///runs.db", engine)):
            with pytest.raises(InvalidSetting, match="either a URL or an engine="):
                SQLAlchemyCheckpointStore(url, engine=given)


# Loops, processes, sessions.


# Python says of a loop that ended that it left sessions open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", [*POSTGRES, "aiosqlite"])
async def test_a_store_is_used_on_one_event_loop_after_another(one_postgres: Server, tmp_path: Path, way: str) -> None:
    def use(store: CheckpointStore) -> int:
        async def count() -> int:
            await opened(store, f"run-{len(await store.list_runs())}")
            return len(await store.list_runs())

        return asyncio.run(count())

    async with two_ways(way, one_postgres, tmp_path) as (_, store):
        assert [await asyncio.to_thread(use, store) for _ in range(3)] == [1, 2, 3]
        gc.collect()


@pytest.mark.parametrize("way", [*POSTGRES, "aiosqlite"])
async def test_a_store_that_is_left_open_keeps_no_process_alive(one_postgres: Server, tmp_path: Path, way: str) -> None:
    async with fresh_schema(one_postgres.url) as schema:
        url = f"sqlite+aiosqlite:///{tmp_path}/runs.db" if way == "aiosqlite" else by(way, one_postgres.url)
        options = "" if way == "aiosqlite" else f", schema={schema!r}"
        program = (
            "import asyncio\n"
            "from agent_runtime.stores import SQLAlchemyCheckpointStore\n"
            "async def look():\n"
            f"    store = SQLAlchemyCheckpointStore({url!r}{options})\n"
            "    print(len(await store.list_runs()))\n"
            "asyncio.run(look())\n"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
        assert (process.returncode, out.strip()) == (0, b"0")


@by_postgres_driver
async def test_a_session_that_was_ended_while_nobody_used_it_is_replaced(one_postgres: Server, driver: str) -> None:
    user = one_postgres.user(options="SUPERUSER")
    async with fresh_schema(one_postgres.url) as schema:
        store = SQLAlchemyCheckpointStore(by(driver, one_postgres.url_as(user)), schema=schema)
        draft = await opened(store)
        assert one_postgres.terminate_backends(user=user) >= 1
        answers = [(await store.commit([draft.add(b"one")]))[0].kind for _ in range(3)]
        assert AnswerKind.OK in answers
        assert len(await store.calls(draft.run_id)) == 2
        await store.close()


@by_postgres_driver
async def test_a_write_that_is_cancelled_takes_its_connection_along(one_postgres: Server, driver: str) -> None:
    url = one_postgres.url
    async with fresh_schema(url) as schema, session(url) as holder, session(url) as watcher:
        store = SQLAlchemyCheckpointStore(by(driver, one_postgres.url), schema=schema)
        draft = await opened(store)
        await holder.execute(f'BEGIN; LOCK TABLE "{schema}".agent_runtime_runs IN EXCLUSIVE MODE')
        writing = asyncio.ensure_future(store.commit([draft.add(b"one")]))
        await eventually(lambda: watcher.fetchval(f"SELECT count(*) = 1 {WAITING} AND query LIKE '%{schema}%'"))
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await holder.execute("ROLLBACK")
        assert len(await store.calls(draft.run_id)) in (1, 2)
        await land(store, draft, draft.add(b"one"))
        await store.close()


async def test_a_file_whose_connection_is_lost_at_the_commit_answers_that_it_does_not_know_and_goes_on(tmp_path: Path) -> None:
    async with engine_at(f"sqlite+aiosqlite:///{tmp_path}/runs.db") as engine:
        store = SQLAlchemyCheckpointStore(engine=engine)
        draft = await opened(store)
        lost = list[Any]()

        @event.listens_for(engine.sync_engine, "before_cursor_execute")
        def lose(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if statement == "COMMIT" and not lost:
                driver = connection.connection.driver_connection
                lost.append(driver)
                driver._tx.put_nowait((None, driver._conn.close))  # on its thread, before the commit comes to it

        append = draft.add(b"one")
        [answer] = await store.commit([append])
        assert (answer.kind, len(lost)) == (AnswerKind.UNKNOWN, 1)
        assert len(await store.calls(draft.run_id)) == 1
        await land(store, draft, append)
        await store.close()


async def test_a_batch_that_failed_for_certain_leaves_nothing_behind_and_may_be_sent_again(tmp_path: Path) -> None:
    store = SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{tmp_path}/runs.db")
    good, refused_by_the_table = Draft.of("good").open(), Draft.of("bad", epoch=0).open()
    with pytest.raises(StoreUnavailable):
        await store.commit([good, refused_by_the_table])
    other = store.reopen()
    await other.commit([Draft.of("other").open(b"of another run")])
    assert await store.calls(good.row.run_id) == []
    assert [answer.kind for answer in await store.commit([good])] == [AnswerKind.OK]
    await other.close()
    await store.close()


# What is refused.


@by_postgres_driver
async def test_a_value_that_no_server_takes_is_refused_before_it_is_sent_and_the_store_goes_on(
    one_postgres: Server, driver: str
) -> None:
    async with fresh_store(one_postgres, driver) as store:
        with pytest.raises(StoreUnavailable, match="nothing was written"):
            await opened(store, "a\0b")
        await opened(store, "fine")


@by_postgres_driver
async def test_no_error_quotes_what_was_to_be_stored(one_postgres: Server, driver: str) -> None:
    async with fresh_store(one_postgres, driver) as store:
        await store.now()
        with pytest.raises(StoreUnavailable) as caught:
            await store.commit([Draft.of("bad", epoch=0).open(SECRET.encode())])
        assert SECRET not in "".join(traceback.format_exception(caught.value))


@by_postgres_driver
async def test_servers_and_users_that_cannot_keep_runs_are_refused_by_name(one_postgres: Server, driver: str) -> None:
    reader = one_postgres.user()
    one_postgres.sql(f"ALTER ROLE {reader} SET default_transaction_read_only = on")
    assert isinstance(await refusal(SQLAlchemyCheckpointStore(by(driver, one_postgres.url_as(reader)))), ReadOnlyStore)
    nobody_there = by(driver, f"postgresql://me:{SECRET}@127.0.0.1:{free_port()}/runs")
    error = await refusal(SQLAlchemyCheckpointStore(nobody_there))
    assert isinstance(error, StoreUnavailable)
    assert "does not answer" in str(error)
    assert SECRET not in "".join(traceback.format_exception(error))


async def test_a_file_of_another_program_is_refused_and_one_of_ours_is_private(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "theirs.db") as theirs:
        theirs.execute("CREATE TABLE t (a)")
    theirs.close()
    before = (tmp_path / "theirs.db").read_bytes()
    error = await refusal(SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{tmp_path}/theirs.db"))
    assert isinstance(error, ForeignStore)
    assert (tmp_path / "theirs.db").read_bytes() == before
    error = await refusal(SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{tmp_path}/no/folder.db"))
    assert isinstance(error, StoreRefused)
    store = SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{tmp_path}/ours.db")
    await opened(store)
    await store.close()
    assert stat.S_IMODE((tmp_path / "ours.db").stat().st_mode) == 0o600


@pytest.mark.parametrize("inner", ["commits", "rolls back"])
async def test_a_file_that_another_process_writes_is_waited_for(tmp_path: Path, inner: str) -> None:
    store = SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{tmp_path}/runs.db")
    draft = await opened(store)
    other = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writing = asyncio.ensure_future(land(store, draft, draft.add(b"one")))
    await store.calls(draft.run_id)  # the loop is free, and who reads does not wait
    assert not writing.done()
    other.execute("COMMIT" if inner == "commits" else "ROLLBACK")
    await asyncio.wait_for(writing, PATIENCE_SECONDS)
    other.close()
    await store.close()


ODD_URLS = {
    f"postgresql://me:{SECRET}@localhost/runs": "name one of these drivers",
    f"postgresql+pg8000://me:{SECRET}@localhost/runs": "name one of these drivers",
    f"mysql+aiomysql://me:{SECRET}@localhost/runs": "name one of these drivers",
    f"postgresql+asyncpg://me:{SECRET}@localhost:port/runs": "cannot be taken apart|take the .* apart",
    "sqlite+aiosqlite://": "sqlite:///PATH",
    "sqlite+aiosqlite:///:memory:": "memory://",
    "sqlite+aiosqlite:///file:runs.db?uri=true": "sqlite:///PATH",
}


@pytest.mark.parametrize("url", ODD_URLS)
def test_a_url_that_cannot_be_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidSetting, match=ODD_URLS[url]) as caught:
        SQLAlchemyCheckpointStore(url)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@by_postgres_driver
def test_a_store_shows_its_url_with_all_but_its_password(driver: str) -> None:
    url = f"postgresql+{driver}://me:{SECRET}@host:5433/runs"
    assert shown_url(url) == f"postgresql+{driver}://me@host:5433/runs"
    store = open_store(url)
    assert isinstance(store, SQLAlchemyCheckpointStore)
    assert repr(store) == f"SQLAlchemyCheckpointStore('postgresql://me@host:5433/runs' by {driver})"


def test_options_that_mean_nothing_in_a_file_are_refused() -> None:
    for option in ({"schema": "x"}, {"prefix": "x_"}, {"pooler": True}):
        with pytest.raises(InvalidSetting, match="are for Postgres"):
            SQLAlchemyCheckpointStore("sqlite+aiosqlite:///runs.db", **option)


@pytest.mark.parametrize(
    ("missing", "url", "advice"),
    [
        ("sqlalchemy.ext.asyncio", "sqlite+aiosqlite:///runs.db", r"durable-agent-runtime\[sqlalchemy\]' 'aiosqlite'"),
        ("greenlet", "postgresql+asyncpg://localhost/runs", r"durable-agent-runtime\[sqlalchemy\]' 'asyncpg'"),
        ("asyncpg", "postgresql+asyncpg://localhost/runs", "pip install 'asyncpg'"),
        ("psycopg", "postgresql+psycopg://localhost/runs", r"pip install 'psycopg\[binary\]'"),
        ("aiosqlite", "sqlite+aiosqlite:///runs.db", "pip install 'aiosqlite'"),
    ],
)
def test_what_is_not_installed_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, missing: str, url: str, advice: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InvalidSetting, match=advice):
        open_store(url)
