"""What must come of failed saves, lost answers, rivals, long calls and poison: the same tests, on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_runtime.stores.postgres import PostgresCheckpointStore
from tests.bench import Place
from tests.cases.test_failed_saves import (
    test_a_claim_that_cannot_be_written_runs_nothing,
    test_a_run_whose_very_first_save_fails_was_never_there_and_did_nothing,
    test_a_save_that_fails_stops_the_run_where_it_stands,
    test_an_end_that_cannot_be_written_is_no_end,
)
from tests.cases.test_long_work import test_a_call_longer_than_the_lease_is_nobody_elses
from tests.cases.test_own_commit import (
    test_a_claim_whose_answer_is_lost_is_claimed_once,
    test_a_passing_error_is_tried_a_bounded_number_of_times_and_is_never_a_result,
    test_whichever_answer_is_lost_the_run_is_as_if_it_had_come,
)
from tests.cases.test_poison_run import (
    test_a_released_run_goes_again_and_has_all_its_attempts_before_it,
    test_a_run_is_claimed_so_often_without_progress_and_then_set_aside_with_its_reason,
)
from tests.cases.test_two_workers import (
    test_of_two_threads_that_take_a_run_over_one_at_most_goes_on,
    test_two_starts_of_one_id_make_one_run,
)
from tests.schemas import Schemas
from tests.servers import Server
from tests.stores.places import Somewhere

__all__ = [
    "test_a_call_longer_than_the_lease_is_nobody_elses",
    "test_a_claim_that_cannot_be_written_runs_nothing",
    "test_a_claim_whose_answer_is_lost_is_claimed_once",
    "test_a_passing_error_is_tried_a_bounded_number_of_times_and_is_never_a_result",
    "test_a_released_run_goes_again_and_has_all_its_attempts_before_it",
    "test_a_run_is_claimed_so_often_without_progress_and_then_set_aside_with_its_reason",
    "test_a_run_whose_very_first_save_fails_was_never_there_and_did_nothing",
    "test_a_save_that_fails_stops_the_run_where_it_stands",
    "test_an_end_that_cannot_be_written_is_no_end",
    "test_of_two_threads_that_take_a_run_over_one_at_most_goes_on",
    "test_two_starts_of_one_id_make_one_run",
    "test_whichever_answer_is_lost_the_run_is_as_if_it_had_come",
]


@pytest.fixture
async def place(one_postgres: Server, schemas: Schemas, tmp_path: Path) -> AsyncIterator[Place]:
    async with schemas.lent(one_postgres.url) as schema:
        where = Somewhere("postgres", tmp_path, lambda: PostgresCheckpointStore(one_postgres.url, schema=schema))
        yield where
        await where.close()
