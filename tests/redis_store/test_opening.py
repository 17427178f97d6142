"""What a server must be before runs are kept on it, and what is said of one that may lose writes."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from agent_runtime.errors import ForeignStore, InvalidSetting, NewerFormat, ReadOnlyStore, StoreRefused, StoreUnavailable
from agent_runtime.stores import open_store, shown_url
from agent_runtime.stores.redis import RedisCheckpointStore
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.tcp_proxy import How, TcpProxy, Way
from tests.redis_servers import RedisServer, free_low_port, redis_origins
from tests.redis_store.bench import OK, UNKNOWN, fresh_store, keys_of, kinds, land, opened, operator, store_on


@pytest.fixture(scope="module")
def own_server() -> Iterator[RedisServer]:
    """One whose settings the tests change."""
    with RedisServer(redis_origins()[0].program) as server:
        yield server


@pytest.fixture
def settings(own_server: RedisServer) -> Iterator[RedisServer]:
    yield own_server
    usual = {"maxmemory-policy": "noeviction", "maxmemory": "0", "appendonly": "yes", "appendfsync": "always"}
    for name, value in usual.items():
        own_server.tell("CONFIG", "SET", name, value)
    for user in ("worker", "nobody"):
        own_server.tell("ACL", "DELUSER", user)


# Refused.


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_evicts_is_refused_and_told_what_to_set(settings: RedisServer, policy: str) -> None:
    settings.tell("CONFIG", "SET", "maxmemory-policy", policy)
    async with fresh_store(settings) as store:
        with pytest.raises(StoreRefused, match=f"{policy}.*CONFIG SET maxmemory-policy noeviction"):
            await store.commit([Draft.of().open()])
        assert await keys_of(settings, store) == []


async def test_a_replica_is_refused(settings: RedisServer) -> None:
    with settings.replica() as replica:
        async with fresh_store(replica) as store:
            with pytest.raises(ReadOnlyStore, match=r"is a replica.*name the primary"):
                await store.now()


async def test_a_key_of_another_program_is_refused_by_its_name_and_left_alone(redis_server: RedisServer) -> None:
    for make in (("SET", "x"), ("HSET", "field", "value"), ("RPUSH", "x")):
        async with fresh_store(redis_server) as store:
            redis_server.tell(make[0], f"{store.prefix}:store", *make[1:])
            before = redis_server.tell("DUMP", f"{store.prefix}:store")
            with pytest.raises(ForeignStore, match=f"'{store.prefix}:store' of another program"):
                await store.commit([Draft.of().open()])
            assert redis_server.tell("DUMP", f"{store.prefix}:store") == before
            assert await keys_of(redis_server, store) == [f"{store.prefix}:store"]


async def test_a_store_of_a_newer_format_is_refused_by_its_number(redis_server: RedisServer) -> None:
    async with fresh_store(redis_server) as store:
        await opened(store)
        redis_server.tell("HSET", f"{store.prefix}:store", "format", "3")
        async with fresh_store(redis_server, prefix=store.prefix) as other:
            with pytest.raises(NewerFormat, match=r"layout 3.*knows 2"):
                await other.list_runs()


async def test_another_programs_key_where_a_run_belongs_is_refused_and_left_alone(redis_server: RedisServer) -> None:
    async with fresh_store(redis_server) as store:
        await store.open()
        draft = await opened(store, "run-1")
        [log] = await keys_of(redis_server, store, "*:log:run-1")
        redis_server.tell("SET", log.replace(":log:", ":row:").replace("run-1", "run-1"), "theirs")
        with pytest.raises(ForeignStore, match="holds something else under a key of ours"):
            await store.commit([draft.add(b"one")])
        with pytest.raises(ForeignStore):
            await store.latest(draft.run_id)


async def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    store = open_store(f"redis://:geheim@127.0.0.1:{free_low_port()}/3")
    with pytest.raises(StoreUnavailable, match=r"redis://127\.0\.0\.1:\d+/3 does not answer") as raised:
        await store.commit([Draft.of().open()])
    assert "geheim" not in str(raised.value)
    await store.close()


async def test_a_server_that_is_no_redis_is_named() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        store = open_store(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(StoreUnavailable, match="is Redis or Valkey"):
            await store.now()
        await store.close()


async def test_a_wrong_password_is_refused_and_not_shown(settings: RedisServer) -> None:
    settings.tell("ACL", "SETUSER", "worker", "on", ">right", "~*", "+@all")
    store = open_store(f"redis://worker:geheim@127.0.0.1:{settings.port}")
    with pytest.raises(StoreRefused, match="correct user and password") as raised:
        await store.now()
    assert "geheim" not in str(raised.value)
    await store.close()


async def test_a_server_that_wants_a_password_is_refused_where_there_is_none(settings: RedisServer) -> None:
    with settings.client() as admin:  # already let in
        admin.ping()
        settings.tell("CONFIG", "SET", "requirepass", "geheim")
        try:
            async with fresh_store(settings) as store:
                with pytest.raises(StoreRefused, match="put user and password into the URL"):
                    await store.now()
        finally:
            admin.execute_command("CONFIG", "SET", "requirepass", "")


async def test_a_user_who_may_not_run_scripts_is_refused(settings: RedisServer) -> None:
    settings.tell("ACL", "SETUSER", "worker", "on", ">right", "~*", "+@all", "-@scripting")
    store = open_store(f"redis://worker:right@127.0.0.1:{settings.port}")
    with pytest.raises(StoreRefused, match=r"NOPERM.*let this user run scripts"):
        await store.commit([Draft.of().open()])
    await store.close()


async def test_a_user_with_the_rights_that_the_page_lists_may_do_everything(settings: RedisServer) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "reference" / "redis.md").read_text()
    [listed] = re.findall(r"(?s)A worker's user needs the commands (.+?)\n\n", page)
    rights = [f"+{word.lower()}" for word in re.findall(r"`([A-Z|]+|@[a-z]+)`", listed)]
    settings.tell("ACL", "SETUSER", "worker", "reset", "on", ">right", "~mine:*", *rights)
    store = open_store(f"redis://worker:right@127.0.0.1:{settings.port}?prefix=mine&ttl_s=600&wait_replicas=0")
    assert isinstance(store, RedisCheckpointStore)
    draft = await opened(store)
    draft = await land(store, draft, draft.add(b"one", checkpoint=b"state"))
    assert (await store.renew(draft.run_id, guard=draft.guard)).kind is OK
    assert (await store.post(draft.run_id, draft.message())).kind is OK
    assert len(await store.inbox(draft.run_id)) == 1
    assert len(await store.load_many([draft.run_id])) == len(await store.list_unfinished()) == 1
    assert await store.repair() == 0
    await store.now()
    assert (await store.delete(draft.run_id, guard=draft.guard)).kind is OK
    await store.close()


async def test_the_node_of_a_cluster_is_refused_by_a_client_that_knows_none() -> None:
    with RedisServer(redis_origins()[0].program, cluster_enabled="yes", appendonly="no") as node:
        async with fresh_store(node) as store:
            with pytest.raises(StoreRefused, match=r"node of a cluster.*RedisCluster\.from_url"):
                await store.now()


# What is given at the door.


@pytest.mark.parametrize("prefix", ["", "t{1}", "t1*", "t 1", "t1\n", "[a]", "a" * 65, "t\\", "ü"])
def test_a_prefix_that_could_stand_for_another_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidSetting, match="prefix= is"):
        RedisCheckpointStore(Redis, prefix=prefix)


@pytest.mark.parametrize(
    "options",
    [{"ttl_s": 0}, {"ttl_s": -1}, {"ttl_s": float("nan")}, {"ttl_s": "60"}, {"ttl_s": 1e12}, {"ttl_s": True},
     {"wait_replicas": -1}, {"wait_replicas": 1.5}, {"timeout_seconds": 0}, {"timeout_seconds": float("inf")}],
)  # fmt: skip
def test_an_option_that_cannot_be_meant_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=f"{next(iter(options))}="):
        RedisCheckpointStore(Redis, **options)


def test_a_client_in_the_place_of_a_function_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"lambda: Redis\.from_url"):
        RedisCheckpointStore("redis://localhost")  # type: ignore[arg-type]


async def test_a_function_that_makes_no_client_of_asyncio_is_refused() -> None:
    for make in (redis.Redis, object):
        with pytest.raises(InvalidSetting, match=r"client of redis\.asyncio"):
            await RedisCheckpointStore(make).now()


@pytest.mark.parametrize(
    "url", ["redis://", "redis:/x", "redis://h?ttl_s=soon", "redis://h?cluster=perhaps", "redis://h?wait_replicas=-1"]
)
def test_a_url_that_cannot_be_taken_apart_is_refused(url: str) -> None:
    with pytest.raises(InvalidSetting):
        open_store(url)


@pytest.mark.parametrize("url", ["redis://h:port/0", "redis://:geheim@h/0?nosuch=1"])
async def test_a_url_that_the_driver_refuses_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(InvalidSetting, match="driver refuses") as raised:
        await open_store(url).now()
    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://ana:geheim@host:6379/2?password=geheim", "redis://ana@host:6379/2"),
        ("rediss://:geheim@host", "rediss://@host"),
        ("redis://:ge@heim@host/1", "redis://…@host/1"),
        ("redis://ge#heim@host", "redis://…"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert shown_url(url) == shown


async def test_the_options_of_a_store_may_stand_in_its_url(redis_server: RedisServer) -> None:
    store = open_store(f"{redis_server.url}?prefix=in-url&ttl_s=600&wait_replicas=0&may_lose_writes=no&socket_keepalive=yes")
    assert isinstance(store, RedisCheckpointStore)
    await opened(store)
    assert redis_server.tell("PTTL", (await keys_of(redis_server, store, "*:row:run-1"))[0]) > 500_000
    assert store.may_lose_writes is False
    await store.close()


# What is said.


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"appendfsync": "everysec"}, ["appendfsync everysec: a power cut loses the writes of its last second"]),
        ({"appendfsync": "no"}, ["appendfsync no: a power cut loses"]),
        ({"appendonly": "no"}, ["has no append-only file: a restart loses"]),
    ],
)
async def test_what_a_server_may_lose_is_said_once(
    settings: RedisServer, caplog: pytest.LogCaptureFixture, changes: dict[str, str], expected: list[str]
) -> None:
    for name, value in changes.items():
        settings.tell("CONFIG", "SET", name, value)
    async with fresh_store(settings) as store, fresh_store(settings) as another:
        assert store.may_lose_writes is True, "nothing is known yet"
        await opened(store)
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(store.list_runs())
        again = store.reopen()
        await again.now()
        await again.close()
        assert [text for text in expected if any(text in line for line in said(caplog))] == expected
        assert len(said(caplog)) == len(expected)
        assert store.may_lose_writes is bool(changes)
        await another.now()


async def test_a_server_that_hides_its_settings_is_said_to(settings: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    settings.tell("ACL", "SETUSER", "worker", "on", ">right", "~*", "+@all", "-config", "-info")
    store = open_store(f"redis://worker:right@127.0.0.1:{settings.port}?prefix=hidden")
    assert isinstance(store, RedisCheckpointStore)
    await opened(store)
    assert store.may_lose_writes is True
    told = said(caplog)
    assert len(told) == 2
    assert "does not tell its maxmemory-policy" in told[0]
    assert "does not tell whether it has an append-only file" in told[1]
    await store.close()


# What is sent once.


async def test_a_client_that_retries_makes_no_store_that_does(redis_server: RedisServer) -> None:
    async with TcpProxy("127.0.0.1", redis_server.port) as proxy:
        retries = Retry(NoBackoff(), 10)
        store = RedisCheckpointStore(lambda: Redis(port=proxy.port, retry=retries, decode_responses=True), prefix="retries")
        draft = await opened(store)
        append = draft.add(b"one")
        strike = proxy.strike(How.LOST, Way.TO_CLIENT, matching=append.row.head)
        assert kinds(await store.commit([append])) == [UNKNOWN]
        assert strike.struck.is_set()
        assert kinds(await store.commit([append])) == [OK]
        assert len(await store.calls(draft.run_id)) == 2
        await store.close()


async def test_scripts_that_a_server_forgot_are_loaded_again(redis_server: RedisServer) -> None:
    async with fresh_store(redis_server) as store:
        drafts = [await opened(store, f"run-{i}") for i in range(5)]
        redis_server.tell("SCRIPT", "FLUSH")
        assert kinds(await store.commit([draft.add(b"one") for draft in drafts])) == [OK] * 5
        redis_server.tell("SCRIPT", "FLUSH")
        assert len(await store.list_unfinished()) == 5


async def test_a_server_that_is_full_has_written_nothing_and_says_so(settings: RedisServer) -> None:
    async with fresh_store(settings) as store:
        draft = await opened(store)
        settings.tell("CONFIG", "SET", "maxmemory", "1mb")
        with pytest.raises(StoreUnavailable, match=r"OOM.*nothing was written; raise maxmemory"):
            await store.commit([draft.add(b"x" * 100_000)])
        assert len(await store.calls(draft.run_id)) == 1
        settings.tell("CONFIG", "SET", "maxmemory", "0")
        await land(store, draft, draft.add(b"x" * 100_000))


async def test_a_primary_that_became_a_replica_has_written_nothing_and_says_so() -> None:
    program = redis_origins()[0].program
    with RedisServer(program) as server, RedisServer(program) as other:
        async with fresh_store(server) as store:
            draft = await opened(store)
            server.tell("REPLICAOF", "127.0.0.1", other.port)
            with pytest.raises((StoreUnavailable, ReadOnlyStore), match="replica"):
                await store.commit([draft.add(b"one")])


async def test_of_a_batch_whose_node_is_away_nothing_is_claimed_to_be_written(settings: RedisServer) -> None:
    program = redis_origins()[0].program
    with RedisServer(program) as server:
        async with fresh_store(server) as store:
            drafts = [await opened(store, f"run-{i}") for i in range(3)]
            server.kill()
            assert kinds(await store.commit([draft.add(b"one") for draft in drafts])) == [UNKNOWN] * 3, "it was sent"
            with pytest.raises(StoreUnavailable, match="does not answer"):
                await store.commit([draft.add(b"one") for draft in drafts])
            server.start()
            assert kinds(await store.commit([draft.add(b"one") for draft in drafts])) == [OK] * 3


async def test_a_store_works_through_a_client_that_somebody_subclassed(redis_server: RedisServer) -> None:
    class Theirs(Redis):
        pass

    store = RedisCheckpointStore(lambda: Theirs.from_url(redis_server.url), prefix="theirs")
    await opened(store)
    async with operator(redis_server) as client:
        assert await client.exists("theirs:store")
    await store.close()
    assert store_on("redis://localhost").may_lose_writes is True
