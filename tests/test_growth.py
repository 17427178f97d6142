"""A step costs the same at 10 and at 1,000: commits, reads, statements, rows and bytes, counted."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_runtime import Runs
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.store import Roomy
from agent_runtime.messages import Message, Reply, ToolCall
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.stores.redis import RedisCheckpointStore
from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY, Asked, Bench, Counting, Place, Script, Worker
from tests.postgres.bench import fresh_store as fresh_postgres
from tests.redis_servers import RedisServer
from tests.redis_store.bench import fresh_store as fresh_redis
from tests.redis_store.bench import keys_of
from tests.servers import Server

KILOBYTE = "x" * 1000


def registry_giving(result: str) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(idempotent=True)
    async def act(at: int) -> str:
        return result

    return registry


class Turns:
    """A model that asks for one call a turn, and does nothing that grows with the conversation."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.asked = 0

    async def reply(self, messages: Sequence[Message], tools: object) -> Reply:
        self.asked += 1
        at = self.asked - 1
        return Reply("done") if at == self.turns else Reply("", [ToolCall("a", "act", {"at": at % 10})])


async def run_turns(store: Any, turns: int, result: str, run_id: str = "run") -> None:
    await run_tool_loop(
        Turns(turns), registry_giving(result), "go", run_id=run_id, checkpoints=store, checkpoint_key=KEY, max_steps=10_000
    )


async def stored_bytes(folder: Path, turns: int) -> int:
    """What a run of so many turns takes in its file, with a kilobyte more in each turn."""
    path = folder / f"{turns}.db"
    store = SQLiteCheckpointStore(path)
    await run_turns(store, turns, KILOBYTE)
    await store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("VACUUM")
        size: int = db.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size").fetchone()[0]
        return size


async def test_doubling_the_turns_at_most_doubles_what_is_stored_and_a_little(tmp_path: Path) -> None:
    sizes = {turns: await stored_bytes(tmp_path, turns) for turns in (50, 100, 200)}
    assert sizes[100] <= 2.5 * sizes[50]
    assert sizes[200] <= 2.5 * sizes[100]
    assert sizes[200] - sizes[100] <= 100 * (1000 + 1000), "a turn costs its kilobyte and less than another"


def file_size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))


async def test_doubling_the_turns_at_most_doubles_what_is_stored_in_postgres(one_postgres: Server) -> None:
    sizes = []
    for turns in (50, 100):
        async with fresh_postgres(one_postgres) as store:
            await run_turns(store, turns, KILOBYTE)
            sizes.append(size_in_postgres(one_postgres, store))
    assert sizes[1] <= 2.5 * sizes[0]
    assert sizes[1] - sizes[0] <= 50 * (1000 + 1500), "pages are filled, indexes included, at four fifths or more"


def size_in_postgres(server: Server, store: PostgresCheckpointStore) -> int:
    """What all tables and indexes of the store take."""
    ours = f"relkind = 'r' AND relnamespace = '{store._schema}'::regnamespace"
    sql = f"SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE {ours}"
    return int(server.sql(sql))


async def test_doubling_the_turns_at_most_doubles_what_is_stored_in_redis(redis_server: RedisServer) -> None:
    sizes = []
    for turns in (50, 100):
        async with fresh_redis(redis_server) as store:
            await run_turns(store, turns, KILOBYTE)
            sizes.append(await size_in_redis(redis_server, store))
    assert sizes[1] <= 2.5 * sizes[0]
    assert sizes[1] - sizes[0] <= 50 * (1000 + 1000), "a turn costs its kilobyte and less than another"


async def size_in_redis(server: RedisServer, store: RedisCheckpointStore) -> int:
    """What all keys of the store take."""
    return sum(server.tell("MEMORY", "USAGE", key, "SAMPLES", "0") for key in await keys_of(server, store))


# What a purge gives back.

MANY = 8


async def fill(store: Any, first: int) -> None:
    for n in range(first, first + MANY):
        await run_turns(store, 1, "x" * 20_000, f"run-{n}")


async def purge(store: Any) -> None:
    report = await Runs(store, checkpoint_key=KEY).purge(0, by="ana")
    assert (len(report.removed), report.left) == (MANY, [])


@pytest.mark.parametrize("by", ["sqlite3", "aiosqlite"])
async def test_a_purge_and_a_vacuum_give_the_room_in_a_file_back(tmp_path: Path, by: str) -> None:
    path = tmp_path / "runs.db"
    native, other = SQLiteCheckpointStore(path), SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{path}")
    store = native if by == "sqlite3" else other
    assert isinstance(store, Roomy)
    await fill(store, 0)
    full = file_size(path)
    await purge(store)
    assert await store.vacuum() >= 0.8 * MANY * 20_000
    assert file_size(path) < 80_000 < MANY * 20_000 < full
    await fill(store, MANY)
    await purge(store)
    assert len(await store.list_runs(status=RunStatus.DELETED)) == 2 * MANY, "the marks stay"
    await native.close()
    await other.close()


async def test_without_a_vacuum_the_room_in_a_file_is_used_again(tmp_path: Path) -> None:
    store = SQLiteCheckpointStore(tmp_path / "runs.db")
    sizes = []
    for first in range(0, 3 * MANY, MANY):
        await fill(store, first)
        sizes.append(await pages_of(store))
        await purge(store)
    assert sizes[2] <= 1.1 * sizes[0]
    await store.close()


async def pages_of(store: SQLiteCheckpointStore) -> int:
    with closing(sqlite3.connect(store.path)) as db:
        found: int = db.execute("PRAGMA page_count").fetchone()[0]
        return found


async def test_what_a_purge_leaves_in_redis_are_the_marks_alone(redis_server: RedisServer) -> None:
    async with fresh_redis(redis_server) as store:
        await fill(store, 0)
        full = await size_in_redis(redis_server, store)
        await purge(store)
        assert full > MANY * 20_000
        assert await size_in_redis(redis_server, store) < MANY * 1500


async def test_what_a_purge_frees_in_postgres_is_used_again_once_it_is_vacuumed(one_postgres: Server) -> None:
    async with fresh_postgres(one_postgres) as store:
        sizes = []
        for first in range(0, 3 * MANY, MANY):
            await fill(store, first)
            sizes.append(size_in_postgres(one_postgres, store))
            await purge(store)
            one_postgres.sql(f"VACUUM {store._schema}.agent_runtime_journal")
        assert sizes[2] <= 1.2 * sizes[0]


@pytest.mark.parametrize("at_once", [1, 3])
async def test_a_step_is_two_commits_and_one_that_waits_for_siblings_is_one_more_for_each(place: Place, at_once: int) -> None:
    step: list[Asked] = [("charge_i", {"amount": at}) for at in range(at_once)]

    async def commits(steps: int, run_id: str) -> int:
        counting, worker = Counting(place.open()), Worker(place)
        worker.inner = counting
        await worker.run(Script(*[step] * steps, "done"), Bench().registry, run_id)
        assert set(counting.verbs) == {"commit"}, "a run that goes well reads nothing"
        return counting.verbs["commit"]

    few, many = await commits(3, "few"), await commits(13, "many")
    assert 2 * 10 <= many - few <= (1 + at_once) * 10
    if at_once == 1:
        assert many - few == 2 * 10


class Listening(SQLiteCheckpointStore):
    """A SQLite store that counts the statements which reach its file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.statements: Counter[str] = Counter()

    def _connect(self, *, wait_seconds: float = 0) -> sqlite3.Connection:
        db = super()._connect(wait_seconds=wait_seconds)
        db.set_trace_callback(lambda sql: self.statements.update([" ".join(sql.split()[:3])]))
        return db


class Watched(Turns):
    """Notes, at some of its turns, all that was counted until then."""

    def __init__(self, store: Listening, turns: Sequence[int]) -> None:
        super().__init__(max(turns))
        self.store, self.at = store, turns
        self.counts: dict[int, Counter[str]] = {}

    async def reply(self, messages: Sequence[Message], tools: object) -> Reply:
        if self.asked in self.at:
            self.counts[self.asked] = Counter(self.store.statements)
        return await super().reply(messages, tools)


async def test_step_1000_takes_no_more_statements_rows_or_bytes_than_step_10(tmp_path: Path) -> None:
    store = Listening(tmp_path / "runs.db")
    model = Watched(store, (10, 20, 990, 1000))
    await run_tool_loop(
        model, registry_giving("fine"), "go", run_id="run", checkpoints=store, checkpoint_key=KEY, max_steps=2_000
    )
    early, late = model.counts[20] - model.counts[10], model.counts[1000] - model.counts[990]
    assert late == early
    assert early.total() > 0
    [run] = await store.load_many([RunId("run")])
    assert run is not None
    sizes: dict[int, tuple[int, int]] = {}
    for record in run.records:
        seq = int(record.call.split("/")[0]) if record.call else -1
        rows, size = sizes.get(seq, (0, 0))
        sizes[seq] = rows + 1, size + len(record.body) + len(record.seal)
    for seq in (989, 990, 998):
        assert sizes[seq][0] == sizes[9][0]
        assert sizes[seq][1] <= sizes[9][1] + 8, "but for the digits of its number"
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("SELECT count(*) FROM checkpoints").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM runs").fetchone() == (1,)
    await store.close()


async def test_a_step_stores_little_more_than_what_was_said_in_it() -> None:
    counting = Counting(MemoryCheckpointStore())
    await run_turns(counting, 20, "r" * 100)
    [run] = await counting.load_many([RunId("run")])
    assert run is not None
    of_a_step = [record for record in run.records if record.call in ("9", "9/model")]
    assert sum(len(record.body) for record in of_a_step) <= 100 + 300


async def test_recovering_a_long_run_reads_it_once_and_writes_a_claim_and_what_is_left(tmp_path: Path) -> None:
    place = Place("sqlite", tmp_path)
    worker, model = Worker(place), Turns(300)

    async def dying(messages: Sequence[Message], tools: object) -> Reply:
        if model.asked == 300:
            worker.die()
        return await model.reply(messages, tools)

    await worker.run_and_die(dying, registry_giving("fine"), max_steps=1000)
    counting = Counting(place.open())
    result = await recover_tool_loop(
        model, registry_giving("fine"), "run", checkpoints=counting, checkpoint_key=KEY, max_steps=1000
    )
    assert (result.steps, model.asked) == (300, 301)
    assert counting.verbs == Counter(load_many=1, commit=3)
    assert sum(len(append.records) for append in counting.appends) == 4
    await place.close()


async def test_a_lone_run_in_a_file_is_committed_without_a_task(tmp_path: Path) -> None:
    tasks = 0

    def count(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal tasks
        tasks += 1
        return asyncio.Task(coro, loop=loop, **options)

    on_a_quick_disk = ManualClock()  # no commit takes time by it: a slow disk gets them on a thread
    store, bench = SQLiteCheckpointStore(tmp_path / "runs.db", clock=on_a_quick_disk), Bench()
    steps: list[list[Asked]] = [[("lookup", {"name": str(at)})] for at in range(60)]
    model = Script(*steps, "done")
    loop = asyncio.get_running_loop()
    loop.set_task_factory(count)
    try:
        await run_tool_loop(model, bench.registry, "go", run_id="run", checkpoints=store, checkpoint_key=KEY)
    finally:
        loop.set_task_factory(None)
        await store.close()
    assert tasks < 10, "of 120 commits"
