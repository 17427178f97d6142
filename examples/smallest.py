"""The smallest own program: one tool, one model function, one SQLite file. Start it twice; kill it anywhere."""

import asyncio
from collections.abc import Sequence

from agent_runtime import (
    CheckpointNotFound,
    Message,
    Reply,
    ToolCall,
    ToolRegistry,
    ToolSpec,
    recover_tool_loop,
    run_tool_loop,
)
from agent_runtime.stores import SQLiteCheckpointStore

KEY = b"use-a-secret-from-your-vault-32b"  # seals what is stored; the same key on every worker
registry = ToolRegistry()


@registry.tool(pure=True)
def add(left: int, right: int) -> int:
    """Add two numbers."""
    return left + right


async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    print("the model is asked")
    if messages[-1].role == "tool":
        return Reply(text=f"The sum is {messages[-1].content}.")
    return Reply(tool_calls=[ToolCall(id="call_0", name="add", args={"left": 19, "right": 23})])


async def main() -> None:
    store = SQLiteCheckpointStore("smallest.db")
    try:
        result = await recover_tool_loop(model, registry, "sum-1", checkpoints=store, checkpoint_key=KEY)
    except CheckpointNotFound:
        result = await run_tool_loop(model, registry, "Add 19 and 23", run_id="sum-1", checkpoints=store, checkpoint_key=KEY)
    print(result.status, "-", result.output)
    await store.close()


asyncio.run(main())
