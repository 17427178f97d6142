"""Makes golden stores, by the code beside it: `python -m tests.golden.make FOLDER`, once for each layout that is released.

Each store holds the same runs, one in each state that a run can be left in. What is made stays in the repository for ever,
and `test_golden.py` opens it with the code of its day.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent_runtime import Runs, lease
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import RecoveryNeedsDecision, RunQuarantined, StepLimitReached
from agent_runtime.executor import Executor
from agent_runtime.flow.runner import FlowRunner
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.lease import ProcessMark
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.stores.postgres_schema import TABLES, schema_sql
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from tests.bench import Delegate, KillPlan, Worker, expect_death
from tests.golden.program import CTX, HOSTILE, KEY, TENANT, Ask, Order, Tools, orders
from tests.postgres.bench import session
from tests.redis_servers import RedisServer, redis_origins
from tests.redis_store.bench import store_on
from tests.servers import own_origins, start

PREFIX = "golden"
OF_LOOP: dict[str, Any] = {"checkpoint_key": KEY, "tenant": TENANT, "ctx": CTX, "lease_seconds": 1.0, "heartbeat_seconds": 0.3}
OF_FLOW = {name: value for name, value in OF_LOOP.items() if name != "ctx"}


def worker_on(store: CheckpointStore) -> Worker:
    worker = Worker.__new__(Worker)
    Delegate.__init__(worker, store.reopen())
    worker.is_dead = False
    worker.plan = KillPlan.of(worker)
    return worker


async def fill(store: CheckpointStore) -> None:
    """Put a run of each state into an empty store."""
    tools = Tools()
    runs = Runs(store, checkpoint_key=KEY, tenant=TENANT)
    workers: list[Worker] = []

    def worker() -> Worker:
        workers.append(worker_on(store))
        return workers[-1]

    async def work(run_id: str, *asked: str, **options: Any) -> Any:
        return await worker().run(Ask(*asked), tools.registry, run_id, **{**OF_LOOP, **options})

    async def die(run_id: str, point: CrashPoint, *asked: str, seq: int = 0) -> None:
        dying = worker().killed_at(point, seq)
        await dying.run_and_die(Ask(*asked), tools.registry, run_id, **OF_LOOP)

    def runner(dying: Worker) -> FlowRunner:
        return FlowRunner(Executor(tools.registry), checkpoints=dying, crash=dying.plan, **OF_FLOW)

    await work("done", "send", "charge")
    await work(HOSTILE, "send")
    await die("interrupted", CrashPoint.AFTER_DECIDE, "send", "charge", seq=1)
    await die("interrupted in a call", CrashPoint.AFTER_CALL, "send")
    await die("doubtful", CrashPoint.AFTER_CALL, "charge")
    await die("blocked", CrashPoint.AFTER_CALL, "charge")
    await refused(worker().recover(Ask("charge"), tools.registry, "blocked", **OF_LOOP), RecoveryNeedsDecision)
    await work("paused", "refund")
    await work("answered", "refund")
    await runs.approve((await runs.pending("answered"))[0], by="bo", note="so be it")
    await work("approved", "refund")
    await runs.approve((await runs.pending("approved"))[0], by="bo")
    await worker().recover(Ask("refund"), tools.registry, "approved", **OF_LOOP)
    await refused(work("failed", "send", "send", max_steps=1), StepLimitReached)
    await die("cancelled", CrashPoint.AFTER_DECIDE, "send")
    await runs.cancel("cancelled", by="ana", why="enough")
    await work("deleted", "send")
    await runs.delete("deleted", by="ana")
    await die("quarantined", CrashPoint.AFTER_CALL, "send")
    dying = worker().killed_at(CrashPoint.AFTER_CALL)
    await dying.recover_and_die(Ask("send"), tools.registry, "quarantined", **OF_LOOP)
    last = worker().recover(Ask("send"), tools.registry, "quarantined", max_attempts=1, **OF_LOOP)
    await refused(last, RunQuarantined)
    await runner(worker()).run(orders(), Order(), run_id="flow", ctx=CTX)
    dying = worker().killed_at(CrashPoint.AFTER_CALL, 1)
    await expect_death(runner(dying).run(orders(), Order(), run_id="interrupted flow", ctx=CTX))
    for each in workers:
        await each.inner.close()


async def refused(work: Any, error: type[Exception]) -> None:
    try:
        await work
    except error:
        return
    raise AssertionError(f"expected {error.__name__}")


# As files.


async def make_sqlite(file: Path) -> None:
    with TemporaryDirectory() as folder:
        store = SQLiteCheckpointStore(Path(folder) / "runs.db")
        await fill(store)
        await store.close()
        shutil.copyfile(Path(folder) / "runs.db", file)


async def dump_postgres() -> str:
    server = start(own_origins()[0])
    try:
        store = PostgresCheckpointStore(server.url)
        await fill(store)
        await store.close()
        lines = [schema_sql(), "BEGIN;"]
        async with session(server.url) as connection:
            for table in TABLES[1:]:
                for row in await connection.fetch(f"SELECT * FROM agent_runtime_{table} ORDER BY 1"):
                    written = {name: value for name, value in row.items() if name != "ended_at"}  # which the server makes
                    names, values = ", ".join(written), ", ".join(map(literal, written.values()))
                    lines.append(f"INSERT INTO agent_runtime_{table} ({names}) OVERRIDING SYSTEM VALUE VALUES ({values});")
            for table, column in (("runs", "key"), ("inbox", "id")):
                newest = await connection.fetchval(f"SELECT coalesce(max({column}), 0) FROM agent_runtime_{table}")
                lines.append(f"ALTER TABLE agent_runtime_{table} ALTER COLUMN {column} RESTART WITH {newest + 1};")
        return "\n".join([*lines, "COMMIT;", ""])
    finally:
        server.close()


def literal(value: object) -> str:
    match value:
        case None:
            return "NULL"
        case bytes():
            return f"'\\x{value.hex()}'"
        case int():
            return str(value)
        case _:
            return "'" + str(value).replace("'", "''") + "'"


READS = {
    b"string": ("GET", ()), b"hash": ("HGETALL", ()), b"list": ("LRANGE", (0, -1)), b"set": ("SMEMBERS", ()),
    b"zset": ("ZRANGE", (0, -1, "WITHSCORES")),
}  # fmt: skip


async def dump_redis() -> str:
    with RedisServer(redis_origins()[0].program, appendonly="no") as server:
        store = store_on(server.url, prefix=PREFIX)
        await fill(store)
        await store.close()
        kept = {}
        with server.client() as client:
            for key in sorted(client.keys()):
                kind = client.type(key)
                command, rest = READS[kind]
                found = client.execute_command(command, key, *rest)
                kept[key.decode()] = {"type": kind.decode(), "value": plain(found)}
        return json.dumps(kept, indent=0, ensure_ascii=False) + "\n"


def plain(found: Any) -> Any:
    """Values as base64, in an order that stays."""
    match found:
        case bytes():
            return base64.b64encode(found).decode()
        case dict():
            return {name.decode("latin-1"): plain(value) for name, value in sorted(found.items())}
        case set():
            return sorted(map(plain, found))
        case float():
            return found
        case _:
            return [plain(value) for value in found]


def nobody(pid: int) -> ProcessMark:
    """Whose runs these are: no process of any host."""
    return ProcessMark("golden", "0" * 8, "pid:[1]", 1, "1")


def main(folder: Path) -> None:
    vars(lease)["_mark_of"] = nobody
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(make_sqlite(folder / "sqlite.db"))
    (folder / "postgres.sql").write_text(asyncio.run(dump_postgres()), encoding="utf-8")
    (folder / "redis.json").write_text(asyncio.run(dump_redis()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
