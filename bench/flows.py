"""Flows of three nodes, each one call: many at once, beside loops of three steps; and many that were killed, recovered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from pydantic import BaseModel

from agent_runtime import Call, Executor, Flow, FlowResult, FlowRunner, ToolRegistry, idempotency_key
from bench.job import Figures
from bench.places import store_in
from bench.workload import Stopwatch, Tally, call_args, closed_loop, tool_result

KEY = bytes(range(32))
NODES = 3


class State(BaseModel):
    """What a flow gathers: the result of each node."""

    first: str = ""
    second: str = ""
    third: str = ""


def _asks(step: int) -> Callable[[State], dict[str, object]]:
    return lambda state: call_args(step)


FLOW = (
    Flow("three", state=State)
    .node("one", Call("lookup", args=_asks(0), into="first"))
    .node("two", Call("lookup", args=_asks(1), into="second"))
    .node("three", Call("lookup", args=_asks(2), into="third"))
    .edge("one", "two")
    .edge("two", "three")
    .end("three")
)


class Flows:
    """Works flows on a store."""

    def __init__(
        self, folder: str, url: str, *, tally: Tally | None = None, inside_tool: Callable[[int], Awaitable[None]] | None = None
    ) -> None:
        self.store = store_in(folder, url)
        self._tally = tally
        self._inside_tool = inside_tool
        registry = ToolRegistry()
        registry.tool(name="lookup", idempotent=True)(self._lookup)
        self.runner = FlowRunner(Executor(registry), checkpoints=self.store, checkpoint_key=KEY)

    async def work(self, run: str) -> None:
        """A new flow to its end."""
        await self.runner.run(FLOW, State(), run_id=run)

    async def _lookup(self, q: str, i: int) -> str:
        """What is known of a query."""
        if self._inside_tool is not None:
            await self._inside_tool(i)
        if self._tally is not None:
            self._tally.count("tool", idempotency_key().split(":")[0], i)
        return tool_result(i)


def crowd(*, folder: str, runs: int, in_flight: int, url: str = "") -> Figures:
    """Many flows at once."""

    async def work() -> Figures:
        flows = Flows(folder, url)
        await flows.work("warm")
        watch = Stopwatch()
        await closed_loop((f"r{at}" for at in range(runs)), in_flight, flows.work)
        figures = watch.read()
        await flows.store.close()
        return figures

    return asyncio.run(work())


def crash(*, folder: str, runs: int, steps: int, tally: str, url: str = "") -> Figures:
    """All flows at once until each is inside the call of its last node; then this process is killed."""
    assert steps == NODES, f"a flow here has {NODES} nodes"

    async def work() -> Figures:
        counted = Tally(tally, kill_at=runs)
        flows = Flows(folder, url, tally=counted, inside_tool=counted.enter_tool)
        await closed_loop((f"r{at}" for at in range(runs)), runs, flows.work)
        raise AssertionError("expected to be killed")

    return asyncio.run(work())


def recover(*, folder: str, steps: int, in_flight: int, tally: str, started_at: float, url: str = "") -> Figures:
    """Every unfinished flow of the store to its end; `since_start` counts from before this process was made."""
    assert steps == NODES, f"a flow here has {NODES} nodes"

    async def work() -> Figures:
        flows = Flows(folder, url, tally=Tally(tally))
        results = await flows.runner.recover_all(FLOW)
        figures = {"since_start": time.time() - started_at}
        assert all(isinstance(each, FlowResult) and each.status == "done" for each in results.values()), results
        await flows.store.close()
        return figures

    return asyncio.run(work())
