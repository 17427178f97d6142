"""A worker as a process: takes orders as JSON lines on standard input, says on standard output what became of them.

The remote and the model are one file to which every request appends a line: what they saw is counted there, not here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_runtime import ToolSpec
from agent_runtime.clock import SYSTEM_CLOCK, Clock
from agent_runtime.errors import AgentRuntimeError
from agent_runtime.journal.store import Answer, Append, CheckpointStore
from agent_runtime.messages import Message, Reply, ToolCall
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry, idempotency_key

KEY = b"a key for tests, which guards nothing"
TOOL = "charge"


@dataclass(frozen=True, slots=True)
class Order:
    """A run to work, and what happens on the way."""

    run: str
    name: str = ""
    """The program whose run it says it is."""
    verb: str = "start"
    """`start`, `recover`, or `abandon`: start as many as `runs` says, and die with a call of each in doubt."""
    runs: int = 1
    calls: int = 1
    """How often the model asks for the tool before it is content."""
    idempotent: bool = True
    style: str = "sync"
    """`sync`: a plain function, on a thread. `async`: a coroutine function, whatever it does then blocks the loop."""
    inside: str = "nothing"
    """What the tool does once the remote has acted: `nothing`, `wait` for a line, `sleep`, `freeze`, `fork`."""
    seconds: float = 0.0
    """How long a tool sleeps."""
    commits: str = "grouped"
    lease: float = 30.0
    heartbeat: float = 0.25
    freeze_at: int = 0
    """The number of the write, from 1, at which the worker stops itself by SIGSTOP; 0 for none."""
    freeze: str = "before"
    """Whether it stops `before` that write or `after` it is durable."""

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


class Remote:
    """What acts, and what is asked, kept in one file that many processes append to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def take(self, kind: str, run: str, key: str) -> None:
        """Count a request, on disk, in one write that no other can tear."""
        line = json.dumps({"kind": kind, "run": run, "key": key, "pid": os.getpid()}) + "\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(line.encode())

    def seen(self, kind: str, run: str) -> list[dict[str, Any]]:
        """Every request of that kind for that run, in the order they came."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [request for request in found if (request["kind"], request["run"]) == (kind, run)]


class FreezingStore(SQLiteCheckpointStore):
    """The store, whose worker stops itself at one write."""

    freeze_at = 0
    freeze = "before"
    writes = 0

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        self.writes += 1
        if (self.writes, self.freeze) == (self.freeze_at, "before"):
            stop_here()
        answers = await super().commit(appends)
        if (self.writes, self.freeze) == (self.freeze_at, "after"):
            stop_here()
        return answers


def stop_here() -> None:
    """Stop this whole process, at this very line."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def say(**what: object) -> None:
    """A line to whoever started this worker."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def model_of(order: Order, remote: Remote) -> Callable[[Sequence[Message], Sequence[ToolSpec]], Any]:
    """A model that asks for the tool so many times and counts every request at the remote."""

    async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        remote.take("model", order.run, idempotency_key())
        answered = sum(message.role == "tool" for message in messages)
        if answered < order.calls:
            return Reply("", [ToolCall(f"call_{answered}", TOOL, {"cents": 100 + answered})])
        return Reply("content")

    return model


def tools_of(order: Order, remote: Remote) -> ToolRegistry:
    """The one tool, as the order wants it."""
    registry = ToolRegistry()

    def charge(cents: int) -> int:
        return act(order, remote, cents)

    async def charge_on_the_loop(cents: int) -> int:
        return act(order, remote, cents)

    function = charge if order.style == "sync" else charge_on_the_loop
    registry.tool(name=TOOL, idempotent=order.idempotent)(function)
    return registry


def act(order: Order, remote: Remote, cents: int) -> int:
    remote.take("tool", order.run, idempotency_key())
    match order.inside:
        case "nothing":
            pass
        case "wait":
            say(acting=order.run, pid=os.getpid())
            sys.stdin.readline()
        case "sleep":
            say(acting=order.run, pid=os.getpid())
            time.sleep(order.seconds)
        case "freeze":
            stop_here()
        case "fork":
            say_as_copy(os.fork())
        case _:
            raise AssertionError(order.inside)
    return cents


def say_as_copy(child: int) -> None:
    """The parent waits for its copy; the copy goes on with the run as if it were its own."""
    if child:
        os.waitpid(child, 0)


async def work(order: Order, store: CheckpointStore, remote: Remote, *, clock: Clock = SYSTEM_CLOCK) -> str:
    """What the run came to."""
    if order.verb == "abandon":
        await abandon(order, store)
    model, registry = model_of(order, remote), tools_of(order, remote)
    if order.verb == "start":
        result = await run_tool_loop(
            model, registry, "charge them", run_id=order.run, checkpoints=store, checkpoint_key=KEY,
            commits=order.commits, lease_seconds=order.lease, heartbeat_seconds=order.heartbeat, name=order.name,
            clock=clock,
        )  # fmt: skip
    else:
        result = await recover_tool_loop(
            model, registry, order.run, checkpoints=store, checkpoint_key=KEY,
            commits=order.commits, lease_seconds=order.lease, heartbeat_seconds=order.heartbeat, clock=clock,
        )  # fmt: skip
    return result.output


async def abandon(order: Order, store: CheckpointStore) -> None:
    """Start runs named `run-0`, `run-1` and so on, and die once each of them has its tool call in doubt."""
    acting: list[str] = []
    registry = ToolRegistry()

    @registry.tool(name=TOOL, idempotent=order.idempotent)
    async def charge(cents: int) -> int:
        acting.append(idempotency_key())
        if len(acting) == order.runs:
            os._exit(1)
        await asyncio.Event().wait()
        return cents

    async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        return Reply("", [ToolCall("call_0", TOOL, {"cents": 100})])

    await asyncio.gather(
        *(
            run_tool_loop(model, registry, "charge them", run_id=f"{order.run}-{i}", checkpoints=store, checkpoint_key=KEY)
            for i in range(order.runs)
        )
    )


async def serve(store_path: str, remote_path: str) -> None:
    """Work what is ordered until standard input ends."""
    me, store, remote = os.getpid(), FreezingStore(store_path), Remote(Path(remote_path))
    say(ready=me)
    while line := sys.stdin.readline():
        order = Order(**json.loads(line))
        store.freeze_at, store.freeze, store.writes = order.freeze_at, order.freeze, 0
        try:
            ended, message = "done", await work(order, store, remote)
        except AgentRuntimeError as error:
            ended, message = type(error).__name__, str(error)
        say(ended=ended, message=message, run=order.run, pid=os.getpid(), writes=store.writes)
        if os.getpid() != me:
            os._exit(0)  # a copy has nothing of its own to clean up
    await store.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
