"""A worker that kills its own process in the middle of its second call; its spans go to a file as they end.

python mortal.py STORE SPANS
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.telemetry_otel import OpenTelemetrySink
from agent_runtime.tool_loop import run_tool_loop
from agent_runtime.tools import ToolRegistry

KEY = b"a key for tests, which guards nothing"
CALLS = 3


class OneByOne:
    """Asks for one call after the other."""

    model = "counting-1"

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        made = sum(message.role == "assistant" for message in messages)
        if made == CALLS:
            return Reply("done", usage={"input": 3, "output": 1})
        return Reply("", [ToolCall(f"c{made}", "charge", {"amount": made})], {"input": 3, "output": 1})


def tools(*, dies_at: int | None) -> ToolRegistry:
    """One tool; it kills its process where it gets that amount."""
    registry = ToolRegistry()

    @registry.tool(idempotent=True)
    async def charge(amount: int) -> str:
        if amount == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"charged {amount}"

    return registry


def main(store: str, spans: str) -> None:
    provider = TracerProvider()
    with open(spans, "w", encoding="utf-8") as out:
        exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n")
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        sink = OpenTelemetrySink(provider.get_tracer("mortal"))
        checkpoints = SQLiteCheckpointStore(store)
        asyncio.run(
            run_tool_loop(
                OneByOne(), tools(dies_at=1), "go", run_id="run", checkpoints=checkpoints, checkpoint_key=KEY, sinks=[sink]
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
