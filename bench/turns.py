"""Taking turns: each measurement of ours between two of the floor, in one pass, each in a process and a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from bench.backends import Backend
from bench.job import Figures
from tests.strace import strace

TOP = Path(__file__).resolve().parent.parent
LONGEST_SECONDS = 300
SLOWER_FLUSH_MS = 1

Measure: TypeAlias = Callable[[], Figures]
Ask: TypeAlias = "Callable[[str, dict[str, Any]], Figures]"


@dataclass(frozen=True)
class Sizes:
    """How much work each measure does."""

    runs: int = 1000
    steps: int = 5
    crowds: Sequence[int] = (64, 256)
    long_steps: int = 1000
    slow_steps: int = 250
    kept_steps: tuple[int, int] = (100, 1000)
    counted_steps: tuple[int, int] = (20, 120)
    killed: int = 200
    recover_in_flight: int = 200
    records: int = 1000
    loads: int = 15
    idle_runs: int = 2000
    starts: int = 6
    beating_runs: int = 10_000
    beats: int = 9
    answers: int = 30
    waited: int = 10_000
    idle_seconds: float = 10.0


QUICK = Sizes(
    runs=200,
    long_steps=200,
    slow_steps=100,
    kept_steps=(50, 250),
    killed=50,
    idle_runs=1000,
    starts=4,
    beating_runs=2000,
    answers=5,
    waited=200,
    idle_seconds=1.0,
)


def ask_process(name: str, options: dict[str, Any]) -> Figures:
    """The job's figures, measured in a process of its own."""
    return run_script(["-m", "bench.job", name, json.dumps(options)])


def ask_on_slow_disk(name: str, options: dict[str, Any]) -> Figures:
    """The same in a process whose every flush takes `SLOWER_FLUSH_MS` longer: it is held back on its way out of the kernel."""
    flushes = "fdatasync,fsync"
    delayed = ["-e", f"trace={flushes}", "-e", f"inject={flushes}:delay_exit={SLOWER_FLUSH_MS * 1000}", "-e", "signal=none"]
    tracer = [strace(), "-f", "--seccomp-bpf", "-qq", "-o", os.devnull, *delayed]
    return run_script(["-m", "bench.job", name, json.dumps(options)], under=tracer)


def run_script(arguments: Sequence[str], *, under: Sequence[str] = ()) -> Figures:
    """What a Python process prints as JSON, run by itself or by the program `under`. `CalledProcessError` where it fails."""
    done = subprocess.run(
        [*under, sys.executable, *arguments], cwd=TOP, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        if done.returncode > 0:
            print(done.stderr, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, arguments, done.stdout, done.stderr)
    figures: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


@dataclass(frozen=True)
class Bench:
    """What every measure is given."""

    sizes: Sizes
    rounds: int
    base: Path
    peers: Path | None = None
    backend: Backend = field(default_factory=Backend)
    ask: Ask = ask_process
    say: Callable[[str], None] = field(default=lambda line: None)

    def job(self, name: str, **options: Any) -> Measure:
        """A measurement in a folder and a store of its own, which are removed after it."""
        return lambda: self.in_place(lambda place: self.ask(name, {**place, **options}))

    def in_place(self, measure: Callable[[dict[str, str]], Figures]) -> Figures:
        with self.backend.place() as place:
            return self.in_folder(lambda folder: measure({"folder": folder, **place}))

    def in_folder(self, measure: Callable[[str], Figures]) -> Figures:
        folder = tempfile.mkdtemp(prefix="bench-", dir=self.base)
        try:
            return measure(folder)
        finally:
            shutil.rmtree(folder)

    def in_turns(self, what: str, ours: Measure, *floors: Measure) -> tuple[list[Figures], list[list[Figures]]]:
        """A round: the floors, ours, the floors again in reverse. Ours of all rounds, and of each floor the means of two."""
        mine: list[Figures] = []
        beside: list[list[Figures]] = [[] for _ in floors]
        for number in range(1, self.rounds + 1):
            self.say(f"{what}, round {number} of {self.rounds}")
            before = [floor() for floor in floors]
            mine.append(ours())
            after = [floor() for floor in reversed(floors)][::-1]
            for found, pair in zip(beside, zip(before, after, strict=True), strict=True):
                found.append(mean_of(*pair))
        return mine, beside


def mean_of(one: Figures, other: Figures) -> Figures:
    """The mean of two measurements, figure by figure."""
    return {name: (value + other[name]) / 2 for name, value in one.items()}
