"""While a model or a tool works, nothing of a store is held: no connection is lent, no transaction is open, no file locked."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec
from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.tool_loop import run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY, until
from tests.redis_servers import RedisServer
from tests.redis_store.bench import store_on
from tests.servers import Server, fresh_schema

RUNS = 5


async def assert_nothing_is_held(store: CheckpointStore, held: Callable[[], object]) -> None:
    """Five runs wait in their model at the same time, then in their tool: at either time nothing is held."""
    waiting, go = list[str](), {"model": asyncio.Event(), "tool": asyncio.Event()}
    registry = ToolRegistry()

    async def wait_in(what: str) -> None:
        waiting.append(what)
        await go[what].wait()

    @registry.tool
    async def mail() -> str:
        await wait_in("tool")
        return "sent"

    async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        if messages[-1].role == "tool":
            return Reply("done")
        await wait_in("model")
        return Reply(tool_calls=[ToolCall("a", "mail", {})])

    running = asyncio.gather(
        *(
            run_tool_loop(model, registry, "go", run_id=f"run-{i}", checkpoints=store, checkpoint_key=KEY, commits="each")
            for i in range(RUNS)
        )
    )
    for what in ("model", "tool"):
        await until(lambda what=what: waiting.count(what) == RUNS)  # type: ignore[misc]  # mypy cannot infer it
        await until(lambda: not held())  # the last answer may still be on its way back
        assert not any(held() for _ in range(20))
        go[what].set()
    assert [result.status for result in await running] == ["done"] * RUNS


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_five_runs_share_a_pool_of_one_connection(one_postgres: Server, driver: str) -> None:
    url = one_postgres.url.replace(":", f"+{driver}:", 1)
    engine = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=20)
    async with fresh_schema(one_postgres.url) as schema:
        store = SQLAlchemyCheckpointStore(engine=engine, schema=schema)
        pool: Any = engine.sync_engine.pool
        await assert_nothing_is_held(store, pool.checkedout)
        assert pool.checkedin() == 1
        await store.close()
        await engine.dispose()


async def test_five_runs_share_four_connections_to_redis_and_leave_no_transaction_open(redis_server: RedisServer) -> None:
    name = f"n{secrets.token_hex(6)}"
    store = store_on(f"{redis_server.url}?client_name={name}", may_lose_writes=False)

    def clients() -> list[bytes]:
        found: bytes = redis_server.tell("CLIENT", "LIST")
        return [client for client in found.splitlines() if f"name={name} ".encode() in client]

    def held() -> bool:
        return any(b"multi=-1" not in client or b"flags=N" not in client for client in clients())

    await assert_nothing_is_held(store, held)
    assert 1 <= len(clients()) <= 4
    await store.close()


@pytest.mark.parametrize("kind", ["sqlite", "sqlalchemy+aiosqlite"])
async def test_a_file_is_free_to_be_written_by_anybody(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "runs.db"
    store: CheckpointStore = SQLiteCheckpointStore(path)
    if kind != "sqlite":
        await store.close()
        store = SQLAlchemyCheckpointStore(f"sqlite+aiosqlite:///{path}")
    await store.now()

    def is_locked() -> bool:
        other = sqlite3.connect(path, timeout=0, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return True
        finally:
            other.close()
        return False

    await assert_nothing_is_held(store, is_locked)
    await store.close()
