"""Our first run in a fresh process: three steps on the SQLite file named on the command line. Prints the peak memory in KB."""

import asyncio
import sys
from collections.abc import Sequence

from agent_runtime import Message, Reply, ToolCall, ToolRegistry, ToolSpec, run_tool_loop
from agent_runtime.stores import SQLiteCheckpointStore

STEPS = 3

tools = ToolRegistry()


@tools.tool(idempotent=True)
async def lookup(q: str, i: int) -> str:
    """What is known of a query."""
    return f"result {i}: " + "t" * 180


async def model(messages: Sequence[Message], offered: Sequence[ToolSpec]) -> Reply:
    step = len(messages) // 2
    if step >= STEPS:
        return Reply("done")
    return Reply(f"step {step}: " + "m" * 170, [ToolCall(f"call_{step}", "lookup", {"q": f"query-{step}", "i": step})])


async def main(path: str) -> None:
    store = SQLiteCheckpointStore(path)
    await run_tool_loop(model, tools, "u" * 270, checkpoints=store, checkpoint_key=bytes(range(32)))
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
    with open("/proc/self/status", encoding="ascii") as status:
        print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
