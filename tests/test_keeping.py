"""`agent-runtime purge`, `archive`, `verify` and `show` of files: what they print, what they refuse, what a kill leaves."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.archive import UNFINISHED, archives_in, verify_archive
from agent_runtime.cli import main
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from tests.bench import KEY, LONG_SECONDS, Asked, Bench, Place, Script, Worker, error_of
from tests.processes.job import environment

CALL: list[Asked] = [("charge_i", {"amount": 1})]
TOP = Path(__file__).resolve().parents[1]
PURGER = Path(__file__).with_name("processes") / "purger.py"


class Shell:
    """The command line in a folder that has a store with runs in it."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capture = capture

    def __call__(self, *words: str, code: int = 0) -> str:
        """What a command prints; it must end with that code, and say nothing of errors unless it is one."""
        ended = main(words)
        said = self._capture.readouterr()
        assert (ended, said.err == "" or code == 1) == (code, True), said
        return said.out if ended == 0 or said.out else said.err

    def usage(self, *words: str) -> str:
        """What is said of a command line that cannot be."""
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        return self._capture.readouterr().err

    def plain(self, *words: str, code: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self(*words, "--json", code=code).splitlines()]

    @property
    def runs(self) -> list[str]:
        return [each["run"] for each in self.plain("runs")]


def fill(folder: Path, *run_ids: str, result: str = "done") -> None:
    async def work() -> None:
        place = Place("sqlite", folder)
        for run_id in run_ids:
            await Worker(place).run(Script(CALL, result), Bench().registry, run_id)
        await error_of(Worker(place).run(Script(CALL), Bench().registry, "failed", max_steps=1))
        await place.close()

    asyncio.run(work())


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    fill(tmp_path, "a", "b")
    for name in list(os.environ):
        if name in ("DATABASE_URL", "CHECKPOINT_KEY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DATABASE_URL", "sqlite:///runs.db")
    monkeypatch.setenv("CHECKPOINT_KEY", base64.b64encode(KEY).decode())
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def test_a_purge_says_what_it_would_remove_and_then_what_it_removed(shell: Shell) -> None:
    said = shell("purge", "--older-than", "0s", "--dry-run")
    assert re.search(r"(?m)^a +done +\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ +\d+ records, [\d,]+ bytes$", said)
    assert re.search(r"(?m)^would remove 3 runs, \d+ records, [\d,]+ bytes$", said)
    assert shell("purge", "--older-than", "1d") == "removed 0 runs, 0 records, 0 bytes\n"
    assert re.fullmatch(
        r"removed 1 run, \d+ records, [\d,]+ bytes\n", shell("purge", "--older-than", "0s", "--status", "failed")
    )
    assert shell.runs == ["a", "b"]
    [one] = shell.plain("purge", "--older-than", "0s", "--limit", "1")
    assert (one["run"], one["removed"], one["left"]) == ("a", True, "")
    assert one["records"] > 0
    assert shell.runs == ["b"]


def test_a_purge_of_what_cannot_be_meant_is_refused_with_its_usage(shell: Shell) -> None:
    for age in ("30", "-1d", "soon", "", "1.5h", "30 days", "nan", "999999999999w"):
        assert "--older-than" in shell.usage("purge", f"--older-than={age}"), age
    assert "30d or 12h; found 'soon'" in shell.usage("purge", "--older-than", "soon")
    assert "--older-than" in shell.usage("purge")
    assert "invalid choice: 'running'" in shell.usage("purge", "--older-than", "1d", "--status", "running")
    for limit in ("0", "-1", "x", "1.5"):
        assert "--limit" in shell.usage("purge", "--older-than", "1d", f"--limit={limit}")
    assert "by force" in shell("purge", "--older-than", "0s", "--status", "paused", code=1)
    assert "there is none at 'nowhere'" in shell("purge", "--older-than", "0s", "--archive-to", "nowhere", code=1)
    assert shell.runs == ["a", "b", "failed"]


def test_a_purge_gives_the_room_back_where_that_is_asked_for(shell: Shell) -> None:
    said = shell("purge", "--older-than", "0s", "--vacuum")
    assert re.match(r"gave back [\d,]+ bytes\nremoved 3 runs", said)
    [vacuum] = shell.plain("purge", "--older-than", "0s", "--vacuum")
    assert vacuum["vacuum"] is True


def test_an_archive_is_verified_and_shown_without_the_store(shell: Shell) -> None:
    assert re.fullmatch(r"run a is archived in a\.jsonl: \d+ records\n", shell("archive", "a", "a.jsonl"))
    shown = shell("show", "a")
    for path in shell.folder.glob("runs.db*"):
        path.unlink()
    assert re.fullmatch(r"verified 1 run, \d+ records: none corrupt\nunder key key: 1 run\n", shell("verify", "a.jsonl"))
    assert shell("show", "a.jsonl") == shown
    [plain] = shell.plain("verify", "a.jsonl")
    assert (plain["run"], plain["file"], plain["holds"]) == ("a", "a.jsonl", True)
    assert "InvalidSetting" in shell("verify", "a", code=1), "that is a run, and there is no store any more"


def test_a_run_goes_from_its_store_once_it_is_archived_and_that_is_asked_for(shell: Shell) -> None:
    assert "removed from the store" in shell("archive", "a", "a.jsonl", "--delete", "--by", "ana")
    assert shell.runs == ["b", "failed"]
    assert "goes over nothing" in shell("archive", "b", "a.jsonl", "--delete", code=1)
    assert shell.runs == ["b", "failed"]


def test_files_folders_and_runs_are_verified_in_one_go_and_what_is_wrong_is_named(shell: Shell) -> None:
    (shell.folder / "kept").mkdir()
    shell("purge", "--older-than", "0s", "--status", "done", "--archive-to", "kept")
    shell("archive", "failed", "failed.jsonl")
    assert shell("verify", "kept", "failed.jsonl", "failed").startswith("verified 4 runs, ")
    path = shell.folder / "kept" / "b.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    (shell.folder / "kept" / f".x{UNFINISHED}").write_bytes(b"what a killed process left")
    said = shell("verify", "kept", "failed", code=1)
    assert re.search(
        r"(?m)^corrupt  kept/b\.jsonl  archive 'kept/b\.jsonl' is not as it was written, at line \d+: it is cut off", said
    )
    assert " records: 1 corrupt\nunder key key: " in said
    assert [each["holds"] for each in shell.plain("verify", "kept", code=1)] == [True, False]
    assert "CheckpointNotFound" in shell("verify", "nobody", code=1)
    assert "is not as it was written" in shell("show", "kept/b.jsonl", code=1)


# What a kill leaves.


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(PURGER), str(folder / "runs.db"), str(folder / "kept"), *words]
    return subprocess.Popen(command, env=environment({"PYTHONPATH": str(TOP)}), stdout=subprocess.DEVNULL)


def stored(folder: Path) -> set[str]:
    async def read() -> set[str]:
        store = SQLiteCheckpointStore(folder / "runs.db")
        found: set[str] = {row.run_id for row in await store.list_runs()}
        await store.close()
        return found

    return asyncio.run(read())


def archived(folder: Path) -> set[str]:
    """The runs in the archives; all of these must verify."""
    return {verify_archive(path, checkpoint_key=KEY).run_id for path in archives_in(folder / "kept")}


@pytest.mark.parametrize(("moment", "both"), [("before", {"b"}), ("after", set())])
def test_whoever_purges_and_is_killed_leaves_each_run_in_its_store_or_its_archive(
    tmp_path: Path, moment: str, both: set[str]
) -> None:
    fill(tmp_path, "a", "b", "c")
    (tmp_path / "kept").mkdir()
    assert start(tmp_path, moment, "2").wait(LONG_SECONDS) == -9
    assert archived(tmp_path) == {"a", "b"}
    assert stored(tmp_path) == {"c", "failed"} | both
    assert start(tmp_path).wait(LONG_SECONDS) == 0
    assert (archived(tmp_path), stored(tmp_path)) == ({"a", "b", "c", "failed"}, set())


def test_whoever_is_killed_while_an_archive_is_written_leaves_none_and_the_run(tmp_path: Path) -> None:
    fill(tmp_path, "a", result="x" * 6_000_000)
    (tmp_path / "kept").mkdir()
    process = start(tmp_path)
    wait_for(lambda: any(name.endswith(UNFINISHED) for name in os.listdir(tmp_path / "kept")), process)
    process.kill()
    process.wait()
    assert stored(tmp_path) | archived(tmp_path) == {"a", "failed"}
    assert start(tmp_path).wait(LONG_SECONDS) == 0
    assert (archived(tmp_path), stored(tmp_path)) == ({"a", "failed"}, set())


def wait_for(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + LONG_SECONDS
    while not holds():
        assert process.poll() is None, "it ended before it was seen to write"
        assert time.monotonic() < give_up_at
        time.sleep(0.0005)
