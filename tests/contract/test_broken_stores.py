"""Stores that are broken on purpose: each must fail the case of the contract that is there to find it."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.errors import StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredMessage, StoredRecord, StoredRow, StoredRun
from agent_runtime.journal.store import Answer, AnswerKind, Append, CheckpointStore, Guard
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.store_contract import StoreContract, cases, run_contract, strikes

OK, FENCED, MOVED = AnswerKind.OK, AnswerKind.FENCED, AnswerKind.MOVED


class Broken(MemoryCheckpointStore):
    """Lets a subclass change an append before it is judged, a row once it is stored, and an answer before it is given."""

    def _append_one(self, append: Append) -> Answer:
        answer = super()._append_one(self.asked(append))
        return self.answered(append, answer)

    def stored(self, run_id: RunId) -> StoredRow | None:
        run = self._runs.get(run_id)
        return None if run is None else run.row

    def change(self, run_id: RunId, **changes: int | None) -> None:
        run = self._runs[run_id]
        run.row = StoredRow(**{**run.row._asdict(), **changes})

    def asked(self, append: Append) -> Append:
        return append

    def answered(self, append: Append, answer: Answer) -> Answer:
        return answer

    def with_guard(self, append: Append, change: Callable[[Guard, StoredRow], Guard]) -> Append:
        row = self.stored(append.row.run_id)
        return append if append.guard is None or row is None else append._replace(guard=change(append.guard, row))


# What a guard names.


class IgnoresTheHead(Broken):
    def asked(self, append: Append) -> Append:
        return self.with_guard(append, lambda guard, row: guard._replace(head=row.head))


class IgnoresTheNumber(Broken):
    def asked(self, append: Append) -> Append:
        return self.with_guard(append, lambda guard, row: guard._replace(number=row.number))


class IgnoresTheOwner(Broken):
    def asked(self, append: Append) -> Append:
        return self.with_guard(append, lambda guard, row: guard._replace(owner=row.owner))


class IgnoresTheEpoch(Broken):
    def asked(self, append: Append) -> Append:
        return self.with_guard(append, lambda guard, row: guard._replace(epoch=row.epoch))


class IgnoresTheHeartbeat(Broken):
    def asked(self, append: Append) -> Append:
        return self.with_guard(append, lambda guard, row: guard._replace(heartbeat_at=None))


class IgnoresTheStep(Broken):
    def asked(self, append: Append) -> Append:
        if (row := self.stored(append.row.run_id)) is not None and append.row.step > row.step:
            self.change(row.run_id, step=append.row.step - 1)
        return append


class RepeatsTheHeartbeat(Broken):
    def _beat_after(self, row: StoredRow) -> int:
        return row.heartbeat_at


class ChecksThenWrites(Broken):
    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        [append] = appends
        row = self.stored(append.row.run_id)
        await asyncio.sleep(0)
        if row is not None:
            self._runs[row.run_id].row = row
        return await super().commit(appends)


# What an answer says.


class AnswersMovedForFenced(Broken):
    def answered(self, append: Append, answer: Answer) -> Answer:
        return answer._replace(kind=MOVED if answer.kind is FENCED else answer.kind)


class AnswersFencedForMoved(Broken):
    def answered(self, append: Append, answer: Answer) -> Answer:
        return answer._replace(kind=FENCED if answer.kind is MOVED else answer.kind)


class DoesNotKnowItsOwnWrite(Broken):
    def _append_one(self, append: Append) -> Answer:
        row = self.stored(append.row.run_id)
        return Answer(MOVED) if row is not None and row.head == append.row.head else super()._append_one(append)


class TakesARunTwice(Broken):
    def asked(self, append: Append) -> Append:
        if append.guard is None:
            self._runs.pop(append.row.run_id, None)
        return append


class AnswersInTheOrderOfIds(Broken):
    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        return await super().commit(sorted(appends, key=lambda append: append.row.run_id))


class LetsOneRunStopTheBatch(Broken):
    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        answers = await super().commit(appends)
        worst = next((answer.kind for answer in answers if answer.kind is not OK), OK)
        return [answer._replace(kind=worst) for answer in answers]


class KeepsMessagesToItself(Broken):
    def answered(self, append: Append, answer: Answer) -> Answer:
        return Answer(answer.kind)


# What a refusal, or the end, leaves behind.


class KeepsRefusedRecords(Broken):
    def answered(self, append: Append, answer: Answer) -> Answer:
        if answer.kind is not OK and (run := self._runs.get(append.row.run_id)):
            run.records.extend(append.records)
        return answer


class KeepsARefusedCheckpoint(Broken):
    def answered(self, append: Append, answer: Answer) -> Answer:
        if answer.kind is not OK and (run := self._runs.get(append.row.run_id)):
            run.checkpoint = append.checkpoint
        return answer


class AddsTheSameAgain(Broken):
    def asked(self, append: Append) -> Append:
        row = self.stored(append.row.run_id)
        if row is not None and row.head == append.row.head:
            self._runs[row.run_id].records.extend(append.records)
        return append


class TakesAnythingAfterTheEnd(Broken):
    def asked(self, append: Append) -> Append:
        row = self.stored(append.row.run_id)
        if row is not None and RunStatus(row.status).is_final:
            self.change(row.run_id, status=RunStatus.RUNNING)
        return append


class TakesNothingAfterTheEnd(Broken):
    def _append_one(self, append: Append) -> Answer:
        row = self.stored(append.row.run_id)
        return Answer(FENCED) if row is not None and RunStatus(row.status).is_final else super()._append_one(append)


class LeavesNoTombstone(Broken):
    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        answer = await super().delete(run_id, guard=guard)
        if answer.kind is OK:
            del self._runs[run_id]
        return answer


class DeletesTheRowAlone(Broken):
    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        run = self._runs.get(run_id)
        answer = await super().delete(run_id, guard=guard)
        if answer.kind is OK and run is not None:
            self._runs[run_id].records, self._runs[run_id].messages = run.records, run.messages
        return answer


class DeletesByPrefix(Broken):
    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        answer = await super().delete(run_id, guard=guard)
        for near in [other for other in self._runs if other.startswith(run_id[:-1]) and other != run_id]:
            del self._runs[near]
        return answer


# What is kept.


class KeepsTheFirstCheckpoint(Broken):
    def asked(self, append: Append) -> Append:
        run = self._runs.get(append.row.run_id)
        return append if run is None or run.checkpoint is None else append._replace(checkpoint=run.checkpoint)


class ForgetsTheCheckpoint(Broken):
    def answered(self, append: Append, answer: Answer) -> Answer:
        if answer.kind is OK:
            self._runs[append.row.run_id].checkpoint = append.checkpoint
        return answer


class KeepsText(Broken):
    def asked(self, append: Append) -> Append:
        texts = (record.body.decode(errors="replace").encode() for record in append.records)
        pairs = zip(append.records, texts, strict=True)
        return append._replace(records=tuple(record._replace(body=body) for record, body in pairs))


class StopsAtAZero(Broken):
    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        return await super().post(run_id, message._replace(body=message.body.split(b"\0")[0]))


class GivesOutWhatItHolds(Broken):
    async def calls(self, run_id: RunId, *, since: int = 0) -> list[StoredRecord]:
        run = self._runs.get(run_id)
        return [] if run is None else run.records if since == 0 else run.records[since:]


class FoldsCase(Broken):
    def asked(self, append: Append) -> Append:
        return append._replace(row=append.row._replace(run_id=RunId(append.row.run_id.casefold())))

    async def latest(self, run_id: RunId) -> StoredRun | None:
        return await super().latest(RunId(run_id.casefold()))

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        return await super().load_many([RunId(run_id.casefold()) for run_id in run_ids])


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


# Heartbeats and messages.


class RenewsForAnybody(Broken):
    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        row = self.stored(run_id)
        mine = guard if row is None else Guard(row.epoch, row.owner, row.number, row.head)
        return await super().renew(run_id, guard=mine, seen=seen)


class RenewsOnlyAtTheHead(Broken):
    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        row = self.stored(run_id)
        if row is not None and row.head != guard.head:
            return Answer(MOVED)
        return await super().renew(run_id, guard=guard, seen=seen)


class NeverGrowsIdle(Broken):
    def _as_read(self, row: StoredRow) -> StoredRow:
        return row._replace(idle_ms=0)


class TakesNoAppendForASignOfLife(Broken):
    def answered(self, append: Append, answer: Answer) -> Answer:
        row = self.stored(append.row.run_id)
        if row is not None:
            self.change(row.run_id, heartbeat_at=self._beats.setdefault(row.run_id, row.heartbeat_at))
        return answer

    @property
    def _beats(self) -> dict[RunId, int]:
        beats: dict[RunId, int] = self.__dict__.setdefault("beats", {})
        return beats


class CountsAMessageTwice(Broken):
    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        if run_id in self._runs:
            self._runs[run_id].messages.pop(message.digest, None)
        return await super().post(run_id, message)


class WakesNobody(Broken):
    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        row = self.stored(run_id)
        answer = await super().post(run_id, message)
        if row is not None:
            self.change(run_id, wake_at=row.wake_at)
        return answer


class ParksOverMessages(Broken):
    def asked(self, append: Append) -> Append:
        return append._replace(seen=2**31)


class CountsMessagesAsTheWriterDoes(Broken):
    def answered(self, append: Append, answer: Answer) -> Answer:
        if answer.kind is OK:
            self.change(append.row.run_id, posted=append.row.posted)
        return answer


class NeverSleepsAgain(Broken):
    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        return await super().renew(run_id, guard=guard)


class SleepsOverMessages(Broken):
    async def renew(self, run_id: RunId, *, guard: Guard, seen: int | None = None, wake_at: int | None = None) -> Answer:
        row = self.stored(run_id)
        return await super().renew(run_id, guard=guard, seen=0 if row is None else row.posted)


class PostsToTheEnded(Broken):
    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        row = self.stored(run_id)
        if row is not None:
            self.change(run_id, status=RunStatus.RUNNING)
        answer = await super().post(run_id, message)
        if row is not None:
            self.change(run_id, status=row.status)
        return answer


class PostsToNobody(Broken):
    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        answer = await super().post(run_id, message)
        return answer if run_id in self._runs else Answer(OK)


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


# What is more than one fault, or another way to have one.


class GuardsByTheEpochAlone(Broken):
    """As a lease that is a number, and a guard that looks at nothing else."""

    def asked(self, append: Append) -> Append:
        return self.with_guard(append, lambda guard, row: row_guard(row)._replace(epoch=guard.epoch))


class WritesWhereThereIsARun(Broken):
    """As an INSERT of records that only asks whether the run exists."""

    def answered(self, append: Append, answer: Answer) -> Answer:
        if answer.kind is MOVED:
            self._runs[append.row.run_id].records.extend(append.records)
            return answer._replace(kind=OK)
        return answer


class EncodesAgain(Broken):
    """As a column for JSON, which gives back another text of the same value."""

    def asked(self, append: Append) -> Append:
        return append._replace(records=tuple(record._replace(body=encoded_again(record.body)) for record in append.records))


class AcknowledgesBeforeItWrites(Broken):
    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        asyncio.get_running_loop().call_later(0.01, lambda: [self._append_one(append) for append in appends])
        return [Answer(OK)] * len(appends)


class TakesUnknownForOk(Broken):
    """As a driver's error that is swallowed: nothing of it is there."""

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        await super().commit(appends[:2])
        return [Answer(OK)] * len(appends)


class SkipsTheFirstOfAPage(Broken):
    async def list_unfinished(
        self, *, name: str | None = None, limit: int = 100, after: RunId | None = None
    ) -> list[StoredRow]:
        rows = await super().list_unfinished(name=name, limit=limit + 1, after=after)
        return rows[1:] if after is not None else rows[:limit]


class TearsWhatIsCancelled(Broken):
    """As two statements outside of a transaction: the row, then the records."""

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        answers = await super().commit(appends)
        held = [self._runs.get(append.row.run_id) for append in appends]
        tails = [run.records[-len(append.records) :] if run else [] for run, append in zip(held, appends, strict=True)]
        for run, tail in zip(held, tails, strict=True):
            if run is not None:
                del run.records[len(run.records) - len(tail) :]
        await asyncio.sleep(0)
        for run, tail in zip(held, tails, strict=True):
            if run is not None:
                run.records.extend(tail)
        return answers


class CountsBeforeItKeeps(Broken):
    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        answer = await super().post(run_id, message)
        if answer.kind is OK and run_id in self._runs:
            self._runs[run_id].messages.pop(message.digest)
            await asyncio.sleep(0)
            self._runs[run_id].messages[message.digest] = message
        return answer


class DeletesBitByBit(Broken):
    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        if run_id in self._runs:
            self._runs[run_id].records.clear()
            await asyncio.sleep(0)
        return await super().delete(run_id, guard=guard)


class LendsToTheCancelled(Broken):
    """As a pool that gets no connection back from a reader that was cancelled."""

    async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
        readers: asyncio.Semaphore = self.__dict__.setdefault("readers", asyncio.Semaphore(4))
        await readers.acquire()
        await asyncio.sleep(0)
        found = await super().load_many(run_ids)
        readers.release()
        return found


def row_guard(row: StoredRow) -> Guard:
    return Guard(row.epoch, row.owner, row.number, row.head)


def encoded_again(body: bytes) -> bytes:
    try:
        return json.dumps(json.loads(body)).encode()
    except ValueError:
        return body


FOUND_BY: dict[type[MemoryCheckpointStore], str] = {
    GuardsByTheEpochAlone: "an append onto another head is moved",
    WritesWhereThereIsARun: "of two appends from one place the second is moved",
    EncodesAgain: "the bytes of a record come back as they were",
    AcknowledgesBeforeItWrites: "a new run is stored whole",
    TakesUnknownForOk: "three hundred runs share one commit",
    SkipsTheFirstOfAPage: "unfinished runs are read page by page",
    TearsWhatIsCancelled: "an append that is cancelled has landed whole or not at all",
    CountsBeforeItKeeps: "a message whose posting is cancelled counts once when it is posted again",
    DeletesBitByBit: "a deletion that is cancelled leaves the run or its mark",
    LendsToTheCancelled: "readers that are cancelled cost nobody else a read",
    IgnoresTheHead: "an append onto another head is moved",
    IgnoresTheNumber: "an append past another number is moved",
    IgnoresTheOwner: "an append under another owner is fenced",
    IgnoresTheEpoch: "an append under another epoch is fenced",
    IgnoresTheHeartbeat: "a claim that names the heartbeat is fenced by a renewal",
    IgnoresTheStep: "a run that skips a step is moved",
    RepeatsTheHeartbeat: "no two renewals leave the same heartbeat",
    ChecksThenWrites: "of two claimants at once one wins",
    AnswersMovedForFenced: "a claim fences the appends of the owner before",
    AnswersFencedForMoved: "of two appends from one place the second is moved",
    DoesNotKnowItsOwnWrite: "the same append again is ok and adds nothing",
    TakesARunTwice: "a new run is fenced where another has its id",
    AnswersInTheOrderOfIds: "answers come in the order of the appends",
    LetsOneRunStopTheBatch: "each run of a commit is guarded by itself",
    KeepsMessagesToItself: "every answer to an owner says how many messages came",
    KeepsRefusedRecords: "three hundred refused records leave nothing",
    KeepsARefusedCheckpoint: "an append onto another head is moved",
    AddsTheSameAgain: "the same new run again is ok and adds nothing",
    TakesAnythingAfterTheEnd: "a final run takes no common record",
    TakesNothingAfterTheEnd: "a final run takes settled records and stays as it is",
    LeavesNoTombstone: "the id of a deleted run is not used again",
    DeletesTheRowAlone: "a deleted run leaves a mark and nothing else",
    DeletesByPrefix: "a deletion touches no other run",
    KeepsTheFirstCheckpoint: "a checkpoint replaces the one before",
    ForgetsTheCheckpoint: "an append without a checkpoint keeps the last one",
    KeepsText: "the bytes of a record come back as they were",
    StopsAtAZero: "the bytes of a message come back as they were",
    GivesOutWhatItHolds: "what a reader does to a list changes nothing stored",
    FoldsCase: "ids that look alike are two",
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
    RenewsForAnybody: "a renewal is fenced for another owner or epoch",
    RenewsOnlyAtTheHead: "a renewal asks for no number and no head",
    NeverGrowsIdle: "a run grows idle until it is renewed",
    TakesNoAppendForASignOfLife: "a run grows idle until it is written",
    CountsAMessageTwice: "the same message again is ok and changes nothing",
    WakesNobody: "a message wakes a parked run now",
    ParksOverMessages: "a run parked over an unseen message wakes at once",
    CountsMessagesAsTheWriterDoes: "an append does not change how many messages came",
    NeverSleepsAgain: "a reader that found nothing lets the run sleep again",
    SleepsOverMessages: "a reader that missed a message leaves the run awake",
    PostsToTheEnded: "a final run takes no common message",
    PostsToNobody: "a message to no run is fenced",
    ListsTheOldestFirst: "the run that changed last is listed first",
    TakesAMomentForOneRun: "runs of one moment are listed page by page each once",
    ListsTheDeletedByTime: "runs by time are those of a status where one is named",
    KeepsTheTimeOfTheEnd: "a settled record brings a run that ended to the front",
    TakesASignOfLifeForAChange: "a sign of life or a message moves no run in the list by time",
}


@pytest.mark.parametrize(("broken", "name"), FOUND_BY.items(), ids=lambda value: getattr(value, "__name__", value))
async def test_the_contract_finds_what_is_broken(
    broken: type[MemoryCheckpointStore], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strikes, "PATIENCE_SECONDS", 0.2)
    with pytest.raises((AssertionError, RuntimeError, TimeoutError)):
        await cases()[name](StoreContract(), broken())


def test_every_store_that_is_broken_here_is_looked_for() -> None:
    assert set(FOUND_BY) == set(Broken.__subclasses__())


async def test_a_store_that_hands_everything_on_is_not_found_broken() -> None:
    for name in sorted(set(FOUND_BY.values())):
        await cases()[name](StoreContract(), Broken())


def test_the_page_names_cases_that_find_a_broken_store() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "guides" / "write-your-own-store.md").read_text()
    named = re.findall(r"\| `([a-z0-9 ]+)` \|", page)
    assert len(named) >= 15
    assert set(named) <= set(FOUND_BY.values())


class CutOffForGood(StoreContract):
    """A contract whose strike a store does not get over."""

    async def cut_off(self, store: CheckpointStore) -> None:
        async def gone(*_: object, **__: object) -> Any:
            raise StoreUnavailable("gone")

        for verb in ("commit", "post", "load_many"):
            setattr(store, verb, gone)


@pytest.mark.parametrize("name", ["a store that lost its connections reads on", "a write over lost connections lands once"])
async def test_the_contract_finds_a_store_that_does_not_connect_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strikes, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        await cases()[name](CutOffForGood(), Broken())


async def test_a_report_names_what_a_broken_store_failed() -> None:
    async def make_store() -> MemoryCheckpointStore:
        return LeavesNoTombstone()

    report = await run_contract(make_store)
    name = FOUND_BY[LeavesNoTombstone]
    assert not report.holds
    assert report.failed[name].startswith("AssertionError")
    assert name in str(report)
    assert {*report.passed, *report.failed} == set(cases())
