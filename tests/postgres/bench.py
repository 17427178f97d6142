"""What the tests of the Postgres store share: a schema with a store in it, and runs to write."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.journal.store import Answer, AnswerKind, Append, CheckpointStore
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.testing.store_contract import Draft
from tests.servers import Server, fresh_schema

PATIENCE_SECONDS = 20.0


@asynccontextmanager
async def fresh_store(server: Server, **options: Any) -> AsyncIterator[PostgresCheckpointStore]:
    """A store in a schema of its own."""
    async with fresh_schema(server.url) as schema:
        store = PostgresCheckpointStore(server.url, schema=schema, **options)
        yield store
        await store.close()


@asynccontextmanager
async def session(url: str) -> AsyncIterator[Any]:
    """A connection of the driver, past the store."""
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        connection.terminate()


async def land(store: CheckpointStore, draft: Draft, append: Append) -> Draft:
    """Commit an append that must land; the draft after it."""
    [answer] = await store.commit([append])
    assert answer.kind is AnswerKind.OK, f"expected ok, found {answer}"
    return draft.after(append)


async def opened(store: CheckpointStore, run_id: str = "run-1") -> Draft:
    draft = Draft.of(run_id)
    return await land(store, draft, draft.open())


def kinds(answers: list[Answer]) -> list[AnswerKind]:
    return [answer.kind for answer in answers]


async def until_blocked(watcher: Any, pid: int) -> None:
    """Wait until that session waits for a lock."""
    give_up_at = monotonic() + PATIENCE_SECONDS
    while not await watcher.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", pid):
        assert monotonic() < give_up_at, "expected the session to wait for a lock"
        await SYSTEM_CLOCK.sleep(0.005)
