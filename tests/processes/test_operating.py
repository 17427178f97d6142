"""The operator's commands as processes: what is true of each run, in the command line, the library and the store alike."""

from __future__ import annotations

import json
import os
import pty
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes.job import Job, environment, statuses

RUNNING = 1


def command(job: Job, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agent_runtime", *words], cwd=job.folder, env=environment(settings), capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip


def plain(job: Job, *words: str) -> list[dict[str, object]]:
    said = command(job, *words, "--json")
    assert said.stderr == ""
    return [json.loads(line) for line in said.stdout.splitlines()]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is done, and one that died before its first step and one in the middle of one; to be copied."""
    job = Job(tmp_path_factory.mktemp("left"))
    assert job.run(RUN_ID="whole").code == 0
    assert job.run(RUN_ID="early", CRASH_AT="before_decide").code == 1
    assert job.run(RUN_ID="mid step", CRASH_AT="after_call").code == 1
    return job.folder


@pytest.fixture
def crashed(job: Job, left: Path) -> Job:
    """A copy of it for one test."""
    shutil.copytree(left, job.folder, dirs_exist_ok=True)
    return job


def change(job: Job, statement: str, *values: object) -> None:
    connection = sqlite3.connect(job.store)
    with connection:
        connection.execute(statement, values)
    connection.close()


def test_a_run_whose_worker_was_killed_is_interrupted_wherever_one_looks(crashed: Job) -> None:
    wanted = {"early": "interrupted", "mid step": "interrupted", "whole": "done"}
    assert {each["run"]: each["status"] for each in plain(crashed, "runs")} == wanted
    assert {run: plain(crashed, "show", run)[0]["status"] for run in wanted} == wanted
    assert statuses(crashed.store)["early"] == RUNNING, "which the store alone cannot know"
    assert [each["run"] for each in plain(crashed, "runs", "--status", "interrupted")] == ["early", "mid step"]
    head, *rows = command(crashed, "runs").stdout.splitlines()
    assert head.split() == ["RUN", "STATUS", "PROGRAM", "STEP", "ATTEMPTS", "WORKER", "UPDATED", "WHY"]
    assert [row.split("  ")[0] for row in rows] == ["early", "mid step", "whole"]
    column = head.index("STATUS")
    assert [row[column:].split()[0] for row in rows] == ["interrupted", "interrupted", "done"], "the columns are aligned"


def test_show_tells_of_every_claim_and_every_record(crashed: Job) -> None:
    assert crashed.run(RUN_ID="mid step").code == 0
    shown = command(crashed, "show", "mid step").stdout
    assert "claim 1 (start) by process " in shown
    assert ": no word of its end\n" in shown
    assert ": ended it: done\n" in shown
    picture, records = shown.split("\nclaim 1 ", 1)
    assert "▫" in picture, "what was on record was not made again"
    assert records.count("create_server") == 3, "decided once, started twice"
    [told] = plain(crashed, "show", "mid step")
    assert [segment["why"] for segment in _list(told["segments"])] == ["start", "recovery"]


def _list(value: object) -> Sequence[dict[str, object]]:
    assert isinstance(value, list)
    return value


def test_verify_says_which_run_is_not_as_it_was_written_and_exits_with_one(crashed: Job) -> None:
    whole = command(crashed, "verify")
    assert (whole.returncode, whole.stderr) == (0, "")
    assert whole.stdout.startswith("verified 3 runs, ")
    assert whole.stdout.endswith(" records: none corrupt\nunder key key: 3 runs\n")
    change(crashed, "UPDATE journal SET body = ? WHERE key = 1 AND number = 4", b'{"text":"never said"}')
    bad = command(crashed, "verify")
    assert bad.returncode == 1
    assert bad.stdout.startswith("corrupt  whole  run 'whole' is not as it was written: the seal of record 4 does not hold")
    assert bad.stdout.splitlines()[-2:] == [bad.stdout.splitlines()[1], "under key key: 2 runs"]
    assert bad.stdout.splitlines()[1].endswith(": 1 corrupt")
    assert [each["run"] for each in plain(crashed, "verify") if not each["holds"]] == ["whole"]
    assert command(crashed, "verify", "early").returncode == 0
    assert command(crashed, "verify", "whole").returncode == 1
    assert_error(command(crashed, "show", "whole"), "CheckpointStoreCorrupt", "record 4")
    assert {each["run"]: each["status"] for each in plain(crashed, "runs")}["whole"] == "done", "its row is as it was"


def test_a_changed_row_is_listed_as_corrupt_with_why_and_the_others_as_usual(crashed: Job) -> None:
    change(crashed, "UPDATE runs SET attempts = 4, name = ? WHERE run_id = 'whole'", "\x1b[31mred")
    listed = command(crashed, "runs").stdout
    assert "\x1b" not in listed
    assert [line.split()[0] for line in listed.splitlines()] == ["RUN", "early", "mid", "whole"]
    assert "the seal of its row does not hold" in listed
    assert [set(each) for each in plain(crashed, "runs", "--status", "corrupt")] == [{"run", "status", "why"}]


def test_no_control_character_that_somebody_stored_reaches_the_terminal(crashed: Job) -> None:
    evil = "evil\x1b]0;title\x07\x7f\u202e"
    change(crashed, "UPDATE runs SET run_id = ? WHERE run_id = 'early'", evil)
    for words in (("runs",), ("runs", "--json"), ("verify",), ("verify", "--json")):
        said = command(crashed, *words).stdout
        assert "evil" in said
        assert not set(said) & set("\x1b\x07\x7f\u202e"), words


def assert_error(said: subprocess.CompletedProcess[str], error: str, *words: str) -> None:
    assert said.returncode == 1
    assert said.stderr.startswith(f"ERROR {error}: ")
    assert said.stderr.count("\n") == 1
    assert all(word in said.stderr for word in words), said.stderr


@pytest.mark.parametrize("words", [("runs",), ("verify",), ("show", "x"), ("release", "x")], ids=" ".join)
def test_looking_at_a_store_that_is_not_there_makes_none(job: Job, words: tuple[str, ...]) -> None:
    assert_error(command(job, *words), "InvalidSetting", "no store at 'agent_runtime.db'", "--store")
    assert_error(command(job, *words, "--store", "memory://"), "InvalidSetting", "memory")
    assert job.files() == []


def test_another_key_or_none_is_an_error_that_says_where_it_was_looked_for(crashed: Job) -> None:
    assert command(crashed, "verify", CHECKPOINT_KEY="YW5vdGhlciBrZXksIHdoaWNoIGlzIGxvbmc=").returncode == 1
    crashed.key.rename(crashed.folder / "elsewhere")
    assert_error(command(crashed, "runs"), "InvalidKey", "agent_runtime.db.key", "CHECKPOINT_KEY")
    assert command(crashed, "runs", CHECKPOINT_KEY=f"file:{crashed.folder / 'elsewhere'}").returncode == 0
    assert not crashed.key.exists(), "none is made"


@pytest.mark.parametrize(
    "words", [("runs", "--status", "blocked"), ("runs", "x"), ("show",), ("release",), ("runs", "--colour")], ids=" ".join
)
def test_a_command_line_that_cannot_be_is_refused_with_its_usage(job: Job, words: tuple[str, ...]) -> None:
    said = command(job, *words)
    assert said.returncode == 2
    assert said.stderr.startswith("usage: agent-runtime")


def test_what_is_not_stored_is_an_error_and_a_closed_pipe_is_none(crashed: Job) -> None:
    for words in (("show", "nobody"), ("verify", "nobody"), ("release", "nobody")):
        assert_error(command(crashed, *words), "CheckpointNotFound", "'nobody'")
    piped = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m agent_runtime show whole | true"], cwd=crashed.folder, env=environment({}),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "Traceback" not in piped.stderr


def test_verify_shows_on_a_terminal_how_far_it_is(crashed: Job) -> None:
    change(crashed, "UPDATE runs SET name = name")
    primary, secondary = pty.openpty()
    program = "import sys; from agent_runtime.cli import keep, main; keep.PROGRESS_EVERY = 1; sys.exit(main(['verify']))"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=crashed.folder, env=environment({}), stderr=secondary, stdout=subprocess.PIPE
    ) as process:
        out, _ = process.communicate(timeout=60)
    os.close(secondary)
    shown = os.read(primary, 65536).decode()
    os.close(primary)
    assert out.decode().startswith("verified 3 runs")
    assert "] 3 runs" in shown
    assert shown.endswith("\r\x1b[K")


def test_a_resumed_run_must_be_stored(job: Job) -> None:
    said = command(job, "provision", "--resume", RUN_ID="nobody")
    assert_error(said, "CheckpointNotFound", "'nobody'")
