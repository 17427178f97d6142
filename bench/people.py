"""People in the loop: how soon a call goes out once somebody agreed to it, and what it costs to wait for them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import IO

from agent_runtime import LoopResult, Message, Reply, ToolCall, ToolRegistry, ToolSpec, run_tool_loop
from agent_runtime.abandoned import Lookout
from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.doorbell import doorbell
from agent_runtime.events import Event
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, post_message
from agent_runtime.journal.seal import KeyRing, sealer_for
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.offload import SYSTEM_OFFLOAD
from agent_runtime.recovery import read_verified
from agent_runtime.run import Backing
from agent_runtime.supervisor import LOOK_SECONDS
from agent_runtime.tool_loop import KIND
from bench.job import Figures
from bench.places import store_in
from bench.workload import closed_loop

KEY = bytes(range(32))
LONG_SECONDS = 60.0
CREATING = 256
"""How many runs are brought to their pause at a time."""

registry = ToolRegistry()
_sent: list[float] = []


@registry.tool(needs_approval=True)
async def refund(order: str) -> str:
    """Refund an order."""
    _sent.append(time.time())
    return "refunded"


async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    if messages[-1].role == "tool":
        return Reply("done")
    return Reply("", [ToolCall("call_0", "refund", {"order": "7"})])


async def _pause(store: CheckpointStore, run: str, *, wait_seconds: float = 0.0, told: IO[str] | None = None) -> LoopResult:
    def tell(event: Event) -> None:
        if event.name == "run.paused":
            print(json.dumps({"paused": event.run_id}), file=told, flush=True)

    return await run_tool_loop(
        model, registry, "refund it", run_id=run, checkpoints=store, checkpoint_key=KEY, wait_seconds=wait_seconds,
        sinks=() if told is None else [tell],
    )  # fmt: skip


def worker(*, folder: str, times: int, url: str = "") -> Figures:
    """Works runs one after another, each waiting for its verdict; says when each has paused, and when its call went out."""

    async def work() -> Figures:
        store = store_in(folder, url)
        for at in range(times):
            result = await _pause(store, f"r{at}", wait_seconds=LONG_SECONDS, told=sys.stdout)
            assert result.status == "done", result
            print(json.dumps({"sent": _sent[-1]}), flush=True)
        await store.close()
        return {}

    return asyncio.run(work())


def answered(*, folder: str, times: int, url: str = "") -> Figures:
    """Answers the requests of a worker in another process. `wall`: from posting a verdict to its call going out."""
    options = json.dumps({"folder": folder, "times": times, "url": url})
    with subprocess.Popen(
        [sys.executable, "-m", "bench.job", "people.worker", options], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parent.parent,
    ) as process:  # fmt: skip
        try:
            took = asyncio.run(_answer(process, folder, url, times))
        finally:
            process.kill()
    return {"wall": median(took), "most": max(took)}


async def _answer(process: subprocess.Popen[str], folder: str, url: str, times: int) -> list[float]:
    assert process.stdout is not None, "its lines are read"
    store, ring, took = store_in(folder, url), KeyRing.of(KEY), []
    for at in range(times):
        run_id = RunId(json.loads(process.stdout.readline())["paused"])
        assert run_id == f"r{at}", "runs pause one after another"
        [request] = (await read_verified(Backing(store, ring), run_id)).pending
        await asyncio.sleep(0.05)  # it waits by now
        verdict = request.approve(by="ana").to_plain()
        sealer = sealer_for(ring, tenant="", run_id=run_id)
        began = time.time()
        await post_message(store, sealer, MessageKind.VERDICT, verdict)
        took.append(json.loads(process.stdout.readline())["sent"] - began)
    await store.close()
    return took


LOOKS = 20
"""Of a supervisor, whose mean is taken."""


def idle(*, folder: str, runs: int, seconds: float, url: str = "") -> Figures:
    """`cpu`: the share of a processor that waiting for messages to so many paused runs takes; `looking`: a supervisor."""

    async def work() -> Figures:
        store = store_in(folder, url)

        async def pause(run: str) -> None:
            assert (await _pause(store, run)).status == "paused"

        await closed_loop((f"r{at}" for at in range(runs)), CREATING, pause)
        bell = doorbell(store, SYSTEM_CLOCK, SYSTEM_OFFLOAD)
        waiting = [asyncio.ensure_future(bell.wait(RunId(f"r{at}"), seen=0)) for at in range(runs)]
        await asyncio.sleep(seconds / 2)  # every one of them has been looked at
        began, used = time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        cpu = (time.process_time() - used) / (time.perf_counter() - began)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        looking = await _look(store)
        await store.close()
        return {"cpu": cpu, "looking": looking}

    return asyncio.run(work())


async def _look(store: CheckpointStore) -> float:
    """The share of a processor that the looks of a supervisor take, as often as it looks at most."""
    watch = Lookout(store, name="", kind=KIND, poll_seconds=0.0, clock=SYSTEM_CLOCK)
    used = time.process_time()
    for _ in range(LOOKS):
        assert not (await watch.look(lambda run_id: True, trust_leases=True)).due
    return (time.process_time() - used) / LOOKS / LOOK_SECONDS
