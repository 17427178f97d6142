"""A run's parts live and die together: where any of them is missing the run is corrupt, never empty and never another."""

from __future__ import annotations

import sqlite3
import struct
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_runtime import Runs
from agent_runtime.errors import CheckpointConflict, CheckpointNotFound, CheckpointStoreCorrupt
from agent_runtime.ids import RunId
from agent_runtime.journal.records import StoredRecord, StoredRun
from agent_runtime.journal.seal import open_run
from agent_runtime.journal.store import AnswerKind, CheckpointStore, Guard
from agent_runtime.runs import NAMELESS
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.draft import RING, TENANT
from tests.postgres.bench import land, session
from tests.redis_servers import RedisServer
from tests.redis_store.bench import operator, store_on
from tests.servers import Server, fresh_schema

RUN, NEAR = RunId("run-1"), RunId("run-2")
RECORDS = 6


class Surgeon(ABC):
    """Somebody who may write past the store, and takes parts of a run away."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store

    @abstractmethod
    async def cut_record(self, number: int) -> None: ...

    @abstractmethod
    async def put_record(self, body: bytes) -> None:
        """A first record, where there is none."""

    @abstractmethod
    async def cut_state(self) -> None: ...

    @abstractmethod
    async def cut_row(self) -> None: ...


class InMemory(Surgeon):
    store: MemoryCheckpointStore

    async def cut_record(self, number: int) -> None:
        del self.store._runs[RUN].records[number - 1]

    async def put_record(self, body: bytes) -> None:
        self.store._runs[RUN].records.append(StoredRecord(1, 1, 1, "", 0, body, bytes(32)))

    async def cut_state(self) -> None:
        self.store._runs[RUN].checkpoint = None

    async def cut_row(self) -> None:
        raise AssertionError("a run in memory is one thing")


class OnFile(Surgeon):
    def __init__(self, store: CheckpointStore, path: Path) -> None:
        super().__init__(store)
        self.path = path

    async def cut_record(self, number: int) -> None:
        self._tell(f"DELETE FROM journal WHERE key = 1 AND number = {number}")

    async def put_record(self, body: bytes) -> None:
        self._tell(f"INSERT INTO journal VALUES (1, 1, 1, 1, '', 0, x'{body.hex()}', zeroblob(32))")

    async def cut_state(self) -> None:
        self._tell("DELETE FROM checkpoints WHERE key = 1")

    async def cut_row(self) -> None:
        self._tell("DELETE FROM runs WHERE key = 1")

    def _tell(self, sql: str) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            assert db.execute(sql).rowcount == 1


class OnPostgres(Surgeon):
    def __init__(self, store: CheckpointStore, url: str, schema: str) -> None:
        super().__init__(store)
        self.url = url
        self.at = f"{schema}.agent_runtime_"

    async def cut_record(self, number: int) -> None:
        await self._tell(f"DELETE FROM {self.at}journal WHERE place = (1::bigint << 24) + {number}")

    async def put_record(self, body: bytes) -> None:
        columns = "(place, epoch, attempt, kind, call, body, seal)"
        values = f"((1::bigint << 24) + 1, 1, 0, 1, '', '\\x{body.hex()}', '\\x00')"
        await self._tell(f"INSERT INTO {self.at}journal {columns} VALUES {values}", "INSERT 0 1")

    async def cut_state(self) -> None:
        await self._tell(f"DELETE FROM {self.at}checkpoints WHERE key = 1")

    async def cut_row(self) -> None:
        await self._tell(f"DELETE FROM {self.at}runs WHERE key = 1")

    async def _tell(self, sql: str, done: str = "DELETE 1") -> None:
        async with session(self.url) as connection:
            assert await connection.execute(sql) == done


class OnRedis(Surgeon):
    def __init__(self, store: CheckpointStore, server: RedisServer, prefix: str) -> None:
        super().__init__(store)
        self.server = server
        self.prefix = prefix

    async def cut_record(self, number: int) -> None:
        key = await self._key("log")
        self.server.tell("LSET", key, str(number - 1), "gone")
        assert self.server.tell("LREM", key, "1", "gone") == 1

    async def put_record(self, body: bytes) -> None:
        key = (await self._key("row")).replace(":row:", ":log:")
        record = struct.pack(">QQHQIIH", 1, 1, 1, 0, 0, len(body), 32) + body + bytes(32)
        assert self.server.tell("RPUSH", key, record) == 1

    async def cut_state(self) -> None:
        assert self.server.tell("DEL", await self._key("state")) == 1

    async def cut_row(self) -> None:
        assert self.server.tell("DEL", await self._key("row")) == 1

    async def _key(self, part: str) -> str:
        async with operator(self.server) as client:
            [key] = [key async for key in client.scan_iter(match=f"{self.prefix}:*:{part}:{RUN}", count=1000)]
        found: str = key.decode()
        return found


STORES = ("memory", "sqlite", "aiosqlite", "postgres", "redis")
WITH_ROWS = STORES[1:]


@pytest.fixture
async def surgeon(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Surgeon]:
    """One on each store, which has a run of six records with a state, and another run beside it."""
    path, kind = tmp_path / "runs.db", request.param
    if kind == "postgres":
        server: Server = request.getfixturevalue("one_postgres")
        async with fresh_schema(server.url) as schema:
            postgres = PostgresCheckpointStore(server.url, schema=schema)
            yield await filled(OnPostgres(postgres, server.url, schema))
            await postgres.close()
        return
    made: Surgeon
    if kind == "redis":
        redis_server: RedisServer = request.getfixturevalue("redis_server")
        redis = store_on(redis_server.url)
        made = OnRedis(redis, redis_server, redis.prefix)
    elif kind == "memory":
        made = InMemory(MemoryCheckpointStore())
    elif kind == "sqlite":
        made = OnFile(SQLiteCheckpointStore(path), path)
    else:
        made = OnFile(SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{path}"), path)
    yield await filled(made)
    await made.store.close()


async def filled(surgeon: Surgeon) -> Surgeon:
    for run_id in (RUN, NEAR):
        draft = Draft.of(run_id)
        draft = await land(surgeon.store, draft, draft.open(b"one", b"two"))
        await land(surgeon.store, draft, draft.add(b"three", b"four", checkpoint=b"state"))
    run = await load(surgeon.store)
    assert run is not None
    assert len(run.records) == RECORDS
    open_run(RING, run, tenant=TENANT)
    return surgeon


async def load(store: CheckpointStore, run_id: RunId = RUN) -> StoredRun | None:
    [run] = await store.load_many([run_id])
    return run


async def assert_corrupt(store: CheckpointStore, found: str) -> None:
    """It is corrupt for whoever opens it, and stays as it is; the run beside it is whole."""
    operator = Runs(store, checkpoint_key=RING, tenant=TENANT)
    [verified] = await operator.verify(RUN)
    assert not verified.holds
    assert found in verified.why
    with pytest.raises(CheckpointStoreCorrupt):
        await operator.delete(RUN, by="ana", force=True)
    near = await load(store, NEAR)
    assert near is not None
    open_run(RING, near, tenant=TENANT)


on_each_store = pytest.mark.parametrize("surgeon", STORES, indirect=True)
on_each_store_with_rows = pytest.mark.parametrize("surgeon", WITH_ROWS, indirect=True)


@on_each_store
@pytest.mark.parametrize("number", [1, 3, RECORDS], ids=["the first", "one in the middle", "the last"])
async def test_a_run_without_one_of_its_records_is_corrupt(surgeon: Surgeon, number: int) -> None:
    await surgeon.cut_record(number)
    await assert_corrupt(surgeon.store, f"its row counts {RECORDS} records and {RECORDS - 1} are there")


@on_each_store
async def test_a_run_without_any_record_is_corrupt_and_no_new_one(surgeon: Surgeon) -> None:
    for number in range(RECORDS, 0, -1):
        await surgeon.cut_record(number)
    await assert_corrupt(surgeon.store, f"its row counts {RECORDS} records and 0 are there")
    [answer] = await surgeon.store.commit([Draft.of(RUN).open()])
    assert answer.kind is AnswerKind.FENCED


@on_each_store
async def test_a_run_without_its_state_is_corrupt(surgeon: Surgeon) -> None:
    await surgeon.cut_state()
    await assert_corrupt(surgeon.store, "its checkpoint is not the one its journal names")


@on_each_store_with_rows
async def test_a_run_without_its_row_is_corrupt_to_whoever_verifies_it(surgeon: Surgeon) -> None:
    await surgeon.cut_row()
    operator = Runs(surgeon.store, checkpoint_key=RING, tenant=TENANT)
    if isinstance(surgeon, OnRedis):
        with pytest.raises(CheckpointStoreCorrupt, match="a part of a run whose row is gone"):
            await load(surgeon.store)
    else:
        [named] = [each for each in await operator.verify() if each.run_id == NAMELESS]
        assert "from number 1 on, and its row is gone" in named.why
    [verified] = await operator.verify(RUN)
    assert "row is gone" in verified.why
    with pytest.raises(CheckpointNotFound):
        await operator.verify("another")


# Of a deleted run.


async def deleted(surgeon: Surgeon) -> None:
    run = await load(surgeon.store)
    assert run is not None
    row = run.row
    answer = await surgeon.store.delete(RUN, guard=Guard(row.epoch, row.owner, row.number, row.head))
    assert answer.kind is AnswerKind.OK


@on_each_store
async def test_a_deleted_run_is_told_of_as_deleted(surgeon: Surgeon) -> None:
    await deleted(surgeon)
    with pytest.raises(CheckpointConflict, match="was deleted, and its id is not used again"):
        await Runs(surgeon.store, checkpoint_key=RING, tenant=TENANT).show(RUN)


@on_each_store
async def test_a_deleted_run_of_which_records_are_left_is_corrupt(surgeon: Surgeon) -> None:
    await deleted(surgeon)
    await surgeon.put_record(b"one that somebody put back")
    with pytest.raises(CheckpointStoreCorrupt):
        await Runs(surgeon.store, checkpoint_key=RING, tenant=TENANT).show(RUN)
