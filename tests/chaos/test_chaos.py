"""Chaos in its short form: on each store nothing is done twice, lost or stuck; and a broken promise is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.mock import start_cloud
from tests.chaos.__main__ import main
from tests.chaos.plan import Kind, draw_death
from tests.chaos.processes import Role, find
from tests.processes.job import until

TOP = Path(__file__).resolve().parents[2]
SHORT = ("--workers", "4", "--latency-ms", "80", "--kills", "1.5", "--max-attempts", "3", "--rest-within", "60")
PATIENCE_SECONDS = 100


def chaos(*words: str, folder: Path) -> tuple[int, dict[str, Any], str]:
    """The exit code, what was found, and what else was said."""
    command = [sys.executable, "-m", "tests.chaos", *SHORT, *words, "--folder", str(folder), "--json"]
    ended = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout), ended.stderr


@pytest.mark.parametrize("words", [("--minutes", "0"), ("--workers", "none"), ("--store", "redis"), ("--only", "rain")])
def test_what_cannot_be_is_refused_with_what_may_be(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert words[0] in said
    assert words[1] in said
    assert "expected" in said or "choose from" in said


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_whatever_strikes_every_run_gets_done_and_nothing_is_done_twice(store: str, tmp_path: Path) -> None:
    code, found, said = chaos("--store", store, "--seconds", "6", "--seed", "5", folder=tmp_path)
    assert found["violations"] == [], found
    assert (code, said) == (0, f"chaos on {store} for 6 s, seed 5\n")
    struck = found["faults"]
    assert struck["kill"] >= 3, struck
    assert len(struck) >= 10, f"expected most of the {len(Kind)} kinds, found {struck}"
    assert found["runs"] >= 4
    assert found["claims"] > found["runs"], "some were taken over"
    assert found["set_aside"] >= 1, "a poison run is among them"
    assert find((tmp_path / "mark").read_text()) == []


def test_a_remote_that_forgets_its_keys_is_caught_and_the_run_is_shown(tmp_path: Path) -> None:
    seed = next(seed for seed in count() if all(_dies_between_act_and_record(seed, number) for number in range(3)))
    seconds, folder, ended = forgetful(tmp_path, seed)
    assert ended.returncode == 1, ended
    assert "one key, one effect, one set of arguments: run " in ended.stdout
    assert "$ agent-runtime show " in ended.stdout
    assert "attempt 2" in ended.stdout, "its journal"
    assert f"--store sqlite --seconds {seconds} --seed {seed}" in ended.stdout, "how to do the same again"
    assert f"CHECKPOINT_KEY=file:{folder}/key agent-runtime show RUN" in ended.stdout


def forgetful(tmp_path: Path, seed: int, seconds: int = 2) -> tuple[int, Path, subprocess.CompletedProcess[str]]:
    """Chaos with a remote that forgets its keys: for so long, in that folder. On a busy machine no worker may get as far as to
    die there in two seconds; then it lasts longer."""
    folder = tmp_path / str(seconds)
    folder.mkdir()
    with start_cloud(folder / "mock.db", switches={"forget": True}):
        pass
    words = [*SHORT, "--kills", "0.3", "--store", "sqlite", "--seconds", str(seconds), "--seed", str(seed)]
    command = [sys.executable, "-m", "tests.chaos", *words, "--folder", str(folder)]
    ended = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    return (seconds, folder, ended) if ended.returncode or seconds > 20 else forgetful(tmp_path, seed, 4 * seconds)


def _dies_between_act_and_record(seed: int, number: int) -> bool:
    death = draw_death(seed, number)
    return death is not None and death.point is CrashPoint.AFTER_CALL


def test_whoever_kills_a_chaos_run_finds_nothing_left_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos", *SHORT, "--store", "sqlite", "--seconds", "60", "--folder", str(tmp_path)]
    with subprocess.Popen(command, cwd=TOP, env=dict(os.environ), stderr=subprocess.DEVNULL) as process:
        try:
            until((tmp_path / "mark").exists, "it has begun")
            mark = (tmp_path / "mark").read_text()
            until(lambda: {each.role for each in find(mark)} >= set(Role) - {Role.OPERATOR}, "everybody is at work")
        finally:
            process.kill()
    until(lambda: not find(mark), "the janitor has ended them")
