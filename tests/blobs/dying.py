"""A worker with a blob folder that is killed at one moment: `python -m tests.blobs.dying MOMENT FOLDER`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_runtime import Runs
from agent_runtime.ids import RunId
from agent_runtime.journal.store import Answer, Append, Guard
from agent_runtime.stores.blob_stub import MARK
from agent_runtime.stores.blobs import BlobStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.tool_loop import run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY, Script

MOMENTS = ("blobs written", "committed", "deleted")
registry = ToolRegistry()


@registry.tool(pure=True)
def read(page: int) -> str:
    """A page that is large."""
    return f"{page}" * 100_000


def script() -> Script:
    return Script([("read", {"page": 1})], [("read", {"page": 2})], "end")


class Dying(SQLiteCheckpointStore):
    """The inner store: it knows when a blob is written, and when it is named."""

    moment = ""

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        names_blob = any(record.body.startswith(MARK) for append in appends for record in append.records)
        if names_blob and self.moment == "blobs written":
            _die()
        answers = await super().commit(appends)
        if names_blob and self.moment == "committed":
            _die()
        return answers

    async def delete(self, run_id: RunId, *, guard: Guard) -> Answer:
        answer = await super().delete(run_id, guard=guard)
        if self.moment == "deleted":
            _die()
        return answer


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(moment: str, folder: Path) -> None:
    inner = Dying(folder / "runs.db")
    inner.moment = moment
    store = BlobStore(inner, folder / "blobs")
    await run_tool_loop(script(), registry, "go", run_id="run", checkpoints=store, checkpoint_key=KEY)
    await Runs(store, checkpoint_key=KEY).delete("run", by="ana")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
