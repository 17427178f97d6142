"""Runs that kill every worker, and workers whose process lives while their loop hangs: set aside, replaced, released."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.processes.job import assert_refused, column, dump, statuses, until
from tests.processes.stage import LONG, Stage, exits, pids, wait_until_gone

RUNNING, QUARANTINED, DONE = 1, 4, 8
NOT_MINE, IS_QUARANTINED = 4, 5
LIMIT = 3
TWO_LEASES_US = 2_000_000


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_run_that_kills_every_worker_is_set_aside_after_so_many_and_the_others_get_done(stage: Stage) -> None:
    healthy = ["healthy-1", "healthy-2", "healthy-3"]
    stage.abandon("poison-1", *healthy)
    with stage.supervised("--until-idle", "--max-workers", "2", MAX_ATTEMPTS=str(LIMIT)) as supervisor:
        ended = supervisor.ended()
    assert ended.code == 0
    assert statuses(stage.store) == {"poison-1": QUARANTINED, **dict.fromkeys(healthy, DONE)}
    assert exits(ended.out, "poison-1") == [-signal.SIGKILL] * LIMIT + [IS_QUARANTINED]
    assert len(stage.remote.seen("tool", "poison-1")) == 1 + LIMIT, "the first worker, and as many as are allowed"
    assert "ERROR RunQuarantined: run 'poison-1' is quarantined: claimed 3 times without progress" in ended.err
    assert "`agent-runtime release poison-1`" in ended.err

    [listed] = stage.operate("runs", "--status", "quarantined", "--json").lines
    info = json.loads(listed)
    assert (info["run"], info["status"], info["owner"], info["wake_at"]) == ("poison-1", "quarantined", "", None)
    assert "claimed 3 times without progress" in info["why"]
    assert "was gone without a word; started and not ended: call 0 (attempt 4)" in info["why"]
    refused = stage.run("work", RUN_ID="poison-1")
    assert (refused.code, refused.err.count("`agent-runtime release poison-1`")) == (IS_QUARANTINED, 1)
    assert len(stage.remote.seen("tool", "poison-1")) == 1 + LIMIT

    stage.mend()
    released = stage.operate("release", "poison-1", "--by", "ana")
    assert (released.code, released.out) == (0, "run poison-1 goes again\n")
    assert (statuses(stage.store)["poison-1"], column(stage.store, "attempts")["poison-1"]) == (RUNNING, 0)
    with stage.supervised("--until-idle", MAX_ATTEMPTS=str(LIMIT)) as supervisor:
        assert exits(supervisor.ended().out) == [0]
    assert statuses(stage.store)["poison-1"] == DONE
    shown = stage.operate("show", "poison-1").out
    assert "(release) by process" in shown
    assert "released by ana" in shown


def test_a_worker_whose_loop_hangs_loses_its_run_is_killed_by_its_supervisor_and_replaced(stage: Stage) -> None:
    stage.abandon("spin-1", "healthy-1")
    with stage.supervised("--until-idle", "--max-workers", "1", STUCK_AFTER="0.5") as supervisor:
        ended = supervisor.ended()
    assert ended.code == 0
    [hung, _] = pids(ended.out, "spin-1")
    assert f'INFO killing run=spin-1 pid={hung} why="its lease is over"' in ended.lines
    assert exits(ended.out, "spin-1") == [-signal.SIGKILL, 0]
    assert statuses(stage.store) == {"spin-1": DONE, "healthy-1": DONE}
    assert column(stage.store, "epoch")["spin-1"] == 3


def test_a_hung_worker_that_no_supervisor_may_kill_is_replaced_and_refused_when_it_goes_on(stage: Stage) -> None:
    stage.abandon("spin-1")
    with stage.started("work", RUN_ID="spin-1", LEASE="1", HEARTBEAT="0.25", STUCK_AFTER="0.5") as hung:
        until(lambda: len(stage.remote.seen("tool", "spin-1")) == 2, "its loop hangs")
        with stage.supervised() as supervisor:
            supervisor.wait_for("INFO worker-exited run=spin-1 code=0")
            assert hung.process.poll() is None, "it is no child of this supervisor"
            assert "killing" not in supervisor.out.read_text()
        stored = dump(stage.store)
        (stage.folder / "thawed").touch()
        ended = hung.ended()
    assert (ended.code, ended.err) == (NOT_MINE, "")
    assert dump(stage.store) == stored


def test_a_hung_loop_keeps_its_run_where_no_deadline_is_set(stage: Stage) -> None:
    stage.abandon("spin-1")
    with stage.supervised() as supervisor:
        until(lambda: len(stage.remote.seen("tool", "spin-1")) == 2, "its loop hangs")
        heard = column(stage.store, "heartbeat_at")["spin-1"]
        until(lambda: column(stage.store, "heartbeat_at")["spin-1"] > heard + TWO_LEASES_US, "it beats on")
        assert column(stage.store, "epoch")["spin-1"] == 2
        (stage.folder / "thawed").touch()
        supervisor.wait_for("INFO worker-exited run=spin-1 code=0")
    assert len(pids(supervisor.out.read_text())) == 1


def test_a_frozen_worker_of_its_own_is_killed_once_its_lease_is_over(stage: Stage) -> None:
    stage.abandon("wait-1")
    with stage.supervised("--max-workers", "1") as supervisor:
        until(lambda: len(stage.remote.seen("tool", "wait-1")) == 2, "the run is worked")
        [frozen] = pids(supervisor.out.read_text())
        os.kill(frozen, signal.SIGSTOP)
        stage.mend()
        supervisor.wait_for("INFO worker-exited run=wait-1 code=0")
        wait_until_gone(frozen)
    assert exits(supervisor.out.read_text()) == [-signal.SIGKILL, 0]
    assert statuses(stage.store) == {"wait-1": DONE}


def test_a_run_that_is_released_twice_is_released_once_and_one_that_runs_not_at_all(stage: Stage) -> None:
    stage.abandon("poison-1", "wait-1", **LONG)
    with stage.supervised(MAX_ATTEMPTS="1", **LONG) as supervisor:
        supervisor.wait_for(f"INFO worker-exited run=poison-1 code={IS_QUARANTINED}")
        before = [row for row in dump(stage.store)["runs"] if "wait-1" in row]
        living = stage.operate("release", "wait-1")
        assert (living.code, living.out) == (0, "run wait-1 is in no quarantine; nothing was changed\n")
        assert [row for row in dump(stage.store)["runs"] if "wait-1" in row] == before
        supervisor.process.terminate()
        supervisor.ended()
    said = [json.loads(stage.operate("release", "poison-1", "--json").out) for _ in range(2)]
    assert [each["released"] for each in said] == [True, False]
    assert_refused(stage.operate("release", "nobody"), "CheckpointNotFound", "'nobody'")
