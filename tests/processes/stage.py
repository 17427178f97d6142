"""A folder with a store in it, runs that somebody left there, and supervisors that watch it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.processes.job import Ended, Running, environment, until
from tests.processes.worker import Remote

PROGRAM = Path(__file__).with_name("supervised.py")
TOP = PROGRAM.parents[2]
QUICK = {"LEASE": "1.0", "HEARTBEAT": "0.25", "POLL": "0.1"}
LONG = {"LEASE": "600", "HEARTBEAT": "100", "POLL": "60"}


class Stage:
    """Where supervisors and workers meet."""

    def __init__(self, folder: Path, *, url: str | None = None) -> None:
        """Its store is a file in the folder, unless a URL leads elsewhere."""
        self.folder = folder / "stage"
        self.folder.mkdir()
        self._printed = folder
        self._starts = 0
        self.store: Path | str = url or self.folder / "runs.db"
        self._url = url or f"sqlite:///{self.store}"
        self.remote = Remote(self.folder / "remote.jsonl")
        self._pids: set[int] = set()

    def abandon(self, *runs: str, **settings: str) -> None:
        """Runs whose worker is dead, each with its call in flight."""
        assert self.run("abandon", *runs, **settings).code == 1
        for run in runs:
            assert len(self.remote.seen("tool", run)) == 1, run

    def mend(self) -> None:
        """From now on the tools do as they should."""
        (self.folder / "mended").touch()

    def run(self, verb: str, *rest: str, **settings: str) -> Ended:
        with self.started(verb, *rest, **settings) as running:
            return running.ended()

    @contextmanager
    def started(self, verb: str, *rest: str, **settings: str) -> Iterator[Running]:
        """A process of the program; it and the workers that it told of are gone when the block is left."""
        with self._process([sys.executable, str(PROGRAM), verb, str(self.folder), *rest], settings) as running:
            try:
                yield running
            finally:
                self._dismiss(running)

    @contextmanager
    def supervised(self, *options: str, **settings: str) -> Iterator[Running]:
        with self.started("supervise", *options, **{**QUICK, **settings}) as running:
            yield running

    def operate(self, *words: str, **settings: str) -> Ended:
        """The command line, on this store."""
        with self._process([sys.executable, "-m", "agent_runtime", *words], {**settings}) as running:
            return running.ended()

    @contextmanager
    def _process(self, command: Sequence[str], settings: dict[str, str]) -> Iterator[Running]:
        self._starts += 1
        out, err = (self._printed / f"{self._starts}.{stream}" for stream in ("out", "err"))
        key = "YSBrZXkgZm9yIHRlc3RzLCB3aGljaCBndWFyZHMgbm90aGluZw=="  # worker.KEY
        given = {"DATABASE_URL": self._url, "CHECKPOINT_KEY": key, "PYTHONPATH": str(TOP), **settings}
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(command, env=environment(given), stdout=stdout, stderr=stderr)
        try:
            yield Running(process, out, err)
        finally:
            process.kill()
            process.wait()

    def _dismiss(self, running: Running) -> None:
        """No worker outlives the test, whatever became of its supervisor: each is known by its pid and what it was told."""
        running.process.kill()
        running.process.wait()
        for pid in pids(running.out.read_text()):
            with suppress(OSError):
                if b"supervised.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


def pids(out: str, run: str = "") -> list[int]:
    """The workers that a supervisor says it has started, for a run or for all."""
    wanted = re.escape(run) if run else r"\S+"
    return [int(pid) for pid in re.findall(rf"(?m)^INFO resuming run={wanted} pid=(\d+)$", out)]


def exits(out: str, run: str = "") -> list[int]:
    """The exit codes of its workers, for a run or for all."""
    wanted = re.escape(run) if run else r"\S+"
    return [int(code) for code in re.findall(rf"(?m)^INFO worker-exited run={wanted} code=(-?\d+)$", out)]


def most_at_once(out: str) -> int:
    """How many workers a supervisor had at the same time, at most."""
    now = most = 0
    for line in out.splitlines():
        now += line.startswith("INFO resuming ") - line.startswith("INFO worker-exited ")
        most = max(most, now)
    return most


def wait_until_gone(pid: int) -> None:
    until(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} is gone")
