"""A process that writes to one store: `saver.py STORE NAME COUNT` saves so many runs once standard input ends."""

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


if __name__ == "__main__":
    sys.stdin.read()
    asyncio.run(save(sys.argv[1], sys.argv[2], int(sys.argv[3])))
