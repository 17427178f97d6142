"""Stores that keep heartbeats or messages wrongly, each with the case of the contract that is there to find it."""

from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredMessage, StoredRow
from agent_runtime.journal.store import Answer, Append, Guard
from agent_runtime.stores.memory import MemoryCheckpointStore
from tests.contract.broken import MOVED, OK, Broken

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


FOUND_BY: dict[type[MemoryCheckpointStore], str] = {
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
}
