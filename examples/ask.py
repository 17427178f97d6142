"""Answering at once: whoever sits at the console agrees, refuses or changes what is sent.

    python examples/ask.py

Without a terminal it says yes by itself. Everything is kept in memory.
"""

import asyncio
import json
import sys
from collections.abc import Sequence

from agent_runtime import ApprovalRequest, Message, Reply, ToolCall, ToolRegistry, ToolSpec, Verdict, run_tool_loop
from agent_runtime.stores import MemoryCheckpointStore

registry = ToolRegistry()


@registry.tool(needs_approval=True)
async def close_account(customer: str, reason: str) -> str:
    """Close an account for good."""
    return f"closed the account of {customer}: {reason}"


async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    if messages[-1].role == "tool":
        return Reply(messages[-1].content)
    return Reply("", [ToolCall("call_0", "close_account", {"customer": "Kim", "reason": "asked for it"})])


def ask_on_console(request: ApprovalRequest) -> Verdict:
    shown = f"{request.tool} {json.dumps(request.args)}"
    said = input(f"{shown}? [y, n, or a reason] ") if sys.stdin.isatty() else "y"
    match said:
        case "y":
            return request.approve(by="console")
        case "n":
            return request.deny(by="console", note="not today")
        case _:
            return request.edit({"reason": said}, by="console")


async def main() -> None:
    store = MemoryCheckpointStore()
    result = await run_tool_loop(
        model, registry, "Close Kim's account", run_id="close-1", approvals=ask_on_console, checkpoints=store
    )
    print(result.status, "-", result.output)


asyncio.run(main())
