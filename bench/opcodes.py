"""Counts the bytecode instructions of one step of a loop, which no busy machine makes more or less:

    PYTHONPATH=src python bench/opcodes.py

The same file counts another version of the package: PYTHONPATH=/that/one/src.
"""

from __future__ import annotations

import asyncio
import linecache
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.tool_loop import run_tool_loop
from agent_runtime.tools import ToolRegistry

FEW, MANY = 50, 150
TELLING = re.compile(r"\b(has_sinks|watchers|_pending_events)\b|\bfailed = ")
"""Lines that are there for telemetry alone."""


def tools() -> ToolRegistry:
    """One tool that does nothing."""
    registry = ToolRegistry()

    @registry.tool(pure=True)
    async def nothing(at: int) -> int:
        return at

    return registry


async def work(steps: int, sinks: Sequence[Any] = ()) -> None:
    """A run of so many steps: a decision and a call each."""

    async def model(messages: Sequence[Message], specs: Sequence[ToolSpec]) -> Reply:
        made = len(messages) // 2
        return Reply("", [ToolCall("c", "nothing", {"at": made})]) if made < steps else Reply("done")

    checkpoints = MemoryCheckpointStore()
    result = await run_tool_loop(
        model, tools(), "go", run_id="run", checkpoints=checkpoints, max_steps=steps + 1, lease_seconds=3600,
        heartbeat_seconds=1800, sinks=sinks,
    )  # fmt: skip
    assert result.steps == steps


class Count:
    """Counts what this thread executes: instructions, those of lines that are there for telemetry alone, and functions."""

    def __init__(self) -> None:
        self.all = 0
        self.telling = 0
        self.entered: set[str] = set()
        self._is_telling: dict[tuple[str, int], bool] = {}

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        code = frame.f_code
        if event == "call":
            path = Path(code.co_filename)
            self.entered.add(f"{path.parent.name}.{path.stem}.{code.co_name}")
        elif event == "opcode":
            self.all += 1
            place = (code.co_filename, frame.f_lineno or 0)  # some instructions are of no line
            if place not in self._is_telling:
                self._is_telling[place] = TELLING.search(linecache.getline(*place)) is not None
            self.telling += self._is_telling[place]
        return self.trace


def count(steps: int, sinks: Sequence[Any] = ()) -> Count:
    """What a run of so many steps executes."""
    counted = Count()
    with asyncio.Runner() as runner:
        runner.run(work(2, sinks))  # what is done once in a process is done
        before = sys.gettrace()
        sys.settrace(counted.trace)
        try:
            runner.run(work(steps, sinks))
        finally:
            sys.settrace(before)
    return counted


def per_step(sinks: Sequence[Any] = (), *, few: int = FEW, many: int = MANY) -> tuple[float, float]:
    """Instructions of one step, and those among them that are there for telemetry: what many steps take more than few."""
    less, more = count(few, sinks), count(many, sinks)
    return (more.all - less.all) / (many - few), (more.telling - less.telling) / (many - few)


if __name__ == "__main__":
    off, checks = per_step()
    on, _ = per_step([lambda event: None])
    print(f"{off:.1f} instructions a step without a sink, {checks:.1f} of them ({checks / off:.2%}) ask whether there is one")
    print(f"{on:.1f} with a sink that does nothing")
