"""A worker may die at any moment on Postgres too, where it takes its connection along in the middle of a write."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_runtime.errors import InvalidSetting
from agent_runtime.testing.crash_sweep.__main__ import main
from agent_runtime.testing.crash_sweep.matrix import plan, work_all
from agent_runtime.testing.crash_sweep.severed import Severing
from agent_runtime.testing.faults import FaultyStore, Life, Moment, SimulatedCrash, Where
from agent_runtime.testing.store_contract import Draft
from tests.servers import Server


@pytest.mark.parametrize(
    ("scenario", "commits", "cells"),
    [("one call a reply", "grouped", 24), ("three side by side", "grouped", 15), ("one doubt", "each", 20)],
)
def test_a_run_recovers_from_a_death_at_every_moment_on_a_server(
    scenario: str, commits: str, cells: int, one_postgres: Server, tmp_path: Path
) -> None:
    jobs = plan(scenarios=[scenario], commits=[commits], stores=["postgres"], depth=1, postgres=one_postgres.url)
    report = work_all(jobs, tmp_path, processes=1, show=lambda done, cells: None)
    assert report.holds, str(report)
    assert report.cells >= cells
    schemas = one_postgres.sql("SELECT count(*) FROM information_schema.schemata WHERE schema_name LIKE 'sweep_%'")
    assert schemas == "0", "nothing of it is left there"


def test_a_server_that_is_named_is_swept_and_none_is_needed() -> None:
    assert {job.store for job in plan()} == {"sqlite", "memory"}
    jobs = plan(postgres="postgresql://me@host/database")
    assert {job.store for job in jobs} == {"sqlite", "memory", "postgres"}
    found = {(job.commits, job.depth) for job in jobs if job.store == "postgres"}
    assert found == {("grouped", 1), ("grouped", 2), ("each", 1)}


def test_a_sweep_on_postgres_without_a_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--store", "postgres"])
    assert stopped.value.code == 2
    assert "--postgres URL" in capsys.readouterr().err


def test_an_address_that_no_proxy_can_stand_before_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="USER@HOST"):
        Severing("postgresql:///database?host=/tmp")


async def test_a_sweep_whose_writes_are_not_seen_on_their_way_ends_with_an_error(one_postgres: Server) -> None:
    with pytest.raises(InvalidSetting, match="passed whole"):
        await die_past_the_proxy(one_postgres.url)


async def die_past_the_proxy(url: str) -> None:
    """A worker dies at its first write, whose way the proxy does not see."""
    async with Severing(url) as server:
        store = await server.make_store()
        worker = server.open_store(store, Life(Moment(Where.BEFORE_WRITE, 1)))
        assert isinstance(worker, FaultyStore)
        worker.inner = store
        with pytest.raises(SimulatedCrash):
            await worker.commit([Draft.of().open()])
        await store.close()
