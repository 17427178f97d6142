"""The demo tells a true story, and fails where the story is not true."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_runtime.mock import start_mocks
from tests.mock.asking import create, decide
from tests.processes.job import environment

SCRIPTS = Path(__file__).parents[2] / "scripts"
LONGEST_SECONDS = 10.0


def demo(scripts: Path, temporary: Path, python: str, **settings: str) -> subprocess.CompletedProcess[str]:
    where = {"PYTHON": python, "TMPDIR": str(temporary), **settings}
    words = ["sh", str(scripts / "demo.sh")]
    return subprocess.run(words, env=environment(where), text=True, capture_output=True, timeout=LONGEST_SECONDS, check=False)


def test_the_demo_shows_a_crash_a_recovery_and_one_server_and_leaves_nothing(tmp_path: Path) -> None:
    shown = demo(SCRIPTS, tmp_path, sys.executable, GOAL="something else", CRASH_AT="before_decide")
    assert (shown.returncode, shown.stderr) == (0, "")
    story = ("!!! CRASH_AT=after_call seq=0 -- os._exit(1)", "attempt=2", "remote=already_done", "One server exists.")
    places = [shown.stdout.find(words) for words in story]
    assert -1 not in places
    assert places == sorted(places)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["exit 0", "exit 1"])
def test_the_demo_fails_where_a_worker_does_not_do_as_told(tmp_path: Path, broken: str) -> None:
    scripts = tmp_path / "checkout" / "scripts"
    shutil.copytree(SCRIPTS, scripts)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{broken}\n")
    python.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    shown = demo(scripts, tmp_path / "tmp", str(python))
    assert shown.returncode != 0
    assert "demo: expected" in shown.stderr


@pytest.mark.parametrize(
    ("second_key", "asked", "said"),
    [
        ("demo:0", 4, "One server exists. Nothing was decided twice, and nothing was made twice."),
        ("demo:0", 5, "Expected 4 model requests, found 5."),
        ("demo:9", 4, "2 servers exist, expected one."),
    ],
)
def test_what_the_remotes_saw_is_judged_by_their_own_counters(tmp_path: Path, second_key: str, asked: int, said: str) -> None:
    state = tmp_path / "mocks.db"
    with start_mocks(state) as mocks:
        for key, kind in (("demo:0", "server"), (second_key, "server"), ("demo:1", "database"), ("demo:2", "dns_record")):
            create(mocks.cloud_url, key, kind)
        for _ in range(asked):
            decide(mocks.model_url, "demo", [])
    words = [sys.executable, str(SCRIPTS / "remote_saw.py"), str(state), "demo"]
    judged = subprocess.run(words, env=environment({}), text=True, capture_output=True, check=False)
    assert judged.stdout.splitlines()[-1] == said
    assert (judged.returncode == 0) is said.startswith("One server exists")
    assert os.listdir(tmp_path) == [state.name]


def test_the_whole_story_comes_true_offline_in_a_few_seconds(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "agent_runtime", "demo"],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"},
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("✓") == 11
    assert "1 server, 1 payment, 1 mail; 4 decisions, each bought once" in told.stdout
    assert all(len(line) <= 80 for line in told.stdout.splitlines() if "--store" not in line and "rm -r" not in line)
    [folder] = tmp_path.iterdir()
    shown = subprocess.run(
        [sys.executable, "-m", "agent_runtime", "show", "demo", "--store", f"sqlite:///{folder}/runs.db"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "status     done" in shown.stdout, "the run is kept, with its key, so that it can be looked at"
    assert [path for path in folder.iterdir() if "edited" in path.name] == []


def test_a_story_that_does_not_come_true_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import agent_runtime.cli.demo as demo; demo.AMOUNT = 7; demo.main()"],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert told.returncode == 1
    assert list(tmp_path.iterdir()) == []
