"""A write of which nobody learns whether it landed, on a cluster of three masters: as on a single server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.crc import key_slot

from agent_runtime.stores import open_store
from agent_runtime.stores.redis import RedisCheckpointStore
from agent_runtime.stores.redis_pack import Keys
from agent_runtime.testing.tcp_proxy import TcpProxy
from tests.crash.test_unknown import RUN
from tests.postgres.test_unknown import assert_ends_undisturbed
from tests.redis_servers import SLOTS, RedisCluster, RedisServer, redis_origins
from tests.redis_store.test_unknown import TROUBLES, Scene

STRUCK = ("the opening and the claim", "a reply", "the ending of a call")
ON_THE_WIRE = [name for name in TROUBLES if not name.startswith("the server dies")]


class OnCluster(Scene):
    """That of a cluster. The node of the run says that it is found where the proxy is; so everybody goes through it."""

    def _through(self, port: int, waits: float) -> RedisCheckpointStore:
        url = f"redis://127.0.0.1:{self.proxy.port}{self._query}&cluster=yes&timeout_seconds={waits}"
        store = open_store(url)
        assert isinstance(store, RedisCheckpointStore)
        return store


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """One of this module alone, whose nodes flush each write."""
    with RedisCluster(redis_origins()[0].program) as own:
        yield own


def home_of(cluster: RedisCluster, run_id: str) -> RedisServer:
    """The node that has a run's keys, whatever their prefix."""
    return cluster.nodes[key_slot(Keys("any").row(run_id).encode()) * len(cluster.nodes) // SLOTS]


@pytest.fixture
async def scene(cluster: RedisCluster) -> AsyncIterator[Scene]:
    node = home_of(cluster, RUN)
    async with TcpProxy("127.0.0.1", node.port) as proxy:
        node.tell("CONFIG", "SET", "cluster-announce-bus-port", node.port + 10_000)
        node.tell("CONFIG", "SET", "cluster-announce-port", proxy.port)
        on = OnCluster(node, proxy)
        await on.store.open()
        yield on
        await on.close()
        node.tell("CONFIG", "SET", "cluster-announce-port", 0)


@pytest.mark.parametrize("kind", STRUCK)
@pytest.mark.parametrize("trouble", ON_THE_WIRE)
async def test_a_run_on_a_cluster_ends_as_if_nothing_had_happened(scene: Scene, kind: str, trouble: str) -> None:
    scene.commits = "each"
    await assert_ends_undisturbed(scene, kind, TROUBLES[trouble])
