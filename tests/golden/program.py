"""The programs of the golden runs: what a worker needs to go on with them, for ever. Names and forms stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from agent_runtime import RunContext, ToolRegistry
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec

KEY = b"the key of the golden stores, which guards nothing"
TENANT = "golden"
CTX = RunContext(user="ana", thread="orders", principal="clerk")
HOSTILE = 'it\'s "1"; DROP TABLE runs; -- 50% [*]? {é}/../:x'
"""A run id that is no pattern and no program."""


class Tools:
    """The tools of all golden runs, and how often each of them acted."""

    def __init__(self) -> None:
        self.acted: Counter[str] = Counter()
        self.registry = ToolRegistry()

        @self.registry.tool
        async def charge(amount: int) -> str:
            self.acted["charge"] += 1
            return f"charged {amount}"

        @self.registry.tool(idempotent=True, pause=0.001)
        async def send(to: str) -> str:
            self.acted["send"] += 1
            return f"sent to {to}"

        @self.registry.tool(needs_approval=True)
        async def refund(amount: int) -> str:
            self.acted["refund"] += 1
            return f"refunded {amount}"


class Ask:
    """A model that asks for one call of a tool after another, and is done."""

    def __init__(self, *tools: str) -> None:
        self.tools = tools

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        answered = sum(message.role == "tool" for message in messages)
        if answered == len(self.tools):
            return Reply("all is done", usage={"input": 3, "output": 1})
        tool = self.tools[answered]
        args: dict[str, Any] = {"to": "ana"} if tool == "send" else {"amount": 5}
        return Reply("", [ToolCall(f"call-{answered}", tool, args)], {"input": 2, "output": 1})


class Order(BaseModel):
    """The state of the golden flow."""

    amount: int = 40
    note: str = ""
    terms: str = "as ever " * 400


def orders() -> Flow[Order]:
    """The golden flow: two calls, one after the other."""
    flow = Flow("orders", state=Order)
    flow.node("first", Call("send", args=lambda order: {"to": "bo"}, into="note"))
    flow.node("second", Call("send", args=lambda order: {"to": "ana"}, into="note"))
    return flow.edge("first", "second").end("second")
