"""Keep finished runs for a while, archive them, remove them; and check an archive with nothing but the key.

    python examples/retention.py

`agent-runtime purge`, `archive` and `verify` do the same from a shell.
"""

import asyncio
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from agent_runtime import CheckpointConflict, CheckpointStoreCorrupt, Reply, Runs, ToolRegistry, run_tool_loop
from agent_runtime.archive import verify_archive
from agent_runtime.stores import SQLiteCheckpointStore

KEY = b"use-a-secret-from-your-vault-32b"


async def model(messages: object, tools: object) -> Reply:
    return Reply(text="Good morning.")


async def greet(store: SQLiteCheckpointStore, name: str) -> None:
    await run_tool_loop(model, ToolRegistry(), f"Greet {name}", run_id=name, checkpoints=store, checkpoint_key=KEY)


async def main(folder: Path) -> None:
    store = SQLiteCheckpointStore(folder / "runs.db")
    for name in ("ana", "ben"):
        await greet(store, name)
    runs = Runs(store, checkpoint_key=KEY)

    report = await runs.purge(timedelta(days=30), by="example", dry_run=True)
    print("older than a month:", len(report.removed))
    report = await runs.purge(timedelta(0), by="example", archive_to=folder)
    for purged in report.removed:
        print(f"{purged.run_id} was {purged.status} and is now in {Path(purged.archive).name}")
    print("in the store:", len(await runs.list()))
    try:
        await greet(store, "ana")
    except CheckpointConflict:
        print("the id of ana is not used again")
    await store.close()

    archive = folder / "ana.jsonl"
    print("archived:", verify_archive(archive, checkpoint_key=KEY).records, "records")
    archive.write_bytes(archive.read_bytes().replace(b'"attempts":0', b'"attempts":1', 1))
    try:
        verify_archive(archive, checkpoint_key=KEY)
    except CheckpointStoreCorrupt as error:
        print("changed:", str(error).partition("line ")[2].partition(";")[0])


with TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
