"""What is swept: a scripted conversation, the tools it uses, and the programs that we sweep ourselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol, TypeAlias

from pydantic import BaseModel

from agent_runtime.errors import CallFailed, ToolError
from agent_runtime.flow.calls import NodeRun
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.state import append
from agent_runtime.messages import Reply, ToolCall
from agent_runtime.settlements import Outcome
from agent_runtime.testing.crash_sweep.people import Answer, Answers, by_what_is_asked
from agent_runtime.tools import ToolRegistry


class Client(Protocol):
    """A worker's way to the counting remote. It goes dead with the worker, and watches what the worker may do.

    A call may ask for several things there, each of another name and not one of them twice.
    """

    async def act(self, tool: str, args: Mapping[str, object], *, idempotent: bool = False) -> str:
        """Do something there, once for each time it is asked, or with `idempotent` once for the key of the call."""

    async def read(self, tool: str, args: Mapping[str, object]) -> str:
        """Ask something that changes nothing there."""

    async def probe(self, key: str) -> Outcome:
        """Ask what became of the call with the key: what a tool's probe gives."""


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
    answers: Answers = Answers.VERDICTS
    """How a person's answers come, where a tool needs them."""
    person: Answer = by_what_is_asked
    are_frozen: bool = False
    """Whether workers stand still for good instead of dying: nobody can tell, and the run is taken over."""
    leave_late: bool = False
    """Whether what a dead worker's act gave is left to the run afterwards, with results that are another attempt's."""


@dataclass(frozen=True, slots=True)
class FlowScenario:
    """A flow to be killed everywhere: its graph, what it starts from, and how each worker's tools reach the remote."""

    name: str
    flow: Flow[Any]
    state: BaseModel
    tools: Callable[[Client], ToolRegistry]
    parallel: int = 16
    answers: Answers = Answers.VERDICTS
    """How a person's answers come, where a tool needs them."""
    person: Answer = by_what_is_asked
    are_frozen: bool = False
    """Whether workers stand still for good instead of dying: nobody can tell, and the run is taken over."""
    leave_late: bool = False
    """Whether what a dead worker's act gave is left to the run afterwards, with results that are another attempt's."""


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


def people_tools(remote: Client) -> ToolRegistry:
    """Tools of each repeat rule, some of which need a person: always, or where they are asked to ask."""
    registry = travel_tools(remote)

    def asks(args: Mapping[str, object]) -> bool:
        return str(args["what"]).startswith("ask")

    async def find(key: str, args: Mapping[str, object]) -> Outcome:
        return await remote.probe(key)

    @registry.tool(needs_approval=True)
    async def wire(what: str) -> str:
        """Nobody can tell afterwards."""
        return await remote.act("wire", {"what": what})

    @registry.tool(needs_approval=asks, idempotent=True)
    async def book(what: str) -> str:
        """The remote knows the key."""
        await _turns(1)
        return await remote.act("book", {"what": what}, idempotent=True)

    @registry.tool(needs_approval=asks, probe=find)
    async def order(what: str) -> str:
        """The remote can be asked."""
        result = await remote.act("order", {"what": what})
        await _turns(1)
        return result

    @registry.tool(needs_approval=asks, probe=find, settles_after=86_400)
    async def ship(what: str) -> str:
        """The remote can be asked, and what it was sent may take effect for a day."""
        return await remote.act("ship", {"what": what})

    @registry.tool(needs_approval=asks, pure=True)
    async def read(what: str) -> str:
        """Changes nothing."""
        return await remote.read("read", {"what": what})

    @registry.tool(needs_approval=True, pure=True)
    async def fail(what: str) -> str:
        """Always answers with an error, once somebody agreed."""
        await remote.read("fail", {"what": what})
        raise ToolError(f"no {what} today")

    return registry


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _calls(*asked: str) -> Reply:
    """A reply that asks for the tools named, side by side."""
    calls = [ToolCall(f"call_{at}", tool, {"what": f"{tool} {at}"}) for at, tool in enumerate(asked)]
    return Reply(f"{len(calls)} to do", calls, {"tokens": 10})


def _asked(**asked: str) -> Reply:
    """A reply that asks for each tool named with these words, side by side."""
    calls = [ToolCall(f"call_{tool}", tool, {"what": f"{what} please"}) for tool, what in asked.items()]
    return Reply(f"{len(calls)} to ask", calls, {"tokens": 10})


_END = Reply("all done", usage={"tokens": 3})

SCENARIOS = (
    Scenario("one call a reply", [_calls("charge"), _calls("mail"), _calls("look"), _END], travel_tools),
    Scenario("three side by side", [_calls("charge", "mail", "look"), _END], travel_tools),
    Scenario("two doubts, one in line", [_calls("mail", "mail", "charge", "mail"), _END], travel_tools, parallel=2),
    Scenario("side by side, then one", [_calls("look", "charge"), _calls("mail"), _END], travel_tools),
)
"""What `python -m agent_runtime.testing.crash_sweep` sweeps with two deaths a run."""

PEOPLE = (
    Scenario("people: yes, other, no", [_asked(wire="ask yes", order="ask other", book="ask no"), _END], people_tools),
    Scenario(
        "people: by message", [_asked(book="ask other", wire="ask yes", order="free"), _END], people_tools,
        answers=Answers.INBOX,
    ),
    Scenario(
        "people: at the port", [_asked(wire="ask yes", order="ask other", read="ask no"), _END], people_tools,
        answers=Answers.PORT,
    ),
    Scenario(
        "people: some fail, one waits", [_asked(refuse="free", fail="ask yes", mail="free"), _asked(read="ask yes"), _END],
        people_tools,
    ),
    Scenario("probes", [_asked(order="free", ship="free", mail="free"), _END], people_tools),
    Scenario(
        "taken over", [_asked(order="free", wire="ask yes", book="free"), _END], people_tools, are_frozen=True,
        answers=Answers.INBOX,
    ),
    Scenario("late results", [_asked(order="free", mail="free", charge="free"), _END], people_tools, leave_late=True),
)  # fmt: skip
"""Loops with people, probes and late results in them, swept with two deaths a run."""

SHORT_SCENARIOS = (
    Scenario("one key", [_calls("charge"), _END], travel_tools),
    Scenario("one doubt", [_calls("mail"), _END], travel_tools),
    Scenario("one question", [_asked(order="ask other"), _END], people_tools),
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


def _ask_three() -> Flow[Trip]:
    flow = Flow("ask-three", state=Trip).node("see", _noting("look"))
    for tool, what in (("wire", "ask yes"), ("order", "ask other"), ("book", "ask no")):
        flow.node(tool, Call(tool, args=partial(_words, what), into="notes"), on_error="sum", error_into="notes")
        flow.edge("see", tool)
    flow.node("sum", lambda trip: {"rounds": len(trip.notes)})
    return flow.edge("wire", "sum").edge("order", "sum").edge("book", "sum").end("sum")


def _words(what: str, trip: Trip) -> dict[str, object]:
    return {"what": f"{what} please"}


async def _asking_code(trip: Trip, run: NodeRun) -> dict[str, object]:
    """Three calls side by side, of which two need a person."""
    asked = (("order", "ask yes please"), ("wire", "ask other please"), ("mail", "free"))
    return {"notes": " + ".join(await asyncio.gather(*(run.call(tool, what=what) for tool, what in asked)))}


FLOWS_WITH_PEOPLE = (
    FlowScenario("flow: ask three", _ask_three(), Trip(), people_tools),
    FlowScenario("flow: ask three, by message", _ask_three(), Trip(), people_tools, answers=Answers.INBOX),
    FlowScenario("flow: ask three at the port", _ask_three(), Trip(), people_tools, answers=Answers.PORT),
    FlowScenario(
        "flow: code that asks", Flow("asking-code", state=Trip).node("own", _asking_code).end("own"), Trip(), people_tools,
        answers=Answers.INBOX,
    ),
)  # fmt: skip
"""Flows with people in them."""

FLOWS = (
    FlowScenario("flow: one after another", _one_after_another(), Trip(), travel_tools),
    FlowScenario("flow: fan-out and join", _fan_out(), Trip(), travel_tools),
    FlowScenario("flow: map, two at once", _map(), Trip(), travel_tools, parallel=2),
    FlowScenario("flow: code, loop, inner, error", _code_and_loop(), Trip(), travel_tools),
)
"""The flows that it sweeps, with two deaths a run."""
