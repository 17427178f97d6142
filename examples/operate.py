"""Operate the runs of a store: no tools and no model are needed, the key alone.

    python examples/operate.py

`agent-runtime runs`, `show`, `release` and `verify` do the same from a shell.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from agent_runtime import Reply, Runs, ToolRegistry, run_tool_loop
from agent_runtime.stores import SQLiteCheckpointStore

KEY = b"use-a-secret-from-your-vault-32b"


async def model(messages: object, tools: object) -> Reply:
    return Reply(text="Good morning.")


async def main(folder: Path) -> None:
    store = SQLiteCheckpointStore(folder / "runs.db")
    for name in ("ana", "ben"):
        await run_tool_loop(model, ToolRegistry(), f"Greet {name}", run_id=name, checkpoints=store, checkpoint_key=KEY)

    runs = Runs(store, checkpoint_key=KEY)
    for info in await runs.list(status="done"):
        print(info.run_id, info.status, "step", info.step)
    report = await runs.show("ana")
    for segment in report.timeline.segments:
        print(f"claim {segment.epoch} ({segment.why}), which {segment.left}")
    print("released:", await runs.release("ana", by="example"))
    print("corrupt:", len(await runs.verify()))
    await store.close()


with TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
