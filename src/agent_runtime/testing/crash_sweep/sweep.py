"""The way through the cells: a run without faults first, then a death at each moment of each worker found so far."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.testing.crash_sweep.programs import Result
from agent_runtime.testing.crash_sweep.report import Row, SweepReport, Violation
from agent_runtime.testing.crash_sweep.rules import Rule
from agent_runtime.testing.crash_sweep.scenario import AnyScenario
from agent_runtime.testing.crash_sweep.world import CurrentWorker, Died, Done, InDoubt, OpenStore, World, open_faulty
from agent_runtime.testing.faults import Life, Moment, SimulatedCrash, Where

MakeStore: TypeAlias = Callable[[], Awaitable[CheckpointStore]]
LeftBehind: TypeAlias = Callable[[World], Awaitable[None]]
COMMITS = ("grouped", "each")
CELL_SECONDS = 30.0
"""A cell that takes longer hangs: a rule is broken."""
MOST_WORKERS = 20
MOST_TRIES = 5
"""How often a cell is worked whose death does not come: how many writes a run has depends on a file's speed, too."""

Deaths: TypeAlias = "tuple[Moment | None, ...]"
"""Where each worker dies, one after another; None: it lives."""


async def sweep(
    scenario: AnyScenario,
    make_store: MakeStore,
    *,
    store_name: str = "store",
    commits: Sequence[str] = COMMITS,
    depth: int = 2,
    progress: Callable[[Row], None] | None = None,
    open_store: OpenStore = open_faulty,
    is_steady: bool = True,
    left_behind: LeftBehind | None = None,
    run_ids: str = "cell",
) -> SweepReport:
    """Crash the scenario at every moment, with up to `depth` deaths a run, and report each rule that did not hold.

    `make_store` gives an empty store, one for each commit mode; every worker gets it through `reopen()`, or what
    `open_store` makes of it and of the worker's life. `progress` is called after each cell. `is_steady`: the same
    run has the same writes each time; not so where calls side by side wait for a server. There a death that does not come
    is no finding; else it is one when it does not come in a few tries, since a slow disk lets writes share a commit.
    `left_behind` writes each run as a worker left it that is gone; the reference alone starts anew. `run_ids` begins the
    id of every run.
    """
    rows = []
    with quiet_about_the_dead():
        for mode in commits:
            store = await make_store()
            try:
                row = Row(scenario.name, mode, store_name)
                await _Sweep(scenario, store, row, depth, progress, open_store, is_steady, left_behind, run_ids).go()
            finally:
                await store.close()
            rows.append(row)
    return SweepReport(rows)


class _Sweep:
    """One row: one scenario, in one mode, on one store. Every cell is a run of its own."""

    def __init__(
        self,
        scenario: AnyScenario,
        store: CheckpointStore,
        row: Row,
        depth: int,
        progress: Callable[[Row], None] | None,
        open_store: OpenStore,
        is_steady: bool,
        left_behind: LeftBehind | None,
        run_ids: str,
    ) -> None:
        self._scenario = scenario
        self._registry = scenario.tools(CurrentWorker())
        self._store = store
        self._row = row
        self._depth = depth
        self._progress = progress
        self._open_store = open_store
        self._is_steady = is_steady
        self._left_behind = left_behind
        self._run_ids = run_ids
        self._cell = 0
        self._state = ""
        self._effects: dict[str, int] = {}

    async def go(self) -> None:
        """Work every cell."""
        began = SYSTEM_CLOCK.monotonic()
        reference = await self._work_cell(())
        if not self._row.violations:
            self._row.moments = {where: sum(life.reached[where] for life in reference.lives) for where in Where}
            first = reference if self._left_behind is None else await self._work_cell(())
            await self._die_further((), first)
        self._row.seconds = SYSTEM_CLOCK.monotonic() - began

    async def _die_further(self, deaths: Deaths, world: World) -> None:
        """One death more, at each moment of each worker that lived after the last one."""
        if sum(death is not None for death in deaths) == self._depth:
            return
        for at in range(len(deaths), len(world.lives)):
            for moment in world.lives[at].moments():
                more = (*deaths, *[None] * (at - len(deaths)), moment)
                await self._die_further(more, await self._work_cell(more))

    async def _work_cell(self, deaths: Deaths) -> World:
        world, tries = await self._try_cell(deaths), 1
        while {broken.rule for broken in world.broken} == {Rule.DIES} and tries < MOST_TRIES:
            world, tries = await self._try_cell(deaths), tries + 1
        self._write_down(world, deaths)
        return world

    async def _try_cell(self, deaths: Deaths) -> World:
        self._cell += 1
        run_id = f"{self._run_ids}-{self._cell}"
        world = World(
            self._scenario, self._registry, self._store, run_id, self._row.commits, open_store=self._open_store
        )  # fmt: skip
        try:
            async with asyncio.timeout(CELL_SECONDS):
                if self._left_behind is not None and self._cell > 1:
                    await self._left_behind(world)
                await self._work(world, deaths)
        except Exception as error:  # whatever stops a cell is what the sweep is there to find
            world.fail(Rule.REACHES_END, f"{type(error).__name__}: {error}")
        await world.close()
        return world

    async def _work(self, world: World, deaths: Deaths) -> None:
        """One worker after another until the run is done, and one more, which finds nothing to do."""
        rerun = False
        for at in range(MOST_WORKERS):
            life = Life(deaths[at] if at < len(deaths) else None)
            ended = await world.send_worker(life, rerun=rerun)
            if isinstance(ended, Died) != (life.ends is not None) and (self._is_steady or isinstance(ended, Died)):
                world.fail(Rule.DIES, f"worker {at + 1} was to die {life.ends}, and ended as {type(ended).__name__}")
            if isinstance(ended, Done):
                await self._check_end(world, ended.result, is_reference=self._cell == 1)
                return
            rerun = isinstance(ended, InDoubt)
        world.fail(Rule.REACHES_END, f"{MOST_WORKERS} workers did not bring it to its end")

    async def _check_end(self, world: World, result: Result, *, is_reference: bool) -> None:
        state = world.state(result)
        if is_reference:
            self._state, self._effects = state, dict(world.effects())
        if state != self._state:
            world.fail(Rule.SAME_STATE, f"expected {self._state}, found {state}")
        world.check_effects(self._effects)
        world.check_told(is_whole=self._left_behind is None)
        done = (world.model.calls, len(world.remote.requests))
        again = await world.send_worker(Life(), rerun=False)
        world.lives.pop()  # it only looked: it has no moments to die at
        if not isinstance(again, Done) or world.program.told(again.result) != world.program.told(result):
            world.fail(Rule.SAME_STATE, f"the run is done, and recovering it gives {again!r} instead of its result")
        if done != (world.model.calls, len(world.remote.requests)):
            world.fail(Rule.ENDED_ONCE, "the run is done, and recovering it asked for something")

    def _write_down(self, world: World, deaths: Deaths) -> None:
        row = self._row
        count = sum(life.is_over for life in world.lives)  # one that was to come and did not is none
        row.cells += [0] * (count + 1 - len(row.cells))
        row.cells[count] += 1
        row.decisions += world.decisions
        where = _describe(deaths)
        named = dict.fromkeys(world.broken)  # one rule breaks in many looks at one journal: once is enough
        row.violations += [Violation(row.scenario, row.commits, row.store, where, *broken) for broken in named]
        if self._progress is not None:
            self._progress(row)


def _describe(deaths: Deaths) -> str:
    return ", then ".join("nowhere" if death is None else str(death) for death in deaths) or "nowhere"


@contextmanager
def quiet_about_the_dead() -> Iterator[None]:
    """Keep the loop from reporting tasks that died with their worker: nobody was left to await them."""
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), SimulatedCrash):
            return
        if before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
    try:
        yield
    finally:
        loop.set_exception_handler(before)
