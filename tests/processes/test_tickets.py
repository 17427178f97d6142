"""The tickets example as real processes: killed by SIGKILL in each node and at every commit, stopped, and picked up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.processes.job import Ended, Job, dump, environment, until

TOP = Path(__file__).resolve().parents[2]
TICKETS = str(TOP / "examples" / "tickets.py")
COMMITS = 7
"""Of the run without faults: the claim, each call and each checkpoint; one more and nothing is killed."""
MAIL_IS_OPEN = {(6, "after"), (7, "before")}
"""Where the mail's intent is durable and its ending is not."""


def work(job: Job, *words: str) -> Ended:
    return job.run(module=("tests.processes.ticketing", *words), PYTHONPATH=str(TOP))


def told(ended: Ended) -> dict[str, Any]:
    assert (ended.code, ended.err) == (0, ""), ended
    said: dict[str, Any] = json.loads(ended.lines[-1])
    return said


def happened(job: Job) -> Counter[str]:
    """How often each thing was really done outside."""
    log = job.folder / "tickets.log"
    return Counter(line.split()[0] for line in log.read_text().splitlines()) if log.exists() else Counter()


@pytest.mark.parametrize("node", ["hold", "pay", "send"])
def test_the_example_killed_in_a_node_and_started_again_holds_once_charges_once_and_asks_before_it_mails_again(
    node: str, tmp_path: Path
) -> None:
    def start(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", TICKETS, *words],
            cwd=tmp_path,
            env=environment({}),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    killed = start("--crash", node)
    assert killed.returncode == -signal.SIGKILL
    assert killed.stdout == f"!!! killed in {node}: it has happened, and nothing about it is written down\n"
    again = start()
    assert (again.returncode, again.stderr) == (0, "")
    lines = again.stdout.splitlines()
    if node == "send":
        assert lines[:2] == ["in doubt: ['email_tickets']", "after the decision: order-7 done"]
    else:
        assert lines[0] == "done - mailed tickets for Hamlet"
    assert Counter(line.split()[0] for line in lines if line.endswith("]") and "[order-7:" in line) == {
        "held": 1, "charged": 1, "mailed": 2 if node == "send" else 1
    }  # fmt: skip
    once_more = start()
    assert once_more.stdout.splitlines()[0] == "done - mailed tickets for Hamlet"


def test_killed_at_any_commit_it_comes_to_the_same_end_and_a_mail_is_in_doubt_when_it_may_have_gone_out(job: Job) -> None:
    ended = work(job, "kill-everywhere", str(COMMITS))
    assert (ended.code, ended.err) == (0, "")
    cells = [json.loads(line) for line in ended.lines]
    assert [(cell["nth"], cell["when"]) for cell in cells] == [
        (n, w) for n in range(1, COMMITS + 1) for w in ("before", "after")
    ]
    for cell in cells:
        assert cell["killed"] == -signal.SIGKILL, cell
        if (cell["nth"], cell["when"]) in MAIL_IS_OPEN:
            assert [tool for tool, _ in cell["then"]["in_doubt"]] == ["email_tickets"], cell
            assert cell["again"] == cell["then"], "nobody has decided"
            assert Counter(cell["happened"])["mailed"] == (cell["when"] == "before")
        else:
            assert cell["then"] == {"status": "done", "note": "mailed tickets for Hamlet"}, cell
            assert cell["again"] == {**cell["then"], "replayed": 0, "rerun": 0}, cell
            assert Counter(cell["happened"]) == {"held": 1, "charged": 1, "mailed": 1}, cell


def test_a_worker_that_was_stopped_and_goes_on_after_another_took_its_run_starts_and_saves_nothing(job: Job) -> None:
    with job.started(module=("tests.processes.ticketing", "stop"), PYTHONPATH=str(TOP)) as frozen:
        until(lambda: happened(job)["charged"], "the card is charged")
        until(lambda: _state_of(frozen.process.pid) == "T", "the worker is stopped")
        until(lambda: "error" not in told(work(job, "recover")), "its lease lapses and another worker ends the run")
        before = dump(job.folder / "tickets.db")
        os.kill(frozen.process.pid, signal.SIGCONT)
        said = told(frozen.ended())
    assert said["error"] == "CheckpointConflict"
    assert happened(job) == {"held": 1, "charged": 1, "mailed": 1}
    assert dump(job.folder / "tickets.db") == before
    assert told(work(job, "recover"))["status"] == "done"


def test_all_runs_of_a_killed_process_are_picked_up_and_no_finished_call_runs_again(job: Job) -> None:
    assert work(job, "abandon", "200").code == -signal.SIGKILL
    assert told(work(job, "recover-all")) == {"found": 200, "done": 200, "rerun": 200}
    assert happened(job) == {"held": 200, "charged": 200, "mailed": 200}
    assert told(work(job, "recover-all")) == {"found": 0, "done": 0, "rerun": 0}


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
