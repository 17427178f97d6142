"""The floor's table in a Postgres database: plain `asyncpg`, one statement a transaction and nothing around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import asyncpg

from bench.floor_sqlite import Ended

Waiting: TypeAlias = "tuple[tuple[str, int, int, int, str], asyncio.Future[None]]"

_CREATE = """
CREATE TABLE IF NOT EXISTS calls (
    run text, step integer, kind integer, ended integer, body text, PRIMARY KEY (run, step, kind)
)
"""
_BEGIN_CALL = "INSERT INTO calls (run, step, kind, ended, body) VALUES ($1, $2, $3, 0, $4)"
_END_CALL = "UPDATE calls SET ended = 1, body = $4 WHERE run = $1 AND step = $2 AND kind = $3"
_WRITE_ALL = """
INSERT INTO calls (run, step, kind, ended, body)
SELECT * FROM unnest($1::text[], $2::integer[], $3::integer[], $4::integer[], $5::text[])
ON CONFLICT (run, step, kind) DO UPDATE SET ended = 1, body = excluded.body
"""
_READ = "SELECT step, kind, ended, body FROM calls WHERE run = $1 ORDER BY step, kind"
_CREATE_BEATS = "CREATE TABLE beats (key bigint PRIMARY KEY, owner bytea, heard bigint)"
_BEAT = """
UPDATE beats b SET heard = $3 FROM unnest($1::bigint[], $2::bytea[]) AS k (key, owner)
WHERE b.key = k.key AND b.owner = k.owner
"""


class PostgresTable:
    """The calls of all runs; `grouped`: what waits is committed together, else each by itself, on so many connections."""

    def __init__(self, url: str, *, grouped: bool, connections: int = 1) -> None:
        self._url = url
        self._grouped = grouped
        self._number = connections
        self._free: asyncio.LifoQueue[Any] = asyncio.LifoQueue()
        self._waiting: list[Waiting] = []
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def open(self) -> PostgresTable:
        for number in range(self._number):
            connection = await asyncpg.connect(self._url)
            if number == 0:
                await connection.execute(_CREATE)
            self._free.put_nowait(connection)
        if self._grouped:
            self._writer = asyncio.create_task(self._write_groups(await asyncpg.connect(self._url)))
        return self

    async def begin(self, run: str, step: int, kind: int, body: str) -> None:
        if self._grouped:
            await self._write((run, step, kind, 0, body))
        else:
            await self._execute(_BEGIN_CALL, run, step, kind, body)

    async def end(self, run: str, step: int, kind: int, body: str) -> None:
        if self._grouped:
            await self._write((run, step, kind, 1, body))
        else:
            await self._execute(_END_CALL, run, step, kind, body)

    async def read(self, run: str) -> Ended:
        return {(step, kind): body if ended else None for step, kind, ended, body in await self._fetch(_READ, run)}

    async def runs(self) -> list[str]:
        return [run for (run,) in await self._fetch("SELECT DISTINCT run FROM calls")]

    async def fill_beats(self, owners: Sequence[bytes]) -> None:
        await self._execute(_CREATE_BEATS)
        fill = "INSERT INTO beats SELECT key, owner, 0 FROM unnest($1::bytea[]) WITH ORDINALITY AS k (owner, key)"
        await self._execute(fill, owners)

    async def beat(self, owners: Sequence[bytes], now: int) -> int:
        done = await self._execute(_BEAT, range(1, len(owners) + 1), owners, now)
        return int(done.split()[1])

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
        while not self._free.empty():
            await self._free.get_nowait().close()

    async def _execute(self, statement: str, *values: object) -> str:
        connection = await self._free.get()
        done: str = await connection.execute(statement, *values)
        self._free.put_nowait(connection)
        return done

    async def _fetch(self, statement: str, *values: object) -> list[Any]:
        connection = await self._free.get()
        found: list[Any] = await connection.fetch(statement, *values)
        self._free.put_nowait(connection)
        return found

    async def _write(self, row: tuple[str, int, int, int, str]) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, done))
        self._wake.set()
        await done

    async def _write_groups(self, connection: Any) -> None:
        """Commit all that waits, in one statement; each caller goes on once its own is durable."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                batch, self._waiting = self._waiting, []
                await connection.execute(_WRITE_ALL, *zip(*(row for row, _ in batch), strict=True))
                for _, done in batch:
                    done.set_result(None)
        finally:
            connection.terminate()
