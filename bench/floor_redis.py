"""The floor's journal in Redis: plain `redis`, one script a record, pipelined with those of all runs that wait."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeAlias

from redis.asyncio import Redis

from bench.floor_sqlite import Ended

Waiting: TypeAlias = "tuple[str, int, str, asyncio.Future[None]]"

# The least that is guarded at all: a record goes behind the one it was meant for, or nowhere.
_APPEND = """
if (redis.call('HGET', KEYS[1], 'number') or '0') ~= ARGV[1] then return 0 end
redis.call('RPUSH', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], 'number', ARGV[2])
return 1
"""


class RedisTable:
    """The calls of all runs; what waits is sent together."""

    def __init__(self, url: str) -> None:
        self._client: Any = Redis.from_url(url)
        self._numbers: dict[str, int] = {}
        self._waiting: list[Waiting] = []
        self._wake = asyncio.Event()
        self._sha = ""
        self._writer: asyncio.Task[None] | None = None

    async def open(self) -> RedisTable:
        self._sha = await self._client.script_load(_APPEND)
        self._writer = asyncio.create_task(self._write_groups())
        return self

    async def begin(self, run: str, step: int, kind: int, body: str) -> None:
        await self._write(run, step, kind, 0, body)

    async def end(self, run: str, step: int, kind: int, body: str) -> None:
        await self._write(run, step, kind, 1, body)

    async def read(self, run: str) -> Ended:
        found: Ended = {}
        for packed in await self._client.lrange(f"{{{run}}}:log", 0, -1):
            step, kind, ended, body = json.loads(packed)
            found[step, kind] = body if ended else None
        return found

    async def runs(self) -> list[str]:
        return list(self._numbers)

    async def fill_beats(self, owners: list[bytes]) -> None:
        await self.beat(owners, 0)

    async def beat(self, owners: list[bytes], now: int) -> int:
        await self._client.hset("beats", mapping={owner.hex(): now for owner in owners})
        return len(owners)

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
        await self._client.aclose()

    async def _write(self, run: str, step: int, kind: int, ended: int, body: str) -> None:
        number = self._numbers.get(run, 0)
        self._numbers[run] = number + 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((run, number, json.dumps((step, kind, ended, body)), done))
        self._wake.set()
        await done

    async def _write_groups(self) -> None:
        """Send all that waits in one round trip; each caller goes on once its own is answered."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._waiting = self._waiting, []
            pipeline = self._client.pipeline(transaction=False)
            for run, number, packed, _ in batch:
                pipeline.evalsha(self._sha, 2, f"{{{run}}}:row", f"{{{run}}}:log", number, number + 1, packed)
            for (_, _, _, done), landed in zip(batch, await pipeline.execute(), strict=True):
                assert landed == 1, "the guard holds"
                done.set_result(None)
