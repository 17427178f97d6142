"""The measures: what is run beside what, and the rows that come of it. docs/speed.md says what each of them is."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median

from bench.install import core_install
from bench.job import Figures
from bench.peers import ask_floor, floor_job
from bench.table import Goal, Row, Unit, at_least, at_most, ours_at_most, ours_is
from bench.turns import SLOWER_FLUSH_MS, TOP, Bench, Measure, ask_on_slow_disk


def crowd(bench: Bench) -> list[Row]:
    """Many short runs in one process."""
    rows = []
    for in_flight in bench.sizes.crowds:
        rows += _crowd_at(bench, in_flight)
    return rows


def _crowd_at(bench: Bench, in_flight: int) -> list[Row]:
    sizes = bench.sizes
    options = {"runs": sizes.runs, "steps": sizes.steps, "in_flight": in_flight}
    floor = bench.job("floor.crowd", **options)
    theirs = floor_job(bench, "gc", "conc", "--runs", sizes.runs, "--n", sizes.steps, "--conc", in_flight)
    what = f"{sizes.runs:,} runs × {sizes.steps} steps, {in_flight} in flight"
    ours, (own_floor, *peers) = bench.in_turns(what, bench.job("ours.crowd", **options), floor, *theirs)
    alone, (floor_of_alone,) = bench.in_turns(f"{what}: the journal alone", bench.job("alone.crowd", **options), floor)
    steps = sizes.runs * sizes.steps
    rows = [
        _speed_row(what, steps, ours, own_floor, at_least(0.5)),
        _cpu_row(f"{what}: CPU a step", steps, ours, own_floor, ours_at_most(120)),
        _speed_row(f"{what}: the journal alone", steps, alone, floor_of_alone, at_least(0.8)),
        _cpu_row(f"{what}: CPU a step of the journal alone", steps, alone, floor_of_alone, None),
    ]
    rows += [
        _speed_row(f"{what}, to the peers' {bench.backend.floors}-gc", steps, ours, found, at_least(0.5)) for found in peers
    ]
    return rows


def long(bench: Bench) -> list[Row]:
    """One long run."""
    steps = bench.sizes.long_steps
    theirs = [job for form in ("4c", "2c") for job in floor_job(bench, form, "seq", "--n", steps)]
    what = f"one run of {steps:,} steps"
    flat, goal = ours_at_most(1.2), at_least(bench.backend.long_ratio)
    ours, (own_floor, *peers) = bench.in_turns(
        what, bench.job("ours.long", steps=steps), bench.job("floor.long", steps=steps), *theirs
    )
    rows = [
        _speed_row(what, steps, ours, own_floor, goal),
        _cpu_row(f"{what}: CPU a step", steps, ours, own_floor, None),
        _row(f"{what}: time of a late step to an early one", Unit.TIMES, ours, own_floor, itemgetter("grown"), flat),
        _row(f"{what}: CPU of a late step to an early one", Unit.TIMES, ours, own_floor, itemgetter("cpu_grown"), flat),
    ]
    rows += [
        _speed_row(f"{what}, to the peers' {bench.backend.floors}-{form}", steps, ours, found, its_goal)
        for form, found, its_goal in zip(("4c", "2c"), peers, (goal, None), strict=False)
    ]
    return rows


def disk(bench: Bench) -> list[Row]:
    """One long run on a disk that takes its time: there it is the number of commits that counts."""
    steps = bench.sizes.slow_steps
    what = f"one run of {steps:,} steps, each flush {SLOWER_FLUSH_MS} ms longer"
    slow = replace(bench, ask=ask_on_slow_disk)
    ours, (floor,) = slow.in_turns(what, slow.job("ours.long", steps=steps), slow.job("floor.long", steps=steps))
    return [_speed_row(what, steps, ours, floor, None)]


def kept(bench: Bench) -> list[Row]:
    """What a step leaves in the store, and in how many commits: the difference of a long and a short run."""
    sizes = bench.sizes
    bench.say("bytes and commits a step")
    ours = _marginal(bench, "ours.kept", sizes.kept_steps)
    floor = _marginal(bench, "floor.kept", sizes.kept_steps)
    ours_counted = _marginal(bench, "ours.kept", sizes.counted_steps)
    floor_counted = _marginal(bench, "floor.kept", sizes.counted_steps)
    over = "stored bytes a step over the payload"
    return [
        _row(over, Unit.BYTES, [ours], [floor], lambda each: each["bytes"] - each["payload"], ours_at_most(600)),
        _row("commits a step, counted", Unit.COUNT, [ours_counted], [floor_counted], itemgetter("commits"), ours_is(2)),
    ]


def _marginal(bench: Bench, job: str, steps: tuple[int, int]) -> Figures:
    short, long = (bench.job(job, steps=number)() for number in steps)
    return {name: (long[name] - short[name]) / (steps[1] - steps[0]) for name in long}


def recovery(bench: Bench) -> list[Row]:
    """Runs killed in the same tool call, and how soon a new process has them all done."""
    sizes = bench.sizes
    what = f"{sizes.killed} runs killed in step 3, from process start to all done"
    mine = partial(_killed_and_recovered, bench, "ours", extra_calls=1)
    floor = partial(_killed_and_recovered, bench, "floor", grouped=False)
    grouped = partial(_killed_and_recovered, bench, "floor", grouped=True)
    peers = bench.peers
    theirs = [] if peers is None else [partial(_killed_and_recovered_by_peers, bench, peers)]
    ours, (own_floor, group_floor, *others) = bench.in_turns(what, mine, floor, grouped, *theirs)
    rows = [
        _recovery_row(what, ours, own_floor, at_most(1.2)),
        _recovery_row(f"{what}, to the grouped floor", ours, group_floor, None),
        Row("finished calls run again", Unit.COUNT, [each["again"] for each in ours], goal=ours_is(0)),
    ]
    rows += [_recovery_row(f"{what}, to the peers' {bench.backend.floors}-4c", ours, found, at_most(1.2)) for found in others]
    return rows


def _recovery_row(what: str, ours: Sequence[Figures], floor: Sequence[Figures], goal: Goal | None) -> Row:
    return _row(what, Unit.SECONDS, ours, floor, itemgetter("since_start"), goal)


def _killed_and_recovered(
    bench: Bench, side: str, *, extra_calls: int = 0, steps: int = 0, calls: int = 0, **options: object
) -> Figures:
    """`calls`: how many a run makes in all, where it is not two a step."""
    sizes = bench.sizes
    steps = steps or sizes.steps
    calls = calls or 2 * steps + extra_calls

    def measure(place: dict[str, str]) -> Figures:
        tally = os.path.join(place["folder"], "tally")
        common = {**place, "steps": steps, "tally": tally}
        _be_killed(bench, f"{side}.crash", {**common, "runs": sizes.killed})
        figures = bench.ask(
            f"{side}.recover", {**common, "in_flight": sizes.recover_in_flight, "started_at": time.time(), **options}
        )
        return {**figures, "again": run_again(Path(tally), expected=sizes.killed * calls)}

    return bench.in_place(measure)


def _be_killed(bench: Bench, job: str, options: dict[str, object]) -> None:
    try:
        bench.ask(job, options)
    except subprocess.CalledProcessError as error:
        if error.returncode != -signal.SIGKILL:
            raise
        return
    raise AssertionError(f"{job} was to be killed, and ended by itself")


def _killed_and_recovered_by_peers(bench: Bench, peers: Path) -> Figures:
    sizes = bench.sizes

    def measure(folder: str) -> Figures:
        options = ("--runs", sizes.killed, "--n", sizes.steps, "--counter", os.path.join(folder, "tally"))
        ask_floor(bench, peers, "4c", "crash", folder, *options, killed=True)
        found = ask_floor(bench, peers, "4c", "recover", folder, *options, "--t0", time.time())
        return {"since_start": found["since_start_s"]}

    return bench.in_folder(measure)


def run_again(tally: Path, *, expected: int) -> int:
    """How often a finished call was made again. Raises where calls are missing."""
    calls = collections.Counter(tally.read_text(encoding="utf-8").splitlines())
    if len(calls) != expected:
        raise AssertionError(f"expected {expected} calls in all, found {len(calls)}: not every run came to its end")
    return sum(calls.values()) - len(calls)


def flows(bench: Bench) -> list[Row]:
    """Flows of three nodes beside loops of three steps, and flows that were killed."""
    sizes = bench.sizes
    rows = []
    for in_flight in sizes.crowds[:1]:
        options = {"runs": sizes.runs, "in_flight": in_flight}
        what = f"{sizes.runs:,} flows of {NODES} nodes, {in_flight} in flight, to loops of as many steps"
        loops = bench.job("ours.crowd", **options, steps=NODES)
        ours, (loop,) = bench.in_turns(what, bench.job("flows.crowd", **options), loops)
        rows.append(_speed_row(what, sizes.runs * NODES, ours, loop, at_least(0.6)))
    what = f"{sizes.killed} flows killed in their last node, from process start to all done"
    killed, _ = bench.in_turns(what, partial(_killed_and_recovered, bench, "flows", steps=NODES, calls=NODES))
    rows.append(_row(what, Unit.SECONDS, killed, [], itemgetter("since_start"), ours_at_most(1.0)))
    rows.append(Row("finished calls of flows run again", Unit.COUNT, [each["again"] for each in killed], goal=ours_is(0)))
    return rows


def people(bench: Bench) -> list[Row]:
    """How soon a call goes out that somebody agreed to, and what waiting for people costs."""
    sizes = bench.sizes
    what = "from a verdict to its call, a worker waiting beside the run"
    answered, _ = bench.in_turns(what, bench.job("people.answered", times=sizes.answers))
    idle, _ = bench.in_turns(
        f"waiting for {sizes.waited:,} paused runs", bench.job("people.idle", runs=sizes.waited, seconds=sizes.idle_seconds)
    )
    return [
        _row(what, Unit.MILLISECONDS, answered, [], _milliseconds, ours_at_most(bench.backend.answer_ms)),
        _row(f"{what}: the slowest", Unit.MILLISECONDS, answered, [], lambda each: each["most"] * 1e3, None),
        _row(
            f"a processor's share, waiting for {sizes.waited:,} paused runs", Unit.PERCENT, idle, [],
            lambda each: each["cpu"] * 100, ours_at_most(1),
        ),
        _row(
            f"a processor's share, a supervisor beside {sizes.waited:,} paused runs", Unit.PERCENT, idle, [],
            lambda each: each["looking"] * 100, ours_at_most(1),
        ),
    ]  # fmt: skip


def load(bench: Bench) -> list[Row]:
    """Read and verify one long run."""
    options = {"records": bench.sizes.records, "times": bench.sizes.loads}
    what = f"load and verify a run of {bench.sizes.records:,} records"
    ours, (floor,) = bench.in_turns(what, bench.job("ours.load", **options), bench.job("floor.load", **options))
    return [_row(what, Unit.MILLISECONDS, ours, floor, _milliseconds, ours_at_most(15))]


def beats(bench: Bench) -> list[Row]:
    """Say of many runs at once that their owner lives."""
    options = {"runs": bench.sizes.beating_runs, "times": bench.sizes.beats}
    what = f"heartbeats of {bench.sizes.beating_runs:,} runs"
    ours, (floor,) = bench.in_turns(what, bench.job("ours.beats", **options), bench.job("floor.beats", **options))
    return [_row(what, Unit.MILLISECONDS, ours, floor, _milliseconds, ours_at_most(100))]


def start(bench: Bench) -> list[Row]:
    """The first run of a fresh process, its imports and its memory."""
    peaks: list[float] = []

    def first(script: str) -> Measure:
        return lambda: bench.in_folder(lambda folder: _first_run(bench, script, folder, peaks))

    what = "first 3-step run of a fresh process"
    ours, (floor,) = bench.in_turns(what, first("first_run.py"), first("first_floor.py"))
    rows = [
        _row(what, Unit.MILLISECONDS, ours, floor, _milliseconds, at_most(2.5)),
        Row("peak resident memory of it", Unit.MEGABYTES, [median(peaks)], goal=ours_at_most(45)),
    ]
    pairs = (
        ("import agent_runtime, to import pydantic", "import agent_runtime", "import pydantic"),
        ("import of all that a durable loop needs, to pydantic's BaseModel", LOOP_IMPORT, "from pydantic import BaseModel"),
    )
    for what, mine, pydantic in pairs:
        ours, (floor,) = bench.in_turns(what, partial(_import, bench, mine), partial(_import, bench, pydantic))
        rows.append(_row(what, Unit.MILLISECONDS, ours, floor, _milliseconds, at_most(1.6)))
    return rows


LOOP_IMPORT = "from agent_runtime import run_tool_loop, ToolRegistry; from agent_runtime.stores import SQLiteCheckpointStore"


def _milliseconds(figures: Figures) -> float:
    return figures["wall"] * 1e3


def _first_run(bench: Bench, script: str, folder: str, peaks: list[float]) -> Figures:
    """The median of a few processes on one file; the first, which makes the file and warms the caches, is not counted."""
    took = []
    for _ in range(bench.sizes.starts):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(TOP / "bench" / script), os.path.join(folder, "first.db")],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        took.append(time.perf_counter() - began)
        if done.stdout.strip():
            peaks.append(int(done.stdout) / 1024)
    return {"wall": median(took[1:] or took)}


def _import(bench: Bench, line: str) -> Figures:
    program = f"import time; began = time.perf_counter()\n{line}\nprint(time.perf_counter() - began)"
    took = [
        float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
        for _ in range(bench.sizes.starts)
    ]
    return {"wall": median(took)}


def sqlalchemy(bench: Bench) -> list[Row]:
    """The same runs through SQLAlchemy, beside the native store."""
    sizes, in_flight = bench.sizes, bench.sizes.crowds[0]
    options = {"runs": sizes.runs, "steps": sizes.steps, "in_flight": in_flight}
    native = bench.job("ours.crowd", **options)
    rows = []
    for driver in DRIVERS:
        what = f"{sizes.runs:,} runs × {sizes.steps} steps, {in_flight} in flight, SQLAlchemy with {driver} to native"
        ours, (beside,) = bench.in_turns(what, bench.job("ours.crowd", **options, driver=driver), native)
        goal = at_least(0.5) if driver == DRIVERS[0] else None
        rows.append(_speed_row(what, sizes.runs * sizes.steps, ours, beside, goal))
    return rows


def size(bench: Bench) -> list[Row]:
    """What an open run takes in memory, and what an install takes on disk."""
    bench.say("memory of open runs, size of the install")
    idle = [bench.job("ours.idle", runs=bench.sizes.idle_runs)()["bytes"] / 1024 for _ in range(bench.rounds)]
    names, megabytes = core_install()
    return [
        Row("memory of an open idle run above its messages", Unit.KILOBYTES, idle, goal=ours_at_most(8)),
        Row("distributions of the core install", Unit.COUNT, [len(names)], goal=ours_at_most(6)),
        Row("size of the core install", Unit.MEGABYTES, [megabytes], goal=ours_at_most(15)),
    ]


MEASURES: dict[str, Callable[[Bench], list[Row]]] = {
    "crowd": crowd,
    "long": long,
    "disk": disk,
    "start": start,
    "kept": kept,
    "recovery": recovery,
    "flows": flows,
    "people": people,
    "load": load,
    "beats": beats,
    "sqlalchemy": sqlalchemy,
    "size": size,
}
NODES = 3
"""Of a flow that is measured."""
WITHOUT_SERVER = frozenset({"start", "size", "disk"})
"""Measured once, on SQLite: what they are about is not the store, or it is the flushes of this process."""
WITH_SERVER_ALONE = frozenset({"sqlalchemy"})
DRIVERS = ("asyncpg", "psycopg")
"""Of Postgres, through SQLAlchemy; the first is that of the native store."""
ON_REDIS = frozenset({"crowd", "load"})
"""Measured on Redis: the others need a floor, or a meter of commits and bytes, that is not there."""


def _row(
    what: str,
    unit: Unit,
    ours: Sequence[Figures],
    floor: Sequence[Figures],
    compute: Callable[[Figures], float],
    goal: Goal | None,
) -> Row:
    """A row of what is computed from the figures of each round."""
    return Row(what, unit, [compute(each) for each in ours], [compute(each) for each in floor], goal)


def _speed_row(what: str, steps: int, ours: Sequence[Figures], floor: Sequence[Figures], goal: Goal | None) -> Row:
    return _row(what, Unit.STEPS_A_SECOND, ours, floor, lambda each: steps / each["wall"], goal)


def _cpu_row(what: str, steps: int, ours: Sequence[Figures], floor: Sequence[Figures], goal: Goal | None) -> Row:
    return _row(what, Unit.MICROSECONDS, ours, floor, lambda each: each["cpu"] / steps * 1e6, goal)
