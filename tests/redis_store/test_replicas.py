"""What replicas promise, and what a failover takes back: a run whose store went back in time is stopped by its owner."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio.sentinel import Sentinel

from agent_runtime import Reply, ToolCall, recover_tool_loop, run_tool_loop
from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.errors import CheckpointStoreCorrupt, ReadOnlyStore, StoreRefused, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import StoredRun
from agent_runtime.stores.redis import RedisCheckpointStore
from agent_runtime.testing.script_model import ScriptModel
from agent_runtime.testing.tcp_proxy import How, TcpProxy, Way
from agent_runtime.tools import ToolRegistry
from tests.load import Load, assert_is_there
from tests.redis_servers import RedisServer, redis_origins, until
from tests.redis_store.bench import MOVED, OK, UNKNOWN, fresh_store, keys_of, kinds, land, opened, store_on

KEY = b"a key of tests, known to everybody"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(redis_origins()[0].program) as own:
        yield own


async def test_a_write_that_enough_replicas_have_is_ok(server: RedisServer) -> None:
    with server.replica():
        async with fresh_store(server, wait_replicas=1) as store:
            draft = await opened(store)
            draft = await land(store, draft, draft.add(b"one"))
            assert (await store.latest(draft.run_id)) is not None
            assert store.may_lose_writes is False


async def test_replicas_that_nobody_waits_for_may_lose_writes(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with server.replica():
        async with fresh_store(server) as store:
            await opened(store)
            assert store.may_lose_writes is True
    assert "1 replica(s) that nobody waits for" in caplog.text


async def test_a_write_that_too_few_replicas_have_is_not_ok_until_they_do(server: RedisServer) -> None:
    with server.replica() as replica:
        async with fresh_store(server, wait_replicas=1, timeout_seconds=0.4) as store:
            draft = await opened(store)
            replica.pause()
            append = draft.add(b"one")
            assert kinds(await store.commit([append])) == [UNKNOWN]
            with pytest.raises(StoreUnavailable, match=r"0 replica\(s\) have what was written.*expected 1"):
                await store.latest(draft.run_id)
            assert kinds(await store.commit([append])) == [UNKNOWN], "it is there, and not yet safe"
            assert (await store.post(draft.run_id, draft.message())).kind is UNKNOWN
            replica.go_on()
            run = await until_told(store, draft.run_id)
            assert run.row.head == append.row.head
            assert kinds(await store.commit([append])) == [OK]


async def test_a_write_whose_answer_was_lost_counts_once_enough_replicas_have_it_although_it_can_be_read(
    server: RedisServer,
) -> None:
    with server.replica() as replica:
        async with TcpProxy("127.0.0.1", server.port) as between:
            store = store_on(f"redis://127.0.0.1:{between.port}", wait_replicas=1, timeout_seconds=0.4)
            draft = await opened(store)
            replica.pause()
            append = draft.add(b"on the primary alone")
            between.strike(How.LOST, Way.TO_CLIENT, matching=append.row.head)
            assert kinds(await store.commit([append])) == [UNKNOWN]
            assert server.tell("LLEN", (await keys_of(server, store, "*:log:*"))[0]) == 2, "it can be read"
            with pytest.raises(StoreUnavailable, match=r"0 replica\(s\) have what was written.*expected 1"):
                await store.latest(draft.run_id)
            replica.go_on()
            assert (await until_told(store, draft.run_id)).row.head == append.row.head
            await store.close()


async def test_no_write_that_a_replica_was_waited_for_is_lost_when_the_primary_dies_under_load(server: RedisServer) -> None:
    with server.replica() as replica:
        async with fresh_store(server, wait_replicas=1) as store:
            load = Load(store)
            running = load.start()
            await load.is_under_way()
            replica.pause()  # what is sent from now on waits before its door
            await asyncio.to_thread(until, lambda: server.facts("clients")["blocked_clients"] > 0)
            server.kill()
            before = list(load.store.acknowledged)
            replica.go_on()
            replica.kill()
            promote(replica, server)
            later = store.reopen()
            await assert_is_there(later, before)
            await later.close()
            with replica.replica():
                await load.assert_ended_once(running, store)


async def until_told(store: RedisCheckpointStore, run_id: RunId) -> StoredRun:
    """The run, as soon as enough replicas have it."""
    async with asyncio.timeout(20):
        while True:
            try:
                run = await store.latest(run_id)
            except StoreUnavailable:
                await SYSTEM_CLOCK.sleep(0.02)
            else:
                assert run is not None
                return run


async def test_a_failover_that_lost_acknowledged_writes_stops_the_living_owner_as_corrupt(server: RedisServer) -> None:
    model = ScriptModel([Reply(tool_calls=[ToolCall(f"{i}", "note", {"n": i})]) for i in range(6)] + [Reply("done")])
    registry = ToolRegistry()
    acted: list[int] = []

    async with TcpProxy("127.0.0.1", server.port) as between:
        with RedisServer(redis_origins()[0].program, replicaof=f"127.0.0.1 {between.port}") as replica:
            await asyncio.to_thread(until, lambda: replica.facts("replication")["master_link_status"] == "up")
            async with fresh_store(server) as store:

                @registry.tool(idempotent=True)
                async def note(n: int) -> str:
                    acted.append(n)
                    if n == 1:  # what has been written so far is on both; what follows is on the primary alone
                        await in_step(server, replica)
                        between.partition(Way.TO_CLIENT)
                    if n == 3:
                        server.kill()
                        between.reset()
                        replica.kill()
                        promote(replica, server)
                    return f"noted {n}"

                with pytest.raises(CheckpointStoreCorrupt):
                    await run_tool_loop(
                        model, registry, "go", run_id="run-1", checkpoints=store, checkpoint_key=KEY, commits="each"
                    )
            assert acted == [0, 1, 2, 3], "nothing further was started"


async def in_step(server: RedisServer, replica: RedisServer) -> None:
    """Wait until the replica has all that the primary has."""
    offset = server.facts("replication")["master_repl_offset"]
    async with asyncio.timeout(20):
        while replica.facts("replication")["slave_repl_offset"] < offset:
            await SYSTEM_CLOCK.sleep(0.005)


def promote(replica: RedisServer, gone: RedisServer) -> None:
    """Let the replica be found where the primary was, as a name that leads to the primary does."""
    replica.be_primary(gone.port)


async def test_what_a_failover_lost_is_told_to_the_owner_as_moved(server: RedisServer) -> None:
    with server.replica() as replica:
        async with fresh_store(server) as store:
            draft = await opened(store)
            await in_step(server, replica)
            replica.tell("REPLICAOF", "NO", "ONE")  # as far behind as a replica can be
            draft = await land(store, draft, draft.add(b"acknowledged, and lost"))
            server.kill()
            replica.kill()
            promote(replica, server)
            answers = kinds(await store.commit([draft.add(b"next")]))
            if answers == [UNKNOWN]:  # over the connection to the server that is gone
                answers = kinds(await store.commit([draft.add(b"next")]))
            assert answers == [MOVED]


async def test_a_store_behind_sentinel_goes_on_with_the_replica_that_was_promoted(server: RedisServer) -> None:
    with server.replica() as replica, server.sentinel("runs") as watcher:
        make: Any = Sentinel  # has no types
        sentinel = make([("127.0.0.1", watcher.port)])
        store = RedisCheckpointStore(lambda: sentinel.master_for("runs"), wait_replicas=1)
        draft = await opened(store)
        draft = await land(store, draft, draft.add(b"one"))
        server.kill()
        append = draft.add(b"two")
        # Who promotes it ends all its connections, ours too.
        await asyncio.to_thread(until, lambda: replica.facts("replication")["role"] == "master")
        lone = RedisCheckpointStore(lambda: sentinel.master_for("runs"))
        async with asyncio.timeout(30):
            while True:
                try:
                    answers = kinds(await lone.commit([append]))
                except (StoreUnavailable, ReadOnlyStore):
                    answers = [UNKNOWN]
                if answers != [UNKNOWN]:
                    break
                await SYSTEM_CLOCK.sleep(0.02)
        assert answers == [OK]
        run = await lone.latest(draft.run_id)
        assert run is not None
        assert run.row.number == 3
        await store.close()
        await lone.close()
        for client in sentinel.sentinels:
            await client.aclose()


# What is not called where writes may be lost.


def mailing() -> tuple[ScriptModel, ToolRegistry, list[str]]:
    """A loop of one call of a tool without a repeat rule, one of a tool with one before it, and what they did."""
    model = ScriptModel([Reply(tool_calls=[ToolCall("a", "look", {}), ToolCall("b", "mail", {})]), Reply("done")])
    registry, acted = ToolRegistry(), list[str]()

    @registry.tool(pure=True)
    async def look() -> str:
        acted.append("look")
        return "seen"

    @registry.tool
    async def mail() -> str:
        acted.append("mail")
        return "sent"

    return model, registry, acted


@pytest.fixture(scope="module")
def forgetful() -> Iterator[RedisServer]:
    with RedisServer(redis_origins()[0].program, appendfsync="everysec") as own:
        yield own


async def test_a_tool_without_a_repeat_rule_is_not_called_where_writes_may_be_lost(forgetful: RedisServer) -> None:
    model, registry, acted = mailing()
    async with fresh_store(forgetful) as store:
        with pytest.raises(StoreRefused, match=r"tool 'mail' has no repeat rule.*accept_lost_writes=True"):
            await run_tool_loop(model, registry, "go", run_id="run-1", checkpoints=store, checkpoint_key=KEY)
        assert acted in ([], ["look"])
        acted.clear()
        result = await recover_tool_loop(
            model, registry, "run-1", checkpoints=store, checkpoint_key=KEY, accept_lost_writes=True
        )
        assert (result.status, result.output) == ("done", "done")
        assert "mail" in acted


async def test_it_is_called_where_that_is_accepted_or_the_store_is_declared_durable(forgetful: RedisServer) -> None:
    for declared, accepted in ((None, True), (False, False)):
        model, registry, acted = mailing()
        async with fresh_store(forgetful, may_lose_writes=declared) as store:
            await run_tool_loop(
                model, registry, "go", run_id="run-1", checkpoints=store, checkpoint_key=KEY, accept_lost_writes=accepted
            )
        assert sorted(acted) == ["look", "mail"]


async def test_it_is_called_on_a_server_that_flushes_every_write(server: RedisServer) -> None:
    model, registry, acted = mailing()
    async with fresh_store(server) as store:
        await run_tool_loop(model, registry, "go", run_id="run-1", checkpoints=store, checkpoint_key=KEY)
    assert sorted(acted) == ["look", "mail"]
