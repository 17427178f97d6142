"""Large values: what may be recorded at all, and where large bodies go.

    python examples/large_values.py

A folder beside the store takes bodies above a threshold; a limit says what is too large for any place.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from agent_runtime import Outcome, Runs, ToolRegistry, Unrecordable, recover_tool_loop, run_tool_loop
from agent_runtime.stores import BlobStore, SQLiteCheckpointStore
from agent_runtime.testing import ScriptModel

KEY = b"use-a-secret-from-your-vault-32b"
MEGABYTE = 1_000_000
registry = ToolRegistry()


@registry.tool(pure=True)
def scan(page: int) -> str:
    """A page, as large as scans are."""
    return f"{page}" * 2 * MEGABYTE


@registry.tool
def charge(cents: int) -> str:
    """Charges, and gives more back than anybody needs."""
    return "receipt " * MEGABYTE


async def keep_outside(folder: Path) -> None:
    """Large bodies lie in a folder; the store itself stays small."""
    blobs = folder / "blobs"
    blobs.mkdir(mode=0o700)
    store = BlobStore(SQLiteCheckpointStore(folder / "runs.db"), blobs, above=64 * 1024)
    model = ScriptModel.calling("scan", page=7)
    await run_tool_loop(model, registry, "Scan page 7", run_id="scan-7", checkpoints=store, checkpoint_key=KEY)
    [blob] = [path for path in blobs.glob("??/*/*") if path.name != "run"]
    print(f"a blob of {blob.stat().st_size:,} bytes beside a store of less than {MEGABYTE:,}:", _size(folder) < MEGABYTE)
    print("left over by crashes:", (await store.sweep(dry_run=True)).files)
    await Runs(store, checkpoint_key=KEY).delete("scan-7", by="example")
    print("it goes with its run:", not blob.exists())
    await store.close()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("runs.db*"))


async def refuse(folder: Path) -> None:
    """What may not be recorded is refused once. The call happened: somebody says what came of it."""
    store = SQLiteCheckpointStore(folder / "small.db")
    model = ScriptModel.calling("charge", cents=4200)
    try:
        await run_tool_loop(
            model, registry, "Charge 42", run_id="order-7", checkpoints=store, checkpoint_key=KEY, max_value_bytes=MEGABYTE
        )
    except Unrecordable as error:
        print("refused:", str(error).partition(";")[0])
    runs = Runs(store, checkpoint_key=KEY)
    print((await runs.list())[0].status)
    await runs.settle("order-7", "0", Outcome.done("receipt 17, in the bank's portal"), by="ana", why="seen there")
    result = await recover_tool_loop(model, registry, "order-7", checkpoints=store, checkpoint_key=KEY)
    print(f"{result.status}: {result.messages[2].content}")
    await store.close()


async def main(folder: Path) -> None:
    await keep_outside(folder)
    await refuse(folder)


with TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
