"""Who works in a chaos run: two remotes, supervisors that are always started again, and workers that put runs in."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from tests.chaos.plan import Death
from tests.chaos.processes import MARK, REMOTES_MODULE, SUPERVISOR_MODULE
from tests.processes.job import environment, until

TOP = Path(__file__).resolve().parents[2]
START_AGAIN_SECONDS = 0.3
LEASE, HEARTBEAT, POLL = 1.0, 0.25, 0.25


@dataclass(frozen=True, slots=True)
class Terms:
    """How a chaos run is set up."""

    folder: Path
    mark: str
    store_url: str
    supervisors: int
    workers: int
    latency_ms: int
    max_attempts: int

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def mended(self) -> Path:
        return self.folder / "mended"

    @property
    def work(self) -> Path:
        """Where every process works; nothing is to be left in it."""
        return self.folder / "work"

    def settings(self) -> dict[str, str]:
        """What every process is told."""
        return {
            "DATABASE_URL": self.store_url, "CHECKPOINT_KEY": f"file:{self.folder / 'key'}", MARK: self.mark,
            "LEASE": str(LEASE), "HEARTBEAT": str(HEARTBEAT), "POLL": str(POLL), "MAX_ATTEMPTS": str(self.max_attempts),
            "CHAOS_MENDED": str(self.mended), "PYTHONPATH": str(TOP),
        }  # fmt: skip


class Remotes:
    """The cloud and the model, in a process of their own. What they know is on disk: a kill makes them forget nothing."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._ports = ("0", "0")
        self.start()

    def start(self) -> None:
        """Start them, the second time at the same addresses."""
        out = self._terms.logs / "remotes.log"
        out.unlink(missing_ok=True)
        cloud, model = self._ports
        words = ["--state", str(self._terms.folder / "mock.db"), "--cloud-port", cloud, "--model-port", model]
        words += ["--latency-ms", str(self._terms.latency_ms)]
        self._process = spawn([sys.executable, "-m", REMOTES_MODULE, *words], self._terms, out, {})
        until(lambda: self._process.poll() is not None or out.read_text().count("\n") == 2, "the remotes serve")
        assert self._process.poll() is None, f"the remotes did not start: {out.read_text()}"
        self.cloud_url, self.model_url = (line.split()[1] for line in out.read_text().splitlines())
        self._ports = (self.cloud_url.rpartition(":")[2], self.model_url.rpartition(":")[2])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def settings(self) -> dict[str, str]:
        return {"MOCK_CLOUD_URL": self.cloud_url, "MOCK_LLM_URL": self.model_url}

    def switch(self, remote: str, **switches: int) -> bool:
        """Set switches of the `cloud` or the `model`; false where it is away."""
        url = self.cloud_url if remote == "cloud" else self.model_url
        with suppress(OSError):
            _ask(f"{url}/switches", json.dumps(switches).encode())
            return True
        return False

    def ask(self, remote: str, path: str) -> dict[str, Any]:
        """What a counter shows."""
        return _ask(f"{self.cloud_url if remote == 'cloud' else self.model_url}{path}")


@dataclass(slots=True)
class Desk:
    """One place for a supervisor, and who sits there."""

    log: Path
    process: subprocess.Popen[bytes] | None = None
    ended_at: float = field(default=float("-inf"))


class Crew:
    """Supervisors and workers."""

    def __init__(self, terms: Terms, remotes: Remotes) -> None:
        self._terms = terms
        self._settings = remotes.settings()
        self.desks = [Desk(terms.logs / f"supervisor-{number + 1}.log") for number in range(terms.supervisors)]
        self.put_in_log = terms.logs / "put-in.log"
        self.put_in_log.touch()
        for desk in self.desks:
            desk.log.touch()
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []

    def keep(self) -> None:
        """What keeps processes alive on a machine: start every supervisor again that has ended, after a moment."""
        now = monotonic()
        for desk in self.desks:
            if desk.process is not None and desk.process.poll() is not None:
                desk.process, desk.ended_at = None, now
            if desk.process is None and now - desk.ended_at >= START_AGAIN_SECONDS:
                share = -(-self._terms.workers // self._terms.supervisors)
                command = [sys.executable, "-m", SUPERVISOR_MODULE, "--max-workers", str(share)]
                desk.process = spawn(command, self._terms, desk.log, self._settings)

    def put_in(self, run: str, death: Death | None = None) -> None:
        """A worker that starts the run, and dies where it was told to."""
        armed = {"CRASH_AT": death.point.value, "CRASH_SEQ": str(death.seq)} if death else {}
        self._start([sys.executable, "-m", "agent_runtime"], run, armed)

    def resume(self, run: str) -> None:
        """A person picks a run up."""
        self._start([sys.executable, "-m", "agent_runtime", "provision", "--resume"], run)

    def release(self, run: str) -> None:
        """A person lets a quarantined run go again."""
        self._start([sys.executable, "-m", "agent_runtime", "release", run, "--by", "chaos"], run)

    def show(self, run: str) -> str:
        """What the operator's command says of a run."""
        command = [sys.executable, "-m", "agent_runtime", "show", run]
        told = {**self._terms.settings(), **self._settings}
        ended = subprocess.run(
            command, cwd=self._terms.work, env=environment(told), capture_output=True, text=True, check=False, timeout=60
        )
        return ended.stdout + ended.stderr

    def busy(self) -> set[str]:
        """Runs for which a process that we started still works."""
        self._started = [(run, process) for run, process in self._started if process.poll() is None]
        return {run for run, _ in self._started}

    def stop(self) -> None:
        """Tell every supervisor to stop."""
        for desk in self.desks:
            if desk.process is not None:
                desk.process.terminate()

    def is_gone(self) -> bool:
        return not self.busy() and all(desk.process is None or desk.process.poll() is not None for desk in self.desks)

    def _start(self, command: Sequence[str], run: str, settings: Mapping[str, str] | None = None) -> None:
        told = {**self._settings, "RUN_ID": run, **(settings or {})}
        self._started.append((run, spawn(command, self._terms, self.put_in_log, told)))


def spawn(command: Sequence[str], terms: Terms, log: Path, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process of this chaos run. A Ctrl-C at the terminal is not for it."""
    with open(log, "ab") as out:
        return subprocess.Popen(
            list(command), cwd=terms.work, env=environment({**terms.settings(), **settings}),
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip


def _ask(url: str, data: bytes | None = None) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=10) as response:
        answer: dict[str, Any] = json.load(response)
    return answer
