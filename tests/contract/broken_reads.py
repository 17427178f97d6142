"""Stores that read or list wrongly, each with the case of the contract that is there to find it."""

from collections.abc import Sequence
from datetime import datetime

from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredRecord, StoredRow, StoredRun
from agent_runtime.journal.store import Answer, Append, Guard
from agent_runtime.stores.memory import MemoryCheckpointStore
from tests.contract.broken import Broken

# What is read.


class ReadsFromTheStart(Broken):
    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        return await super().calls(run_id)


class SortsNumbersAsText(Broken):
    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        return sorted(await super().calls(run_id, since=since), key=lambda record: str(record.number))


class LeavesOutWhatIsAbsent(Broken):
    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        return [run for run in await super().load_many(run_ids) if run is not None]


class ListsFinalRunsAsUnfinished(Broken):
    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        return await self.list_runs(limit=limit, after=after)


class FindsNamesByPrefix(Broken):
    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        rows = await super().list_unfinished(after=after, limit=1000)
        return [row for row in rows if name is None or row.name.startswith(name)][:limit]


class LimitsBeforeItFilters(Broken):
    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        rows = await super().list_unfinished(limit=limit, after=after)
        return [row for row in rows if name is None or row.name == name]


class PagesFromTheIdOn(Broken):
    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        rows = await super().list_unfinished(name=name, limit=1000)
        return [row for row in rows if after is None or row.run_id >= after][:limit]


class ListsDeletedRuns(Broken):
    async def list_runs(self, *, status: int | None = None, limit: int = 100, after: RunId | None = None) -> list[StoredRow]:
        return self._list(lambda row: status in (None, row.status), limit, after)


class TellsNoZone(Broken):
    async def now(self) -> datetime:
        return (await super().now()).replace(tzinfo=None)


class ClosesOnce(Broken):
    is_closed = False

    async def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed already")
        self.is_closed = True


# The list by time.


class ListsTheOldestFirst(Broken):
    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        return (await super().list_recent(status=status, before=before, limit=limit))[::-1]


class TakesAMomentForOneRun(Broken):
    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        rows = await super().list_recent(status=status, before=before)
        return [row for row in rows if before is None or row.updated_at < before[0]][:limit]


class ListsTheDeletedByTime(Broken):
    async def list_recent(
        self, *, status: int | None = None, before: tuple[int, RunId] | None = None, limit: int = 100
    ) -> list[StoredRow]:
        rows = await super().list_recent(status=status, before=before, limit=limit)
        return rows if status is not None else rows + await super().list_recent(status=RunStatus.DELETED)


class KeepsTheTimeOfTheEnd(Broken):
    def asked(self, append: Append) -> Append:
        row = self.stored(append.row.run_id)
        self.kept = row.updated_at if row is not None and RunStatus(row.status).is_final else None
        return append

    def answered(self, append: Append, answer: Answer) -> Answer:
        if self.kept is not None:
            self.change(append.row.run_id, updated_at=self.kept)
        return answer


class TakesASignOfLifeForAChange(Broken):
    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        self.change(run_id, updated_at=self._wall_ms())
        return await super().renew(run_id, guard=guard, seen=seen, wake_at=wake_at)


FOUND_BY: dict[type[MemoryCheckpointStore], str] = {
    ReadsFromTheStart: "calls gives the records past a number",
    SortsNumbersAsText: "calls gives all records in order",
    LeavesOutWhatIsAbsent: "load many gives each run in its place",
    ListsFinalRunsAsUnfinished: "unfinished runs are those that are not final",
    FindsNamesByPrefix: "unfinished runs are listed by name",
    LimitsBeforeItFilters: "a name and a page go together",
    PagesFromTheIdOn: "a page begins past an id that need not be there",
    ListsDeletedRuns: "a deleted run is listed only where asked for",
    TellsNoZone: "the store tells an aware time in utc",
    ClosesOnce: "a store may be closed twice",
    ListsTheOldestFirst: "the run that changed last is listed first",
    TakesAMomentForOneRun: "runs of one moment are listed page by page each once",
    ListsTheDeletedByTime: "runs by time are those of a status where one is named",
    KeepsTheTimeOfTheEnd: "a settled record brings a run that ended to the front",
    TakesASignOfLifeForAChange: "a sign of life or a message moves no run in the list by time",
}
