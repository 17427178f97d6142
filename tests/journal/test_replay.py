"""What happened is read from records alone: any history that may be is read, and any other is corrupt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.errors import CheckpointStoreCorrupt
from agent_runtime.journal.records import RecordKind, StoredRecord
from agent_runtime.journal.replay import CallLife, History, Move, Settled, next_move, read_history
from agent_runtime.journal.states import CALL_LIFE, IN_DOUBT, SETTLEMENT_MOVES, WAITING, CallMove, CallState, Settlement

KIND_OF = {
    CallMove.PENDING: RecordKind.PENDING,
    CallMove.VERDICT: RecordKind.VERDICT,
    CallMove.STARTED: RecordKind.STARTED,
    CallMove.UNSENT: RecordKind.UNSENT,
    CallMove.UNRECORDABLE: RecordKind.UNRECORDABLE,
    CallMove.DONE: RecordKind.DONE,
    **dict.fromkeys(SETTLEMENT_MOVES.values(), RecordKind.SETTLED),
}
SETTLED_AS = {move: settlement.value.encode() for settlement, move in SETTLEMENT_MOVES.items()}
SETTLED_AS[CallMove.SETTLED_DONE] += b" its result"


@dataclass(frozen=True)
class Told:
    """One thing that happened to a call, before it has a number."""

    call: str
    move: CallMove
    attempt: int
    body: bytes


def settlement(body: bytes) -> Settled:
    how, _, ending = body.partition(b" ")
    return Settled(Settlement(how.decode()), ending)


def record(number: int, kind: int, call: str = "", attempt: int = 0, body: bytes = b"", epoch: int = 1) -> StoredRecord:
    return StoredRecord(number, epoch, kind, call, attempt, body, b"")


BEGINNING = (record(1, RecordKind.OPENED, body=b"input"), record(2, RecordKind.CLAIMED, body=b"who"))


def journal(told: Sequence[Told]) -> list[StoredRecord]:
    """The whole journal of a run in which that happened."""
    own = [record(at, KIND_OF[t.move], t.call, t.attempt, t.body) for at, t in enumerate(told, start=3)]
    return [*BEGINNING, *own]


def read(records: Sequence[StoredRecord]) -> History:
    return read_history("run", records, settlement)


@st.composite
def legal_lives(draw: st.DrawFn) -> list[Told]:
    """Some calls, each led through its life by moves that the table allows, interleaved in any way."""
    told: list[Told] = []
    states = dict.fromkeys(
        draw(st.lists(st.sampled_from(["0", "0/model", "1.0", "1.1"]), min_size=1, unique=True)), CallState.NEW
    )
    attempts = dict.fromkeys(states, 0)
    for step in range(draw(st.integers(0, 25))):
        call = draw(st.sampled_from(sorted(states)))
        is_pended = any(each.call == call and each.move is CallMove.PENDING for each in told)
        moves = [move for before, move in CALL_LIFE if before is states[call]]
        moves = [move for move in moves if not (is_pended and move is CallMove.PENDING)]  # a call is asked about once
        if not moves:
            continue
        move = draw(st.sampled_from(moves))
        attempts[call] += move is CallMove.STARTED
        states[call] = CALL_LIFE[states[call], move]
        told.append(Told(call, move, attempts[call], SETTLED_AS.get(move, f"body {step}".encode())))
    return told


def fold(told: Sequence[Told], call: str) -> CallState:
    state = CallState.NEW
    for each in told:
        if each.call == call:
            state = CALL_LIFE[state, each.move]
    return state


@given(legal_lives())
def test_any_history_that_the_table_allows_is_read(told: list[Told]) -> None:
    history = read(journal(told))
    assert set(history.lives) == {each.call for each in told}
    for call, life in history.lives.items():
        own = [each for each in told if each.call == call]
        starts = [each for each in own if each.move is CallMove.STARTED]
        assert life.state is fold(told, call)
        assert life.attempts == len(starts)
        assert life.asked == (starts[-1].body if starts else b"")
        assert life.unrecordable == sum(each.move is CallMove.UNRECORDABLE for each in own)
        said = b"its result" if own[-1].move is CallMove.SETTLED_DONE else own[-1].body
        assert life.ended == (said if life.state is CallState.DONE else b"")
        assert life.pending == next((each.body for each in own if each.move is CallMove.PENDING), b"")
        assert life.verdict == next((each.body for each in own[::-1] if each.move is CallMove.VERDICT), b"")
    assert {life.call for life in history.waiting()} == {c for c, life in history.lives.items() if life.state in WAITING}
    assert {life.call for life in history.in_doubt()} == {c for c, life in history.lives.items() if life.state in IN_DOUBT}


def facts(history: History) -> object:
    """All that a history says, as what can be compared."""
    own = [history.opened, history.claimed, history.cancelled, history.ended]
    return own, {call: [getattr(life, name) for name in CallLife.__slots__] for call, life in history.lives.items()}


@given(legal_lives())
def test_reading_twice_gives_the_same_and_reading_more_only_adds(told: list[Told]) -> None:
    assert facts(read(journal(told))) == facts(read(journal(told)))
    for length in range(len(told)):
        shorter = read(journal(told[:length]))
        assert set(shorter.lives) <= set(read(journal(told)).lives)


@settings(max_examples=200)
@given(legal_lives(), st.data())
def test_any_history_that_the_table_forbids_is_corrupt(told: list[Told], data: st.DataObject) -> None:
    call = data.draw(st.sampled_from(["0", "0/model", "2"]))
    state = fold(told, call)
    forbidden = [move for move in CallMove if (state, move) not in CALL_LIFE]
    move = data.draw(st.sampled_from(forbidden))
    attempt = sum(each.call == call and each.move is CallMove.STARTED for each in told)
    bad = Told(call, move, attempt + (move is CallMove.STARTED), SETTLED_AS.get(move, b""))
    with pytest.raises(CheckpointStoreCorrupt, match=f"number {len(told) + 3}"):
        read(journal([*told, bad]))


@pytest.mark.parametrize("attempt", [-1, 0, 1, 3, 4])
def test_attempts_are_counted_without_a_gap(attempt: int) -> None:
    first = [Told("0", CallMove.STARTED, 1, b""), Told("0", CallMove.STARTED, attempt, b"")]
    with pytest.raises(CheckpointStoreCorrupt):
        read(journal(first))
    assert read(journal([*first[:1], Told("0", CallMove.STARTED, 2, b"")])).lives["0"].attempts == 2


@pytest.mark.parametrize("kind", [RecordKind.OPENED, RecordKind.CLAIMED, RecordKind.CHECKPOINT, RecordKind.ENDED, 17, 99, 0])
def test_a_record_of_no_calls_kind_that_names_a_call_is_corrupt(kind: int) -> None:
    with pytest.raises(CheckpointStoreCorrupt):
        read([*BEGINNING, record(3, kind, "0")])


def test_a_run_is_opened_once_and_first() -> None:
    for records in (
        [record(1, RecordKind.CLAIMED)],
        [*BEGINNING, record(3, RecordKind.OPENED)],
        [record(1, RecordKind.CLAIMED), record(2, RecordKind.OPENED)],
        BEGINNING[:1],
        [],
    ):
        with pytest.raises(CheckpointStoreCorrupt):
            read(records)


def test_after_its_end_a_run_takes_settlements_and_goes_on_to_other_keys_and_nothing_else() -> None:
    ended = [*BEGINNING, record(3, RecordKind.STARTED, "0", 1), record(4, RecordKind.ENDED)]
    settled = read([*ended, record(5, RecordKind.SETTLED, "0", 1, b"done its result")])
    assert (settled.lives["0"].state, settled.lives["0"].ended) == (CallState.DONE, b"its result")
    read([*ended, record(5, RecordKind.REKEYED, "the old key"), record(6, RecordKind.SETTLED, "0", 1, b"done its result")])
    for kind in RecordKind:
        if kind not in (RecordKind.SETTLED, RecordKind.REKEYED):
            with pytest.raises(CheckpointStoreCorrupt, match="follows the run's end"):
                read([*ended, record(5, kind, "0" if kind is RecordKind.STARTED else "", 2)])


def test_the_latest_of_the_runs_own_records_counts() -> None:
    records = [*BEGINNING, record(3, RecordKind.CHECKPOINT), record(4, RecordKind.RELEASED), record(5, RecordKind.CLAIMED),
               record(6, RecordKind.CHECKPOINT), record(7, RecordKind.ENDED)]  # fmt: skip
    history = read(records)
    cancelled = record(8, RecordKind.CANCELLED)
    assert read([*records[:-1], cancelled._replace(number=7)]).cancelled == cancelled._replace(number=7)
    assert (history.opened, history.claimed, history.ended) == (records[0], records[4], records[6])


def test_a_record_of_another_key_names_a_key_and_no_call() -> None:
    history = read([*BEGINNING, record(3, RecordKind.REKEYED, "old-key")])
    assert history.lives == {}


@pytest.mark.parametrize("state", CallState)
@pytest.mark.parametrize("may_repeat", [True, False])
def test_what_is_done_about_a_call_depends_on_its_state_and_only_in_doubt_on_its_rule(
    state: CallState, may_repeat: bool
) -> None:
    move = next_move(CallLife("0", state), may_repeat=may_repeat)
    if state is CallState.DONE:
        assert move is Move.REPLAY
    elif state in IN_DOUBT:
        assert move is (Move.RERUN if may_repeat else Move.IN_DOUBT)
    else:
        assert move is Move.ACT


def test_a_call_that_nobody_heard_of_acts() -> None:
    assert next_move(None, may_repeat=False) is Move.ACT
    assert next_move(None, may_repeat=True) is Move.ACT


@given(st.integers(1, 50), st.booleans())
def test_no_number_of_attempts_turns_a_call_in_doubt_into_one_to_run_again(attempts: int, unrecordable: bool) -> None:
    told = [Told("0", CallMove.STARTED, at, b"") for at in range(1, attempts + 1)]
    if unrecordable:
        told.append(Told("0", CallMove.UNRECORDABLE, attempts, b""))
    life = read(journal(told)).lives["0"]
    assert next_move(life, may_repeat=False) is Move.IN_DOUBT


def test_a_settlement_that_cannot_be_read_stops_the_reading() -> None:
    def unreadable(body: bytes) -> Settled:
        raise CheckpointStoreCorrupt("no settlement")

    records = journal([Told("0", CallMove.STARTED, 1, b""), Told("0", CallMove.SETTLED_DONE, 1, b"done")])
    with pytest.raises(CheckpointStoreCorrupt, match="no settlement"):
        read_history("run", records, unreadable)
