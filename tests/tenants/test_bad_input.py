"""What is no store that we may write, at the door of each: named, with what to do, without a password, and left as it is."""

from __future__ import annotations

import asyncio
import sqlite3
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agent_runtime import Runs
from agent_runtime.cli import main
from agent_runtime.errors import (
    AgentRuntimeError,
    CheckpointStoreCorrupt,
    ForeignStore,
    InvalidSetting,
    NewerFormat,
    StoreRefused,
    StoreUnavailable,
)
from agent_runtime.journal.records import FORMAT
from agent_runtime.stores import open_store
from agent_runtime.testing.store_contract import Draft
from tests.golden.program import KEY, TENANT
from tests.servers import free_port
from tests.tenants.house import NATIVE, SOME, House

SECRET = "geheim-pa55"
VERBS: dict[str, Callable[[Any], Awaitable[object]]] = {
    "a list": lambda store: store.list_runs(),
    "a write": lambda store: store.commit([Draft.of("new").open()]),
    "the layout": lambda store: store.read_layout(),
    "a migration": lambda store: store.migrate(),
}


async def refusals(url: str, *verbs: str) -> dict[str, AgentRuntimeError]:
    """What each verb, or these, say to whoever opens that URL."""
    found = {}
    for name, verb in VERBS.items():
        if verbs and name not in verbs:
            continue
        store = open_store(url)
        try:
            with pytest.raises(AgentRuntimeError) as refused:
                await verb(store)
            found[name] = refused.value
        finally:
            await store.close()
    return found


def told(error: BaseException) -> str:
    """All that anybody may come to read of it."""
    return "".join(traceback.format_exception(error))


# The way to it.


def elsewhere(house: House, change: str) -> str:
    """A URL with a password that leads to no store of ours."""
    port, user = free_port(), house.postgres.user(password="right") if house.is_postgres else "worker"
    redis = f"redis://{user}:{SECRET}@127.0.0.1:{house.redis.port}/0?prefix={house.name}"
    postgres = house.url().replace("postgres@", f"{user}:{SECRET}@", 1)
    match change, house.is_postgres:
        case "no server", True:
            return postgres.replace(f":{house.postgres.port}/", f":{port}/")
        case "no server", False:
            return redis.replace(f":{house.redis.port}/", f":{port}/")
        case "another password", True:
            return postgres
        case "another password", False:
            return redis
        case _:
            return postgres.replace("/postgres?", "/no_such_database?").replace(SECRET, "right")


@pytest.mark.parametrize("house", ["postgres", "psycopg", "redis"], indirect=True)
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ("no server", StoreUnavailable, "does not answer"),
        ("another password", StoreRefused, "password"),
        ("another database", StoreRefused, "no_such_database"),
    ],
)
async def test_a_way_that_leads_nowhere_is_named_without_the_password(
    house: House, change: str, error: type[Exception], said: str
) -> None:
    if (house.kind, change) == ("redis", "another database"):
        change, said = "another password", "password"  # Redis numbers its databases, and has all of them
    url = elsewhere(house, change)
    for name, refused in (await refusals(url, "a write", "the layout")).items():
        assert isinstance(refused, error), (name, refused)
        assert said in str(refused)
        assert "127.0.0.1" in str(refused)
        assert SECRET not in told(refused)


@pytest.mark.parametrize(
    "url",
    ["", "runs.db", "sqlite:runs.db", "sqlite://", "mysql://h/d", "postgresql+mysql://h/d", f"postgres:/u:{SECRET}@h", "redis://",
     f"http://u:{SECRET}@h/d", f"postgresql://u:{SECRET}@h@h/d", f"redis:u:{SECRET}@h", "memory://x",
     f"postgresql+asyncpg:{SECRET}@h"],
)  # fmt: skip
def test_what_is_no_url_of_a_store_is_refused_by_every_command(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["migrate", "--check"], ["runs"], ["verify"]):
        if url:
            assert main([*words, "--store", url]) == 1
            said = capsys.readouterr().err
            assert said.startswith("ERROR InvalidSetting: ")
            assert SECRET not in said
    with pytest.raises(InvalidSetting):
        open_store(url)


# What is there.


def put_foreign(house: House) -> None:
    """Something of another program, where a store of ours would be."""
    if house.is_file:
        with sqlite3.connect(house.file()) as db:
            db.execute("PRAGMA application_id = 77")
            db.execute("CREATE TABLE runs (theirs)")
        db.close()
    elif house.is_postgres:
        at = f"{house.schema()}.agent_runtime_"
        house.postgres.sql(f"CREATE SCHEMA {house.schema()}; CREATE TABLE {at}runs (id serial, started timestamptz)")
    else:
        house.redis.tell("HSET", f"{house.name}.t1:store", "cart", "bread")


def put_half(house: House) -> None:
    """A store of ours from which somebody took a part, or gave it another form."""
    house.put_golden(1)
    if house.is_file:
        with sqlite3.connect(house.file()) as db:
            db.execute("ALTER TABLE inbox RENAME TO outbox")
        db.close()
    elif house.is_postgres:
        house.postgres.sql(f"ALTER TABLE {house.schema()}.agent_runtime_inbox RENAME TO outbox")
    else:
        house.redis.tell("HDEL", f"{house.name}.t1:store", "format")


def put_bytes(house: House) -> None:
    """What is not even of the right kind."""
    if house.is_file:
        house.file().write_bytes(bytes(range(256)) * 64)
    elif house.is_postgres:
        at = f"{house.schema()}.agent_runtime_"
        house.postgres.sql(f"CREATE SCHEMA {house.schema()}; CREATE VIEW {at}store AS SELECT 'shelf'::text AS format")
    else:
        house.redis.tell("SET", f"{house.name}.t1:store", "x" * 100)


def put_newer(house: House) -> None:
    house.put_golden(1)
    if house.is_file:
        with sqlite3.connect(house.file()) as db:
            db.execute("PRAGMA user_version = 99")
            db.execute("CREATE TABLE new_in_99 (x)")
        db.close()
    elif house.is_postgres:
        at = f"{house.schema()}.agent_runtime_"
        house.postgres.sql(f"UPDATE {at}store SET format = 99; ALTER TABLE {at}runs ADD COLUMN new_in_99 text")
    else:
        house.redis.tell("HSET", f"{house.name}.t1:store", "format", "99")


@pytest.mark.parametrize("house", SOME, indirect=True)
@pytest.mark.parametrize(
    ("put", "error", "said"),
    [
        (put_foreign, ForeignStore, "name another"),
        (put_half, ForeignStore, "name another"),
        (put_bytes, ForeignStore, "name another"),
        (put_newer, NewerFormat, "has layout 99, and this version knows 2; use the newer version"),
    ],
)
async def test_what_is_no_store_of_this_version_is_refused_by_every_verb_and_left_as_it_is(
    house: House, put: Callable[[House], None], error: type[Exception], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(house)
    before = house.content()
    for name, refused in (await refusals(house.url())).items():
        assert type(refused) is error, (name, refused)
        assert said in str(refused), name
    assert await asyncio.to_thread(main, ["migrate", "--store", house.url()]) == 1
    assert f"ERROR {error.__name__}: " in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["doctor", "--store", house.url()]) == 0
    assert said in capsys.readouterr().out
    assert house.content() == before


@pytest.mark.parametrize("index", ["unfinished", "runs", "used", "ended"])
@pytest.mark.parametrize("house", ["redis"], indirect=True)
async def test_another_programs_key_where_an_index_belongs_is_refused_before_anything_is_written(
    house: House, index: str
) -> None:
    store = house.open()
    await store.list_runs()
    for bucket in range(64):
        house.redis.tell("SET", f"{house.name}.t1:{{{bucket:02}}}:{index}", "theirs")
    before = house.content()
    with pytest.raises(ForeignStore, match="holds something else under a key of ours"):
        await store.commit([Draft.of("new").open()])
    assert house.content() == before


# What is in it.


def edit_row(house: House, run_id: str, column: str, value: str) -> None:
    """Change a row by hand."""
    if house.is_file:
        with sqlite3.connect(house.file()) as db:
            assert db.execute(f"UPDATE runs SET {column} = ? WHERE run_id = ?", (value, run_id)).rowcount == 1
        db.close()
    elif house.is_postgres:
        at = f"{house.schema()}.agent_runtime_runs"
        house.postgres.sql(f"UPDATE {at} SET {column} = '{value}' WHERE run_id = '{run_id}'")
    else:
        [key] = house.redis.tell("KEYS", f"{house.name}.t1:*:row:{run_id}")
        house.redis.tell("HSET", key, column, value)


@pytest.mark.parametrize("house", NATIVE, indirect=True)
async def test_rows_that_somebody_edited_are_named_as_corrupt_and_hide_no_other(house: House) -> None:
    house.put_golden(1)
    edits = {
        "done": ("status", "10"),
        "approved": ("step", "7"),
        "failed": ("tenant", "another"),
        "flow": ("number", "3"),
        "interrupted": ("key_id", "k9"),
    }
    for run_id, (column, value) in edits.items():
        edit_row(house, run_id, column, value)
    store = house.open()
    runs = Runs(store, checkpoint_key=KEY, tenant=TENANT)
    assert [info.run_id for info in await runs.list(status="corrupt")] == sorted(edits)
    assert [verified.run_id for verified in await runs.verify()] == sorted(edits)
    for run_id in edits:
        with pytest.raises(CheckpointStoreCorrupt, match=f"'{run_id}'"):
            await runs.show(run_id)
    await store.migrate()
    again = Runs(house.open(), checkpoint_key=KEY, tenant=TENANT)
    assert [each.run_id for each in await again.verify()] == sorted(edits), "a migration mends nothing and hides nothing"


@pytest.mark.parametrize("house", NATIVE, indirect=True)
async def test_a_run_of_a_newer_format_is_named_by_its_number_and_hides_no_other(house: House) -> None:
    house.put_golden(1)
    edit_row(house, "done", "format", "99")
    runs = Runs(house.open(), checkpoint_key=KEY, tenant=TENANT)
    with pytest.raises(NewerFormat, match=f"format 99, and this version knows {FORMAT}"):
        await runs.show("done")
    assert [verified.run_id for verified in await runs.verify()] == ["done"]
