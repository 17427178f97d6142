"""The two tables: what they allow, what they can never allow, and the diagrams drawn from them."""

from __future__ import annotations

import pytest

from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.states import (
    CALL_LIFE,
    IN_DOUBT,
    MOVES,
    RUN_LIFE,
    SETTLEMENT_MOVES,
    CallMove,
    CallState,
    Settlement,
    after,
    draw_call_life,
    draw_run_life,
)

FINAL = [status for status in RunStatus if status.is_final]
OPEN = [status for status in RunStatus if not status.is_final]


def reachable(start: CallState, *, without: frozenset[CallMove] = frozenset()) -> set[CallState]:
    found, left = {start}, [start]
    while left:
        state = left.pop()
        for (before, move), ends in CALL_LIFE.items():
            if before is state and move not in without and ends not in found:
                found.add(ends)
                left.append(ends)
    return found


@pytest.mark.parametrize("move", CallMove)
def test_a_call_that_is_done_never_moves_again(move: CallMove) -> None:
    assert after(CallState.DONE, move) is None


@pytest.mark.parametrize("state", CallState)
def test_every_state_of_a_call_can_be_reached_and_can_reach_done(state: CallState) -> None:
    assert state in reachable(CallState.NEW)
    assert CallState.DONE in reachable(state)


def test_a_call_in_doubt_is_left_only_by_an_ending_another_attempt_or_a_settlement() -> None:
    leaving = {move for (before, move), ends in CALL_LIFE.items() if before in IN_DOUBT and ends not in IN_DOUBT}
    settled = set(SETTLEMENT_MOVES.values())
    assert leaving == {CallMove.DONE, CallMove.UNSENT} | settled
    assert after(CallState.UNRECORDABLE, CallMove.DONE) is None
    assert after(CallState.UNRECORDABLE, CallMove.UNSENT) is None


def test_nothing_is_in_doubt_that_was_not_started_first() -> None:
    assert not reachable(CallState.NEW, without=frozenset({CallMove.STARTED})) & IN_DOUBT


@pytest.mark.parametrize("move", [CallMove.UNSENT, CallMove.UNRECORDABLE, *SETTLEMENT_MOVES.values()])
@pytest.mark.parametrize("state", [CallState.NEW, CallState.PENDING, CallState.DECIDED])
def test_what_an_attempt_came_to_needs_an_attempt(state: CallState, move: CallMove) -> None:
    assert after(state, move) is None


def test_an_act_needs_its_own_verdict_where_one_was_asked_for() -> None:
    assert CallState.STARTED not in reachable(CallState.PENDING, without=frozenset({CallMove.VERDICT}))
    assert not {CallState.PENDING, CallState.ASKING} & IN_DOUBT
    assert after(CallState.DECIDED, CallMove.STARTED) is CallState.STARTED
    assert after(CallState.DECIDED, CallMove.VERDICT) is None
    assert after(CallState.STARTED, CallMove.VERDICT) is None


def test_a_call_that_is_asked_about_has_sent_nothing_and_ends_only_through_its_verdict() -> None:
    assert {move for before, move in CALL_LIFE if before is CallState.ASKING} == {CallMove.VERDICT, CallMove.UNSENT}


def test_every_move_is_used_and_every_settlement_is_one() -> None:
    assert {move for _, move in CALL_LIFE} == set(CallMove)
    assert set(SETTLEMENT_MOVES) == set(Settlement)
    assert set(MOVES.values()) | set(SETTLEMENT_MOVES.values()) == set(CallMove)


def test_every_record_of_a_call_is_a_move_and_no_record_of_the_run_is_one() -> None:
    of_calls = {RecordKind.PENDING, RecordKind.VERDICT, RecordKind.STARTED, RecordKind.UNSENT, RecordKind.UNRECORDABLE,
                RecordKind.DONE}  # fmt: skip
    assert set(MOVES) == of_calls


@pytest.mark.parametrize("before", FINAL)
def test_nothing_leads_out_of_a_final_status(before: RunStatus) -> None:
    assert [ends for start, ends in RUN_LIFE if start is before] == []


@pytest.mark.parametrize("before", OPEN)
def test_every_open_status_leads_to_running_and_to_an_end(before: RunStatus) -> None:
    assert (before, RunStatus.RUNNING) in RUN_LIFE
    assert (before, RunStatus.CANCELLED) in RUN_LIFE


def test_only_a_running_run_is_done_or_fails_and_only_deleting_leads_to_deleted() -> None:
    assert {start for start, ends in RUN_LIFE if ends in (RunStatus.DONE, RunStatus.FAILED)} == {RunStatus.RUNNING}
    assert [start for start, ends in RUN_LIFE if ends is RunStatus.DELETED] == []


def test_final_statuses_are_those_from_done_on() -> None:
    assert FINAL == [RunStatus.DONE, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.DELETED]


def test_the_diagrams_name_every_state_and_every_move_and_are_drawn_the_same_each_time() -> None:
    calls, runs = draw_call_life(), draw_run_life()
    assert (calls, runs) == (draw_call_life(), draw_run_life())
    assert len(calls.splitlines()) == 3 + len(CALL_LIFE)
    for (before, move), ends in CALL_LIFE.items():
        assert f"    {before.value} --> {ends.value}: {move.value}" in calls.splitlines()
    for start, end in RUN_LIFE:
        assert start is end or f"    {start.name.lower()} --> {end.name.lower()}" in runs.splitlines()
    assert runs.splitlines()[:3] == ["stateDiagram-v2", "    [*] --> running", "    running --> paused"]
