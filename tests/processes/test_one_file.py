"""Many processes on one SQLite file: they wait for each other, nobody is told that it is locked, and a step has one winner."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind
from agent_runtime.journal.seal import open_run
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.draft import RING, TENANT
from tests.processes.job import PATIENCE_SECONDS
from tests.processes.rival import SHARED

SAVES = 200
CLAIMS = 25
NAMES = ("a", "b", "c")


async def at_once(what: str, path: Path, names: Sequence[str], count: int) -> list[dict[str, int]]:
    """What as many processes were answered, all at the same time."""
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.processes.rival", what, str(path), name, str(count),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        for name in names
    ]  # fmt: skip
    try:
        async with asyncio.timeout(4 * PATIENCE_SECONDS):
            printed = [await process.communicate() for process in processes]
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
    assert [(process.returncode, err) for process, (_, err) in zip(processes, printed, strict=True)] == [(0, b"")] * len(names)
    return [json.loads(out) for out, _ in printed]


async def verified(path: Path, name: str) -> int:
    """How many records a run has, all of them genuine."""
    store = SQLiteCheckpointStore(path)
    [run] = await store.load_many([RunId(name)])
    await store.close()
    assert run is not None
    open_run(RING, run, tenant=TENANT)
    return len(run.records)


async def test_three_processes_save_to_one_file_beside_a_long_reader_and_nothing_is_locked_or_lost(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    await at_once("save", path, ["first"], 1)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM runs").fetchone() == (1,)
        assert await at_once("save", path, NAMES, SAVES) == [{"ok": SAVES}] * len(NAMES)
        assert reader.execute("SELECT count(*) FROM runs").fetchone() == (1,), "the reader saw one moment all along"
        held = (tmp_path / "runs.db-wal").stat().st_size
        reader.execute("COMMIT")
        # The log grew as long as the reader held it. From then on it is used again from its start: nobody has to tend it.
        assert await at_once("save", path, ["d", "e", "f"], SAVES) == [{"ok": SAVES}] * len(NAMES)
        assert (tmp_path / "runs.db-wal").stat().st_size < 1.5 * held
        assert reader.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    # An `opened`, its record and its checkpoint's; then a record and a checkpoint's for each save.
    assert [await verified(path, name) for name in (*NAMES, "d", "e", "f")] == [2 * SAVES + 1] * 6


async def test_of_processes_that_race_for_one_run_each_step_has_one_winner(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store = SQLiteCheckpointStore(path)
    await store.commit([Draft.of(SHARED).open()])
    await store.close()
    told = await at_once("race", path, NAMES, CLAIMS)
    assert [answers["ok"] for answers in told] == [CLAIMS] * len(NAMES)
    assert set().union(*told) <= {"ok", "fenced"}, "who came late was told so, and nothing else"
    assert await verified(path, SHARED) == 1 + CLAIMS * len(NAMES)
    store = SQLiteCheckpointStore(path)
    records = await store.calls(RunId(SHARED))
    await store.close()
    assert [record.epoch for record in records] == [1, *range(2, len(records) + 1)]
    assert {record.kind for record in records[1:]} == {RecordKind.CLAIMED}
