"""How one hears of messages in Postgres: a session that listens; behind a pooler, which keeps none for us, a poll.

A pooled poll goes by the ids of messages. They are given before their transactions commit, so that a lower one may show up
after a higher: a mark moves only to where every transaction that could have had a lower id has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from agent_runtime.errors import StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.stores.postgres_errors import translate
from agent_runtime.stores.postgres_link import Held, Lender, Link
from agent_runtime.stores.postgres_schema import Statements

_PAST_ALL = 2**63 - 1


class ListeningEar:
    """Told by the server, through a session of its own. A name on the channel is a hint: anybody may send one."""

    every = float("inf")

    def __init__(self, link: Link, connection: Held, sql: Statements, place: str, ring: Callable[[], None]) -> None:
        self._link = link
        self._connection = connection
        self._sql = sql
        self._place = place
        self._ring = ring
        self._named: set[RunId] = set()
        self._is_lost = False

    @classmethod
    async def open(cls, link: Link, sql: Statements, place: str, ring: Callable[[], None]) -> ListeningEar:
        """One that hears from now on."""
        connection = await link.keep()
        ear = cls(link, connection, sql, place, ring)
        connection.add_termination_listener(ear._lose)
        try:
            await connection.add_listener(sql.channel, ear._take)
        except BaseException as error:
            await ear.close()
            if isinstance(error, Exception):
                raise translate(error, place) from error
            raise
        return ear

    async def heard(self) -> Collection[RunId] | None:
        if self._is_lost:
            raise StoreUnavailable(f"{self._place} ended the session that listened for messages; listen again")
        named, self._named = self._named, set()
        return named

    async def posted(self, run_ids: Sequence[RunId]) -> list[int | None]:
        try:
            found = dict(await self._connection.fetch(self._sql["find_posted"], run_ids))
        except Exception as error:
            raise translate(error, self._place) from error
        return [found.get(run_id) for run_id in run_ids]

    async def close(self) -> None:
        await self._link.part_with(self._connection)

    def _take(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        self._named.add(RunId(payload))
        self._ring()

    def _lose(self, connection: Any) -> None:
        self._is_lost = True
        self._ring()


class PollingEar:
    """Asks the server, through whatever session the pooler lends."""

    every = 0.2

    def __init__(self, link: Lender, sql: Statements) -> None:
        self._link = link
        self._sql = sql
        self._low: int | None = None
        """All messages up to this id have been heard of; None: not known yet."""
        self._seen: set[int] = set()
        """Those past it that have been."""
        self._edge = 0
        """Where the low mark moves to, once all transactions before `until` have ended."""
        self._until: int | None = None

    async def heard(self) -> Collection[RunId] | None:
        low = self._start() if self._low is None else self._low
        found = await self._link.read(lambda db: db.fetch(self._sql["messages_since"], low))
        named = {row["id"]: RunId(row["run_id"]) for row in found if row["id"] is not None}
        new = {run_id for id, run_id in named.items() if id not in self._seen}
        self._seen.update(named)
        was_known = self._low is not None
        self._advance(found[0]["oldest"], found[0]["next"], found[0]["newest"])
        return new if was_known else None

    async def posted(self, run_ids: Sequence[RunId]) -> list[int | None]:
        found = dict(await self._link.read(lambda db: db.fetch(self._sql["find_posted"], run_ids)))
        return [found.get(run_id) for run_id in run_ids]

    async def close(self) -> None:
        return None

    def _start(self) -> int:
        return _PAST_ALL if self._until is None else self._edge

    def _advance(self, oldest: int, following: int, newest: int) -> None:
        """Move the low mark where that is safe, and choose where it goes next."""
        if self._until is not None and oldest < self._until:
            return
        if self._until is not None:
            self._low = self._edge
            self._seen = {id for id in self._seen if id > self._edge}
        self._edge, self._until = max(self._edge, newest), following
