"""Flows over the tools of the bench, and workers of them that can be killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel

from agent_runtime.crash import CrashPoint
from agent_runtime.executor import Executor
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowResult, FlowRunner
from agent_runtime.flow.state import append
from agent_runtime.journal.records import StoredRun
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY, Bench, Place, Worker, expect_death


class Order(BaseModel):
    """A state that most flows of these tests work on."""

    amount: int = 40
    to: str = "ana"
    note: str = ""
    notes: Annotated[list[str], append] = []
    names: list[str] = []
    found: list[str] = []
    rounds: int = 0
    trouble: str = ""


CHARGE = Call("charge_i", args=lambda order: {"amount": order.amount}, into="note")
MAIL = Call("email", args=lambda order: {"to": order.to}, into="note")
LOOK = Call("lookup", args=lambda order: {"name": order.to}, into="note")


def chain(*calls: Call, name: str = "orders") -> Flow[Order]:
    """A flow of one call after another, its nodes `n0`, `n1`, …"""
    flow = Flow(name, state=Order)
    for at, call in enumerate(calls):
        flow.node(f"n{at}", call)
    for at in range(len(calls) - 1):
        flow.edge(f"n{at}", f"n{at + 1}")
    return flow.end(f"n{len(calls) - 1}")


def runner_on(worker: Worker, registry: ToolRegistry, **options: Any) -> FlowRunner:
    """A runner of that worker, which dies with it."""
    given = {"checkpoints": worker, "checkpoint_key": KEY, "crash": worker.plan, **options}
    return FlowRunner(Executor(registry), **given)


async def run(
    worker: Worker,
    registry: ToolRegistry,
    flow: Flow[Any],
    state: BaseModel | None = None,
    run_id: str = "run",
    **options: Any,
) -> FlowResult[Any]:
    """Start a run on the worker."""
    ctx = options.pop("ctx", None)
    return await runner_on(worker, registry, **options).run(flow, state or Order(), run_id=run_id, ctx=ctx)


async def run_and_die(worker: Worker, registry: ToolRegistry, flow: Flow[Any], *given: Any, **options: Any) -> None:
    """Start a run that the worker's death cuts short."""
    await expect_death(run(worker, registry, flow, *given, **options))


async def recover(
    worker: Worker, registry: ToolRegistry, flow: Flow[Any], run_id: str = "run", **options: Any
) -> FlowResult[Any]:
    """Pick a run up on the worker."""
    mine = {name: options.pop(name) for name in ("ctx", "rerun_in_doubt", "take_over", "migrate") if name in options}
    return await runner_on(worker, registry, **options).recover(flow, run_id, **mine)


def still(run: StoredRun) -> StoredRun:
    """A stored run without what changes while nothing is written: how long its owner was not heard."""
    return run._replace(row=run.row._replace(idle_ms=0))


def noting(what: str) -> Callable[[Order], dict[str, object]]:
    return lambda order: {"notes": f"{what} of {len(order.notes)}"}


async def end_of(
    flow: Flow[Any], state: BaseModel | None = None, bench: Bench | None = None, **options: Any
) -> FlowResult[Any]:
    """What a flow comes to in memory."""
    given = {"checkpoints": MemoryCheckpointStore(), "checkpoint_key": KEY, **options}
    return await FlowRunner(Executor((bench or Bench()).registry), **given).run(flow, state or Order())


DONE = Order(note="what is known of ana")
"""What a flow of a charge and a look comes to."""


async def left(place: Place, bench: Bench, flow: Flow[Any], point: CrashPoint, seq: int = 0, **options: Any) -> None:
    """A run whose worker died at that point of that superstep."""
    await run_and_die(Worker(place).killed_at(point, seq), bench.registry, flow, **options)
