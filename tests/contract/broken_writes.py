"""Stores that guard, answer or keep what is written wrongly, each with the case of the contract that is there to find it."""

import asyncio
from collections.abc import Sequence

from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredMessage, StoredRecord, StoredRow, StoredRun
from agent_runtime.journal.store import Answer, Append, Guard
from agent_runtime.stores.memory import MemoryCheckpointStore
from tests.contract.broken import FENCED, MOVED, OK, Broken

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


FOUND_BY: dict[type[MemoryCheckpointStore], str] = {
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
}
