"""Random graphs with random calls, killed at random moments, against the same graphs without faults.

The worlds of the crash sweep hold every cell to its rules; here the graphs and the moments are drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from agent_runtime.errors import CallFailed
from agent_runtime.flow.calls import NodeRun
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.state import append
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.crash_sweep.scenario import FlowScenario, travel_tools
from agent_runtime.testing.crash_sweep.sweep import quiet_about_the_dead
from agent_runtime.testing.crash_sweep.world import CurrentWorker, Done, InDoubt, World, open_faulty
from agent_runtime.testing.faults import Life, Moment
from tests.bench import LONG_SECONDS

TOOLS = ("charge", "mail", "look", "refuse")
MOST_WORKERS = 8


class Notes(BaseModel):
    """Every node of a random graph adds a note."""

    notes: Annotated[list[str], append] = []
    items: list[str] = ["x", "y", "z"]
    found: list[str] = []
    rounds: int = 0


def noting(name: str, tool: str) -> Call:
    return Call(tool, args=lambda state: {"what": f"{name} {len(state.notes)}"}, into="notes")


def own_calls(name: str, tools: Sequence[str], *, side_by_side: bool) -> Any:
    """A function that makes these calls, and notes what each came to."""

    async def work(state: Notes, run: NodeRun) -> dict[str, object]:
        async def one(at: int, tool: str) -> str:
            try:
                return str(await run.call(tool, what=f"{name} {at} {len(state.notes)}"))
            except CallFailed as failed:
                return failed.message

        if side_by_side:
            return {"notes": "; ".join(await asyncio.gather(*(one(at, tool) for at, tool in enumerate(tools))))}
        return {"notes": "; ".join([await one(at, tool) for at, tool in enumerate(tools)])}

    return work


@st.composite
def works(draw: st.DrawFn, name: str, depth: int) -> Any:
    """What one node does."""
    kind = draw(st.sampled_from(["call", "call", "code", "plain", *(["flow"] if depth else [])]))
    tool = draw(st.sampled_from(TOOLS[:3]))
    if kind == "call":
        return noting(name, tool)
    if kind == "plain":
        return lambda state: {"notes": f"{name} {len(state.notes)}"}
    if kind == "code":
        tools = draw(st.lists(st.sampled_from(TOOLS), min_size=1, max_size=3))
        return own_calls(name, tools, side_by_side=draw(st.booleans()))
    return draw(flows(depth=depth - 1))


def leave(state: Notes, ended: Notes) -> dict[str, object]:
    return {"notes": f"inside: {'; '.join(ended.notes[len(state.notes) :])}"}


def add(flow: Flow[Notes], name: str, work: Any, **options: Any) -> None:
    """Add a node, and what an inner flow needs besides."""
    flow.node(name, work, leave=leave if isinstance(work, Flow) else None, **options)


@st.composite
def flows(draw: st.DrawFn, depth: int = 1) -> Flow[Notes]:
    """A graph of layers, each of nodes side by side; from each layer all of the next is led to, or one joins them."""
    flow = Flow("random", state=Notes)
    layers: list[list[str]] = [["n0"]]
    add(flow, "n0", draw(works("n0", depth)))
    for at in range(1, draw(st.integers(1, 3)) + 1):
        layer = [f"n{at}{letter}" for letter in "abc"[: draw(st.integers(1, 3))]]
        for name in layer:
            what = draw(st.sampled_from(["work", "work", "map", "error"]))
            if what == "map" and len(layer) == 1:
                each = Call(draw(st.sampled_from(TOOLS[:3])), args=lambda state, item: {"what": f"{item} {len(state.notes)}"})
                flow.map(name, each, over="items", into="found")
            elif what == "error":
                flow.node(name, noting(name, draw(st.sampled_from(TOOLS))), on_error=f"{name}-mend", error_into="notes")
                flow.node(f"{name}-mend", noting(f"{name}-mend", draw(st.sampled_from(TOOLS[:3]))))
            else:
                add(flow, name, draw(works(name, depth)))
        layers.append(layer)
    _lead(draw, flow, layers)
    return flow


def _lead(draw: st.DrawFn, flow: Flow[Notes], layers: list[list[str]]) -> None:
    ends: set[str] = {f"{name}-mend" for layer in layers for name in layer if f"{name}-mend" in flow._nodes}
    for before, layer in pairwise(layers):
        certain = [name for name in before if f"{name}-mend" not in flow._nodes]
        for target in layer:
            for source in before:
                flow.edge(source, target)
        if len(certain) == len(before) > 1 and draw(st.booleans()):
            flow.join(*layer)
    last = layers[-1][0]
    if draw(st.booleans()) and last not in flow._joins:
        flow.node("again", lambda state: {"rounds": state.rounds + 1}, max_visits=2)
        flow.edge(last, "again").edge("again", last, when=lambda state: state.rounds < 2)
        ends.add("again")
    flow.end(*ends, *layers[-1])


async def work(flow: Flow[Notes], commits: str, parallel: int, deaths: Sequence[float]) -> World:
    """Work it with these deaths, each given as a share of the moments of a life, and hold it against one without."""
    scenario = FlowScenario("random", flow, Notes(), travel_tools, parallel)
    registry, store = travel_tools(CurrentWorker()), MemoryCheckpointStore()
    reference = World(scenario, registry, store, "reference", commits, open_store=open_faulty)
    ended = await reference.send_worker(Life(), rerun=False)
    assert isinstance(ended, Done), ended
    moments = reference.lives[0].moments()
    world, left, rerun = World(scenario, registry, store, "run", commits, open_store=open_faulty), list(deaths), False
    for _ in range(MOST_WORKERS):
        ends: Moment | None = moments[int(left.pop(0) * len(moments))] if left and moments else None
        now = await world.send_worker(Life(ends), rerun=rerun)
        rerun = isinstance(now, InDoubt)
        if isinstance(now, Done):
            world.check_effects(reference.effects())
            assert world.state(now.result) == reference.state(ended.result)
            return world
    raise AssertionError("it did not come to its end")


@settings(max_examples=120)
@given(
    flows(), st.sampled_from(["grouped", "each"]), st.sampled_from([1, 2, 16]),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3),
)  # fmt: skip
def test_a_random_graph_killed_at_random_moments_comes_to_what_it_comes_to_without_faults(
    flow: Flow[Notes], commits: str, parallel: int, deaths: list[float]
) -> None:
    async def whole() -> None:
        with quiet_about_the_dead():
            async with asyncio.timeout(LONG_SECONDS):
                world = await work(flow, commits, parallel, deaths)
        assert world.broken == []

    asyncio.run(whole())
