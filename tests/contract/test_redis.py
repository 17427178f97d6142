"""The store in Redis passes the contract, on every server that is there and on a cluster."""

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores import open_store
from agent_runtime.testing.store_contract import StoreContract
from tests.redis_servers import RedisCluster, RedisServer, redis_origins


@pytest.fixture(scope="module", params=redis_origins(), ids=lambda origin: origin.name)
def contract_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(request.param.program, appendonly="no") as server:
        yield server


def end_connections(server: RedisServer) -> None:
    server.tell("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


class TestRedisStore(StoreContract):
    async def cut_off(self, store: CheckpointStore) -> None:
        end_connections(self.server)

    @pytest.fixture(autouse=True)
    def _know(self, contract_server: RedisServer) -> None:
        self.server = contract_server

    @pytest.fixture
    async def store(self, contract_server: RedisServer) -> AsyncIterator[CheckpointStore]:
        store = open_store(f"{contract_server.url}?prefix=t{secrets.token_hex(8)}")
        yield store
        await store.close()


class TestRedisStoreOnACluster(StoreContract):
    async def cut_off(self, store: CheckpointStore) -> None:
        for node in self.nodes:
            end_connections(node)

    @pytest.fixture(autouse=True)
    def _know(self, one_cluster: RedisCluster) -> None:
        self.nodes = one_cluster.nodes

    @pytest.fixture
    async def store(self, one_cluster: RedisCluster) -> AsyncIterator[CheckpointStore]:
        store = open_store(f"{one_cluster.url}?cluster=yes&prefix=t{secrets.token_hex(8)}")
        yield store
        await store.close()
