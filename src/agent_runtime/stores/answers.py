"""Why a guarded append did not land, by the row as it is now: the same for every store that keeps rows in tables. Pure."""

from __future__ import annotations

from agent_runtime.journal.records import RunStatus, StoredRow
from agent_runtime.journal.store import Answer, AnswerKind, Append


def why_refused(stored: StoredRow | None, append: Append) -> Answer:
    """OK where the row already is what the append writes, else whether the run is another's or has moved."""
    if stored is None:
        return Answer(AnswerKind.FENCED)
    guard, wished = append.guard, append.row
    written = (stored.epoch, stored.owner, stored.number, stored.head, stored.status)
    if written == (wished.epoch, wished.owner, wished.number, wished.head, wished.status):
        return Answer(AnswerKind.OK, stored.posted)
    if guard is None or stored.status >= RunStatus.DONE or (stored.epoch, stored.owner) != (guard.epoch, guard.owner):
        return Answer(AnswerKind.FENCED, stored.posted)
    if guard.heartbeat_at is not None and (stored.number, stored.head) == (guard.number, guard.head):
        return Answer(AnswerKind.FENCED, stored.posted)  # the owner was heard since: it lives
    return Answer(AnswerKind.MOVED, stored.posted)
