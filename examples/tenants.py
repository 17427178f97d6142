"""Two tenants with one program: each has a store of its own, and its runs are sealed for it.

python examples/tenants.py
"""

import asyncio
import shutil
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from agent_runtime import Message, Reply, Runs, ToolRegistry, ToolSpec, run_tool_loop
from agent_runtime.stores import open_store

KEY = b"one key for all tenants, from a vault"


async def model(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    return Reply("hello")


async def main() -> None:
    with TemporaryDirectory() as folder:
        # As well postgresql://…?schema=acme, or redis://…?prefix=acme
        for tenant in ("acme", "beta"):
            store = open_store(f"sqlite:///{folder}/{tenant}.db")
            await run_tool_loop(
                model, ToolRegistry(), "hi", run_id="order-1", checkpoints=store, checkpoint_key=KEY, tenant=tenant
            )
            await store.close()

        # A file of acme's where one of beta's should be: by mistake, or not.
        shutil.copyfile(f"{folder}/acme.db", f"{folder}/beta.db")
        beta = open_store(f"sqlite:///{folder}/beta.db")
        for verified in await Runs(beta, checkpoint_key=KEY, tenant="beta").verify():
            print(f"{verified.run_id}: {verified.why}")
        await beta.close()


asyncio.run(main())
