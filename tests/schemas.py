"""Schemas with the tables of a store in them and nothing else, lent to one test after another on the same server.

To make the tables and to drop them takes a server more time than what most tests then do there. Whoever changes the tables,
or leaves statements on their way for long, takes a fresh schema (`servers.fresh_schema`).
"""

from __future__ import annotations

import secrets
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

RESTING = 8
"""So many tests use others before a schema is lent again: what the statement of a cancelled caller still does, it has done."""
_EMPTY = """
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = '{schema}' AND tablename NOT LIKE '%\\_store' LOOP
        EXECUTE format('DELETE FROM {schema}.%I', name);
    END LOOP;
END $$
"""


class Schemas:
    """Those of one session of tests, at each address of a server."""

    def __init__(self) -> None:
        self._resting: dict[str, deque[str]] = defaultdict(deque)

    @asynccontextmanager
    async def lent(self, url: str) -> AsyncIterator[str]:
        """The name of a schema that nobody else has meanwhile: without tables, or with empty ones."""
        resting = self._resting[url]
        if len(resting) < RESTING:
            name = f"t{secrets.token_hex(8)}"
        else:
            name = resting.popleft()
            await _execute(url, _EMPTY.format(schema=name))
        yield name
        resting.append(name)

    async def drop(self, url: str) -> None:
        """Leave nothing behind on a server that outlives the tests."""
        for name in self._resting.pop(url, ()):
            await _execute(url, f"DROP SCHEMA IF EXISTS {name} CASCADE")


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url, statement_cache_size=0)  # also behind a pooler
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
