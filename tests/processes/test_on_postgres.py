"""Supervisors, poison, stops and what operators see: the same tests, with the runs in a database."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from agent_runtime.mock import start_mocks
from tests.mock.asking import ask, change
from tests.processes.job import Job, column, until
from tests.processes.stage import Stage
from tests.processes.test_poison_and_stuck import (
    test_a_run_that_kills_every_worker_is_set_aside_after_so_many_and_the_others_get_done,
)
from tests.processes.test_supervisor import (
    test_a_run_of_the_main_job_that_crashed_is_finished_by_a_supervisor_that_started_later,
    test_a_stop_lets_the_workers_give_their_runs_back_and_ends_well,
    test_runs_that_wait_for_a_person_are_not_woken_however_often_it_is_restarted,
    test_several_supervisors_side_by_side_work_each_run_once,
)
from tests.servers import Server

__all__ = [
    "test_a_run_of_the_main_job_that_crashed_is_finished_by_a_supervisor_that_started_later",
    "test_a_run_that_kills_every_worker_is_set_aside_after_so_many_and_the_others_get_done",
    "test_a_stop_lets_the_workers_give_their_runs_back_and_ends_well",
    "test_runs_that_wait_for_a_person_are_not_woken_however_often_it_is_restarted",
    "test_several_supervisors_side_by_side_work_each_run_once",
]

RUNNING, DONE = 1, 8
LONG_MS = 20_000


@pytest.fixture
def url(one_postgres: Server) -> str:
    """A database of one's own."""
    return one_postgres.url_as("postgres", database=one_postgres.database())


@pytest.fixture
def stage(url: str, tmp_path: Path) -> Stage:
    return Stage(tmp_path, url=url)


@pytest.fixture
def job(url: str, tmp_path: Path) -> Job:
    return Job(tmp_path, url=url)


def test_a_dead_run_is_shown_as_interrupted_by_every_command_and_as_done_once_it_is(job: Job) -> None:
    assert job.run(RUN_ID="early", CRASH_AT="before_decide").code == 1
    assert job.run(RUN_ID="mid", CRASH_AT="after_call").code == 1
    assert job.statuses() == {"early": RUNNING, "mid": RUNNING}, "which the store alone cannot know better"

    def shown(*words: str) -> dict[str, str]:
        lines = job.run(module=("agent_runtime", *words, "--json")).lines
        return {each["run"]: each["status"] for each in map(json.loads, lines) if "run" in each}

    assert shown("runs") == dict.fromkeys(("early", "mid"), "interrupted")
    assert shown("show", "mid")["mid"] == "interrupted"
    job.run(module=("agent_runtime.supervisor", "--until-idle"))
    assert shown("runs") == dict.fromkeys(("early", "mid"), "done")
    assert job.run(module=("agent_runtime", "verify")).code == 0


def test_a_stop_while_the_cloud_is_at_work_leaves_a_run_that_recovers_with_one_server(job: Job) -> None:
    with start_mocks(job.mocks, cloud_switches={"late_ms": LONG_MS}) as remotes:
        with job.started(RUN_ID="demo") as worker:
            until(lambda: ask(remotes.cloud_url, "GET", "/created")[1]["total"] == 1, "the cloud has acted")
            worker.process.send_signal(signal.SIGTERM)
            stopped = worker.ended(within_seconds=5)
        change(remotes.cloud_url, {"late_ms": 0})
    assert (stopped.code, stopped.err) == (143, "")
    assert job.url is not None
    assert (job.statuses(), column(job.url, "attempts")) == ({"demo": RUNNING}, {"demo": 0})
    back = job.run(RUN_ID="demo")
    assert "INFO confirmed run=demo seq=0 key=demo:0 result=i-0000001 remote=already_done" in back.lines
    assert job.saw().kinds == {"server": 1, "database": 1, "dns_record": 1}
