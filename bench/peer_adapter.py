"""Our runtime as one of the peers of their comparison. Their harness finds it by BENCH_EXTRA (see docs/speed.md).

`common` is theirs, and is on the path when their harness runs this file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import common  # type: ignore[import-not-found]  # the peers' own module, found only where their harness runs us

from agent_runtime import (
    CheckpointNotFound,
    Message,
    Reply,
    ToolCall,
    ToolRegistry,
    ToolSpec,
    idempotency_key,
    recover_tool_loop,
    run_tool_loop,
)
from agent_runtime.model import ModelFunction
from agent_runtime.stores import open_store

KEY = bytes(range(32))
DATABASE = "p_ours"
"""The name that BENCH_EXTRA gives their harness, too, as `db`."""

tools = ToolRegistry()


@tools.tool(idempotent=True)
async def lookup(q: str, i: int) -> str:
    """What is known of a query."""
    result: str = await common.tool_stub_async(run_of_call(), i)
    return result


def run_of_call() -> str:
    """The run that the call being made belongs to."""
    return idempotency_key().split(":")[0]


def model_of(steps: int) -> ModelFunction:
    """The peers' model stub; after so many steps a reply that calls nothing, which no peer counts."""

    async def model(messages: Sequence[Message], offered: Sequence[ToolSpec]) -> Reply:
        step = len(messages) // 2
        if step >= steps:
            return Reply("done")
        said = common.model_stub(run_of_call(), step, len(messages))
        asked = said["tool_call"]
        return Reply(said["content"], [ToolCall(asked["id"], asked["name"], asked["args"])])

    return model


class Ours(common.Base):  # type: ignore[misc]  # as `common` is not known here
    """A run a tool loop, on one SQLite file; under a name that ends in -pg, in a database of its own."""

    async def setup(self) -> None:
        if self.args.variant.endswith("-pg"):
            self.pg_url = common.db_url(self.args, DATABASE)
            self.store = open_store(self.pg_url)
        else:
            self.files = os.path.join(self.args.dir, "ours.db")
            self.store = open_store(f"sqlite:///{self.files}")

    async def run_one(self, run: str, steps: int) -> None:
        """Go on with the run where it is stored and may be left over, else start it."""
        model, most = model_of(steps), steps + 1
        if self.args.cmd == "recover":
            try:
                await recover_tool_loop(model, tools, run, checkpoints=self.store, checkpoint_key=KEY, max_steps=most)
                return
            except CheckpointNotFound:
                pass
        first = common.FIRST_MESSAGE["content"]
        await run_tool_loop(model, tools, first, run_id=run, checkpoints=self.store, checkpoint_key=KEY, max_steps=most)

    async def close(self) -> None:
        await self.store.close()


if __name__ == "__main__":
    common.main(Ours)
