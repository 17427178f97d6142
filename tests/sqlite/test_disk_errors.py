"""A disk that fails a real worker: errors of flushes, writes, reads and openings, put in at its system calls by strace.

Whatever fails, and whichever record or verb it strikes: no call is made before its intent is durable, none is made twice, no
acknowledged record is lost, nobody is told that a run is another's, no batch is there by half, and once the disk works again
every run comes to its end.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sqlite.beaten import Report
from tests.strace import run_traced

RUNS = 2
KINDS = {
    "opened", "claimed", "started", "done", "ended", "checkpoint",
    "a heartbeat", "heartbeats", "a message", "a delete",
}  # fmt: skip


class Fault(NamedTuple):
    """Which system calls fail, on which of the files, with which error and when (`when` is that of strace)."""

    calls: str
    error: str
    when: str
    files: Sequence[str] = ("", "-wal")


MOMENTS = ("13+6", "6+4", "12+7", "8+9", "10+5", "9+11", "7+13", "15+8", "11+10")
FLUSHES = [Fault("fdatasync,fsync", "EIO", when) for when in MOMENTS]
"""Together they strike every kind; which of them strikes which depends on how SQLite lays out its pages."""
OWN = ("",)
FAULTS = {
    "a write fails": [Fault("pwrite64", "EIO", "60+71")],
    "a write finds no room": [Fault("pwrite64", "ENOSPC", "61+53")],
    "there is no room for a while": [Fault("pwrite64", "ENOSPC", "150..154")],
    "the log cannot be folded into the file": [Fault("fdatasync", "EIO", "2+2", OWN), Fault("pwrite64", "EIO", "5+9", OWN)],
    "a read fails": [Fault("pread64", "EIO", "40+23")],
    "the shared memory cannot grow": [Fault("pwrite64,ftruncate", "ENOSPC", "1..3", ("-shm",))],
}


def beaten(folder: Path, faults: Sequence[Fault], *, runs: int = RUNS) -> tuple[Report, int]:
    """What became of a worker with these faults, and how often it was struck."""
    file, log = folder / "runs.db", folder / "log"
    places = [word for fault in faults for suffix in fault.files for word in ("-P", f"{file}{suffix}")]
    strikes = [word for f in faults for word in ("-e", f"inject={f.calls}:error={f.error}:when={f.when}")]
    program = [sys.executable, "-m", "tests.sqlite.beaten", str(file), str(runs)]
    told = run_traced(program, log=log, calls=",".join(fault.calls for fault in faults), options=[*places, *strikes])
    return Report(**json.loads(told)), log.read_text().count("(INJECTED)")


def all_went_well(report: Report, *, runs: int = RUNS) -> None:
    names = [f"{kind}-{at}" for kind in ("grouped", "each", "died") for at in range(runs)]
    names += [f"beside-{at}" for at in range(2 * runs)]
    assert report.wrong == []
    assert sorted(report.done) == sorted(names)
    assert report.effects == {f"{name}:0": 1 for name in names}


def test_a_flush_that_fails_at_any_record_and_any_verb_is_settled(tmp_path: Path) -> None:
    unknown: set[str] = set()
    for at, fault in enumerate(FLUSHES):
        folder = tmp_path / str(at)
        folder.mkdir()
        report, struck = beaten(folder, [fault], runs=3)
        all_went_well(report, runs=3)
        assert report.stopped == {}
        assert struck > 5
        unknown |= set(report.unknown)
        if unknown >= KINDS:
            return
    raise AssertionError(f"nothing strikes {KINDS - unknown}")


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_else_of_the_disk_fails_no_call_is_lost_or_made_twice(tmp_path: Path, name: str) -> None:
    report, struck = beaten(tmp_path, FAULTS[name])
    all_went_well(report)
    assert struck >= 3


def test_a_folder_that_lets_nothing_be_opened_for_a_while_stops_workers_and_loses_nothing(tmp_path: Path) -> None:
    flushes = Fault("fdatasync", "EIO", "12+7", ("", "-wal", "-shm"))
    report, struck = beaten(tmp_path, [flushes, Fault("openat", "EACCES", "12..20", ())])
    all_went_well(report)
    assert struck > 9


ROOMS = ["limit"]
_MOUNT = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
if shutil.which("unshare") and subprocess.run(_MOUNT, capture_output=True, check=False).returncode == 0:
    ROOMS.append("file system")


@pytest.mark.parametrize("room", ROOMS)
def test_a_disk_that_is_full_for_a_while_stops_nothing_for_good(tmp_path: Path, room: str) -> None:
    """`limit`: on the size of files, which anybody may set. `file system`: a small one, which is gone with the worker."""
    work = f"exec {sys.executable} -m tests.sqlite.beaten {tmp_path}/runs.db {RUNS}"
    if room == "limit":
        command = ["sh", "-c", f"{work} limit"]
    else:
        mount = f"mount -t tmpfs -o size=600k none {tmp_path} && head -c 400000 /dev/zero >{tmp_path}/ballast"
        command = ["unshare", "--mount", "sh", "-c", f"{mount} && {work} {tmp_path}/ballast"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    report = Report(**json.loads(ended.stdout))
    all_went_well(report)
    assert sum(report.unknown.values()) >= 5


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite"])
def test_nothing_is_taken_for_durable_that_no_flush_has_carried(tmp_path: Path, scheme: str) -> None:
    """Once a flush has failed, what it was to carry has to be written anew: the system may hold it for flushed.

    A few writes land before. Each thread counts for itself, of which aiosqlite has one for each connection.
    """
    file, side, log = tmp_path / "runs.db", tmp_path / "side", tmp_path / "log"
    program = [sys.executable, "-m", "tests.sqlite.flushed", f"{scheme}:///{file}", str(side)]
    subprocess.run([*program, "before"], check=True, timeout=60)
    side.unlink()
    places = [word for path in (f"{file}-wal", file, side) for word in ("-P", str(path))]
    options = ["-y", "-s", "8", *places, "-e", "inject=fdatasync:error=EIO:when=6..30"]
    run_traced([*program, "struck"], log=log, calls="pwrite64,fdatasync,write", options=options)
    lacks, acked, struck = "", 0, 0
    for line in log.read_text().splitlines():
        call, path = re.findall(r"(\w+)\(\d+<([^>]+)>", line)[0]
        match call, Path(path).name:
            case "fdatasync", "runs.db-wal" if "INJECTED" in line:
                lacks, struck = "a write", struck + 1
            case "pwrite64", "runs.db-wal" if lacks == "a write":
                lacks = "a flush"
            case "fdatasync", "runs.db-wal" if lacks == "a flush":
                lacks = ""
            case "write", "side":
                acked += 1
                assert not lacks, f"acknowledgement {acked} came without {lacks} since a flush failed"
    assert struck > 2
    assert acked > 4
