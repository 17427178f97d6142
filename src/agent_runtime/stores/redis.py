"""Runs in Redis or Valkey, on one server or on a cluster: as durable as the server is told to be.

Rules of this file:

* One script a write, on the keys of one run: guard, records, row, index and expiry are one atomic move. A batch is the
  scripts of many runs in one round trip to each node.
* A script finds its own head and says OK, so whatever may have been lost may be sent again. Nothing but the caller does so:
  our connections try nothing twice.
* An error either says that nothing was written, by the table of `redis_errors.py`, or its connection is dropped and what
  follows reads through a fresh one.
* The lease clock is the server's, read inside the script.
* The indexes are hints: what they say is compared with the rows, and mended.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from typing import Any

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.errors import AgentRuntimeError, CheckpointStoreCorrupt, InvalidSetting, StoreRefused, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredMessage, StoredRecord, StoredRow, StoredRun
from agent_runtime.journal.store import Answer, AnswerKind, Append, BatchStore, Guard, check_append, recency
from agent_runtime.stores.layouts import Layout, say_old
from agent_runtime.stores.postgres_batch import rounds
from agent_runtime.stores.redis_errors import Fate, fate_of, translate
from agent_runtime.stores.redis_link import Few, Link, Lost, Node, Wire
from agent_runtime.stores.redis_open import LAYOUT, Level, Said, check_mark, check_server, mark, read_mark
from agent_runtime.stores.redis_pack import (
    BUCKETS,
    Command,
    Keys,
    bucket_of,
    plain,
    script,
    unpack_ids,
    unpack_messages,
    unpack_records,
    unpack_row,
    unpack_state,
)
from agent_runtime.stores.redis_time import ByTime
from agent_runtime.stores.redis_url import check_prefix

MOST_BEATS = 2_000
"""How many heartbeats go in one round trip: an append waits for one at most."""
MOST_LOADS = 64
MOST_BYTES = 500 * 2**20
"""What one script may take: a value of a server ends at 512 MiB."""
AROUND_BODY = 64 * 1024
"""What a value of the server holds besides a body."""
MOST_SECONDS = 100 * 365 * 86_400
"""A time further away than a server counts to would stop a script in its middle."""
PAGE = 500
SYNC = "sync"
_EPOCH_START = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS = (AnswerKind.OK, AnswerKind.FENCED, AnswerKind.MOVED)
_UNKNOWN = Answer(AnswerKind.UNKNOWN)
_PLAIN_ANSWERS = {code: Answer(kind) for code, kind in enumerate(_KINDS)}


class RedisCheckpointStore(BatchStore):
    """Runs under keys that begin with `prefix`, where the client that `make_client` makes leads."""

    lanes = 2

    def __init__(
        self,
        make_client: Callable[[], Any],
        *,
        prefix: str = "agent_runtime",
        ttl_s: float | None = None,
        wait_replicas: int = 0,
        may_lose_writes: bool | None = None,
        timeout_seconds: float = 5.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`make_client`: `lambda: Redis.from_url(url)`, or `RedisCluster`, of `redis.asyncio`.

        `ttl_s`: a run is removed so long after its last write or heartbeat, unless it waits for somebody. `wait_replicas`: a
        write counts once so many replicas have it. `may_lose_writes`: whether an acknowledged write can be lost, where you
        know better than the server tells. `timeout_seconds`: then a write is unknown.
        """
        if not callable(make_client):
            raise InvalidSetting(
                f"RedisCheckpointStore takes a function that makes a client, found {type(make_client).__name__}; write "
                "RedisCheckpointStore(lambda: Redis.from_url(url))"
            )
        check_prefix(prefix)
        _check_seconds("timeout_seconds", timeout_seconds)
        if ttl_s is not None:
            _check_seconds("ttl_s", ttl_s)
        if type(wait_replicas) is not int or not 0 <= wait_replicas <= 100:
            raise InvalidSetting(f"wait_replicas= is a number from 0 to 100, found {wait_replicas!r}")
        self._make_client = make_client
        self._ttl_ms = None if ttl_s is None else max(1, round(ttl_s * 1000))
        self._wait_replicas = wait_replicas
        self._declared = may_lose_writes
        self.may_lose_writes = may_lose_writes is not False
        """Whether a power cut or a failover can lose an acknowledged write, by what the servers said; true until they did."""
        self.max_body_bytes = MOST_BYTES - AROUND_BODY
        """By what a script may take, and by the server's proto-max-bulk-len once it was asked."""
        self._timeout = timeout_seconds
        self._clock = clock
        self._keys = Keys(prefix)
        self._levels: dict[str, Level] = {}
        self._said = Said()
        self._is_set_up = False
        self._unconfirmed: set[RunId] = set()
        """Runs of which an answer was lost, or too few replicas had what was written."""
        self._link = Link(
            make_client, timeout_seconds=timeout_seconds, wait_replicas=wait_replicas, clock=clock, greet=self._greet
        )

    def __repr__(self) -> str:
        return f"RedisCheckpointStore({self._link.place!r}, prefix={self._keys.prefix!r})"

    @property
    def prefix(self) -> str:
        """What all keys of the store begin with."""
        return self._keys.prefix

    async def open(self) -> None:
        """Look at the servers, refuse what is no store of ours, and mark a new one. The first verb does so by itself."""
        if self._is_set_up:
            return
        await self._link.ask_all(self._look_at)
        [found] = await self._link.read([mark(self._keys)])
        say_old(f"the store under {self.prefix!r} of {self._link.place}", Layout(self._check(found), LAYOUT))
        self._is_set_up = True

    # Writing.

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        for append in appends:
            check_append(append)
        if not appends:
            return []
        await self.open()
        run_ids = {append.row.run_id for append in appends}
        if len(run_ids) == len(appends):
            return self._answers(appends, await self._link.write(self._scripts(appends), sync=SYNC))
        answers: list[Answer] = [_UNKNOWN] * len(appends)
        for part in rounds(appends):  # a run stands once in a round trip
            batch = [append for _, append in part]
            for (place, _), answer in zip(part, await self._carry_round(batch, answers), strict=True):
                answers[place] = answer
        return answers

    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        return await self._write_one(self._keys.renew(run_id, guard, seen, wake_at))

    async def renew_all(self, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        if not guards:
            return []
        await self.open()
        found: list[Any] = []
        for first in range(0, len(guards), MOST_BEATS):
            part = guards[first : first + MOST_BEATS]
            found += await self._link.write([self._keys.renew(run_id, guard, None, None) for run_id, guard in part])
        return self._definite(found)

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        await self.open()
        self._check_body(run_id, [message.body])
        return await self._write_one(self._keys.post(run_id, message), sync=SYNC)

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        answer = await self._write_one(self._keys.bury(run_id, guard), sync=SYNC)
        return answer._replace(posted=0) if answer.kind is AnswerKind.OK else answer

    # Reading.

    async def latest(self, run_id: RunId) -> StoredRun | None:
        await self.open()
        [found] = await self._link.read([self._keys.select(run_id, None)])
        if run_id in self._unconfirmed:  # after the read: a write that comes late may land in between
            await self._confirm(run_id)
        return self._run(run_id, found)

    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        await self.open()
        [found] = await self._link.read([self._keys.select(run_id, since)])
        run = self._run(run_id, found)
        return [] if run is None else list(run.records)

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        await self.open()
        runs: list[StoredRun | None] = []
        for first in range(0, len(run_ids), MOST_LOADS):
            part = run_ids[first : first + MOST_LOADS]
            found = await self._link.read([self._keys.select(run_id, 0) for run_id in part])
            runs += [self._run(run_id, each) for run_id, each in zip(part, found, strict=True)]
        return runs

    async def inbox(self, run_id: RunId) -> list[StoredMessage]:
        await self.open()
        [found] = await self._link.read([self._keys.select_messages(run_id)])
        with _naming(run_id):
            return unpack_messages(found)

    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        def is_wanted(row: StoredRow) -> bool:
            return row.status < RunStatus.DONE and name in (None, row.name)

        return await self._list("unfinished", is_wanted, limit, after)

    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        if status is None:
            return await self._list("runs", lambda row: row.status != RunStatus.DELETED, limit, after)
        return await self._list("runs", lambda row: row.status == status, limit, after)

    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        await self.open()
        found: list[StoredRow] = []
        if status is None or status < RunStatus.DONE:
            found += [row async for row in self._each_unfinished(status) if before is None or recency(row) < before]
        if status is None or status >= RunStatus.DONE:
            found += await ByTime(self._link, self._keys, self._rows).list_ended(status, before, limit)
        return nlargest(limit, found, key=recency)

    async def now(self) -> datetime:
        await self.open()
        [(seconds, microseconds)] = await self._link.read([plain(self._keys.mark, "TIME")])
        return _EPOCH_START + timedelta(seconds=int(seconds), microseconds=int(microseconds))

    async def repair(self) -> int:
        """Go through every key of the store and mend the indexes by what is there; how many entries were wrong.

        Not needed in the ordinary: the scripts keep them. Do it once somebody removed keys by hand, or put some back.
        """
        await self.open()
        mended = 0

        async def mend_node(node: Node) -> None:
            nonlocal mended
            async for ids in self._scan(node):
                mended += sum(await self._link.read([self._keys.mend(run_id) for run_id in ids]))

        await self._link.ask_all(mend_node)
        return mended

    # Its layout.

    async def read_layout(self) -> Layout:
        await self._link.ask_all(self._look_at)
        [found] = await self._link.read([read_mark(self._keys)])
        return Layout(None if found is None else self._check(found), LAYOUT)

    async def migrate(self) -> Layout:
        before = await self.read_layout()
        if before.is_old:
            await ByTime(self._link, self._keys, self._rows).migrate(self._clock)
        return before

    def _check(self, found: Any) -> int:
        return check_mark(found, self._keys, self._link.place)

    def reopen(self) -> RedisCheckpointStore:
        again = RedisCheckpointStore(
            self._make_client,
            prefix=self._keys.prefix,
            ttl_s=None if self._ttl_ms is None else self._ttl_ms / 1000,
            wait_replicas=self._wait_replicas,
            may_lose_writes=self._declared,
            timeout_seconds=self._timeout,
            clock=self._clock,
        )
        again._is_set_up, again._said, again._levels = self._is_set_up, self._said, self._levels
        again.may_lose_writes, again.max_body_bytes = self.may_lose_writes, self.max_body_bytes
        return again

    async def close(self) -> None:
        await self._link.close()

    # How a write is carried.

    def _scripts(self, appends: Sequence[Append]) -> list[Command]:
        for append in appends:
            bodies = [record.body for record in append.records]
            self._check_body(append.row.run_id, bodies if append.checkpoint is None else [*bodies, append.checkpoint.body])
        commands = [self._keys.append(append, self._ttl_ms) for append in appends]
        for append, command in zip(appends, commands, strict=True):
            if len(command.packed) > MOST_BYTES:
                raise StoreRefused(
                    f"run {append.row.run_id!r}: an append of {len(command.packed):,} bytes, and Redis takes {MOST_BYTES:,}; "
                    "nothing was written: record less in one call"
                )
        return commands

    def _check_body(self, run_id: RunId, bodies: Sequence[bytes]) -> None:
        """Refuse what the server would answer by ending the connection, after which nobody would know what it wrote."""
        size = max(map(len, bodies), default=0)
        if self.max_body_bytes is not None and size > self.max_body_bytes:
            raise StoreRefused(
                f"run {run_id!r}: a value of {size:,} bytes, and {self._link.place} takes {self.max_body_bytes:,} "
                "(proto-max-bulk-len); nothing was written: record less, or let the server take more"
            )

    async def _carry_round(self, batch: list[Append], before: list[Answer]) -> list[Answer]:
        try:
            return self._answers(batch, await self._link.write(self._scripts(batch), sync=SYNC))
        except AgentRuntimeError:
            if all(answer is _UNKNOWN for answer in before):
                raise  # nothing of this commit was written; else nobody knows of what has no answer
            return [_UNKNOWN] * len(batch)

    def _answers(self, appends: Sequence[Append], found: list[Any]) -> list[Answer]:
        answers = self._definite(found)
        if self._wait_replicas:
            for append, answer in zip(appends, answers, strict=True):
                if answer.kind is AnswerKind.UNKNOWN:
                    self._unconfirmed.add(append.row.run_id)
                elif answer.kind is AnswerKind.OK:  # and all that came before it
                    self._unconfirmed.discard(append.row.run_id)
        return answers

    async def _write_one(self, command: Command, *, sync: str = "") -> Answer:
        await self.open()
        [answer] = self._definite(await self._link.write([command], sync=sync))
        return answer

    def _definite(self, found: list[Any]) -> list[Answer]:
        """An answer for each. Raises where nothing of all of them was written."""
        failed: AgentRuntimeError | None = None
        answers: list[Answer] = []
        for given in found:
            if type(given) is int:
                answers.append(_PLAIN_ANSWERS.get(given) or _answer_of(given))
                continue
            error = _undone(given, self._link.place)
            failed = failed or error
            answers.append(_answer_of(given.value, is_confirmed=False) if type(given) is Few else _UNKNOWN)
        if failed is not None and all(_undone(given, self._link.place) is not None for given in found):
            raise failed from failed.__cause__
        return answers

    async def _confirm(self, run_id: RunId) -> None:
        """Wait until enough replicas have what was written of a run; raise where they do not."""
        key = self._keys.row(run_id)
        [found] = await self._link.write([plain(key, "EXISTS", key)], sync=SYNC)
        if isinstance(found, Few):
            raise StoreUnavailable(
                f"{self._link.place}: {found.acknowledged} replica(s) have what was written of run {run_id!r}, expected "
                f"{self._wait_replicas} (wait_replicas=); it goes on once they do. See what keeps them"
            )
        if isinstance(found, int):
            self._unconfirmed.discard(run_id)

    # What a read does.

    def _run(self, run_id: RunId, found: Any) -> StoredRun | None:
        if found is None:
            return None
        row, state, records = found
        with _naming(run_id):
            checkpoint = None if state is None else unpack_state(state)
            return StoredRun(unpack_row(row, run_id), checkpoint, tuple(unpack_records(records)))

    async def _list(
        self, index: str, is_wanted: Callable[[StoredRow], bool], limit: int, after: RunId | None
    ) -> list[StoredRow]:
        await self.open()
        rows: list[StoredRow] = []
        start: str | None = after
        while len(rows) < limit:
            ids, start = await self._page(index, start, min(limit, PAGE))
            for row in await self._rows(index, ids):
                if is_wanted(row) and len(rows) < limit:
                    rows.append(row)
            if start is None:
                break
        return rows

    async def _each_unfinished(self, status: int | None) -> AsyncIterator[StoredRow]:
        after: RunId | None = None
        while page := await self.list_unfinished(limit=PAGE, after=after):
            after = page[-1].run_id
            for row in page:
                if status in (None, row.status):
                    yield row

    async def _page(self, index: str, after: str | None, size: int) -> tuple[list[str], str | None]:
        """The next ids of all buckets in their order, and past which one to go on; None where these are the last."""
        most = 2 * size // BUCKETS + 8
        asked = [self._keys.list_ids(bucket, index, after, most) for bucket in range(BUCKETS)]
        found = [unpack_ids(packed) for packed in await self._link.read(asked)]
        ends = [ids[-1] for ids in found if len(ids) == most]
        horizon = min(ends) if ends else None  # past it a bucket may hold more than it gave
        return sorted(run_id for ids in found for run_id in ids if horizon is None or run_id <= horizon), horizon

    async def _rows(self, index: str, ids: list[str]) -> list[StoredRow]:
        """The rows of those ids that are there, in their order. An index that says otherwise is mended."""
        buckets: dict[int, list[str]] = {}
        for run_id in ids:
            buckets.setdefault(bucket_of(run_id), []).append(run_id)
        asked = [script("select_rows", tuple(map(self._keys.row, part))) for part in buckets.values()]
        rows: list[StoredRow] = []
        wrong: list[str] = []
        for part, packed in zip(buckets.values(), await self._link.read(asked), strict=True):
            for run_id, each in zip(part, packed, strict=True):
                row = unpack_row(each, run_id) if each else None
                if row is not None:
                    rows.append(row)
                if row is None or (index != "runs" and (index == "ended") != (row.status >= RunStatus.DONE)):
                    wrong.append(run_id)
        if wrong:
            with suppress(StoreUnavailable):  # it changes no answer, and the next list mends what is left
                await self._link.write([self._keys.mend(run_id) for run_id in wrong])
        return sorted(rows)

    async def _scan(self, node: Node) -> Any:
        """The ids of the runs that one server has, some at a time."""
        begin, end = (part.encode() for part in self._keys.around_bucket("row:"))
        cursor = b"0"
        while True:
            pattern = f"{self._keys.prefix}:{{*}}:row:*"
            command = plain(self._keys.mark, "SCAN", cursor, "MATCH", pattern, "COUNT", "1000")
            cursor, found = await self._link.read_on(node, command)
            rests = [key[len(begin) + 2 :] for key in found]  # the bucket has two digits
            ids = [rest[len(end) :].decode() for rest in rests if rest.startswith(end)]
            if ids:
                yield ids
            if cursor == b"0":
                return

    # Opening.

    async def _greet(self, link: Link, node: Node, wire: Wire) -> None:
        self._levels[node.place] = await check_server(
            wire, node.place, self._said, wait_replicas=self._wait_replicas, is_cluster=link.is_cluster
        )
        levels = list(self._levels.values())
        told = [level.most_bytes for level in levels if level.most_bytes is not None]
        self.max_body_bytes = min([MOST_BYTES, *told]) - AROUND_BODY
        if self._declared is None:
            self.may_lose_writes = any(level.may_lose_writes(self._wait_replicas) for level in levels)

    async def _look_at(self, node: Node) -> None:
        try:
            await self._link.read_on(node, plain(self._keys.mark, "PING"))
        except StoreUnavailable:
            if not self._link.is_cluster:
                raise  # of a cluster, the runs of the other nodes can be worked; this one is looked at when it is back


def _answer_of(code: int, *, is_confirmed: bool = True) -> Answer:
    posted, kind = divmod(code, 4)
    if kind == 0 and not is_confirmed:
        return _UNKNOWN
    return Answer(_KINDS[kind], posted)


def _undone(given: Any, place: str) -> AgentRuntimeError | None:
    """The error after which nothing is written; None where something may be."""
    if isinstance(given, AgentRuntimeError):
        return given
    if not isinstance(given, Exception) or isinstance(given, Lost) or fate_of(given) is Fate.UNKNOWN:
        return None
    error = translate(given, place)
    error.__cause__ = given
    return error


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MOST_SECONDS:
        raise InvalidSetting(f"{name}= is a number of seconds above 0, at most {MOST_SECONDS:,}, found {value!r}")


class _naming:
    """Says of which run the bytes are that are not what was written."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | IndexError | struct.error):
            raise CheckpointStoreCorrupt(
                f"run {self._run_id!r}: what Redis holds of it is not what was written ({error}); find out who changed it, "
                "and restore it from a backup"
            ) from error
