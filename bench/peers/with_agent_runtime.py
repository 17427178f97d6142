"""A flow of ours: ask for the price, charge it. `start` begins its run, anything else goes on with it.

`RULE=none` takes the repeat rule off the charge.
"""

import asyncio
import os
import sys

import bank
from pydantic import BaseModel

from agent_runtime import AgentRuntimeError, Call, Executor, Flow, FlowRunner, ToolRegistry, idempotency_key
from agent_runtime.stores import SQLiteCheckpointStore

KEY = b"a-key-for-this-measurement-only!"
registry = ToolRegistry()


@registry.tool(pure=True)
async def quote() -> str:
    return bank.quote()


@registry.tool(idempotent=os.environ.get("RULE") != "none")
async def charge(price: str) -> str:
    return await asyncio.to_thread(bank.charge, price, idempotency_key())


class Order(BaseModel):
    price: str = ""
    receipt: str = ""


flow = (
    Flow("order", state=Order)
    .node("quote", Call("quote", args=lambda order: {}, into="price"))
    .node("charge", Call("charge", args=lambda order: {"price": order.price}, into="receipt"))
    .edge("quote", "charge")
    .end("charge")
)


async def main() -> None:
    store = SQLiteCheckpointStore("runs.db")
    runner = FlowRunner(Executor(registry), checkpoints=store, checkpoint_key=KEY)
    try:
        found = await (
            runner.run(flow, Order(), run_id="order-7") if sys.argv[1] == "start" else runner.recover(flow, "order-7")
        )
        print(found.status, found.state)
    except AgentRuntimeError as refused:
        print(f"{type(refused).__name__}: {refused}")
    finally:
        await runner.close()
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
