"""What a dump of all values tells of runs under a key that encrypts."""

from __future__ import annotations

from typing import Any

from agent_runtime.journal.keys import KeyRing
from tests.keys.rings import ALL_HIDING, STILL_OLD
from tests.keys.story import MARKER, come_back, refuse_pickles, tell
from tests.redis_servers import RedisServer
from tests.redis_store.bench import fresh_store, operator


async def dump(client: Any, prefix: str) -> bytes:
    """The name and the value of every key under a prefix."""
    said = []
    async for name in client.scan_iter(f"{prefix}:*"):
        match await client.type(name):
            case b"hash":
                value = b"".join(part for pair in (await client.hgetall(name)).items() for part in pair)
            case b"list":
                value = b"".join(await client.lrange(name, 0, -1))
            case b"string":
                value = await client.get(name)
            case b"zset":
                value = b"".join(await client.zrange(name, 0, -1))
            case _:
                value = b"".join(await client.smembers(name))
        said.append(name + value)
    return b"\n".join(said)


async def test_a_secret_is_nowhere_in_a_dump_of_all_values(redis_server: RedisServer) -> None:
    async def told_by(ring: KeyRing, prefix: str) -> bytes:
        async with fresh_store(redis_server, prefix=prefix) as store, operator(redis_server) as client:
            assert MARKER in str(await tell(store, ring))
            return await dump(client, prefix)

    assert MARKER.encode() in await told_by(STILL_OLD, "plainly"), "else nobody would find it anywhere"
    hidden = await told_by(ALL_HIDING, "hidden")
    assert MARKER.encode() not in hidden
    assert len(hidden) > 10_000


async def test_hostile_data_is_data_and_what_nobody_sealed_is_refused(redis_server: RedisServer) -> None:
    async with fresh_store(redis_server) as store:
        await come_back(store, STILL_OLD)
        await refuse_pickles(store, STILL_OLD)
