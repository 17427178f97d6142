"""What stands under which key: runs that expire whole, indexes that are mended, prefixes that keep tenants apart."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.crc import key_slot

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.errors import CheckpointConflict, CheckpointStoreCorrupt
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.seal import open_run
from agent_runtime.stores.redis import RedisCheckpointStore
from agent_runtime.stores.redis_pack import bucket_of
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.draft import BOB, RING, TENANT
from tests.redis_servers import RedisServer
from tests.redis_store.bench import FENCED, OK, fresh_store, keys_of, kinds, land, opened, store_on

PATIENCE_SECONDS = 20.0
LONG, SHORT = 1000.0, 0.15
RUN_KEYS = ["inbox", "log", "row", "state"]


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisCheckpointStore]:
    async with fresh_store(redis_server) as fresh:
        yield fresh


async def full(store: RedisCheckpointStore, run_id: str = "run-1") -> Draft:
    """A run that has something under each of its keys."""
    draft = await opened(store, run_id)
    draft = await land(store, draft, draft.add(b"one", checkpoint=b"state"))
    await store.post(draft.run_id, draft.message())
    return draft


async def ends(server: RedisServer, store: RedisCheckpointStore, run_id: str = "run-1") -> list[int]:
    """When each key of a run expires, in milliseconds; -1 for never."""
    keys = await keys_of(server, store, f"*:*:{run_id}")
    assert [key.split(":")[-2] for key in keys] == RUN_KEYS
    return [server.tell("PEXPIRETIME", key) for key in keys]


async def eventually(happened: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await happened():
            await SYSTEM_CLOCK.sleep(0.01)


# Expiry.


async def test_without_ttl_nothing_expires(redis_server: RedisServer, store: RedisCheckpointStore) -> None:
    await full(store)
    assert await ends(redis_server, store) == [-1] * 4


async def test_all_keys_of_a_run_expire_at_the_same_moment_after_its_last_write(redis_server: RedisServer) -> None:
    async with fresh_store(redis_server, ttl_s=LONG) as store:
        draft = await full(store)
        now_ms = int((await store.now()).timestamp() * 1000)
        [end] = set(await ends(redis_server, store))
        assert abs(end - now_ms - LONG * 1000) < PATIENCE_SECONDS * 1000
        before = end
        writes: list[Callable[[], Awaitable[object]]] = [
            lambda: store.commit([draft.add(b"two")]),
            lambda: store.renew(draft.run_id, guard=draft.guard),
            lambda: store.renew_all([(draft.run_id, draft.guard)]),
            lambda: store.post(draft.run_id, draft.message(b"more")),
        ]
        for write in writes:
            await SYSTEM_CLOCK.sleep(0.003)  # so that the end, in milliseconds, is another
            await write()
            [end] = set(await ends(redis_server, store))
            assert end > before
            before = end


@pytest.mark.parametrize("status", [RunStatus.PAUSED, RunStatus.BLOCKED, RunStatus.QUARANTINED])
async def test_a_run_that_waits_for_somebody_does_not_expire(redis_server: RedisServer, status: RunStatus) -> None:
    async with fresh_store(redis_server, ttl_s=LONG) as store:
        draft = await full(store)
        draft = await land(store, draft, draft.park(status))
        assert set(await ends(redis_server, store)) == {-1}
        await store.post(draft.run_id, draft.message(b"more"))
        await store.renew(draft.run_id, guard=draft.guard)
        assert set(await ends(redis_server, store)) == {-1}
        draft = await land(store, draft, draft.claim(BOB))
        assert min(await ends(redis_server, store)) > 0
        await land(store, draft, draft.end())
        assert min(await ends(redis_server, store)) > 0


async def test_a_run_keeps_the_ttl_of_who_claimed_it_last(redis_server: RedisServer) -> None:
    async with fresh_store(redis_server, ttl_s=LONG) as store, fresh_store(redis_server, prefix=store.prefix) as looser:
        draft = await full(store)
        draft = await land(looser, draft, draft.add(b"by an operator"))
        assert min(await ends(redis_server, store)) > 0
        draft = await land(looser, draft, draft.claim(BOB))
        assert set(await ends(redis_server, store)) == {-1}
        await land(store, draft, draft.claim(BOB))
        assert min(await ends(redis_server, store)) > 0


async def test_an_expired_run_is_gone_whole_and_its_id_is_not_used_again(redis_server: RedisServer) -> None:
    async with fresh_store(redis_server, ttl_s=SHORT) as store:
        draft = await full(store)
        kept = await opened(store, "kept")
        await land(store, kept, kept.park())
        await eventually(lambda: _is_gone(store, draft))
        assert await keys_of(redis_server, store, "*:*:run-1") == []
        for _ in range(2):
            assert kinds(await store.commit([Draft.of().open()])) == [FENCED]
            assert kinds(await store.commit([draft.add(b"late")])) == [FENCED]
            assert (await store.post(draft.run_id, draft.message())).kind is FENCED
            assert [row.run_id for row in await store.list_runs()] == ["kept"]
            assert [row.run_id for row in await store.list_unfinished()] == ["kept"]
            assert [row.run_id for row in await store.list_runs(status=RunStatus.DELETED)] == []


async def _is_gone(store: RedisCheckpointStore, draft: Draft) -> bool:
    return await store.latest(draft.run_id) is None


async def test_a_deleted_run_keeps_its_mark_although_runs_expire(redis_server: RedisServer) -> None:
    async with fresh_store(redis_server, ttl_s=LONG) as store:
        draft = await full(store)
        assert (await store.delete(draft.run_id, guard=draft.guard)).kind is OK
        [key] = await keys_of(redis_server, store, "*:*:run-1")
        assert redis_server.tell("PTTL", key) == -1


async def test_a_loop_is_told_that_the_id_of_an_expired_run_was_used(redis_server: RedisServer) -> None:
    from agent_runtime import Reply, run_tool_loop
    from agent_runtime.testing.script_model import ScriptModel
    from agent_runtime.tools import ToolRegistry

    async with fresh_store(redis_server, ttl_s=SHORT) as store:
        draft = await opened(store)
        await eventually(lambda: _is_gone(store, draft))
        with pytest.raises(CheckpointConflict, match="exists already, or did before"):
            await run_tool_loop(
                ScriptModel([Reply("done")]), ToolRegistry(), "go", run_id="run-1", checkpoints=store, checkpoint_key=b"k" * 32
            )


async def test_a_run_that_goes_on_over_a_message_it_has_not_seen_stays_awake(store: RedisCheckpointStore) -> None:
    draft = await full(store)
    for append in (draft.add(b"two", seen=0), draft.after(draft.add(b"two", seen=0)).add(b"three", seen=1)):
        await land(store, draft, append)
        run = await store.latest(draft.run_id)
        assert run is not None
        assert (run.row.wake_at is None) is (append.seen == 1)


# Half a run.


@pytest.mark.parametrize("gone", ["row", "log", "state"])
async def test_half_a_run_is_corrupt_and_never_empty(redis_server: RedisServer, gone: str) -> None:
    async with fresh_store(redis_server) as store:
        draft = await full(store)
        [key] = await keys_of(redis_server, store, f"*:{gone}:run-1")
        redis_server.tell("DEL", key, *await keys_of(redis_server, store, "*:runs"))
        assert kinds(await store.commit([Draft.of().open()])) == [FENCED]
        if gone == "row":
            for read in (store.latest, store.calls, lambda run_id: store.load_many([run_id])):
                with pytest.raises(CheckpointStoreCorrupt, match="a part of a run whose row is gone"):
                    await read(draft.run_id)
        elif gone == "log":
            [run] = await store.load_many([draft.run_id])
            assert run is not None
            with pytest.raises(CheckpointStoreCorrupt):
                open_run(RING, run, tenant=TENANT)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("log", ("LSET", "0", "short")),
        ("log", ("LPUSH", b"\xff" * 60)),
        ("state", ("SET", "")),
    ],
)
async def test_what_somebody_edited_is_named_as_corrupt(
    redis_server: RedisServer, store: RedisCheckpointStore, kind: str, change: tuple[str | bytes, ...]
) -> None:
    draft = await full(store)
    [key] = await keys_of(redis_server, store, f"*:{kind}:run-1")
    redis_server.tell(change[0], key, *change[1:])
    with pytest.raises(CheckpointStoreCorrupt, match="run 'run-1'"):
        await store.load_many([draft.run_id])


@pytest.mark.parametrize(
    "change", [("HSET", "epoch", "many"), ("HDEL", "step"), ("HSET", "status", "8"), ("HSET", "name", b"\xff")]
)
async def test_a_row_that_somebody_edited_fails_its_seal_and_hides_no_other(
    redis_server: RedisServer, store: RedisCheckpointStore, change: tuple[str | bytes, ...]
) -> None:
    draft = await full(store)
    await opened(store, "other")
    [key] = await keys_of(redis_server, store, "*:row:run-1")
    redis_server.tell(change[0], key, *change[1:])
    [run] = await store.load_many([draft.run_id])
    assert run is not None
    with pytest.raises(CheckpointStoreCorrupt):
        open_run(RING, run, tenant=TENANT)
    assert [row.run_id for row in await store.list_runs()] == ["other", "run-1"]


async def test_a_run_that_was_copied_to_another_id_is_not_taken_for_that(
    redis_server: RedisServer, store: RedisCheckpointStore
) -> None:
    draft = await full(store)
    for key in await keys_of(redis_server, store, "*:*:run-1"):
        kind = key.split(":")[-2]
        redis_server.tell("COPY", key, f"{store.prefix}:{{{bucket_of('run-2'):02}}}:{kind}:run-2")
    [run, copied] = await store.load_many([draft.run_id, RunId("run-2")])
    assert run is not None
    assert copied is not None
    assert copied.row.run_id == "run-2"
    open_run(RING, run, tenant=TENANT)
    with pytest.raises(CheckpointStoreCorrupt):
        open_run(RING, copied, tenant=TENANT)


# Indexes.


async def test_the_list_of_unfinished_runs_mends_what_an_index_says_wrongly(
    redis_server: RedisServer, store: RedisCheckpointStore
) -> None:
    done = await opened(store, "done")
    await land(store, done, done.end())
    await opened(store, "open")
    for wrong in ("never-there", "done"):
        redis_server.tell("ZADD", f"{store.prefix}:{{{bucket_of(wrong):02}}}:unfinished", 0, wrong)
    assert [row.run_id for row in await store.list_unfinished()] == ["open"]
    found = [redis_server.tell("ZRANGE", key, 0, -1) for key in await keys_of(redis_server, store, "*:unfinished")]
    assert found == [[b"open"]]
    assert kinds(await store.commit([Draft.of("never-there").open()])) == [OK]


async def test_indexes_that_somebody_removed_are_made_again(redis_server: RedisServer, store: RedisCheckpointStore) -> None:
    ids = sorted(f"run-{i}" for i in range(150))
    await store.commit([Draft.of(run_id).open() for run_id in ids])
    last = Draft.of(ids[-1])
    last = last.after(last.open())
    await land(store, last, last.end())
    assert await store.repair() == 0
    for name in ("unfinished", "runs"):
        redis_server.tell("DEL", *await keys_of(redis_server, store, f"*:{name}"))
    assert await store.list_runs() == []
    assert await store.repair() == len(ids) + len(ids[:-1])
    assert [row.run_id for row in await store.list_runs(limit=1000)] == ids
    assert [row.run_id for row in await store.list_unfinished(limit=1000)] == ids[:-1]


@pytest.mark.parametrize("prefix", ["00", "t100:0000", "row:", "0"])
async def test_they_are_made_again_whatever_the_prefix(redis_server: RedisServer, prefix: str) -> None:
    store = store_on(redis_server.url, prefix=f"{prefix}{secrets.token_hex(4)}{prefix}")
    await opened(store, "run:00}:row:00")
    redis_server.tell("DEL", *await keys_of(redis_server, store, "*:unfinished"))
    assert await store.repair() == 1
    assert [row.run_id for row in await store.list_unfinished()] == ["run:00}:row:00"]
    await store.close()


async def test_long_lists_are_read_page_by_page_whatever_the_page(store: RedisCheckpointStore) -> None:
    ids = sorted(f"run-{i}" for i in range(700))
    await store.commit([Draft.of(run_id, name="odd" if i % 7 == 0 else "even").open() for i, run_id in enumerate(ids)])
    for limit in (1, 7, 699, 700, 5000):
        assert [row.run_id for row in await store.list_unfinished(limit=limit)] == ids[:limit]
        assert [row.run_id for row in await store.list_runs(limit=limit, after=RunId(ids[350]))] == ids[351 : 351 + limit]
    assert [row.run_id for row in await store.list_unfinished(name="odd", limit=200)] == ids[::7]
    assert await store.list_unfinished(name="none") == []


# Tenants.


async def test_tenants_whose_prefixes_begin_alike_never_see_each_other(redis_server: RedisServer) -> None:
    prefixes = ["t1", "t1:x", "t1:", "t1:row", "t", "T1", "t1-", "t1.x"]
    stores = {prefix: store_on(redis_server.url, prefix=prefix) for prefix in prefixes}
    for prefix, store in stores.items():
        await opened(store, f"of {prefix}")
        await opened(store, "{shared}:row:x")
    for prefix, store in stores.items():
        expected = sorted([f"of {prefix}", "{shared}:row:x"])
        assert [row.run_id for row in await store.list_unfinished()] == expected
        assert [row.run_id for row in await store.list_runs()] == expected
        assert await store.repair() == 0
        draft = Draft.of("{shared}:row:x")
        draft = draft.after(draft.open())
        assert (await store.delete(draft.run_id, guard=draft.guard)).kind is OK
    for store in stores.values():
        await store.close()


async def test_all_keys_of_a_run_lie_in_one_slot_whatever_its_id(redis_server: RedisServer) -> None:
    async with fresh_store(redis_server) as store:
        for run_id in ("plain", "{other}", "}{", "a{b}c", "{00}", "{}", "☃:{x}"):
            await full(store, run_id)
        slots: dict[str, set[int]] = {}
        for key in await keys_of(redis_server, store):
            if found := re.search(r"(\{\d\d\}):", key):
                slots.setdefault(found[1], set()).add(key_slot(key.encode()))
        assert {len(each) for each in slots.values()} == {1}
        assert len({slot for each in slots.values() for slot in each}) == len(slots) > 1
