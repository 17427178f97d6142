"""Another program that posts messages: `python -m tests.processes.posting PLACE SCHEMA RUN_ID BODY …`, one after another.

PLACE is a file, or the URL of a Postgres.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.store_contract import Draft

TOP = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60


async def post_elsewhere(place: str, run_id: str, *bodies: str, schema: str = "") -> None:
    """Have another process post to a run."""
    words = [sys.executable, "-m", "tests.processes.posting", place, schema, run_id, *bodies]
    await asyncio.to_thread(subprocess.run, words, cwd=TOP, check=True, timeout=PATIENCE_SECONDS)


async def main(place: str, schema: str, run_id: str, *bodies: str) -> None:
    store: CheckpointStore = PostgresCheckpointStore(place, schema=schema) if "://" in place else SQLiteCheckpointStore(place)
    draft = Draft.of(run_id)
    for body in bodies:
        answer = await store.post(draft.run_id, draft.message(body.encode()))
        assert answer.kind is AnswerKind.OK, answer
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
