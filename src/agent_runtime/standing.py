"""What a face asks of runs: a page of a long list, how one stands while it is watched, what waits, what people left."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from agent_runtime.described import CORRUPT, IN_DOUBT, STATUSES, Left, RunInfo, RunReport, Stand, word_of
from agent_runtime.doubts import Case, passed_over, verdict_left
from agent_runtime.errors import CheckpointNotFound, InvalidSetting, VerdictRefused
from agent_runtime.ids import RunId, check_run_id
from agent_runtime.inbox import Message, MessageKind, find_cancel
from agent_runtime.journal.records import NO_OWNER, RunStatus, StoredRow
from agent_runtime.journal.states import IN_DOUBT as STATES_IN_DOUBT
from agent_runtime.journal.states import WAITING
from agent_runtime.journal.store import CheckpointStore, recency
from agent_runtime.lease import find_mark
from agent_runtime.recovery import Found
from agent_runtime.redaction import Part, Redact, shown_text
from agent_runtime.run import Backing
from agent_runtime.settlements import said_from_plain

MOST_LISTED = 1000
PAGE_OF_A_FACE = 50
PAGE = 100
FILTERED_PAGE = 1000
LOOK_SECONDS = 0.07
"""How long a face is kept waiting for a page of runs that are few among many."""
WATCH_SECONDS = 0.15


class Page(NamedTuple):
    """Some runs of a long list; `after`: from where it goes on, None where that was all.

    It may hold fewer runs than were asked for, or none, and yet go on: looking has its time.
    """

    runs: Sequence[RunInfo]
    after: str | None = None


ROWS = {
    "running": RunStatus.RUNNING, "interrupted": RunStatus.RUNNING, "paused": RunStatus.PAUSED, IN_DOUBT: RunStatus.BLOCKED,
    "quarantined": RunStatus.QUARANTINED, "done": RunStatus.DONE, "failed": RunStatus.FAILED,
    "cancelled": RunStatus.CANCELLED,
}  # fmt: skip
"""What the row of a run says that is shown as such; a corrupt one may say anything."""
UNFINISHED = frozenset(word for word, status in ROWS.items() if not status.is_final)
ENDED = {word: int(status) for word, status in ROWS.items() if status.is_final}


def may_be(row: StoredRow, status: str | None) -> bool:
    """Whether a run may turn out to be of that status: only a corrupt one is other than its row says."""
    return status not in ROWS or row.status == ROWS[status]


def may_wait(row: StoredRow, *, is_parked: bool) -> bool:
    """Whether a run may wait for somebody: parked as it is, or beside its worker."""
    return (row.status in (RunStatus.PAUSED, RunStatus.BLOCKED)) if is_parked else row.status == RunStatus.RUNNING


def check_status(status: str | None) -> None:
    """Refuse a word that no run is shown as."""
    if status is not None and status not in STATUSES:
        raise InvalidSetting(f"status is one of {', '.join(STATUSES)}; found {status!r}")


class Looking(ABC):
    """What a face asks of runs, on what `Runs` knows of whose they are."""

    _backing: Backing
    _store: CheckpointStore

    @abstractmethod
    async def _read(self, run_id: str) -> Found: ...

    @abstractmethod
    async def _infos(self, rows: Sequence[StoredRow], status: str | None) -> Sequence[RunInfo]: ...

    @abstractmethod
    async def _report(self, found: Found) -> RunReport: ...

    @abstractmethod
    async def _own(self, run_ids: Sequence[RunId]) -> Sequence[Found]: ...

    async def list(
        self, *, status: str | None = None, limit: int = MOST_LISTED, after: str | None = None
    ) -> Sequence[RunInfo]:
        """Runs in the order of their ids, from the first one past `after`; no more than `limit`."""
        found: list[RunInfo] = []
        if limit > 0:
            async for info in self.each(status=status, after=after):
                found.append(info)
                if len(found) >= limit:
                    break
        return found

    async def each(self, *, status: str | None = None, after: str | None = None) -> AsyncIterator[RunInfo]:
        """The same, one after another and all of them, read page by page."""
        check_status(status)
        async for page in self._pages(after):
            for info in await self._infos(page, status):
                yield info

    async def _pages(self, after: str | None) -> AsyncIterator[Sequence[StoredRow]]:
        last = None if after is None else check_run_id(after)
        while page := await self._store.list_runs(limit=PAGE, after=last):
            yield page
            last = page[-1].run_id

    async def page(
        self,
        *,
        status: str | None = None,
        name: str | None = None,
        prefix: str = "",
        after: str | None = None,
        limit: int = PAGE_OF_A_FACE,
    ) -> Page:
        """Runs in the order of their ids, for a face: a page at a time, and no longer than `LOOK_SECONDS` for each.

        `name`: only runs of that program; `prefix`: only runs whose ids begin so.
        """
        check_status(status)
        clock, found, last = self._backing.clock, list[RunInfo](), after
        give_up_at = clock.monotonic() + LOOK_SECONDS
        if prefix and after is None:  # the id that is the prefix itself
            first = await self._store.latest(RunId(prefix))
            there: Sequence[StoredRow] = [first.row] if first is not None and first.row.status != RunStatus.DELETED else []
            found += await self._infos([row for row in there if name in (None, row.name)], status)
            last = prefix
        while True:
            is_picked = name is None and (status is None or status in ENDED)  # by the store itself
            rows = await self._rows(status, limit + 1 if is_picked else FILTERED_PAGE, last)
            within = [row for row in rows if row.run_id.startswith(prefix)]
            likely = [row for row in within if name in (None, row.name) and may_be(row, status)]
            for at in range(0, len(likely), limit):
                found += await self._infos(likely[at : at + limit], status)
                if len(found) > limit:
                    return Page(found[:limit], found[limit - 1].run_id)
                if clock.monotonic() >= give_up_at and at + limit < len(likely):
                    return Page(found, likely[at + limit - 1].run_id)
            if not within or len(within) < len(rows):
                return Page(found)
            last = within[-1].run_id
            if clock.monotonic() >= give_up_at:
                return Page(found, last)

    async def recent(
        self, *, status: str | None = None, name: str | None = None, before: str | None = None, limit: int = PAGE_OF_A_FACE
    ) -> Page:
        """Runs for a face as `page` gives them, the one last changed first. `after` of a page is the `before` of the next."""
        check_status(status)
        clock, found, last = self._backing.clock, list[RunInfo](), None if before is None else _read_place(before)
        give_up_at = clock.monotonic() + LOOK_SECONDS
        stored = None if status is None or status not in ROWS else int(ROWS[status])
        is_picked = name is None and status not in ("running", "interrupted", CORRUPT)  # by the store itself
        while True:
            size = limit + 1 if is_picked else FILTERED_PAGE
            rows = await self._store.list_recent(status=stored, before=last, limit=size)
            likely = [row for row in rows if name in (None, row.name)]
            for at in range(0, len(likely), limit):
                part = likely[at : at + limit]
                for row, info in zip(part, await self._infos_of(part, status), strict=True):
                    if info is not None and len(found) == limit:
                        return Page(found, _place(last))
                    if info is not None:
                        found.append(info)
                    last = recency(row)
                if clock.monotonic() >= give_up_at and at + limit < len(likely):
                    return Page(found, _place(last))
            if len(rows) < size:
                return Page(found)
            last = recency(rows[-1])
            if clock.monotonic() >= give_up_at:
                return Page(found, _place(last))

    async def _infos_of(self, rows: Sequence[StoredRow], status: str | None) -> Sequence[RunInfo | None]:
        """What is said of each of these; None of one that is of another status, or another's."""
        infos = {info.run_id: info for info in await self._infos(rows, status)}
        return [infos.get(row.run_id) for row in rows]

    async def watch(self, run_id: str, *, every: float = WATCH_SECONDS) -> AsyncIterator[Stand]:
        """How the run stands now, and again each time that changed. Reads its row, so often, while somebody iterates.

        Raises what `show` raises, at once or later: also once the run is deleted.
        """
        await self._read(run_id)  # whose it is never changes
        last: Stand | None = None
        while True:
            stored = await self._store.latest(RunId(run_id))
            if stored is None or stored.row.status == RunStatus.DELETED:
                await self._read(run_id)
                raise CheckpointNotFound(f"nothing is stored for run {run_id!r} any more")
            stand = await self._stand(stored.row)
            if stand != last:
                yield stand
            last = stand
            await self._backing.clock.sleep(every)

    async def waiting_each(self, *, within_seconds: float = float("inf")) -> AsyncIterator[RunReport]:
        """Every run that waits for somebody: with open requests, or blocked by calls in doubt; those that are parked first.

        `within_seconds`: for how long to look; a run may be left out then.
        """
        give_up_at = self._backing.clock.monotonic() + within_seconds
        for is_parked in (True, False):
            after: RunId | None = None
            while self._backing.clock.monotonic() < give_up_at and (
                page := await self._store.list_unfinished(limit=PAGE, after=after)
            ):
                after = page[-1].run_id
                asking = [row.run_id for row in page if may_wait(row, is_parked=is_parked)]
                for found in await self._own(asking):
                    report = await self._report(found)
                    if report.pending or report.info.status == IN_DOUBT:
                        yield report

    async def _stand(self, row: StoredRow) -> Stand:
        mark = await find_mark(self._store, row) if row.status == RunStatus.RUNNING and row.owner != NO_OWNER else None
        word = word_of(row, mark) if row.status in RunStatus._value2member_map_ else CORRUPT
        return Stand(word, row.epoch, row.number, row.posted)

    async def _rows(self, status: str | None, limit: int, after: str | None) -> Sequence[StoredRow]:
        """The next rows that may be of that status."""
        last = None if after is None else RunId(after)
        if status in UNFINISHED:
            return await self._store.list_unfinished(limit=limit, after=last)
        return await self._store.list_runs(status=ENDED.get(status or ""), limit=limit, after=last)


def _place(recency: tuple[int, RunId] | None) -> str | None:
    """Where a list by time goes on, as text."""
    return None if recency is None else f"{recency[0]}:{recency[1]}"


def _read_place(text: str) -> tuple[int, RunId]:
    moment, _, run_id = text.partition(":")
    if not (moment.isascii() and moment.isdigit() and len(moment) < 19 and run_id):
        raise InvalidSetting(f"before= is what the last page said in its `after`; found {text!r:.100}")
    return int(moment), check_run_id(run_id)


# What people left.


def read_left(case: Case, now_ms: int, redact: Redact | None = None) -> Iterator[Left]:
    """What was left, as it may be shown, the first word about each call alone: that is the one which stands.

    Answers that a worker has found not to hold are left no more.
    """
    passed = passed_over(case, now_ms)
    messages = [message for message in case.messages if message.kind is not MessageKind.VERDICT or message not in passed]
    for left in _read_left(case._replace(messages=messages)):
        yield left._replace(why=shown_text(redact, left.why, Part.MESSAGE if left.what == "verdict" else Part.ERROR))


def _read_left(case: Case) -> Iterator[Left]:
    seen: set[str] = set()
    for message in case.messages:
        left = _verdict(case, message) or _settlement(case, message)
        if left is not None and left.call not in seen:
            seen.add(left.call)
            yield left
    cancel = find_cancel(case.messages)
    if cancel is not None and not RunStatus(case.row.status).is_final:
        yield Left("cancel", "", "cancel", cancel.by, cancel.why)


def _verdict(case: Case, message: Message) -> Left | None:
    if message.kind is not MessageKind.VERDICT:
        return None
    try:
        verdict = verdict_left(message)
    except VerdictRefused:
        return None
    life = case.history.lives.get(verdict.request)
    if life is None or life.state not in WAITING:
        return None
    return Left("verdict", verdict.request, verdict.decision.value, verdict.by, verdict.note)


def _settlement(case: Case, message: Message) -> Left | None:
    said = said_from_plain(message.body) if message.kind is MessageKind.SETTLE else None
    life = None if said is None else case.history.lives.get(said.call)
    if said is None or life is None or life.state not in STATES_IN_DOUBT or life.attempts != said.attempt:
        return None
    return Left("settlement", said.call, said.how.value.replace("_", " "), said.by, said.why)
