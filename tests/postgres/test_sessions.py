"""What a store asks of its sessions, users and servers, and how it refuses those that do not give it."""

from __future__ import annotations

import asyncio
import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress

import pytest

from agent_runtime.errors import (
    AgentRuntimeError,
    InvalidSetting,
    ReadOnlyStore,
    StoreRefused,
    StoreUnavailable,
)
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.store import AnswerKind
from agent_runtime.stores import open_store, shown_url
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.draft import BOB
from tests.conftest import Servers
from tests.postgres.bench import fresh_store, land, opened
from tests.servers import Pooler, Server, free_port, fresh_schema, own_origins

SECRET = "s3cret-pa55"


@pytest.fixture(scope="module")
def pooled(servers: Servers) -> Iterator[tuple[Server, Pooler]]:
    server = servers(own_origins()[0])
    before = Pooler(server)
    yield server, before
    before.close()


async def refusal(store: PostgresCheckpointStore) -> AgentRuntimeError:
    """What a store that must not open says to it."""
    try:
        with pytest.raises(AgentRuntimeError) as caught:
            await store.list_runs()
    finally:
        await store.close()
    return caught.value


# Durability.


def watch_durability(server: Server, schema: str) -> None:
    """Have the server itself write down under which `synchronous_commit` each record is written."""
    server.sql(
        f"CREATE TABLE {schema}.seen (level text); "
        f"CREATE FUNCTION {schema}.see() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS "
        f"$$ BEGIN INSERT INTO {schema}.seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$; "
        f"CREATE TRIGGER seen AFTER INSERT ON {schema}.agent_runtime_journal EXECUTE FUNCTION {schema}.see(); "
        f"CREATE TRIGGER seen AFTER INSERT ON {schema}.agent_runtime_inbox EXECUTE FUNCTION {schema}.see(); "
    )


async def write_everything(store: PostgresCheckpointStore, run_id: str) -> None:
    """An opening, a lone append, a batch, a message."""
    draft = await opened(store, run_id)
    draft = await land(store, draft, draft.add(b"one"))
    draft = await land(store, draft, draft.add(b"two", checkpoint=b"state"))
    assert (await store.post(draft.run_id, draft.message())).kind is AnswerKind.OK


@pytest.mark.parametrize(("level", "expected"), [("off", "on"), ("local", "on"), ("remote_write", "on"), ("on", "on"),
                                                 ("remote_apply", "remote_apply")])  # fmt: skip
async def test_a_weaker_commit_set_for_a_user_is_made_durable_and_a_stronger_one_is_kept(
    level: str, expected: str, pooled: tuple[Server, Pooler]
) -> None:
    server, pooler = pooled
    user = server.user(options="SUPERUSER")
    server.sql(f"ALTER ROLE {user} SET synchronous_commit = {level}")
    pooler.let_in(user)
    async with fresh_schema(server.url) as schema:
        direct = PostgresCheckpointStore(server.url_as(user), schema=schema)
        behind = PostgresCheckpointStore(pooler.url_as(user), schema=schema, pooler=True)
        await direct.now()
        watch_durability(server, schema)
        await write_everything(direct, "directly")
        await write_everything(behind, "behind a pooler")
        seen = server.sql(f"SELECT DISTINCT level FROM {schema}.seen")
        left = await behind._link.read(lambda db: db.fetch("SHOW synchronous_commit"))
        await direct.close()
        await behind.close()
    assert seen == expected
    assert left[0][0] == level, "behind a pooler nothing is left set on a session that others use"


async def test_a_pooler_that_the_store_was_not_told_of_is_refused_with_what_to_do(pooled: tuple[Server, Pooler]) -> None:
    _, pooler = pooled
    said = await refusal(PostgresCheckpointStore(pooler.url))
    assert type(said) is StoreRefused
    assert "open the store with pooler=True" in str(said)


# Servers and users that cannot be written to.


async def test_a_server_that_is_not_there_is_named(postgres: Server) -> None:
    port = free_port()
    said = await refusal(PostgresCheckpointStore(f"postgresql://me:{SECRET}@127.0.0.1:{port}/runs"))
    assert isinstance(said, StoreUnavailable)
    assert f"postgresql://me@127.0.0.1:{port}/runs does not answer" in str(said)


async def test_a_wrong_password_is_refused_and_the_right_one_is_not(postgres: Server) -> None:
    user = postgres.user(password=SECRET)
    said = await refusal(PostgresCheckpointStore(postgres.url_as(user, password=f"not-{SECRET}")))
    assert type(said) is StoreRefused
    assert "correct the password" in str(said)
    postgres.sql(f"CREATE SCHEMA AUTHORIZATION {user}")
    right = PostgresCheckpointStore(postgres.url_as(user, password=SECRET), schema=user)
    assert await right.list_runs() == []
    await right.close()


async def test_a_database_that_is_not_there_is_refused(postgres: Server) -> None:
    said = await refusal(PostgresCheckpointStore(postgres.url_as("postgres", database="nowhere")))
    assert type(said) is StoreRefused
    assert "create the database" in str(said)


async def test_a_user_who_may_not_make_the_tables_is_told_what_to_do(postgres: Server) -> None:
    user = postgres.user()
    said = await refusal(PostgresCheckpointStore(postgres.url_as(user), schema=f"{user}_new"))
    assert type(said) is StoreRefused
    assert "load schema.sql" in str(said)


async def test_a_user_who_may_only_read_is_refused(postgres: Server) -> None:
    user = postgres.user()
    postgres.sql(f"ALTER ROLE {user} SET default_transaction_read_only = on")
    said = await refusal(PostgresCheckpointStore(postgres.url_as(user)))
    assert type(said) is ReadOnlyStore


async def test_a_user_with_another_isolation_level_is_given_ours_or_refused(pooled: tuple[Server, Pooler]) -> None:
    server, pooler = pooled
    user = server.user(options="SUPERUSER")
    server.sql(f"ALTER ROLE {user} SET default_transaction_isolation = 'serializable'")
    pooler.let_in(user)
    async with fresh_schema(server.url) as schema:
        direct = PostgresCheckpointStore(server.url_as(user), schema=schema)
        [found] = await direct._link.read(lambda db: db.fetch("SHOW transaction_isolation"))
        await direct.close()
        said = await refusal(PostgresCheckpointStore(pooler.url_as(user), schema=schema, pooler=True))
    assert found[0] == "read committed"
    assert "default_transaction_isolation = 'read committed'" in str(said)


async def test_a_database_in_another_encoding_is_refused(postgres: Server) -> None:
    name = f"latin_{postgres.user()}"
    postgres.sql(f"CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0")
    said = await refusal(PostgresCheckpointStore(postgres.url_as("postgres", database=name)))
    assert type(said) is StoreRefused
    assert "expected UTF8" in str(said)


async def test_a_read_replica_is_refused_by_name(postgres: Server) -> None:
    with postgres.standby() as replica:
        said = await refusal(PostgresCheckpointStore(replica.url))
    assert type(said) is ReadOnlyStore
    assert "is a read replica" in str(said)


async def test_a_user_without_update_and_delete_on_the_journal_works_runs(postgres: Server) -> None:
    user = postgres.user()
    async with fresh_schema(postgres.url) as schema:
        owner = PostgresCheckpointStore(postgres.url, schema=schema)
        await owner.now()
        at = f"{schema}.agent_runtime_"
        postgres.sql(
            f"GRANT USAGE ON SCHEMA {schema} TO {user}; GRANT SELECT ON {at}store TO {user}; "
            f"GRANT SELECT, INSERT ON {at}journal, {at}inbox TO {user}; "
            f"GRANT SELECT, INSERT, UPDATE ON {at}runs, {at}checkpoints TO {user}"
        )
        store = PostgresCheckpointStore(postgres.url_as(user), schema=schema)
        await write_everything(store, "run-1")
        drafts = [await opened(store, f"run-{i}") for i in range(2, 6)]
        await store.commit([draft.add(b"together") for draft in drafts])
        draft = await land(store, await opened(store, "other"), Draft.of("other").after(Draft.of("other").open()).claim(BOB))
        assert (await store.renew_all([(draft.run_id, draft.guard)]))[0].kind is AnswerKind.OK
        draft = await land(store, draft, draft.end())
        assert (await store.load_many([draft.run_id]))[0] is not None
        assert [row.run_id for row in await store.list_runs(status=RunStatus.DONE)] == ["other"]
        with pytest.raises(StoreRefused, match="permission denied for table agent_runtime_journal"):
            await store.delete(draft.run_id, guard=draft.guard)
        assert len(await store.calls(draft.run_id)) == 3, "a deletion that may not be leaves the run whole"
        await store.close()
        await owner.close()


# URLs and passwords.


ODD_URLS = (
    f"postgresql://me:{SECRET}@127.0.0.1:1/runs",
    f"postgresql://me:{SECRET}@localhost:notaport/runs",
    f"postgresql://me:{SECRET}@/runs?host=/nowhere",
    f"postgresql://me:a#{SECRET}@localhost/runs",
    f"postgresql://me:a/{SECRET}@localhost/runs",
    f"postgresql://me:a?{SECRET}@localhost/runs",
    f"postgresql://me:1/{SECRET}@localhost/runs",
    f"postgresql://me:1?{SECRET}@localhost/runs",
    f"postgresql://me:a@{SECRET}@localhost/runs",
    f"postgresql://me:{SECRET}@127.0.0.1:1/runs?sslmode=never",
    f"postgresql://127.0.0.1:1/runs?password={SECRET}&user=me",
    f"postgres:{SECRET}@localhost",
    f"postgress://me:{SECRET}@localhost/runs",
    f"mysql://me:{SECRET}@localhost/runs",
    f"me:{SECRET}@localhost/runs",
)


@pytest.mark.parametrize("url", ODD_URLS)
async def test_no_error_and_no_name_of_a_store_shows_its_password(url: str) -> None:
    shown = [shown_url(url)]
    try:
        store = open_store(url)
        shown.append(repr(store))
        with suppress(asyncio.TimeoutError):
            await store.latest(Draft.of().run_id)
    except AgentRuntimeError as error:
        shown.append("".join(traceback.format_exception(error)))
    else:
        raise AssertionError("expected nobody to answer there")
    assert [text for text in shown if SECRET in text] == []


def test_a_url_is_shown_with_all_but_its_password() -> None:
    assert shown_url("postgresql://me:x@host:5433/runs?password=y") == "postgresql://me@host:5433/runs"
    assert shown_url("postgres://host/runs") == "postgres://host/runs"
    assert shown_url("sqlite:///runs.db") == "sqlite:///runs.db"


async def test_without_the_driver_a_store_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("postgres://me@127.0.0.1:1/runs")
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(InvalidSetting, match=r"pip install 'durable-agent-runtime\[postgres\]'"):
        await store.latest(Draft.of().run_id)


# What it holds.


async def test_no_session_is_held_between_two_statements(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        await asyncio.gather(*(opened(store, f"run-{i}") for i in range(20)), *(store.now() for _ in range(20)))
        busy = await store._link.read(
            lambda db: db.fetch(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'agent-runtime' AND state <> 'idle'"
                " AND pid <> pg_backend_pid()"
            )
        )
    assert busy[0][0] == 0


# Python says of a loop that ended that it left sessions open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_store_is_used_on_one_event_loop_after_another(postgres: Server) -> None:
    async with fresh_schema(postgres.url) as schema:

        def use(store: PostgresCheckpointStore) -> int:
            async def count() -> int:
                await opened(store, f"run-{len(await store.list_runs())}")
                return len(await store.list_runs())

            return asyncio.run(count())

        store = PostgresCheckpointStore(postgres.url, schema=schema)
        assert [await asyncio.to_thread(use, store) for _ in range(3)] == [1, 2, 3]
        await store.close()
        gc.collect()


async def test_a_session_that_was_ended_while_nobody_used_it_is_replaced(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        draft = await opened(store)
        assert postgres.terminate_backends() >= 1
        answers = [(await store.commit([draft.add(b"one")]))[0].kind for _ in range(3)]
        assert AnswerKind.OK in answers
        assert len(await store.calls(draft.run_id)) == 2
