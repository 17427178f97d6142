"""Runs by time in Redis: the list of those that ended, the newest first, and the migration to the layout with its index.

The index is a hint, as all are. Where a bucket does not have each of its runs in one of two indexes, the unfinished or the
ended, an older version wrote, which knows of no such index: its runs are gone through and mended before they are listed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

from agent_runtime.clock import Clock
from agent_runtime.entropy import SYSTEM_ENTROPY
from agent_runtime.errors import AgentRuntimeError
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredRow
from agent_runtime.journal.store import recency
from agent_runtime.stores.layouts import nobody_knows
from agent_runtime.stores.redis_link import Link
from agent_runtime.stores.redis_open import LAYOUT
from agent_runtime.stores.redis_pack import BUCKETS, Keys, script, unpack_ids

Placed: TypeAlias = "tuple[int, str]"
"""When a run ended by the index, and its id."""

MEND_PAGE = 500
HOLD_MS = 10_000
"""How long a migration keeps others out after its last sign of life."""
WAIT_SECONDS = 0.2


class ByTime:
    """The runs of one store by time."""

    def __init__(self, link: Link, keys: Keys, rows: Callable[[str, list[str]], Awaitable[list[StoredRow]]]) -> None:
        """`rows` gives the rows of the ids of an index that are there."""
        self._link = link
        self._keys = keys
        self._rows = rows

    async def list_ended(self, status: int | None, before: tuple[int, RunId] | None, limit: int) -> list[StoredRow]:
        """Final runs of a status, of all but the deleted where none is named, from the first one before a time and an id."""
        up_to = None if before is None else before[0]
        size = 2 * limit // BUCKETS + 8
        skipped = dict.fromkeys(range(BUCKETS), 0)
        await self._mend_buckets(up_to)
        rows: list[StoredRow] = []
        waiting: list[Placed] = []
        while skipped and len(rows) < limit:
            ends: list[Placed] = []
            for bucket, (_, placed) in (await self._ask(skipped, up_to, size)).items():
                waiting += placed
                skipped[bucket] += size
                if len(placed) < size:
                    del skipped[bucket]
                else:
                    ends.append(placed[-1])
            horizon = max(ends) if ends else None  # before it a bucket may hold more than it gave
            ready = [run_id for when, run_id in waiting if horizon is None or (when, run_id) >= horizon]
            waiting = [placed for placed in waiting if horizon is not None and placed < horizon]
            for row in await self._rows("ended", ready):
                is_wanted = row.status == status if status is not None else RunStatus.DONE <= row.status < RunStatus.DELETED
                if is_wanted and (before is None or recency(row) < before):
                    rows.append(row)
        return rows

    async def migrate(self, clock: Clock) -> None:
        """Put each run into its index, and say that this layout is reached. Whoever else migrates is waited for."""
        me = SYSTEM_ENTROPY.draw(16).hex().encode()
        while (state := await self._hold(me)) != b"done":
            if state == b"held":
                await clock.sleep(WAIT_SECONDS)
            elif await self._mend_all(me):
                await self._carry_one("end_migration", me, b"%d" % LAYOUT)

    async def _hold(self, me: bytes) -> bytes:
        """Keep others from migrating for a while: `mine`, or `held` by another, or `done`."""
        state: bytes = (await self._carry_one("begin_migration", me, b"%d" % HOLD_MS, b"%d" % LAYOUT))[1]
        return state

    async def _mend_all(self, me: bytes) -> bool:
        """False where this one was taken for dead meanwhile, and another goes on."""
        for bucket in range(BUCKETS):
            if not await self._mend_bucket(bucket, me):
                return False
        return True

    async def _carry_one(self, name: str, *values: bytes) -> Any:
        [found] = await self._link.write([script(name, (self._keys.mark,), values)])
        if isinstance(found, AgentRuntimeError):
            raise found
        if isinstance(found, Exception):
            raise nobody_knows(self._link.place) from found
        return found

    # Mending.

    async def _mend_buckets(self, up_to: int | None) -> None:
        """Bring the buckets in order that are not."""
        for bucket, (is_whole, _) in (await self._ask(range(BUCKETS), up_to, 0)).items():
            if not is_whole:
                await self._mend_bucket(bucket)

    async def _mend_bucket(self, bucket: int, me: bytes | None = None) -> bool:
        """Bring the indexes of a bucket to what is stored. False where `me` is not to go on with it."""
        for index in ("runs", "unfinished"):
            after: str | None = None
            while True:
                [packed] = await self._link.read([self._keys.list_ids(bucket, index, after, MEND_PAGE)])
                ids = unpack_ids(packed)
                if me is not None and await self._hold(me) != b"mine":
                    return False
                if not ids:
                    break
                after = ids[-1]
                await self._mend(ids)
        ended = (await self._ask([bucket], None, -1))[bucket][1]
        for start in range(0, len(ended), MEND_PAGE):
            await self._mend([run_id for _, run_id in ended[start : start + MEND_PAGE]])
        return True

    async def _mend(self, ids: list[str]) -> None:
        for found in await self._link.write([self._keys.mend(run_id) for run_id in ids]):
            if isinstance(found, AgentRuntimeError):
                raise found

    async def _ask(
        self, buckets: Iterable[int] | dict[int, int], up_to: int | None, most: int
    ) -> dict[int, tuple[bool, list[Placed]]]:
        """Of each bucket whether its indexes are whole, and ids with their times, past those that were skipped."""
        skipped = buckets if isinstance(buckets, dict) else dict.fromkeys(buckets, 0)
        asked = [self._keys.list_ended(bucket, up_to, skip, most) for bucket, skip in skipped.items()]
        answers = await self._link.read(asked)
        return {bucket: _placed(answer) for bucket, answer in zip(list(skipped), answers, strict=True)}


def _placed(answer: list[bytes]) -> tuple[bool, list[Placed]]:
    whole, *pairs = answer
    ids, times = pairs[::2], pairs[1::2]
    return whole == b"1", [
        (int(float(time)), run_id.decode(errors="replace")) for run_id, time in zip(ids, times, strict=True)
    ]
