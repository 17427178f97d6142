"""The processes of one chaos run: found by a word in their environment, and signalled only while they are who they were."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from time import monotonic, sleep

MARK = "CHAOS_MARK"
SUPERVISOR_MODULE = "tests.chaos.supervisor"
REMOTES_MODULE = "agent_runtime.mock"


class Role(Enum):
    """What a process does."""

    WORKER = "worker"
    SUPERVISOR = "supervisor"
    REMOTES = "remotes"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A process that lives; `born` tells it from a later one with the same pid."""

    pid: int
    born: str
    parent: int
    role: Role
    run: str
    is_frozen: bool

    def send(self, number: signal.Signals) -> bool:
        """Whether the signal reached this process, and no other one."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            stat = _stat(self.pid)
            if stat is None or stat[19] != self.born:
                return False
            signal.pidfd_send_signal(handle, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)

    def __str__(self) -> str:
        return f"{self.role.value} {self.pid}{f' of run {self.run}' if self.run else ''}"


def find(mark: str) -> list[Found]:
    """The processes that carry the mark and live, by pid."""
    pids = sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [found for pid in pids if (found := _look(pid, f"{MARK}={mark}".encode())) is not None]


def end_all(mark: str, *, within_seconds: float = 10.0) -> None:
    """Kill whatever carries the mark, frozen or not, until nothing is left."""
    give_up_at = monotonic() + within_seconds
    while (found := find(mark)) and monotonic() < give_up_at:
        for each in found:
            each.send(signal.SIGKILL)
        sleep(0.02)


def _look(pid: int, word: bytes) -> Found | None:
    with suppress(OSError):
        settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if word not in settings:
            return None
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        stat = _stat(pid)
        if stat is None or stat[0] in ("Z", "X"):
            return None
        run = next((each.removeprefix(b"RUN_ID=").decode() for each in settings if each.startswith(b"RUN_ID=")), "")
        return Found(pid, stat[19], int(stat[1]), _role(command), run, stat[0] == "T")
    return None


def _role(command: list[str]) -> Role:
    if SUPERVISOR_MODULE in command:
        return Role.SUPERVISOR
    if REMOTES_MODULE in command:
        return Role.REMOTES
    return Role.OPERATOR if "release" in command else Role.WORKER


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on: 0 the state, 1 the parent, 19 the birth."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return stat[stat.rindex(")") + 2 :].split()
