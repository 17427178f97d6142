"""The supervisor as a process: what it picks up, what it leaves alone, and what cannot stop it."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
from pathlib import Path
from time import monotonic

import pytest

from agent_runtime.clock import SYSTEM_CLOCK, milliseconds
from tests.processes.hired import Place
from tests.processes.job import Job, assert_refused, column, dump, statuses, until
from tests.processes.stage import LONG, Stage, exits, most_at_once, pids, wait_until_gone
from tests.processes.worker import Order

RUNNING, PAUSED, BLOCKED, QUARANTINED, DONE, CANCELLED = 1, 2, 3, 4, 8, 10
NOT_MINE, TERMINATED = 4, 143
NO_OWNER = bytes(16)
SAME_HOST_SECONDS = 2.0


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def until_status(stage: Stage, **wanted: int) -> None:
    runs = {run.replace("_", "-"): status for run, status in wanted.items()}
    until(lambda: runs.items() <= statuses(stage.store).items(), f"the runs are {runs}")


def acts(stage: Stage, run: str) -> int:
    """How often the remote was asked for the run's one call."""
    return len(stage.remote.seen("tool", run))


# What it picks up.


def test_a_run_of_the_main_job_that_crashed_is_finished_by_a_supervisor_that_started_later(job: Job) -> None:
    crashed = job.run(RUN_ID="selfheal", CRASH_AT="after_call", CRASH_SEQ="1")
    assert crashed.lines[-1] == "!!! CRASH_AT=after_call seq=1 -- os._exit(1)"
    module = ("agent_runtime.supervisor", "--until-idle")
    healed = job.run(module=module, LEASE="12", POLL="3", HEARTBEAT="3", GOAL="another goal, for other runs")
    assert (healed.code, healed.err) == (0, "")
    assert healed.lines[0] == "INFO supervisor lease=12.0 poll=3.0 heartbeat=3.0"
    assert re.fullmatch(r"INFO resuming run=selfheal pid=[1-9]\d*", healed.lines[1])
    assert healed.lines[-1] == "INFO worker-exited run=selfheal code=0"
    assert "INFO confirmed run=selfheal seq=1 key=selfheal:1 result=db-0000001 remote=already_done" in healed.lines
    assert "INFO done run=selfheal steps=3 llm_calls=4" in healed.lines
    assert job.saw().kinds == {"server": 1, "database": 1, "dns_record": 1}
    assert job.run(module=module).lines[1:] == [], "nothing is left to do"


@pytest.mark.parametrize("is_zombie", [False, True], ids=["reaped", "zombie"])
def test_the_run_of_a_worker_killed_on_this_host_is_taken_over_within_two_seconds_whatever_its_lease(
    stage: Stage, is_zombie: bool
) -> None:
    with stage.supervised(**LONG) as supervisor:
        supervisor.wait_for("INFO supervisor lease=600.0")
        with Place(stage.folder).hire() as [worker]:
            worker.order(Order("healthy-1", name="tests", inside="wait", lease=600.0, heartbeat=100.0))
            assert worker.hear()["acting"] == "healthy-1"
            worker.kill()
            if not is_zombie:
                worker.wait()
            died = monotonic()
            supervisor.wait_for("INFO resuming run=healthy-1 ")
            assert monotonic() - died < SAME_HOST_SECONDS
        until_status(stage, healthy_1=DONE)
    assert acts(stage, "healthy-1") == 2


def test_of_many_dead_runs_no_more_than_allowed_are_worked_at_once_and_all_get_done(stage: Stage) -> None:
    runs = [f"healthy-{i}" for i in range(9)]
    stage.abandon(*runs)
    with stage.supervised("--max-workers", "3", "--until-idle") as supervisor:
        ended = supervisor.ended()
    assert (ended.code, ended.err) == (0, "")
    assert most_at_once(ended.out) == 3
    assert statuses(stage.store) == dict.fromkeys(runs, DONE)
    assert exits(ended.out) == [0] * len(runs)
    assert [acts(stage, run) for run in runs] == [2] * len(runs)


def test_several_supervisors_side_by_side_work_each_run_once(stage: Stage) -> None:
    runs = [f"healthy-{i}" for i in range(6)]
    stage.abandon(*runs)
    with stage.supervised("--until-idle") as one, stage.supervised("--until-idle") as other:
        ended = [one.ended(), other.ended()]
    assert [(each.code, each.err) for each in ended] == [(0, "")] * 2
    assert statuses(stage.store) == dict.fromkeys(runs, DONE)
    assert column(stage.store, "epoch") == dict.fromkeys(runs, 2)
    assert [acts(stage, run) for run in runs] == [2] * len(runs)
    codes = [code for each in ended for code in exits(each.out)]
    assert set(codes) <= {0, NOT_MINE}, "one that comes late finds the run taken, or done"


def test_a_worker_that_finds_its_run_taken_leaves_quietly(stage: Stage) -> None:
    stage.abandon("wait-1", **LONG)
    with stage.supervised(**LONG) as supervisor:
        until(lambda: acts(stage, "wait-1") == 2, "a worker has the run")
        [owner] = pids(supervisor.out.read_text())
        late = stage.run("work", RUN_ID="wait-1", **LONG)
    assert (late.code, late.err) == (NOT_MINE, "")
    [line] = late.lines
    assert line.startswith("INFO left-alone why=")
    assert f"held by process {owner} on " in line


def test_only_runs_of_its_own_program_are_touched(stage: Stage) -> None:
    stage.abandon("healthy-1")
    stage.abandon("healthy-other", NAME="another program")
    before = [row for row in dump(stage.store)["runs"] if "healthy-other" in row]
    with stage.supervised("--until-idle") as supervisor:
        ended = supervisor.ended()
    assert exits(ended.out) == [0]
    assert statuses(stage.store) == {"healthy-1": DONE, "healthy-other": RUNNING}
    assert [row for row in dump(stage.store)["runs"] if "healthy-other" in row] == before


# Whom it leaves alone.


def test_runs_that_wait_for_a_person_are_not_woken_however_often_it_is_restarted(stage: Stage) -> None:
    stage.abandon("plain-blocked", "poison-1")
    with stage.supervised("--until-idle", MAX_ATTEMPTS="1") as supervisor:
        assert supervisor.ended().code == 0
    assert statuses(stage.store) == {"plain-blocked": BLOCKED, "poison-1": QUARANTINED}
    stored, seen = dump(stage.store), stage.remote.path.read_bytes()
    for _ in range(3):
        with stage.supervised("--until-idle") as supervisor:
            assert supervisor.ended().lines == ["INFO supervisor lease=1.0 poll=0.1 heartbeat=0.25"]
    assert dump(stage.store) == stored
    assert stage.remote.path.read_bytes() == seen


def test_what_people_decide_from_outside_is_taken_up_by_a_supervisors_worker(stage: Stage) -> None:
    assert stage.run("pause", "ask-yes", "ask-no", "ask-never", "ask-on").code == 0
    stage.abandon("plain-done", "plain-open")
    with stage.supervised() as supervisor:
        until_status(stage, plain_done=BLOCKED, plain_open=BLOCKED)
        assert pids(supervisor.out.read_text(), "ask-yes") == []
        for words in (
            ("approve", "ask-yes", "0"),
            ("deny", "ask-no", "0", "--note", "too much"),
            ("cancel", "ask-never"),
            ("settle", "plain-done", "0", "--done", "100", "--why", "saw it"),
        ):
            assert stage.operate(*words, "--by", "ana").code == 0, words
        until_status(stage, ask_yes=DONE, ask_no=DONE, ask_never=CANCELLED, plain_done=DONE)
    assert {run: status for run, status in statuses(stage.store).items() if status < DONE} == {
        "ask-on": PAUSED,
        "plain-open": BLOCKED,
    }
    assert [acts(stage, run) for run in ("ask-yes", "ask-no", "ask-never", "ask-on", "plain-done")] == [1, 0, 0, 0, 1]


def test_a_call_of_three_leases_has_no_second_worker(stage: Stage) -> None:
    with stage.supervised() as supervisor, Place(stage.folder).hire() as [worker]:
        worker.order(Order("run", name="tests", inside="sleep", style="async", seconds=3.0, lease=1.0, heartbeat=0.25))
        assert worker.hear()["acting"] == "run"
        assert worker.hear()["ended"] == "done"
        assert pids(supervisor.out.read_text()) == []
    assert column(stage.store, "epoch") == {"run": 1}
    assert acts(stage, "run") == 1


def test_a_worker_frozen_beyond_its_lease_is_taken_over_and_refused_when_it_thaws(stage: Stage) -> None:
    with stage.supervised() as supervisor, Place(stage.folder).hire() as [worker]:
        worker.order(Order("plain-1", name="tests", idempotent=False, inside="freeze", lease=1.0, heartbeat=0.25))
        worker.wait_until_frozen()
        until_status(stage, plain_1=BLOCKED)
        supervisor.wait_for("INFO worker-exited run=plain-1 code=3")
        worker.thaw()
        assert worker.hear()["ended"] == "CheckpointConflict"
        until_status(stage, plain_1=DONE)
        supervisor.wait_for("INFO worker-exited run=plain-1 code=0")
        assert exits(supervisor.out.read_text()) == [3, 0], "a call in doubt is for a person, until its result is there"
    assert acts(stage, "plain-1") == 1


def test_time_zones_do_not_make_a_living_owner_look_dead(stage: Stage) -> None:
    with stage.supervised(TZ="Asia/Bangkok") as supervisor, Place(stage.folder).hire() as [worker]:
        worker.order(Order("run", name="tests", inside="wait", lease=2.0, heartbeat=0.25))
        assert worker.hear()["acting"] == "run"
        with stage.supervised("--until-idle", TZ="America/Anchorage") as other:
            assert other.ended().lines[1:] == []
        assert pids(supervisor.out.read_text()) == []
        worker.kill()
        supervisor.wait_for("INFO resuming run=run ")


# What cannot stop it.


def test_a_supervisor_that_is_killed_takes_no_worker_along_and_the_next_one_goes_on(stage: Stage) -> None:
    stage.abandon("wait-1", "wait-2")
    with stage.supervised(**LONG) as first:
        until(lambda: acts(stage, "wait-1") + acts(stage, "wait-2") == 4, "both are worked")
        orphans = pids(first.out.read_text())
        first.process.kill()
        first.process.wait()
        assert all(Path(f"/proc/{pid}").exists() for pid in orphans)
        with stage.supervised() as second:
            os.kill(orphans[0], signal.SIGKILL)
            until(lambda: acts(stage, "wait-1") + acts(stage, "wait-2") == 5, "the run of the dead orphan is worked again")
            assert len(pids(second.out.read_text())) == 1, "the living orphan is another's owner"
            [again] = pids(second.out.read_text())
            for pid in (orphans[1], again):
                os.kill(pid, signal.SIGTERM)
            stage.mend()
            until_status(stage, wait_1=DONE, wait_2=DONE)


def test_one_run_that_is_not_as_it_was_written_stops_no_other_and_makes_nothing_spin(stage: Stage) -> None:
    stage.abandon("healthy-1", "healthy-bad", "healthy-2")
    connection = sqlite3.connect(stage.store)
    with connection:
        connection.execute("UPDATE runs SET name = 'tests', step = step + 1 WHERE run_id = 'healthy-bad'")
    connection.close()
    with stage.supervised("--until-idle", MAX_ATTEMPTS="1") as supervisor:
        ended = supervisor.ended()
    assert ended.code == 0
    assert {run: status for run, status in statuses(stage.store).items() if run != "healthy-bad"} == {
        "healthy-1": DONE, "healthy-2": DONE
    }  # fmt: skip
    assert exits(ended.out, "healthy-bad") == [1, 1, 1], "then it is given up on"
    assert "INFO pausing run=healthy-bad seconds=0.5 exits=2" in ended.lines
    assert ended.err.count("ERROR CheckpointStoreCorrupt: run 'healthy-bad'") == 3
    assert acts(stage, "healthy-bad") == 1


def test_a_program_that_raises_is_tried_again_when_its_time_has_come_and_not_before(stage: Stage) -> None:
    stage.abandon("raise-1")
    with stage.supervised(MAX_ATTEMPTS="1") as supervisor:
        supervisor.wait_for("INFO worker-exited run=raise-1 code=1")
        wake_at = column(stage.store, "wake_at")["raise-1"]
        assert wake_at is not None
        until(lambda: len(pids(supervisor.out.read_text())) == 2, "it is tried again")
        assert milliseconds(SYSTEM_CLOCK.now()) >= wake_at
        supervisor.wait_for("INFO worker-exited run=raise-1 code=5")
    assert exits(supervisor.out.read_text()) == [1, 1, 5], "the first one ended its call, and made progress"


# How it stops.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_the_workers_give_their_runs_back_and_ends_well(stage: Stage, number: signal.Signals) -> None:
    stage.abandon("wait-1", "healthy-1", **LONG)
    with stage.supervised(**LONG) as supervisor:
        until(lambda: acts(stage, "wait-1") == 2, "the run is worked")
        supervisor.wait_for("INFO worker-exited run=healthy-1 code=0")
        supervisor.process.send_signal(number)
        ended = supervisor.ended()
    assert (ended.code, ended.err) == (0, "")
    assert "INFO draining workers=1" in ended.lines
    assert ended.lines[-1] == f"INFO worker-exited run=wait-1 code={TERMINATED}"
    assert column(stage.store, "owner")["wait-1"] == NO_OWNER
    assert column(stage.store, "attempts")["wait-1"] == 0
    assert statuses(stage.store)["wait-1"] == RUNNING


def test_a_stop_reaches_a_worker_that_is_frozen(stage: Stage) -> None:
    stage.abandon("wait-1", **LONG)
    with stage.supervised(**LONG) as supervisor:
        until(lambda: acts(stage, "wait-1") == 2, "the run is worked")
        os.kill(pids(supervisor.out.read_text())[0], signal.SIGSTOP)
        supervisor.process.terminate()
        assert exits(supervisor.ended().out) == [TERMINATED]


def test_a_second_signal_ends_it_at_once_and_its_worker_goes_on(stage: Stage) -> None:
    stage.abandon("spin-1", **LONG)
    with stage.supervised(**LONG) as supervisor:
        until(lambda: acts(stage, "spin-1") == 2, "the run is worked")
        [worker] = pids(supervisor.out.read_text())
        supervisor.process.send_signal(signal.SIGTERM)
        supervisor.wait_for("INFO draining workers=1")
        assert supervisor.process.poll() is None, "it waits for its worker"
        supervisor.process.send_signal(signal.SIGTERM)
        assert supervisor.ended(within_seconds=5).code == TERMINATED
        assert Path(f"/proc/{worker}").exists()
        (stage.folder / "thawed").touch()
        wait_until_gone(worker)
    assert column(stage.store, "owner")["spin-1"] == NO_OWNER


# Bad input.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"LEASE": "1", "HEARTBEAT": "0.6"}, "HEARTBEAT is at most half of LEASE; found 0.6 s and 1.0 s"),
        ({"MAX_ATTEMPTS": "0"}, "MAX_ATTEMPTS is a whole number from 1; found '0'"),
        ({"POLL": "-1"}, "POLL is a number of seconds above 0; found '-1'"),
        ({"STUCK_AFTER": "soon"}, "STUCK_AFTER is a number of seconds above 0; found 'soon'"),
        ({"LEASE": "nan"}, "LEASE is a number of seconds above 0; found 'nan'"),
        ({"DATABASE_URL": "memory://"}, "a store that other processes write"),
        ({"DATABASE_URL": "carrier-pigeon://loft"}, "carrier-pigeon://loft"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused_by_its_name(stage: Stage, settings: dict[str, str], said: str) -> None:
    with stage.supervised(**settings) as supervisor:
        assert_refused(supervisor.ended(), "InvalidSetting", said)


def test_a_store_that_can_never_be_opened_is_refused_at_the_start(stage: Stage) -> None:
    with stage.supervised("--store", "sqlite:////nowhere/at/all.db") as supervisor:
        ended = supervisor.ended()
    assert ended.code == 1
    assert ended.err.startswith("ERROR StoreRefused: ")


@pytest.mark.parametrize("options", [("--max-workers", "0"), ("--max-workers", "many"), ("--forever",), ("a-run",)], ids=str)
def test_an_option_that_cannot_be_is_refused(stage: Stage, options: tuple[str, ...]) -> None:
    with stage.supervised(*options) as supervisor:
        ended = supervisor.ended()
    assert ended.code in (1, 2)
    assert options[0] in ended.err


def test_events_come_as_json_lines_where_a_program_reads_them(stage: Stage) -> None:
    stage.abandon("healthy-1")
    with stage.supervised("--until-idle", "--json") as supervisor:
        ended = supervisor.ended()
    assert ended.lines[0] == '{"event": "supervisor", "lease": 1.0, "poll": 0.1, "heartbeat": 0.25}'
    assert ended.lines[-1] == '{"event": "worker-exited", "run": "healthy-1", "code": 0}'
