"""A process that saves: `saver.py NAME COUNT STORE...` says that it is ready, waits, and saves so many runs in each store."""

from __future__ import annotations

import asyncio
import sys

from agent_runtime.journal.store import AnswerKind
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.store_contract import Draft


async def save(path: str, name: str, count: int) -> None:
    """Save that many runs, each with one record, one after another."""
    store = SQLiteCheckpointStore(path)
    for i in range(count):
        [answer] = await store.commit([Draft.of(f"{name}-{i:03d}").open(b"input")])
        assert answer.kind is AnswerKind.OK, answer
    await store.close()


async def save_in_all(name: str, count: str, *paths: str) -> None:
    for path in paths:
        await save(path, name, int(count))


if __name__ == "__main__":
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    asyncio.run(save_in_all(*sys.argv[1:]))
