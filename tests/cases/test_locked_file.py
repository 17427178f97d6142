"""Several connections on one SQLite file: they wait for each other, and nobody is told that it is locked."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from agent_runtime.journal.records import RunStatus
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.tool_loop import run_tool_loop
from tests.bench import KEY, Bench, Script

RUNS = 12


def save_many(path: Path, name: str, errors: list[BaseException]) -> None:
    """Runs of several steps, each step two commits, from a thread with a loop and a store of its own."""

    async def work() -> None:
        store = SQLiteCheckpointStore(path)
        for at in range(RUNS):
            script, bench = Script([("charge_i", {"amount": at})], [("charge_i", {"amount": at})], "done"), Bench()
            await run_tool_loop(script, bench.registry, "go", run_id=f"{name}-{at}", checkpoints=store, checkpoint_key=KEY)
        await store.close()

    try:
        asyncio.run(work())
    except BaseException as error:  # whatever it is, it is to be seen
        errors.append(error)


async def test_two_writers_and_a_long_reader_get_along(tmp_path: Path) -> None:
    path, errors = tmp_path / "runs.db", list[BaseException]()
    store = SQLiteCheckpointStore(path)
    await store.list_runs()
    threads = [threading.Thread(target=save_many, args=(path, name, errors)) for name in ("a", "b")]
    with closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM runs").fetchone()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await asyncio.to_thread(threads[0].join, 0.01)
            await asyncio.to_thread(threads[1].join, 0.01)
        assert reader.execute("SELECT count(*) FROM runs").fetchone() == (0,)
    assert errors == []
    rows = await store.list_runs(limit=1000)
    assert [row.status for row in rows] == [RunStatus.DONE] * 2 * RUNS
    assert {row.number for row in rows} == {rows[0].number}
    await store.close()


async def test_a_writer_waits_for_a_transaction_that_somebody_holds_open(tmp_path: Path) -> None:
    path, errors = tmp_path / "runs.db", list[BaseException]()
    store = SQLiteCheckpointStore(path)
    await store.list_runs()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        thread = threading.Thread(target=save_many, args=(path, "a", errors))
        thread.start()
        await asyncio.to_thread(thread.join, 0.3)
        assert thread.is_alive()
        other.execute("COMMIT")
    await asyncio.to_thread(thread.join)
    assert errors == []
    assert len(await store.list_runs(limit=1000)) == RUNS
    await store.close()
