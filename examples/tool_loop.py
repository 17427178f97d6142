"""A worker dies after the bank took the money and before it could write that down; another process finishes the run.

    python examples/tool_loop.py

The bank is a folder: a file for each idempotency key that it has seen. It outlives the worker, as a real remote would.
Everything happens in a temporary folder.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from agent_runtime import (
    LogSink,
    Message,
    Reply,
    ToolCall,
    ToolRegistry,
    ToolSpec,
    idempotency_key,
    recover_tool_loop,
    run_tool_loop,
)
from agent_runtime.stores import SQLiteCheckpointStore

KEY = b"use-a-secret-from-your-vault-32b"
RUN_ID = "order-7"
BANK = Path("bank")

registry = ToolRegistry()


@registry.tool(pure=True)
def seats_left(show: str) -> int:
    """How many seats are left."""
    return 4


@registry.tool(idempotent=True)
def charge_card(show: str, seats: int) -> str:
    """Charge the card on file."""
    receipt = charge(idempotency_key(), seats * 40)
    if os.environ.get("DIE_AFTER_CHARGING"):
        print("!!! the worker dies: the bank has acted, nothing is written down", flush=True)
        os._exit(1)
    return receipt


def charge(key: str, amount: int) -> str:
    """What the bank does: it takes the money once for a key, and gives the same receipt each time."""
    BANK.mkdir(exist_ok=True)
    try:
        with (BANK / key.replace(":", "_")).open("x") as receipt:
            receipt.write(str(amount))
        return f"charged {amount}"
    except FileExistsError:
        return f"charged {amount} (the bank had done so before)"


async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    """What a provider would answer: look, charge, report."""
    match sum(message.role == "tool" for message in messages):
        case 0:
            return Reply(tool_calls=[ToolCall("call_0", "seats_left", {"show": "Hamlet"})])
        case 1:
            return Reply(tool_calls=[ToolCall("call_1", "charge_card", {"show": "Hamlet", "seats": 2})])
        case _:
            return Reply(text=f"Two seats for Hamlet: {messages[-1].content}.")


async def start() -> None:
    store = SQLiteCheckpointStore("orders.db")
    await run_tool_loop(
        model, registry, "Two seats for Hamlet", run_id=RUN_ID, checkpoints=store, checkpoint_key=KEY, sinks=[LogSink()]
    )
    await store.close()


async def recover() -> None:
    store = SQLiteCheckpointStore("orders.db")
    result = await recover_tool_loop(model, registry, RUN_ID, checkpoints=store, checkpoint_key=KEY, sinks=[LogSink()])
    await store.close()
    print(f"\n{result.output}")
    print(f"{result.llm_calls} model calls, {len(os.listdir(BANK))} charge at the bank")


def main() -> None:
    if os.environ.get("DIE_AFTER_CHARGING"):
        asyncio.run(start())
        return
    this_file = Path(__file__).resolve()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        print("-- the first worker", flush=True)
        subprocess.run([sys.executable, this_file], env={**os.environ, "DIE_AFTER_CHARGING": "1"}, check=False)
        print("-- another worker")
        asyncio.run(recover())
        os.chdir(this_file.parent)  # a folder that somebody stands in cannot be removed everywhere


main()
