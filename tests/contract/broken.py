"""A store in memory that whoever breaks it on purpose changes at one place."""

from collections.abc import Callable

from agent_runtime.ids import RunId
from agent_runtime.journal.records import StoredRow
from agent_runtime.journal.store import Answer, AnswerKind, Append, Guard
from agent_runtime.stores.memory import MemoryCheckpointStore

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
