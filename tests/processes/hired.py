"""A worker process as a test sees it: give it an order, hear what it says, freeze it, thaw it, kill it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from tests.processes.job import PATIENCE_SECONDS, environment, until
from tests.processes.worker import Order, Remote

PROGRAM = Path(__file__).with_name("worker.py")


class Place:
    """Where workers meet: one store, and one remote that counts."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "runs.db"
        self.remote_file = folder / "remote.jsonl"
        self.remote = Remote(self.remote_file)

    @contextmanager
    def hire(self, many: int = 1) -> Iterator[list[Worker]]:
        """That many workers, ready for orders; none is left when the block is."""
        workers: list[Worker] = []
        try:
            words = [sys.executable, str(PROGRAM), str(self.store), str(self.remote_file)]
            workers += (Worker(words) for _ in range(many))
            for worker in workers:
                assert worker.hear() == {"ready": worker.pid}
            yield workers
        finally:
            for worker in workers:
                worker.dismiss()


class Worker:
    """One process that works what it is ordered to."""

    def __init__(self, words: Sequence[str], **settings: str) -> None:
        self._process = subprocess.Popen(
            words, env=environment(settings), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.pid = self._process.pid
        self._heard = b""

    def order(self, order: Order) -> None:
        self._write(order.to_line())

    def go_on(self) -> None:
        """Let a tool that waits return."""
        self._write("\n")

    def hear(self) -> dict[str, Any]:
        """The next thing it says."""
        assert self._process.stdout is not None
        deadline = monotonic() + PATIENCE_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                assert selector.select(deadline - monotonic()), f"worker {self.pid} says nothing for {PATIENCE_SECONDS} s"
                read = os.read(self._process.stdout.fileno(), 65536)
                assert read, f"worker {self.pid} ended with exit code {self._process.wait()} and said nothing"
                self._heard += read
        line, _, self._heard = self._heard.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    def wait_until_frozen(self) -> None:
        """Until every thread of it stands still."""
        until(lambda: os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT), f"worker {self.pid} is frozen")

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, and leave it a zombie."""
        self._process.kill()
        until(lambda: os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), f"worker {self.pid} is a zombie")

    def wait(self) -> int:
        """Its exit code; no zombie is left."""
        return self._process.wait(PATIENCE_SECONDS)

    def dismiss(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
