"""A worker may die at any moment of a run that is kept in Redis: the next one recovers it."""

from __future__ import annotations

import pytest

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.testing.crash_sweep import FLOWS, SCENARIOS, SHORT_SCENARIOS, sweep
from tests.redis_servers import RedisServer
from tests.redis_store.bench import store_on

NAMED = {each.name: each for each in (*SCENARIOS, *FLOWS, *SHORT_SCENARIOS)}


@pytest.mark.parametrize(
    ("scenario", "commits", "depth", "cells"),
    [("one call a reply", "grouped", 1, 24), ("one doubt", "each", 1, 20)],
)
async def test_a_run_in_redis_recovers_from_a_death_at_every_moment(
    redis_server: RedisServer, scenario: str, commits: str, depth: int, cells: int
) -> None:
    async def make_store() -> CheckpointStore:
        return store_on(redis_server.url)

    report = await sweep(NAMED[scenario], make_store, store_name="redis", commits=[commits], depth=depth)
    assert report.holds, str(report)
    assert report.cells >= cells
