"""A program that writes to a store whose disk fails for good, and says each time that it takes a write for durable.

    python -m tests.sqlite.flushed URL SIDE NAME

What the store does not know of it looks for, as group commit does. Each time it takes a run for stored it writes `acked` to
the file SIDE, in one system call. NAME is what its runs are called.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

from agent_runtime.errors import StoreUnavailable
from agent_runtime.journal.store import Answer, AnswerKind, CheckpointStore
from agent_runtime.stores import open_store
from agent_runtime.testing.store_contract.draft import Draft

RUNS, TRIES = 16, 3


async def main(url: str, side: str, name: str) -> None:
    channel = os.open(side, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = open_store(url)
    for at in range(RUNS):
        if await is_stored(store, Draft.of(f"{name}-{at}")):
            os.write(channel, b"acked\n")
    with suppress(StoreUnavailable):
        await store.close()


async def is_stored(store: CheckpointStore, draft: Draft) -> bool:
    for _ in range(TRIES):
        with suppress(StoreUnavailable):
            answers: list[Answer] = await store.commit([draft.open()])
            if answers[0].kind is AnswerKind.OK or await store.latest(draft.run_id) is not None:
                return True
    return False


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
