"""A program of one tool whose runs a supervisor watches: what a run does is the first word of its id.

`supervised.py supervise FOLDER [OPTION…]`, `supervised.py work FOLDER` (the run in RUN_ID), `supervised.py abandon FOLDER
RUN…` (start the runs, and die once each has its call in flight), `supervised.py pause FOLDER RUN…` (start the runs, and leave
them to whoever agrees to their call).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agent_runtime import ToolSpec
from agent_runtime.messages import Message, Reply, ToolCall
from agent_runtime.settings import read_settings
from agent_runtime.stores import open_store
from agent_runtime.supervisor import Program, add_options, supervise
from agent_runtime.tool_loop import LoopResult, recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry, idempotency_key
from agent_runtime.worker import work_in_process
from tests.processes.worker import KEY, Remote

NAME = "tests"
RULELESS = ("plain", "sleepy")
"""Runs whose tool has no repeat rule."""


def remote_of(folder: Path) -> Remote:
    return Remote(folder / "remote.jsonl")


def tools_of(folder: Path, run: str) -> ToolRegistry:
    """The tool, which does what the run's name says: `ask` a person, `spin`, `sleepy`, `poison`, or simply act."""
    word, registry = run.split("-", maxsplit=1)[0], ToolRegistry()

    @registry.tool(idempotent=word not in RULELESS, needs_approval=word == "ask")
    async def charge(cents: int) -> int:
        remote_of(folder).take("tool", run, idempotency_key())
        is_first = len(remote_of(folder).seen("tool", run)) <= 2  # the first request is of the worker that is gone
        is_mended = (folder / "mended").exists()
        if word == "poison" and not is_mended:
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "spin" and is_first:
            spin_until(folder / "thawed")
        elif word == "wait" and not is_mended:
            await asyncio.Event().wait()
        elif word == "sleepy":
            await asyncio.sleep(float(run.split("-")[1]))
        remote_of(folder).take("done", run, idempotency_key())
        return cents

    return registry


def spin_until(thawed: Path) -> None:
    """Keep the event loop from everything, in Python, so that other threads get their turns."""
    while not thawed.exists():
        time.sleep(0.01)


async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    if messages[-1].role == "tool":
        return Reply("content")
    return Reply("", [ToolCall("call_0", "charge", {"cents": 100})])


async def broken_model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    raise ValueError("this model is out of order")


async def work(folder: Path) -> LoopResult:
    settings = read_settings(os.environ)
    run = settings.run_id or ""
    store = open_store(settings.database_url)
    try:
        return await recover_tool_loop(
            broken_model if run.startswith("raise-") else model, tools_of(folder, run), run,
            checkpoints=store, checkpoint_key=KEY,
            lease_seconds=settings.lease_seconds, heartbeat_seconds=settings.heartbeat_seconds,
            max_attempts=settings.max_attempts, stuck_after=settings.stuck_after,
        )  # fmt: skip
    finally:
        await store.close()


async def abandon(folder: Path, runs: Sequence[str]) -> None:
    """Start the runs, and die once each of them has asked the remote."""
    settings, acting = read_settings(os.environ), 0
    store = open_store(settings.database_url)

    def tools(run: str) -> ToolRegistry:
        registry = ToolRegistry()

        @registry.tool(idempotent=run.split("-", maxsplit=1)[0] not in RULELESS)
        async def charge(cents: int) -> int:
            nonlocal acting
            remote_of(folder).take("tool", run, idempotency_key())
            acting += 1
            if acting == len(runs):
                os._exit(1)
            await asyncio.Event().wait()
            return cents

        return registry

    await asyncio.gather(
        *(
            run_tool_loop(
                model, tools(run), "charge", run_id=run, checkpoints=store, checkpoint_key=KEY,
                name=os.environ.get("NAME", NAME), lease_seconds=settings.lease_seconds,
            )
            for run in runs
        )
    )  # fmt: skip


async def pause(folder: Path, runs: Sequence[str]) -> None:
    """Start the runs, and leave them as they wait for a person."""
    store = open_store(read_settings(os.environ).database_url)
    for run in runs:
        await run_tool_loop(
            model, tools_of(folder, run), "charge", run_id=run, checkpoints=store, checkpoint_key=KEY, name=NAME
        )  # fmt: skip
    await store.close()


def main(verb: str, folder: Path, *rest: str) -> int:
    match verb:
        case "supervise":
            parser = argparse.ArgumentParser()
            add_options(parser)
            command = (sys.executable, __file__, "work", str(folder))
            return supervise(parser.parse_args(rest), program=Program(NAME, command))
        case "work":
            return work_in_process(lambda: work(folder), advice="mend it", is_rival=True)
        case "abandon":
            return work_in_process(lambda: abandon(folder, rest), advice="mend it")
        case "pause":
            return work_in_process(lambda: pause(folder, rest), advice="mend it")
        case _:
            raise AssertionError(verb)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
