"""What the tests of the Redis store share: servers, stores under a prefix of their own, and runs to write."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from agent_runtime.journal.store import Answer, AnswerKind, Append, CheckpointStore
from agent_runtime.stores.redis import RedisCheckpointStore
from agent_runtime.testing.store_contract import Draft
from tests.redis_servers import RedisServer

OK, FENCED, MOVED, UNKNOWN = AnswerKind


def store_on(url: str, *, is_cluster: bool = False, **options: Any) -> RedisCheckpointStore:
    """A store, under a prefix that nobody else has unless one is named."""
    kind = RedisCluster if is_cluster else Redis
    return RedisCheckpointStore(lambda: kind.from_url(url), **({"prefix": f"t{secrets.token_hex(8)}"} | options))


@asynccontextmanager
async def fresh_store(server: RedisServer, **options: Any) -> AsyncIterator[RedisCheckpointStore]:
    store = store_on(server.url, **options)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def operator(server: RedisServer) -> AsyncIterator[Any]:
    """A client of somebody else, past the store."""
    client = Redis(host="127.0.0.1", port=server.port, retry=Retry(NoBackoff(), 0))
    try:
        yield client
    finally:
        await client.aclose()


async def land(store: CheckpointStore, draft: Draft, append: Append) -> Draft:
    """Commit an append that must land; the draft after it."""
    [answer] = await store.commit([append])
    assert answer.kind is OK, f"expected ok, found {answer}"
    return draft.after(append)


async def opened(store: CheckpointStore, run_id: str = "run-1") -> Draft:
    draft = Draft.of(run_id)
    return await land(store, draft, draft.open())


def kinds(answers: list[Answer]) -> list[AnswerKind]:
    return [answer.kind for answer in answers]


async def keys_of(server: RedisServer, store: RedisCheckpointStore, pattern: str = "*") -> list[str]:
    """The keys of a store that fit, in their order."""
    async with operator(server) as client:
        found = [key.decode() async for key in client.scan_iter(match=f"{store.prefix}:{pattern}", count=1000)]
    return sorted(found)
