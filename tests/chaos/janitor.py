"""Ends what a chaos run leaves when it is killed itself: `python -m tests.chaos.janitor MARK`, until its input ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.processes import end_all

TOP = Path(__file__).resolve().parents[2]


@contextmanager
def watched(mark: str) -> Iterator[None]:
    """Nothing that carries the mark outlives the block, nor this process, whatever ends it."""
    janitor = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.janitor", mark], cwd=TOP, stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        assert janitor.stdin is not None
        janitor.stdin.close()
        janitor.wait()


def main(mark: str) -> None:
    """Wait until nobody holds the other end any more, then end all."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 1):
        pass
    end_all(mark)


if __name__ == "__main__":
    main(sys.argv[1])
