"""A power cut takes nothing from a SQLite file that was acknowledged, and shows nothing of a write that was not whole.

A sample; `make powercut` opens tens of thousands of states.
"""

from __future__ import annotations

import pytest

from tests.powercut.recording import Sync, SyncFolder, Truncate
from tests.powercut.states import Recorded, enumerate_states, record_workload

ROUNDS = 2


@pytest.fixture(scope="module")
def full() -> Recorded:
    return record_workload("FULL", ROUNDS)


def test_whatever_a_power_cut_leaves_holds_all_that_was_acknowledged(full: Recorded) -> None:
    tally = enumerate_states(full, 400, every=4)
    assert tally.wrong == {}, tally.example
    assert tally.enumerated >= 400
    assert len(tally.distinct) >= 200


def test_the_sample_holds_a_folded_log_a_log_that_begins_again_and_files_that_come_and_go(full: Recorded) -> None:
    flushed = {call.name for call in full.calls if isinstance(call, Sync)}
    assert {"runs.db", "runs.db-wal"} <= flushed
    starts = [call for call in full.calls if getattr(call, "at", None) == 0 and call.name == "runs.db-wal"]  # type: ignore[union-attr]
    assert len(starts) > 2
    assert any(isinstance(call, SyncFolder) for call in full.calls)
    assert any(isinstance(call, Truncate) for call in full.calls)


def test_a_level_below_the_stores_is_seen_to_lose_what_was_acknowledged() -> None:
    tally = enumerate_states(record_workload("NORMAL", ROUNDS), 150, every=9)
    assert tally.wrong["lost"] > 20, tally.wrong


def test_a_disk_that_flushes_nothing_is_seen_to_lose_what_was_acknowledged(full: Recorded) -> None:
    lying = Recorded([call for call in full.calls if not isinstance(call, Sync | SyncFolder)], full.states)
    assert enumerate_states(lying, 80, every=9).wrong["lost"] > 20
