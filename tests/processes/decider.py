"""A process that decides, or is decided about: `decider.py answer URL NAME`, `decider.py work URL RUN`.

`answer` takes JSON lines on standard input: a run, an answer, and the moment of the monotonic clock at which to give it.
`work` works a run with two calls side by side: one ends at once, the other never does; it can only be cancelled.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from agent_runtime import Reply, Runs, ToolCall, ToolRegistry, VerdictRefused, recover_tool_loop, run_tool_loop
from agent_runtime.errors import CheckpointConflict
from agent_runtime.messages import Message, ToolSpec
from agent_runtime.stores import open_store

KEY = b"a key for tests, which guards nothing"


def say(**what: object) -> None:
    """A line to whoever started this process."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def answer(url: str, name: str) -> None:
    """Give each answer at its moment, and say what was said to it."""
    store = open_store(url)
    runs = Runs(store, checkpoint_key=KEY)
    say(ready=name)
    while line := sys.stdin.readline():
        order = json.loads(line)
        [request] = await runs.pending(order["run"])
        verdict = request.approve(by=name) if order["answer"] == "approve" else request.deny(by=name)
        while monotonic() < order["at"]:
            pass  # both at the same instant, as near as two processes come
        try:
            await runs.answer(verdict)
            say(run=order["run"], told="yes")
        except VerdictRefused as refused:
            say(run=order["run"], told=str(refused))
    await store.close()


def tools(log: Path) -> ToolRegistry:
    """One call that ends and one that does not; each entry is a line in a file."""
    registry = ToolRegistry()

    @registry.tool
    async def quick(n: int) -> str:
        with log.open("a") as file:
            file.write("quick\n")
        return f"quick {n}"

    @registry.tool
    async def endless(n: int) -> str:
        with log.open("a") as file:
            file.write("endless\n")
        await asyncio.Event().wait()
        return "never"

    return registry


async def model(messages: Sequence[Message], specs: Sequence[ToolSpec]) -> Reply:
    """Asks for both calls, once."""
    if any(message.role == "tool" for message in messages):
        return Reply("done")
    return Reply("", [ToolCall("a", "quick", {"n": 1}), ToolCall("b", "endless", {"n": 2})])


async def work(url: str, run: str, log: str) -> None:
    """Start the run, or go on with it, until it is over."""
    store = open_store(url)
    registry = tools(Path(log))
    try:
        result = await run_tool_loop(
            model, registry, "go", run_id=run, checkpoints=store, checkpoint_key=KEY, heartbeat_seconds=0.1
        )  # fmt: skip
    except CheckpointConflict:
        result = await recover_tool_loop(model, registry, run, checkpoints=store, checkpoint_key=KEY)
    say(status=result.status)
    await store.close()


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    asyncio.run(answer(*words) if verb == "answer" else work(*words))
