"""The work that everything here is measured on: what the stubs answer, how many runs go at once, what is counted outside.

A step is one model call and one tool call. The model answers about 300 bytes with one tool call in them, the tool about
200 bytes; neither takes time. A run of n steps ends with a reply that calls nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise

FIRST_MESSAGE = "u" * 270
LAST_TEXT = "done"
KILLED_IN_STEP = 2
"""The tool call in which all runs are killed: that of the third step."""

_REPLY_FILL = "m" * 170
_RESULT_FILL = "t" * 180


def reply_text(step: int) -> str:
    """What the model says in a step."""
    return f"step {step}: {_REPLY_FILL}"


def call_id(step: int) -> str:
    """The model's own name for the call of a step."""
    return f"call_{step}"


def call_args(step: int) -> dict[str, object]:
    """What the tool is called with."""
    return {"q": f"query-{step}", "i": step}


def tool_result(step: int) -> str:
    """What the tool gives."""
    return f"result {step}: {_RESULT_FILL}"


def payload_of(step: int) -> int:
    """The bytes of a step's reply and result as plain JSON: what any journal of the work has to hold."""
    import json

    call = {"id": call_id(step), "name": "lookup", "args": call_args(step)}
    parts = ({"text": reply_text(step), "tool_calls": [call]}, tool_result(step))
    return sum(len(json.dumps(part, separators=(",", ":"))) for part in parts)


async def closed_loop(runs: Iterable[str], in_flight: int, work: Callable[[str], Awaitable[object]]) -> None:
    """Work all runs, so many at once; the next begins when one ends."""
    waiting = iter(runs)

    async def worker() -> None:
        for run in waiting:
            await work(run)

    await asyncio.gather(*(worker() for _ in range(in_flight)))


class Stopwatch:
    """Wall time and the process's CPU time from its making on."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"wall": time.perf_counter() - self._wall, "cpu": time.process_time() - self._cpu}


class Stamps:
    """When each step of a run began, on the wall and in CPU time of the process."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def take(self) -> None:
        """A step begins."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def clear(self) -> None:
        self.wall.clear()
        self.cpu.clear()

    def grown(self) -> dict[str, float]:
        """How much more a late step takes than an early one."""
        return {"grown": late_to_early(self.wall), "cpu_grown": late_to_early(self.cpu)}


def late_to_early(stamps: Sequence[float]) -> float:
    """The median of the last twentieth of the steps to that of steps 6 to 15, from when each began."""
    took = [after - before for before, after in pairwise(stamps)]
    return middle(took[-max(5, len(took) // 20) :]) / middle(took[5:15] or took)


def middle(values: Sequence[float]) -> float:
    """The median, without the module that would make the start of a measured process slower."""
    return sorted(values)[len(values) // 2]


class Tally:
    """Counts calls in a file outside every journal, and kills this process once enough runs are inside one call."""

    def __init__(self, path: str, *, kill_at: int = 0) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._kill_at = kill_at
        self._inside = 0

    def count(self, kind: str, run: str, step: int) -> None:
        """A call has finished."""
        os.write(self._file, f"{kind} {run} {step}\n".encode())

    async def enter_tool(self, step: int) -> None:
        """A tool call begins; the one that all runs are killed in never ends."""
        if not self._kill_at or step != KILLED_IN_STEP:
            return
        self._inside += 1
        if self._inside >= self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.Event().wait()
