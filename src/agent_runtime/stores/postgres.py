"""Runs in Postgres: durable, for every process that reaches the server.

Rules of this file:

* One statement a write, which is its own transaction. The guard is the update of the run's row in that statement: a
  sub-query that only looks at the row would let the write of a fenced owner through.
* READ COMMITTED and `synchronous_commit`, set and read back. Rows are locked in the order of run ids.
* An error either says that nothing was written, by the table of `postgres_errors.py`, or its connection is dropped and
  what follows reads through a fresh one.
* What can be read after a lost answer need not be durable yet: a commit that was interrupted while it waited for a standby
  is visible at once. Before it counts as landed, another write has to be acknowledged.
* A connection is lent for a statement and given back; none is held while a model or a tool is called.
* The lease clock is the server's, read inside the statement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.errors import AgentRuntimeError, InvalidSetting, StoreRefused, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import (
    RunStatus,
    StoredCheckpoint,
    StoredMessage,
    StoredRecord,
    StoredRow,
    StoredRun,
)
from agent_runtime.journal.store import (
    MOST_STRAYS,
    Answer,
    AnswerKind,
    Append,
    BatchStore,
    Ear,
    Guard,
    check_append,
    check_bytes,
)
from agent_runtime.stores.answers import why_refused
from agent_runtime.stores.layouts import Layout, nobody_knows
from agent_runtime.stores.postgres_batch import (
    Placed,
    batches,
    pack_guards,
    pack_many,
    pack_one,
    rounds,
    runs_on,
)
from agent_runtime.stores.postgres_ear import ListeningEar, PollingEar
from agent_runtime.stores.postgres_link import Connection, Lender, Link
from agent_runtime.stores.postgres_schema import BY_TIME, LAYOUT, Statements, check_session, find_layout, migrate, set_up
from agent_runtime.stores.postgres_url import check_names, place_of

MOST_RECORDS = 2**24 - 1
"""How many records a run may have: more numbers than these have no place in the journal."""
MOST_BYTES = 900_000_000
"""What one append may hold: a value, and a message to a server, ends at 1 GiB."""
MOST_KEYS = 50_000
PAST_ALL = (2**63 - 1, RunId(""))
"""Later than any run has changed."""
MOST_BEATS = 2_000
"""How many heartbeats go in one statement: two statements are carried at once, and an append waits for one at most."""
POST_TRIES = 4
LOADS_TAKE = 12
"""How many times longer than another statement the records of many runs may take."""
BEAT_PAUSES = (0.002, 0.01, 0.05, 0.25)
"""How long a heartbeat waits for rows that were being written, before it leaves them to the next beat."""

_ROW_SIZE = len(StoredRow._fields)
_RECORD_SIZE = len(StoredRecord._fields)
_UNKNOWN = Answer(AnswerKind.UNKNOWN)
_OK, _FENCED = Answer(AnswerKind.OK), Answer(AnswerKind.FENCED)
_DUPLICATE = "23505"


class PostgresCheckpointStore(BatchStore):
    """Runs in the database at `url`, in tables whose names begin with `prefix`, in `schema`; made where there are none."""

    lanes = 2
    max_body_bytes: int | None = MOST_BYTES

    def __init__(
        self,
        url: str,
        *,
        schema: str = "public",
        prefix: str = "agent_runtime_",
        pooler: bool = False,
        timeout_seconds: float = 5.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`pooler`: a pooler in transaction mode stands before the server. `timeout_seconds`: then a statement is unknown."""
        self._place = place_of(url)
        check_names(schema, prefix)
        if not timeout_seconds > 0:
            raise InvalidSetting(f"timeout_seconds is a number above 0, found {timeout_seconds!r}")
        self._url = url
        self._schema, self._prefix, self._pooler = schema, prefix, pooler
        self._timeout = timeout_seconds
        self._clock = clock
        self._sql = Statements(schema, prefix, pooler=pooler)
        self._keys: dict[RunId, int] = {}
        self._in_doubt: set[RunId] = set()
        """Runs of which an answer was lost: what is read of them may be on this server alone."""
        self._is_set_up = False
        self._layout = LAYOUT
        self._link = self._make_link()

    def __repr__(self) -> str:
        return f"PostgresCheckpointStore({self._place!r})"

    def _make_link(self) -> Lender:
        return Link(
            self._url,
            self._place,
            pooler=self._pooler,
            timeout_seconds=self._timeout,
            greet=self._greet,
            forget=self._keys.clear,  # another server may answer next
        )

    # Writing.

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        for append in appends:
            check_append(append)
            if append.row.number > MOST_RECORDS:
                raise _too_long(append.row)
            check_bytes(append, MOST_BYTES, "Postgres")
        answers: list[Answer | None] = [None] * len(appends)
        try:
            for part in rounds(appends):
                await self._carry(part, answers)
        except AgentRuntimeError:
            if not any(answers):
                raise  # nothing of this commit was written; else nobody knows of what has no answer
        return [answer or _UNKNOWN for answer in answers]

    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        sql = self._sql["renew"]
        found = await self._link.write(lambda db: db.fetch(sql, run_id, guard.epoch, guard.owner, seen, wake_at))
        if found is None:
            return _UNKNOWN
        return Answer(AnswerKind.OK, found[0][0]) if found else _FENCED

    async def renew_all(self, guards: Sequence[tuple[RunId, Guard]]) -> list[Answer]:
        answers: list[Answer] = [_UNKNOWN] * len(guards)
        cut = [range(start, min(start + MOST_BEATS, len(guards))) for start in range(0, len(guards), MOST_BEATS)]
        try:
            await _side_by_side([self._renew_part(guards, part, answers) for part in cut])
        except AgentRuntimeError:
            if all(answer is _UNKNOWN for answer in answers):
                raise  # no part was renewed; else nobody knows of what has no answer
        return answers

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        values = (run_id, message.digest, message.kind, message.body, message.seal)
        for attempt in range(1, POST_TRIES + 1):
            try:
                found = await self._link.write(lambda db: db.fetch(self._sql["post"], *values))
            except StoreUnavailable as error:
                if attempt < POST_TRIES and getattr(error.__cause__, "sqlstate", None) == _DUPLICATE:
                    continue  # the same message came through another connection just now
                raise
            if found is None:
                return _UNKNOWN
            return Answer(AnswerKind.OK, found[0][0]) if found else await self._why_not_posted(run_id, message)
        raise AssertionError("the last try returns or raises")

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        buried = await self._link.write(lambda db: self._bury(db, run_id, guard))
        if buried is None:
            self._in_doubt.add(run_id)
            return _UNKNOWN
        if buried:
            return _OK
        run = await self.latest(run_id)
        if run is None:
            return _FENCED
        mine = (run.row.epoch, run.row.owner) == (guard.epoch, guard.owner) and run.row.status < 11
        return Answer(AnswerKind.MOVED if mine else AnswerKind.FENCED, run.row.posted)

    # Reading.

    async def latest(self, run_id: RunId) -> StoredRun | None:
        found = await self._link.read(lambda db: self._read_runs(db, [run_id]))
        if run_id in self._in_doubt and found and not await self._is_safe([run_id]):
            raise StoreUnavailable(
                f"{self._place} did not say that what it holds of run {run_id!r} is durable: a standby that its commits wait "
                "for does not answer. It goes on once it does; see synchronous_standby_names"
            )
        return found.get(run_id)

    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        found = await self._link.read(lambda db: db.fetch(self._sql["select_records"], run_id, since))
        return [StoredRecord._make(row) for row in found]

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        if not run_ids:
            return []
        found = await self._link.read(lambda db: self._load_at_once(db, run_ids))
        return [found.get(run_id) for run_id in run_ids]

    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        found = await self._link.read(lambda db: db.fetch(self._sql["list_unfinished"], after or "", name, limit))
        return [StoredRow._make(row) for row in found]

    async def list_awake(
        self, *, at: int, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        found = await self._link.read(lambda db: db.fetch(self._sql["list_awake"], after or "", name, limit, at))
        return [StoredRow._make(row) for row in found]

    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        wanted = None if status is None else int(status)
        found = await self._link.read(lambda db: db.fetch(self._sql["list_runs"], after or "", wanted, limit))
        return [StoredRow._make(row) for row in found]

    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        found = await self._link.read(lambda db: self._read_recent(db, status, before or PAST_ALL, limit))
        if found is None:
            return await super().list_recent(status=status, before=before, limit=limit)
        return [StoredRow._make(row) for row in found]

    async def inbox(self, run_id: RunId) -> list[StoredMessage]:
        found = await self._link.read(lambda db: db.fetch(self._sql["select_messages"], run_id))
        return [StoredMessage._make(row) for row in found]

    async def strays(self) -> list[StoredRecord]:
        """The first record that is left of runs whose row is gone."""
        sql = self._sql["select_strays"]
        found = await self._link.read(lambda db: db.fetch(sql, MOST_STRAYS, timeout=LOADS_TAKE * self._timeout))
        return [StoredRecord._make(row) for row in found]

    async def listen(self, ring: Callable[[], None]) -> Ear:
        if self._pooler or not isinstance(self._link, Link):  # no session of ours stays one and the same
            return PollingEar(self._link, self._sql)
        return await ListeningEar.open(self._link, self._sql, self._place, ring)

    async def now(self) -> datetime:
        [[moment]] = await self._link.read(lambda db: db.fetch(self._sql["read_clock"]))
        assert isinstance(moment, datetime)
        return moment.astimezone(UTC)

    def reopen(self) -> PostgresCheckpointStore:
        again = PostgresCheckpointStore(
            self._url,
            schema=self._schema,
            prefix=self._prefix,
            pooler=self._pooler,
            timeout_seconds=self._timeout,
            clock=self._clock,
        )
        again._is_set_up, again._layout = self._is_set_up, self._layout
        return again

    async def close(self) -> None:
        await self._link.close()

    # Its layout.

    async def read_layout(self) -> Layout:
        door = self._at_the_door()
        try:
            return Layout(await door._link.read(lambda db: find_layout(db, self._sql, self._place)), LAYOUT)
        finally:
            await door.close()

    async def migrate(self) -> Layout:
        before = await self.read_layout()  # what is refused is refused here: inside of a write nobody would know
        if not before.is_old:
            return before
        door = self._at_the_door()
        try:
            found = await door._link.write(lambda db: migrate(db, self._sql, self._place))
        finally:
            await door.close()
        if found is None:
            raise nobody_knows(self._place)
        return found

    def _at_the_door(self) -> PostgresCheckpointStore:
        """The same store, which makes no tables."""
        door = self.reopen()
        door._is_set_up = True
        return door

    # How a commit is carried.

    async def _carry(self, part: list[Placed], answers: list[Answer | None]) -> None:
        """Carry appends to different runs. One that is fenced, or whose run nobody knows, needs no statement."""
        guarded = [append.row.run_id for _, append in part if append.guard is not None]
        keys = await self._find_keys(guarded)
        if len(keys) < len(guarded):
            gone = {place for place, append in part if append.guard is not None and append.row.run_id not in keys}
            for place in gone:
                answers[place] = _FENCED
            part = [placed for placed in part if placed[0] not in gone]
        await _side_by_side([self._carry_batch(batch, keys, answers) for batch in batches(part)])

    async def _carry_batch(self, batch: list[Placed], keys: Mapping[RunId, int], answers: list[Answer | None]) -> None:
        written = await self._link.write(lambda db: self._write_batch(db, [append for _, append in batch], keys))
        if written is None:
            self._in_doubt.update(append.row.run_id for _, append in batch)
            for place, _ in batch:
                answers[place] = _UNKNOWN
            return
        if self._in_doubt:  # what has landed just now is durable, and all that came before it
            self._in_doubt.difference_update(batch[i - 1][1].row.run_id for i in written)
        refused = []
        for i, (place, append) in enumerate(batch, start=1):
            posted = written.get(i)
            if posted is None:
                refused.append((place, append))
            else:
                answers[place] = Answer(AnswerKind.OK, posted) if posted else _OK
        if refused:
            await self._answer_refused(refused, answers)

    async def _write_batch(self, db: Connection, appends: list[Append], keys: Mapping[RunId, int]) -> dict[int, int]:
        """How many messages each run has had, by the append's place in the batch, for those that landed."""
        [first, *others] = appends
        if not others and first.guard is not None and len(first.records) <= len(self._sql.appends) and runs_on(first):
            sql = self._sql.appends[len(first.records) - 1]
            found = await db.fetch(sql, *pack_one(first, first.guard, keys[first.row.run_id]))
            return {1: found[0][0]} if found else {}
        written = {}
        for i, key, posted in await db.fetch(self._sql["append_batch"], *pack_many(appends, keys)):
            written[i] = posted
            if appends[i - 1].guard is None:
                self._remember(appends[i - 1].row.run_id, key)
        return written

    async def _answer_refused(self, refused: list[Placed], answers: list[Answer | None]) -> None:
        """Why guards did not hold, by the rows as they are now. Where these cannot be read, nobody knows."""
        run_ids = [append.row.run_id for _, append in refused]
        try:
            found = await self._link.read(lambda db: self._read_runs(db, run_ids))
        except AgentRuntimeError:
            found = None
        landed = []
        for place, append in refused:
            if found is None:
                answers[place] = _UNKNOWN
                continue
            run = found.get(append.row.run_id)
            answers[place] = answer = why_refused(None if run is None else run.row, append)
            if answer.kind is AnswerKind.OK:
                landed.append((place, append.row.run_id))
        if landed and not await self._is_safe([run_id for _, run_id in landed]):
            for place, _ in landed:
                answers[place] = _UNKNOWN

    async def _is_safe(self, run_ids: Sequence[RunId]) -> bool:
        """Have a write of those runs acknowledged, which changes nothing: then what was read of them before is durable."""
        try:
            written = await self._link.write(lambda db: db.fetch(self._sql["make_sure"], sorted(run_ids)))
        except StoreUnavailable:
            return False
        if written is None or len(written) < len(set(run_ids)):
            return False
        self._in_doubt.difference_update(run_ids)
        return True

    async def _find_keys(self, run_ids: Sequence[RunId]) -> dict[RunId, int]:
        """The dense keys of those runs that are there."""
        keys = {run_id: self._keys[run_id] for run_id in run_ids if run_id in self._keys}
        if len(keys) < len(run_ids):
            unknown = [run_id for run_id in run_ids if run_id not in keys]
            for run_id, key in await self._link.read(lambda db: db.fetch(self._sql["find_keys"], unknown)):
                keys[run_id] = key
                self._remember(run_id, key)
        return keys

    async def _renew_part(self, guards: Sequence[tuple[RunId, Guard]], part: Sequence[int], answers: list[Answer]) -> None:
        """Renew those at the places of `part`, and once more those that somebody was just writing."""
        left = list(part)
        for pause in (0.0, *BEAT_PAUSES):
            if pause:
                await self._clock.sleep(pause)
            left = await self._renew_free(guards, left, answers)
            if not left:
                return

    async def _renew_free(self, guards: Sequence[tuple[RunId, Guard]], wanted: list[int], answers: list[Answer]) -> list[int]:
        """Renew what nobody is writing just now; which ones somebody was."""
        keys = await self._find_keys([guards[place][0] for place in wanted])
        known = [place for place in wanted if guards[place][0] in keys]
        pairs = [(keys[guards[place][0]], guards[place][1]) for place in known]
        renewed = await self._link.write(lambda db: db.fetch(self._sql["renew_all"], *pack_guards(pairs)))
        if renewed is None:
            return []
        [[_, count], *told] = renewed
        if count == len(known):
            for place in known:
                answers[place] = _OK
        for i, posted in told:
            answers[known[i - 1]] = Answer(AnswerKind.OK, posted) if posted else _OK
        left = [place for place in wanted if answers[place] is _UNKNOWN]
        return await self._renew_refused(guards, left, answers) if left else []

    async def _renew_refused(self, guards: Sequence[tuple[RunId, Guard]], left: list[int], answers: list[Answer]) -> list[int]:
        run_ids = [guards[place][0] for place in left]
        found = await self._link.read(lambda db: db.fetch(self._sql["find_owners"], run_ids))
        owners = {run_id: (epoch, owner) for run_id, epoch, owner, _ in found}
        for place in left:
            run_id, guard = guards[place]
            if owners.get(run_id) != (guard.epoch, guard.owner):
                answers[place] = _FENCED
        return [place for place in left if answers[place] is _UNKNOWN]

    async def _why_not_posted(self, run_id: RunId, message: StoredMessage) -> Answer:
        found = await self._link.read(lambda db: db.fetch(self._sql["find_message"], run_id, message.digest))
        if not found:
            return _FENCED
        [[posted, is_there]] = found
        if not is_there:
            return Answer(AnswerKind.FENCED, posted)
        return Answer(AnswerKind.OK, posted) if await self._is_safe([run_id]) else _UNKNOWN

    async def _bury(self, db: Connection, run_id: RunId, guard: Guard) -> bool:
        async with db.transaction():
            found = await db.fetch(self._sql["bury_run"], run_id, *guard[:4])
            for name in ("delete_records", "delete_checkpoint", "delete_messages") if found else ():
                await db.execute(self._sql[name], found[0][0])
        return bool(found)

    # What a read does.

    async def _read_runs(self, db: Connection, run_ids: Sequence[RunId]) -> dict[RunId, StoredRun]:
        return {run.row.run_id: run for run in (await self._read_keyed(db, run_ids)).values()}

    async def _read_keyed(self, db: Connection, run_ids: Sequence[RunId]) -> dict[int, StoredRun]:
        """Rows and latest states, by dense key."""
        runs = {}
        for values in map(tuple, await db.fetch(self._sql["select_run"], run_ids)):
            row, key, checkpoint = StoredRow._make(values[:_ROW_SIZE]), values[_ROW_SIZE], values[_ROW_SIZE + 1 :]
            self._remember(row.run_id, key)
            runs[key] = StoredRun(row, None if checkpoint[0] is None else StoredCheckpoint._make(checkpoint))
        return runs

    async def _load_at_once(self, db: Connection, run_ids: Sequence[RunId]) -> dict[RunId, StoredRun]:
        """Rows, states and records, all as they were at one moment."""
        async with db.transaction(isolation="repeatable_read", readonly=True):
            runs = await self._read_keyed(db, list(set(run_ids)))
            found = await db.fetch(self._sql["select_all_records"], list(runs), timeout=LOADS_TAKE * self._timeout)
        records: dict[int, list[StoredRecord]] = {key: [] for key in runs}
        for values in map(tuple, found):
            records[values[_RECORD_SIZE]].append(StoredRecord._make(values[:_RECORD_SIZE]))
        return {run.row.run_id: run._replace(records=tuple(records[key])) for key, run in runs.items()}

    async def _read_recent(
        self, db: Connection, status: int | None, before: tuple[int, RunId], limit: int
    ) -> list[Any] | None:
        """None where the tables are older than the index for it."""
        if self._layout < BY_TIME:
            return None
        statuses = [int(each) for each in RunStatus if each != RunStatus.DELETED] if status is None else [int(status)]
        return await db.fetch(self._sql["list_recent"], statuses, *before, limit)

    def _remember(self, run_id: RunId, key: int) -> None:
        if len(self._keys) >= MOST_KEYS:
            self._keys.clear()  # a key is found again by its run id
        self._keys[run_id] = key

    async def _greet(self, db: Connection) -> None:
        await check_session(db, self._sql, self._place, pooler=self._pooler)
        if not self._is_set_up:
            self._layout = await set_up(db, self._sql, self._place)
            self._is_set_up = True


def _too_long(row: StoredRow) -> StoreRefused:
    return StoreRefused(
        f"run {row.run_id!r} would have {row.number:,} records, and Postgres holds {MOST_RECORDS:,} records of a run; nothing "
        "was written: go on in a new run"
    )


async def _side_by_side(works: list[Coroutine[object, object, None]]) -> None:
    """Do all of them to their end, then raise what one of them raised."""
    if len(works) == 1:
        return await works[0]
    for ended in await asyncio.gather(*works, return_exceptions=True):
        if ended is not None:
            raise ended
    return None
