"""Crash your own tools at every moment, and see whether they keep what they declare.

    python examples/sweep.py

Two registries with the same tools. In the second, `charge` is declared idempotent and the remote is not told the key.
"""

import asyncio

from agent_runtime import Reply, ToolCall, ToolRegistry
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores import MemoryCheckpointStore
from agent_runtime.testing.crash_sweep import Client, Scenario, sweep

REPLIES = [
    Reply(tool_calls=[ToolCall("a", "look", {"what": "seats"}), ToolCall("b", "charge", {"what": "two seats"})]),
    Reply(tool_calls=[ToolCall("c", "mail", {"what": "tickets"})]),
    Reply(text="done"),
]


def tools(remote: Client, *, tells_the_key: bool) -> ToolRegistry:
    """The tools of a worker. `remote` counts what really happens there, and outlives every worker."""
    registry = ToolRegistry()

    @registry.tool(pure=True)
    async def look(what: str) -> str:
        return await remote.read("look", {"what": what})

    @registry.tool(idempotent=True)
    async def charge(what: str) -> str:
        return await remote.act("charge", {"what": what}, idempotent=tells_the_key)

    @registry.tool
    async def mail(what: str) -> str:
        return await remote.act("mail", {"what": what})

    return registry


async def make_store() -> CheckpointStore:
    return MemoryCheckpointStore()


async def main() -> None:
    honest = Scenario("honest", REPLIES, lambda remote: tools(remote, tells_the_key=True))
    report = await sweep(honest, make_store, store_name="memory", depth=1)
    print(f"honest: {report.cells} runs, {len(report.violations)} violations")

    careless = Scenario("careless", REPLIES, lambda remote: tools(remote, tells_the_key=False))
    report = await sweep(careless, make_store, store_name="memory", depth=1)
    print(f"careless: {report.cells} runs, {len(report.violations)} violations, such as")
    print(f"    {report.violations[0]}")


asyncio.run(main())
