"""The store in Redis passes the contract, on every server that is there and on a cluster."""

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores import open_store
from agent_runtime.testing.store_contract import StoreContract
from tests.redis_servers import RedisCluster, RedisServer, redis_origins


@pytest.fixture(scope="module", params=redis_origins(), ids=lambda origin: origin.name)
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with RedisServer(request.param.program, appendonly="no") as server:
        yield server.url


class TestRedisStore(StoreContract):
    @pytest.fixture
    async def store(self, redis_url: str) -> AsyncIterator[CheckpointStore]:
        store = open_store(f"{redis_url}?prefix=t{secrets.token_hex(8)}")
        yield store
        await store.close()


class TestRedisStoreOnACluster(StoreContract):
    @pytest.fixture
    async def store(self, one_cluster: RedisCluster) -> AsyncIterator[CheckpointStore]:
        store = open_store(f"{one_cluster.url}?cluster=yes&prefix=t{secrets.token_hex(8)}")
        yield store
        await store.close()
