"""Stores with more than one fault, or with one of another kind, each with the case of the contract that finds it."""

import asyncio
import json
from collections.abc import Sequence

from agent_runtime.ids import RunId
from agent_runtime.journal.records import StoredMessage, StoredRow, StoredRun
from agent_runtime.journal.store import Answer, Append, Guard
from agent_runtime.stores.memory import MemoryCheckpointStore
from tests.contract.broken import MOVED, OK, Broken

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
}
