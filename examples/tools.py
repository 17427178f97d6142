"""What a tool may declare, and what the model sees of each way in which a call can end.

python examples/tools.py
"""

import asyncio
from collections.abc import Sequence
from datetime import date

from pydantic import BaseModel

from agent_runtime import (
    HistorySink,
    Message,
    NotSent,
    Reply,
    ToolCall,
    ToolError,
    ToolRegistry,
    ToolSpec,
    idempotency_key,
    run_tool_loop,
)
from agent_runtime.stores import MemoryCheckpointStore

registry = ToolRegistry()


class Booking(BaseModel):
    """A declared result type: it is recorded by its type and comes back as that type."""

    show: str
    day: date


class SoldOut(Exception):
    """The box office's own error."""


@registry.tool(pure=True)
def seats_left(show: str) -> int:
    """A plain function: it runs in a thread. `pure`: nothing outside changes, so it may run again."""
    return {"Hamlet": 4}.get(show, 0)


@registry.tool(idempotent=True, timeout=30, answers=SoldOut)
async def book(show: str, day: date) -> Booking:
    """The remote knows the key, so it may run again under it. `SoldOut` is an answer, which the model sees."""
    if show == "Macbeth":
        raise SoldOut("no seats on that day")
    assert idempotency_key() == "tools-1:0.1", "the run and the call's place in it"
    return Booking(show=show, day=day)


@registry.tool
async def refund(order: str) -> str:
    """No repeat rule: it runs once, and a call in doubt stops the run. `ToolError` is an answer all the same."""
    raise ToolError(f"order {order} was refunded last week")


busy = iter([True, True, False])


@registry.tool(attempts=3, pause=0.01)
async def call_taxi(street: str) -> str:
    """`NotSent` says that nothing went out: the call may be tried again, even without a repeat rule."""
    if next(busy):
        raise NotSent("the line was busy")
    return f"a taxi comes to {street}"


CALLS = [
    ToolCall("a", "seats_left", {"show": "Hamlet"}),
    ToolCall("b", "book", {"show": "Hamlet", "day": "2030-05-01"}),
    ToolCall("c", "book", {"show": "Macbeth", "day": "2030-05-01"}),
    ToolCall("d", "book", {"show": "Hamlet", "day": "soon"}),
    ToolCall("e", "seats_left", {"show": "Hamlet", "row": 3}),
    ToolCall("f", "refund", {"order": "7"}),
    ToolCall("g", "call_taxi", {"street": "Main Street"}),
    ToolCall("h", "fly", {}),
]


async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    if messages[-1].role == "tool":
        return Reply(text="done")
    return Reply(tool_calls=CALLS)  # eight calls of one reply: they run side by side


async def main() -> None:
    history = HistorySink()
    result = await run_tool_loop(
        model, registry, "Try everything", run_id="tools-1", checkpoints=MemoryCheckpointStore(), sinks=[history]
    )
    answers = [message for message in result.messages if message.role == "tool"]
    for call, answer in zip(CALLS, answers, strict=True):
        print(f"{call.name}{dict(call.args)}\n    {answer.content}")
    attempts = [event.data["attempt"] for event in history.of("call.started") if event.data["tool"] == "call_taxi"]
    print(f"attempts of call_taxi: {attempts}")


asyncio.run(main())
