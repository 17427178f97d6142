"""What is swept: a scripted conversation, the tools it uses, and the programs that we sweep ourselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeAlias

from pydantic import BaseModel

from agent_runtime.errors import CallFailed, ToolError
from agent_runtime.flow.calls import NodeRun
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.state import append
from agent_runtime.messages import Reply, ToolCall
from agent_runtime.tools import ToolRegistry


class Client(Protocol):
    """A worker's way to the counting remote. It goes dead with the worker, and watches what the worker may do.

    A call may ask for several things there, each of another name and not one of them twice.
    """

    async def act(self, tool: str, args: Mapping[str, object], *, idempotent: bool = False) -> str:
        """Do something there, once for each time it is asked, or with `idempotent` once for the key of the call."""

    async def read(self, tool: str, args: Mapping[str, object]) -> str:
        """Ask something that changes nothing there."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A tool loop to be killed everywhere: what the model says, and how each worker's tools reach the remote."""

    name: str
    replies: Sequence[Reply]
    tools: Callable[[Client], ToolRegistry]
    messages: str = "go"
    parallel: int = 16
    vary_args: bool = True
    """Whether a decision that is asked for again asks for other arguments; turn it off where they are not free text."""


@dataclass(frozen=True, slots=True)
class FlowScenario:
    """A flow to be killed everywhere: its graph, what it starts from, and how each worker's tools reach the remote."""

    name: str
    flow: Flow[Any]
    state: BaseModel
    tools: Callable[[Client], ToolRegistry]
    parallel: int = 16


AnyScenario: TypeAlias = Scenario | FlowScenario


def travel_tools(remote: Client) -> ToolRegistry:
    """One tool of each repeat rule; their answers take different numbers of turns of the loop to come back."""
    registry = ToolRegistry()

    @registry.tool(idempotent=True)
    async def charge(what: str) -> str:
        """The remote knows the key."""
        return await remote.act("charge", {"what": what}, idempotent=True)

    @registry.tool
    async def mail(what: str) -> str:
        """Nobody can tell afterwards."""
        result = await remote.act("mail", {"what": what})
        await _turns(1)
        return result

    @registry.tool(pure=True)
    async def look(what: str) -> str:
        """Changes nothing."""
        await _turns(1)
        result = await remote.read("look", {"what": what})
        await _turns(2)
        return result

    @registry.tool(pure=True)
    async def refuse(what: str) -> str:
        """Always answers with an error."""
        await remote.read("refuse", {"what": what})
        raise ToolError(f"no {what} today")

    return registry


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _calls(*asked: str) -> Reply:
    """A reply that asks for the tools named, side by side."""
    calls = [ToolCall(f"call_{at}", tool, {"what": f"{tool} {at}"}) for at, tool in enumerate(asked)]
    return Reply(f"{len(calls)} to do", calls, {"tokens": 10})


_END = Reply("all done", usage={"tokens": 3})

SCENARIOS = (
    Scenario("one call a reply", [_calls("charge"), _calls("mail"), _calls("look"), _END], travel_tools),
    Scenario("three side by side", [_calls("charge", "mail", "look"), _END], travel_tools),
    Scenario("two doubts, one in line", [_calls("mail", "mail", "charge", "mail"), _END], travel_tools, parallel=2),
    Scenario("side by side, then one", [_calls("look", "charge"), _calls("mail"), _END], travel_tools),
)
"""What `python -m agent_runtime.testing.crash_sweep` sweeps with two deaths a run."""

SHORT_SCENARIOS = (
    Scenario("one key", [_calls("charge"), _END], travel_tools),
    Scenario("one doubt", [_calls("mail"), _END], travel_tools),
)
"""What it sweeps with three: the worker of the second recovery dies too."""


# Flows.


class Trip(BaseModel):
    """What the swept flows work on: `notes` take what any node of a superstep gives."""

    stops: list[str] = ["oslo", "rome", "oslo"]
    notes: Annotated[list[str], append] = []
    prices: list[str] = []
    rounds: int = 0
    trouble: str = ""


def _asking(what: str) -> Callable[[Trip], dict[str, object]]:
    return lambda trip: {"what": f"{what} {len(trip.notes)}"}


def _noting(tool: str) -> Call:
    return Call(tool, args=_asking(tool), into="notes")


def _one_after_another() -> Flow[Trip]:
    flow = Flow("one-after-another", state=Trip)
    flow.node("pay", _noting("charge")).node("send", _noting("mail")).node("see", _noting("look"))
    return flow.edge("pay", "send").edge("send", "see").end("see")


def _fan_out() -> Flow[Trip]:
    flow = Flow("fan-out", state=Trip).node("see", _noting("look"))
    for name, tool in (("pay", "charge"), ("send", "mail"), ("ask", "look")):
        flow.node(name, _noting(tool)).edge("see", name)
    flow.node("sum", lambda trip: {"trouble": f"{len(trip.notes)} notes"})
    return flow.edge("pay", "sum").edge("send", "sum").edge("ask", "sum").join("sum").end("sum")


def _map() -> Flow[Trip]:
    flow = Flow("map", state=Trip)
    flow.map("price", Call("charge", args=lambda _, stop: {"what": stop}), over="stops", into="prices")
    return flow.node("send", _noting("mail")).edge("price", "send").end("send")


async def _own_calls(trip: Trip, run: NodeRun) -> dict[str, object]:
    """Calls in order, side by side, and one whose error is caught."""
    first = await run.call("charge", what="a fee")
    both = await asyncio.gather(run.call("look", what=first), run.call("charge", what="a tip"))
    try:
        await run.call("refuse", what="rain")
    except CallFailed as failed:
        return {"notes": " + ".join([*both, failed.message]), "rounds": trip.rounds + 1}
    return {}


def _code_and_loop() -> Flow[Trip]:
    inner = Flow("inner", state=Trip).node("pay", _noting("charge")).node("see", _noting("look"))
    inner.edge("pay", "see").end("see")
    flow = Flow("code-and-loop", state=Trip)
    flow.node("own", _own_calls, max_visits=2)
    flow.node("inside", inner, leave=lambda _, ended: {"prices": ended.notes})
    flow.node("refuse", _noting("refuse"), on_error="mend", error_into="trouble")
    flow.node("mend", _noting("charge"))
    flow.edge("own", "own", when=lambda trip: trip.rounds < 2).edge("own", "inside", when=lambda trip: trip.rounds == 2)
    return flow.edge("inside", "refuse").edge("refuse", "mend").end("mend")


FLOWS = (
    FlowScenario("flow: one after another", _one_after_another(), Trip(), travel_tools),
    FlowScenario("flow: fan-out and join", _fan_out(), Trip(), travel_tools),
    FlowScenario("flow: map, two at once", _map(), Trip(), travel_tools, parallel=2),
    FlowScenario("flow: code, loop, inner, error", _code_and_loop(), Trip(), travel_tools),
)
"""The flows that it sweeps, with two deaths a run."""
