"""A worker as a process, whose tool sends a letter when it is told to: it can be frozen before, and killed after.

The remote is a file to which each letter appends a line, and the probe reads it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_runtime import ToolSpec
from agent_runtime.errors import AgentRuntimeError
from agent_runtime.messages import Message, Reply, ToolCall
from agent_runtime.settlements import Outcome
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.tool_loop import LoopResult, recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry, idempotency_key

KEY = b"a key for tests, which guards nothing"
LEASE, BEATS = 0.6, 0.1


def sent(outbox: Path) -> list[str]:
    """The keys of the letters that went out."""
    return outbox.read_text().split() if outbox.exists() else []


def tools(outbox: Path, *, waits: bool, has_probe: bool = True, settles: float = 0.0) -> ToolRegistry:
    """The tool; one that `waits` sends only once a line comes from standard input."""
    registry = ToolRegistry()

    async def probe(key: str, args: dict[str, Any]) -> Outcome:
        return Outcome.done(f"letter {key}") if key in sent(outbox) else Outcome.not_done()

    @registry.tool(name="mail", probe=probe if has_probe else None, settles_after=settles)
    def mail(to: str) -> str:
        if waits:
            say(acting=idempotency_key())
            sys.stdin.readline()
        with open(outbox, "ab", buffering=0) as file:
            file.write(f"{idempotency_key()}\n".encode())
        return f"letter {idempotency_key()}"

    return registry


async def model(messages: Sequence[Message], _: Sequence[ToolSpec]) -> Reply:
    """One that asks for a letter, and is content once it has gone out."""
    answers = [message.content for message in messages if message.role == "tool"]
    return Reply(answers[0]) if answers else Reply("", [ToolCall("call_0", "mail", {"to": "ana"})])


async def work(store: Path, outbox: Path, verb: str, **options: Any) -> LoopResult:
    """Start the run, or pick it up, with these tools."""
    kept = SQLiteCheckpointStore(store)
    given: dict[str, Any] = {
        "run_id": "run",
        "checkpoints": kept,
        "checkpoint_key": KEY,
        "lease_seconds": LEASE,
        "heartbeat_seconds": BEATS,
    }
    registry = tools(outbox, **options)
    try:
        if verb == "start":
            return await run_tool_loop(model, registry, "write to her", **given)
        return await recover_tool_loop(model, registry, given.pop("run_id"), **given)
    finally:
        await kept.close()


def say(**what: object) -> None:
    """A line to whoever started this worker."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(store: str, outbox: str, verb: str, options: str) -> None:
    say(ready=os.getpid())
    try:
        ended = asyncio.run(work(Path(store), Path(outbox), verb, **json.loads(options))).output
    except AgentRuntimeError as error:
        ended = type(error).__name__
    say(ended=ended)


if __name__ == "__main__":
    main(*sys.argv[1:])
