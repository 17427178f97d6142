"""A store on a cluster of three masters: what it does while slots move and nodes go, and that a batch goes to all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis.crc import key_slot

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.errors import StoreUnavailable
from agent_runtime.stores.redis import RedisCheckpointStore
from agent_runtime.testing.store_contract import Draft
from tests.redis_servers import RedisCluster, RedisServer, redis_origins
from tests.redis_store.bench import OK, UNKNOWN, kinds, store_on


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster(redis_origins()[0].program, cluster_require_full_coverage="no") as own:
        yield own


def holders(cluster: RedisCluster, store: RedisCheckpointStore) -> list[int]:
    """How many runs' rows each node has."""
    return [len(node.tell("KEYS", f"{store.prefix}:{{*}}:row:*")) for node in cluster.nodes]


async def test_a_batch_is_shared_out_among_the_nodes_and_lists_come_from_all(cluster: RedisCluster) -> None:
    store = store_on(cluster.url, is_cluster=True)
    ids = sorted(f"run-{i}" for i in range(120))
    drafts = {run_id: Draft.of(run_id) for run_id in ids}
    assert kinds(await store.commit([draft.open() for draft in drafts.values()])) == [OK] * len(ids)
    assert min(holders(cluster, store)) > 0
    assert sum(holders(cluster, store)) == len(ids)
    assert [row.run_id for row in await store.list_unfinished(limit=500)] == ids
    for node in cluster.nodes:
        for key in node.tell("KEYS", f"{store.prefix}:*:unfinished"):
            node.tell("DEL", key)
    assert await store.repair() == len(ids)
    assert [row.run_id for row in await store.list_unfinished(limit=500)] == ids
    await store.close()


async def test_a_run_whose_slot_moved_to_another_node_goes_on_there(cluster: RedisCluster) -> None:
    store = store_on(cluster.url, is_cluster=True)
    draft = Draft.of("run-1")
    opening = draft.open(checkpoint=b"state")
    assert kinds(await store.commit([opening])) == [OK]
    source = next(node for node in cluster.nodes if node.tell("KEYS", f"{store.prefix}:*row:run-1"))
    [key] = source.tell("KEYS", f"{store.prefix}:*row:run-1")
    move(cluster, key_slot(key), source, next(node for node in cluster.nodes if node is not source))
    draft = draft.after(opening)
    append = draft.add(b"one")
    assert kinds(await store.commit([append])) == [OK]
    assert await store.calls(draft.run_id) == [*opening.records, *append.records]
    await store.close()


def move(cluster: RedisCluster, slot: int, source: RedisServer, target: RedisServer) -> None:
    """Move a slot with all its keys."""
    ids = {node: node.tell("CLUSTER", "MYID").decode() for node in (source, target)}
    target.tell("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.tell("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    while keys := source.tell("CLUSTER", "GETKEYSINSLOT", slot, 100):
        source.tell("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
    for node in (target, source, *cluster.nodes):
        node.tell("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


async def test_where_one_node_is_away_the_runs_of_the_others_go_on(cluster: RedisCluster) -> None:
    store = store_on(cluster.url, is_cluster=True)
    drafts = [Draft.of(f"run-{i}") for i in range(60)]
    openings = [draft.open() for draft in drafts]
    assert kinds(await store.commit(openings)) == [OK] * 60
    # Whoever comes asks the first node who has what, and the one with the mark whether this is a store.
    away = next(node for node in cluster.nodes[1:] if not node.tell("KEYS", f"{store.prefix}:store"))
    lost = {key.decode().rpartition(":")[2] for key in away.tell("KEYS", f"{store.prefix}:*:row:*")}
    away.kill()
    drafts = [draft.after(opening) for draft, opening in zip(drafts, openings, strict=True)]
    appends = [draft.add(b"one") for draft in drafts]
    answers = kinds(await store.commit(appends))
    assert answers == [UNKNOWN if draft.run_id in lost else OK for draft in drafts]
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await store.commit([append for append in appends if append.row.run_id in lost])
    late = store_on(cluster.url, is_cluster=True, prefix=store.prefix)
    [draft] = [draft for draft in drafts if draft.run_id not in lost][:1]
    assert await late.latest(draft.run_id) is not None, "who comes while it is away works with the others"
    await late.close()
    away.start()
    async with asyncio.timeout(20):
        while kinds(await store.commit(appends)) != [OK] * 60:  # it asks the others first whether it is still a master
            await SYSTEM_CLOCK.sleep(0.02)
    await store.close()
