"""What must come of failed saves, lost answers, rivals and values that are hard to keep: the same tests, on each store."""

from __future__ import annotations

import pytest

from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import Place
from tests.cases.test_failed_saves import test_a_save_that_fails_stops_the_run_where_it_stands as a_save_that_fails
from tests.cases.test_failed_saves import test_an_end_that_cannot_be_written_is_no_end
from tests.cases.test_own_commit import test_a_claim_whose_answer_is_lost_is_claimed_once
from tests.cases.test_two_workers import test_a_worker_that_was_taken_over_is_told_at_its_next_write_and_starts_nothing
from tests.cases.test_values_come_back import (
    test_a_lone_half_of_a_character_poisons_nothing,
    test_a_type_that_moved_to_another_module_still_reads_what_was_written,
    test_a_type_that_no_longer_fits_what_was_written_is_named_and_never_read_as_nothing,
    test_metadata_of_a_result_comes_back_or_is_refused_and_never_dropped,
    test_what_was_loaded_or_saved_may_be_changed_and_the_store_keeps_what_it_had,
    test_work_that_is_looked_up_by_a_number_is_still_found_after_a_crash,
)

__all__ = [
    "test_a_claim_whose_answer_is_lost_is_claimed_once",
    "test_a_lone_half_of_a_character_poisons_nothing",
    "test_a_type_that_moved_to_another_module_still_reads_what_was_written",
    "test_a_type_that_no_longer_fits_what_was_written_is_named_and_never_read_as_nothing",
    "test_a_worker_that_was_taken_over_is_told_at_its_next_write_and_starts_nothing",
    "test_an_end_that_cannot_be_written_is_no_end",
    "test_metadata_of_a_result_comes_back_or_is_refused_and_never_dropped",
    "test_what_was_loaded_or_saved_may_be_changed_and_the_store_keeps_what_it_had",
    "test_work_that_is_looked_up_by_a_number_is_still_found_after_a_crash",
]


@pytest.mark.parametrize(("written", "how"), [(3, "no answer"), (4, "no room"), (5, "read only"), (6, "away")])
async def test_a_save_that_fails_stops_the_run_where_it_stands(
    place: Place, clock: ManualClock, written: int, how: str
) -> None:
    await a_save_that_fails(place, clock, "charge", written, how)
