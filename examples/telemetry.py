"""Spans and metrics of a run whose worker dies in the middle of a call, and of the worker that finishes it.

    pip install 'durable-agent-runtime[otel,prometheus]' opentelemetry-sdk
    python examples/telemetry.py

Each span is printed when it ends. A program of yours sends them to a collector instead, and has Prometheus read its
metrics from a port. Everything happens in a temporary folder.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from prometheus_client import generate_latest

from agent_runtime import (
    Message,
    OpenTelemetrySink,
    PrometheusSink,
    Reply,
    RunContext,
    Sink,
    ToolCall,
    ToolRegistry,
    ToolSpec,
    recover_tool_loop,
    run_tool_loop,
)
from agent_runtime.stores import SQLiteCheckpointStore

KEY = b"use-a-secret-from-your-vault-32b"
COUNTED = ("agent_runtime_calls_total", "agent_runtime_model_tokens_total", "agent_runtime_takeovers_total")

registry = ToolRegistry()


@registry.tool(pure=True)
def seats_left(show: str) -> int:
    """How many seats are left."""
    return 4


@registry.tool(idempotent=True)
async def charge_card(amount: int) -> str:
    """Charge the card on file."""
    with trace.get_tracer("bank").start_as_current_span("POST /charges"):  # a child of the call's span
        await asyncio.sleep(0)
    if os.environ.get("DIE_AFTER_CHARGING"):
        print("!!! the worker dies", flush=True)
        os._exit(1)
    return f"charged {amount}"


class Provider:
    """What a provider would answer: look, charge, report."""

    model = "example-1"

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        usage = {"input": 20 * len(messages), "output": 10}
        match sum(message.role == "tool" for message in messages):
            case 0:
                return Reply(tool_calls=[ToolCall("call_0", "seats_left", {"show": "Hamlet"})], usage=usage)
            case 1:
                return Reply(tool_calls=[ToolCall("call_1", "charge_card", {"amount": 80})], usage=usage)
            case _:
                return Reply(text="Two seats for Hamlet.", usage=usage)


def shown(span: ReadableSpan) -> str:
    """One line about a span: what it is, and that it has a parent or a link."""
    has = {name.removeprefix("agent_runtime."): value for name, value in (span.attributes or {}).items()}
    told = [f"{name}={has[name]}" for name in ("attempt", "replayed", "rerun", "run.status") if name in has]
    linked = ["linked to the owner before"] * len(span.links)
    return f"{'  ' if span.parent else ''}{'  '.join([span.name, *told, *linked])}\n"


async def work(*, is_new: bool) -> None:
    """Work the run, with both sinks."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=shown)))
    trace.set_tracer_provider(provider)
    store = SQLiteCheckpointStore("orders.db")
    metrics = PrometheusSink()
    metrics.observe(store)
    sinks: list[Sink] = [OpenTelemetrySink(provider="example"), metrics]
    if is_new:
        await run_tool_loop(
            Provider(), registry, "Two seats for Hamlet", run_id="order-7", name="seller", ctx=RunContext(thread="chat-3"),
            checkpoints=store, checkpoint_key=KEY, sinks=sinks,
        )  # fmt: skip
    else:
        await recover_tool_loop(Provider(), registry, "order-7", checkpoints=store, checkpoint_key=KEY, sinks=sinks)
    await store.close()


def main() -> None:
    if os.environ.get("DIE_AFTER_CHARGING"):
        asyncio.run(work(is_new=True))
        return
    this_file = Path(__file__).resolve()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        print("-- the first worker", flush=True)
        subprocess.run([sys.executable, this_file], env={**os.environ, "DIE_AFTER_CHARGING": "1"}, check=False)
        print("-- another worker")
        asyncio.run(work(is_new=False))
        print("-- what it counted")
        print(*[line for line in generate_latest().decode().splitlines() if line.startswith(COUNTED)], sep="\n")
        os.chdir(this_file.parent)  # a folder that somebody stands in cannot be removed everywhere


main()
