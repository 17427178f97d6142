"""What is swept: a scripted conversation, the tools it uses, and the programs that we sweep ourselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
