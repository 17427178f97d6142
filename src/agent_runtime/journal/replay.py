"""Records in, next move out: act, replay, rerun, in doubt, corrupt. Pure.

Rules of this file:

* What happened is read from records alone: no clock, no random source, no memory of a process.
* Records that the tables of `states` do not allow make the run corrupt, even when every seal holds.
* Unknown is unknown for ever: no passage of time and no number of attempts turns a call in doubt into one to run again;
  only its repeat rule, or a settlement that is itself a record.
"""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple, TypeAlias

from agent_runtime.errors import CheckpointStoreCorrupt
from agent_runtime.journal.records import AFTER_THE_END, RecordKind, StoredRecord
from agent_runtime.journal.states import CALL_LIFE, IN_DOUBT, MOVES, SETTLEMENT_MOVES, WAITING, CallMove, CallState, Settlement


class CallLife:
    """What the journal says of one call. Bodies are those of the records, as sealed."""

    __slots__ = (
        "asked", "attempts", "call", "ended", "epoch", "first_asked", "is_settled", "is_unsure", "pending", "state",
        "unrecordable", "verdict",
    )  # fmt: skip

    def __init__(self, call: str, state: CallState = CallState.NEW, attempts: int = 0, *, pending: bytes = b"") -> None:
        self.call, self.state, self.attempts = call, state, attempts
        self.asked = self.first_asked = b""
        """The bodies of the latest `started` and of the first: from that on the remote may know the call's key."""
        self.ended = b""
        """The body of the ending: of `done`, or of the `settled` that closed the call."""
        self.is_settled = False
        """Whether that was a `settled`: somebody else than the tool says what it gave."""
        self.is_unsure = False
        """Whether an attempt before the latest one may have happened, too: nobody ever said that it did not."""
        self.unrecordable = 0
        """How many attempts ended in a result that could not be stored."""
        self.epoch = 0
        """The epoch of the latest `started`."""
        self.pending = pending
        """The body of `pending`, where the call needs a verdict."""
        self.verdict = b""
        """The body of its `verdict`, once it has one."""


class Settled(NamedTuple):
    """What a `settled` record says: how, and the ending that it gives to a call that was done."""

    how: Settlement
    ending: bytes = b""


ReadSettlement: TypeAlias = Callable[[bytes], Settled]
"""From the body of a `settled` record to what it says."""


class Move(Enum):
    """What is to be done about a call."""

    ACT = "act"
    """It never went out, or is known not to have happened: run it."""
    REPLAY = "replay"
    """It ended: give back the recorded ending."""
    RERUN = "rerun"
    """Nobody knows, and it is safe or allowed to run it again under the same key."""
    IN_DOUBT = "in doubt"
    """Nobody knows, and nothing says that it may run again."""


class History:
    """A run's records, read once: the run's own by kind, and the life of each call by its place."""

    __slots__ = ("cancelled", "claimed", "ended", "lives", "opened")

    def __init__(self) -> None:
        self.opened: StoredRecord | None = None
        self.claimed: StoredRecord | None = None
        self.cancelled: StoredRecord | None = None
        self.ended: StoredRecord | None = None
        self.lives: dict[str, CallLife] = {}

    def in_doubt(self) -> list[CallLife]:
        """The calls whose outcome nobody knows, in the order of their first record."""
        return [life for life in self.lives.values() if life.state in IN_DOUBT]

    def waiting(self) -> list[CallLife]:
        """The calls that wait for a verdict, in the order in which they were asked for."""
        return [life for life in self.lives.values() if life.state in WAITING]


def read_history(run_id: str, records: Iterable[StoredRecord], settlement: ReadSettlement) -> History:
    """Fold verified records into what happened; `settlement` reads the body of a `settled` record."""
    history = History()
    for record in records:
        if history.ended is not None and record.kind not in AFTER_THE_END:
            raise _impossible(run_id, record, "follows the run's end")
        if record.call and record.kind != _REKEYED:
            live_on(run_id, history.lives, record, settlement)
        else:
            _note_own(run_id, history, record)
    if history.opened is None or history.claimed is None:
        raise CheckpointStoreCorrupt(f"run {run_id!r} was never opened or never claimed: its journal has no such record")
    return history


def next_move(life: CallLife | None, *, may_repeat: bool) -> Move:
    """What to do about a call, given its life and whether its repeat rule lets a call in doubt run again."""
    if life is None:
        return Move.ACT
    match life.state:
        case CallState.DONE:
            return Move.REPLAY
        case CallState.STARTED | CallState.UNRECORDABLE:
            return Move.RERUN if may_repeat else Move.IN_DOUBT
        case CallState.NEW | CallState.PENDING | CallState.ASKING | CallState.DECIDED | CallState.UNSENT | CallState.REOPENED:
            return Move.ACT


def live_on(run_id: str, lives: dict[str, CallLife], record: StoredRecord, settlement: ReadSettlement) -> None:
    """Fold one more record of a call into its life; corrupt where the table of `states` does not allow it."""
    kind, call = record.kind, record.call
    life = lives.get(call)
    if life is None:
        life = lives[call] = CallLife(call)
    settled = settlement(record.body) if kind == _SETTLED else None
    move = MOVES.get(kind) if settled is None else SETTLEMENT_MOVES[settled.how]
    before = life.state
    state = None if move is None else CALL_LIFE.get((before, move))
    is_second = (move is _PENDING and life.pending) or (move is _STARTED and record.attempt != life.attempts + 1)
    if state is None or is_second:
        raise _impossible(run_id, record, f"cannot follow {before.value!r} of call {call!r}")
    life.state = state
    if settled is not None:
        _take_settled(life, settled, before)
    elif move is _STARTED:
        _take_started(life, record, before)
    elif move is _DONE:
        life.ended = record.body
    elif move is _PENDING:
        life.pending = record.body
    elif move is _VERDICT:
        life.verdict = record.body
    elif move is _UNRECORDABLE:
        life.unrecordable += 1


def _take_started(life: CallLife, record: StoredRecord, before: CallState) -> None:
    life.attempts, life.asked, life.epoch = record.attempt, record.body, record.epoch
    life.first_asked = life.first_asked or record.body
    life.is_unsure = life.is_unsure or before in IN_DOUBT


def _take_settled(life: CallLife, settled: Settled, before: CallState) -> None:
    life.is_unsure = settled.how is Settlement.RERUN and (life.is_unsure or before in IN_DOUBT)
    if settled.how is Settlement.DONE:
        life.ended, life.is_settled = settled.ending, True


def _note_own(run_id: str, history: History, record: StoredRecord) -> None:
    if (record.kind == _OPENED) is not (record.number == 1):
        raise _impossible(run_id, record, "is not where a run is opened")
    name = _OWN.get(record.kind)
    if name is not None:
        setattr(history, name, record)


# Members of an enum that are looked at for each record: to find one in its class takes longer than all else that is done here.
_STARTED, _DONE, _UNRECORDABLE = CallMove.STARTED, CallMove.DONE, CallMove.UNRECORDABLE
_PENDING, _VERDICT = CallMove.PENDING, CallMove.VERDICT
_OPENED, _SETTLED, _REKEYED = int(RecordKind.OPENED), int(RecordKind.SETTLED), int(RecordKind.REKEYED)
_OWN: dict[int, str] = {
    RecordKind.OPENED: "opened",
    RecordKind.CLAIMED: "claimed",
    RecordKind.CANCELLED: "cancelled",
    RecordKind.ENDED: "ended",
}
"""Where a history keeps the run's own records of which it has one."""


def _impossible(run_id: str, record: StoredRecord, why: str) -> CheckpointStoreCorrupt:
    return CheckpointStoreCorrupt(
        f"run {run_id!r} holds a record that cannot be: number {record.number}, kind {record.kind}, {why}. "
        "Nothing was run. It was written by a broken or a newer version; keep the store as it is and report it."
    )
