"""Ctrl-C and SIGTERM leave a run that recovers, whatever its worker was waiting for."""

import signal

import pytest

from agent_runtime.mock import Mocks, start_mocks
from tests.mock.asking import ask, change
from tests.processes.job import Job, column, statuses, until

RUN = "demo"
RUNNING, DONE = 1, 8
GRACE_SECONDS = 3.0
LONG_MS = 20_000
NO_OWNER = bytes(16)

SIGNALS = [
    pytest.param(signal.SIGINT, 130, "INFO stopped by Ctrl-C; the run can be picked up again", id="Ctrl-C"),
    pytest.param(signal.SIGTERM, 143, "INFO stopped by SIGTERM; the run can be picked up again", id="SIGTERM"),
]


def wait_until_asked(remotes: Mocks, requests: int) -> None:
    until(lambda: ask(remotes.model_url, "GET", "/calls")[1]["total"] == requests, "the model is asked")


@pytest.mark.parametrize(("number", "code", "said"), SIGNALS)
def test_a_stop_during_a_model_call_leaves_a_run_that_recovers(job: Job, number: signal.Signals, code: int, said: str) -> None:
    with start_mocks(job.mocks, model_switches={"latency_ms": LONG_MS}) as remotes:
        with job.started(RUN_ID=RUN) as worker:
            wait_until_asked(remotes, 1)
            worker.process.send_signal(number)
            stopped = worker.ended(within_seconds=GRACE_SECONDS)
        change(remotes.model_url, {"latency_ms": 0})
    assert (stopped.code, stopped.err, stopped.lines[-1]) == (code, "", said)
    assert statuses(job.store) == {RUN: RUNNING}

    back = job.run(RUN_ID=RUN)
    assert back.lines[-2:] == [f"INFO done run={RUN} steps=3 llm_calls=5", "done: stand up a web service"]
    after = job.saw()
    assert (after.asked, after.kinds) == ({RUN: 5}, {"server": 1, "database": 1, "dns_record": 1})


@pytest.mark.parametrize(("number", "code", "said"), SIGNALS)
def test_a_stop_during_a_tool_call_leaves_a_run_that_recovers_with_one_server(
    job: Job, number: signal.Signals, code: int, said: str
) -> None:
    with start_mocks(job.mocks, cloud_switches={"late_ms": LONG_MS}) as remotes:
        with job.started(RUN_ID=RUN) as worker:
            until(lambda: ask(remotes.cloud_url, "GET", "/created")[1]["total"] == 1, "the cloud has acted")
            worker.process.send_signal(number)
            stopped = worker.ended(within_seconds=GRACE_SECONDS)
        change(remotes.cloud_url, {"late_ms": 0})
    assert (stopped.code, stopped.err, stopped.lines[-1]) == (code, "", said)
    assert "confirmed" not in stopped.out
    assert statuses(job.store) == {RUN: RUNNING}

    back = job.run(RUN_ID=RUN)
    assert f"INFO confirmed run={RUN} seq=0 key={RUN}:0 result=i-0000001 remote=already_done" in back.lines
    assert back.lines[-2] == f"INFO done run={RUN} steps=3 llm_calls=4"
    assert job.saw().kinds == {"server": 1, "database": 1, "dns_record": 1}


def test_a_run_that_was_stopped_is_free_at_once_and_stopping_is_no_failed_attempt(job: Job) -> None:
    with start_mocks(job.mocks, model_switches={"latency_ms": LONG_MS}) as remotes:
        for requests in (1, 2, 3):
            with job.started(RUN_ID=RUN) as worker:
                wait_until_asked(remotes, requests)
                worker.process.send_signal(signal.SIGTERM)
                assert worker.ended(within_seconds=GRACE_SECONDS).code == 143
            assert (column(job.store, "attempts"), column(job.store, "owner")) == ({RUN: 0}, {RUN: NO_OWNER})
        change(remotes.model_url, {"latency_ms": 0})
    assert job.run(RUN_ID=RUN).lines[-1] == "done: stand up a web service"
