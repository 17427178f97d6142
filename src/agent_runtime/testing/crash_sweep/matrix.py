"""Our own sweep: every scenario, in each commit mode, on each store; its rows are worked by several processes."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import NamedTuple, TypeAlias

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.crash_sweep.mixtures import MIXTURES, sweep_mixtures
from agent_runtime.testing.crash_sweep.report import Row, SweepReport
from agent_runtime.testing.crash_sweep.scenario import (
    FLOWS,
    FLOWS_WITH_PEOPLE,
    PEOPLE,
    SCENARIOS,
    SHORT_SCENARIOS,
    AnyScenario,
    Scenario,
)
from agent_runtime.testing.crash_sweep.severed import Severing
from agent_runtime.testing.crash_sweep.sweep import COMMITS, MakeStore, sweep
from agent_runtime.testing.crash_sweep.world import OpenStore, open_faulty

LOCAL_STORES = ("sqlite", "memory")
STORES = (*LOCAL_STORES, "postgres")
ALL: dict[str, AnyScenario] = {each.name: each for each in (*SCENARIOS, *FLOWS, *PEOPLE, *FLOWS_WITH_PEOPLE, *SHORT_SCENARIOS)}
LONGEST = "flow: code, loop, inner, error"
"""So many moments that two deaths are left to the store that is quickest."""
ASKED_ON_A_SERVER = ("people: by message", "people: at the port", "flow: ask three")
"""Of those with people in them: one for each way on which an answer comes."""
LOOK_SECONDS = 0.2

Show: TypeAlias = Callable[[int, int], None]
"""Told how many rows are done, and how many cells."""


class Job(NamedTuple):
    """One row of the matrix."""

    scenario: str
    commits: str
    store: str
    depth: int
    each: int = 1
    """Of mixtures: one in so many is worked."""
    url: str = ""
    """Of the server, where the store needs one."""


def plan(
    *,
    scenarios: Sequence[str] | None = None,
    commits: Sequence[str] | None = None,
    stores: Sequence[str] | None = None,
    depth: int | None = None,
    postgres: str | None = None,
) -> list[Job]:
    """The rows to work: those that are named, or all, with as many deaths a run as the store is quick.

    `postgres` is the URL of a server to sweep on as well; a schema is made there for each row, and dropped.
    """
    long = [name for name, each in ALL.items() if each not in SHORT_SCENARIOS]
    slow = [name for name, each in ALL.items() if each not in (*PEOPLE, *FLOWS_WITH_PEOPLE) or name in ASKED_ON_A_SERVER]
    named = {"sqlite": [*long, *MIXTURES], "memory": [*ALL, *MIXTURES], "postgres": slow}
    return [
        job
        for store in stores or (STORES if postgres else LOCAL_STORES)
        for scenario in scenarios or named[store]
        for mode in commits or COMMITS
        for job in _jobs(scenario, mode, store, depth, postgres or "")
    ]


def _jobs(scenario: str, mode: str, store: str, depth: int | None, url: str) -> list[Job]:
    """Of mixtures all are recovered once on each store; some, in each mode, with a death in each recovery."""
    if scenario not in MIXTURES:
        return [Job(scenario, mode, store, depth or _usual_depth(scenario, mode, store), url=url)]
    some = Job(scenario, mode, store, depth or 1, each=50 if store == "memory" else 150, url=url)
    return [Job(scenario, mode, store, 0), some] if (mode, depth) == ("grouped", None) else [some]


def _usual_depth(scenario: str, commits: str, store: str) -> int:
    """Three deaths where there are few moments and no disk to wait for; two or one where each is a server's."""
    if store == "postgres":
        return 2 if ALL[scenario] in SHORT_SCENARIOS and commits == "grouped" else 1
    if store == "sqlite" and (scenario == LONGEST or (commits == "each" and ALL[scenario] in (*PEOPLE, *FLOWS_WITH_PEOPLE))):
        return 1
    return 3 if ALL[scenario] in SHORT_SCENARIOS and commits == "grouped" and store == "memory" else 2


def work_all(jobs: Sequence[Job], folder: Path, *, processes: int, show: Show) -> SweepReport:
    """Work the jobs, here where one process is enough, and report their rows in the order of the jobs."""
    if min(processes, len(jobs)) <= 1:
        return SweepReport(_work_here(jobs, folder, show))
    context = multiprocessing.get_context("spawn")
    cells = context.Value("L", 0)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_share, initargs=(cells,)) as pool:
        futures = [pool.submit(_work_apart, job, folder) for job in jobs]
        left = set(futures)
        while left:
            done, left = wait(left, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
            _raise_first(done)
            show(len(futures) - len(left), cells.value)
        return SweepReport([future.result() for future in futures])


def _work_here(jobs: Sequence[Job], folder: Path, show: Show) -> list[Row]:
    rows: list[Row] = []
    cells = 0

    def count(row: Row) -> None:
        nonlocal cells
        cells += 1
        show(len(rows), cells)

    for job in jobs:
        rows.append(asyncio.run(_work(job, folder, count)))
    return rows


_SHARED: list[Synchronized[int]] = []
"""In a process of the pool: the one number of cells that all of them have worked."""


def _share(cells: Synchronized[int]) -> None:
    _SHARED.append(cells)


def _work_apart(job: Job, folder: Path) -> Row:
    return asyncio.run(_work(job, folder, _count_one))


def _count_one(row: Row) -> None:
    with _SHARED[0].get_lock():
        _SHARED[0].value += 1


async def _work(job: Job, folder: Path, progress: Callable[[Row], None]) -> Row:
    async def make_store() -> CheckpointStore:
        if job.store == "memory":
            return MemoryCheckpointStore()
        return SQLiteCheckpointStore(folder / f"{job.scenario}-{job.commits}-{job.depth}.db")

    async def swept(make: MakeStore, open_store: OpenStore = open_faulty) -> Row:
        is_steady = job.store == "memory" or (job.scenario in ALL and _is_one_by_one(ALL[job.scenario]))
        if job.scenario in MIXTURES:
            return await sweep_mixtures(
                job.scenario, make, store_name=job.store, commits=job.commits, depth=job.depth, each=job.each,
                progress=progress, open_store=open_store, is_steady=is_steady,
            )  # fmt: skip
        report = await sweep(
            ALL[job.scenario], make, store_name=job.store, commits=[job.commits], depth=job.depth, progress=progress,
            open_store=open_store, is_steady=is_steady,
        )  # fmt: skip
        return report.rows[0]

    if job.store != "postgres":
        return await swept(make_store)
    async with Severing(job.url) as server:
        return await swept(server.make_store, server.open_store)


def _is_one_by_one(scenario: AnyScenario) -> bool:
    return isinstance(scenario, Scenario) and all(len(reply.tool_calls) < 2 for reply in scenario.replies)


def _raise_first(done: set[Future[Row]]) -> None:
    """A row that could not be worked at all ends the sweep at once."""
    for future in done:
        future.result()
