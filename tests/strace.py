"""The strace that tests use, found or unpacked from the system's package (scripts/strace.sh), and how it runs a program."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PATIENCE_SECONDS = 60


@cache
def strace() -> str:
    """The program. None to be had is an error that says what to do, never a skip."""
    script = Path(__file__).resolve().parent.parent / "scripts" / "strace.sh"
    with open(script) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = subprocess.run(["sh", script], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def run_traced(program: Sequence[str], *, log: Path, calls: str, options: Sequence[str] = ()) -> str:
    """What a program printed that ran under strace, its system calls of these names written to `log`.

    `options` are those of strace. Everything else that the program calls is not slowed down.
    """
    traced = ["-f", "--seccomp-bpf", "-qq", "-e", f"trace={calls}", "-e", "signal=none", "-o", str(log), *options]
    ended = subprocess.run(
        [strace(), *traced, *program], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stderr}\nstrace needs the right to trace its own children (ptrace)"
    return ended.stdout
