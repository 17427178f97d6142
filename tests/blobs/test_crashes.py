"""A worker may be killed between a blob, the commit that names it and its removal: no run is hurt, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent_runtime import Runs
from agent_runtime.errors import CheckpointConflict
from agent_runtime.stores.blobs import BlobStore
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.crash_sweep import FLOWS, SCENARIOS, sweep
from agent_runtime.tool_loop import recover_tool_loop
from tests.bench import KEY, results_in
from tests.blobs.dying import MOMENTS, registry, script
from tests.blobs.test_blobs import age_all, files_in

LEFT = {"blobs written": 1, "committed": 0, "deleted": 2}
"""How many blobs lie there that nothing names."""
BY_NAME = {scenario.name: scenario for scenario in (*SCENARIOS, *FLOWS)}


def work_and_die(moment: str, folder: Path) -> int:
    """What a process of its own ended with."""
    command = [sys.executable, "-m", "tests.blobs.dying", moment, str(folder)]
    return subprocess.run(command, timeout=60, check=False).returncode


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_worker_killed_beside_its_blobs_leaves_a_run_that_goes_on_and_a_folder_that_is_swept(
    moment: str, tmp_path: Path
) -> None:
    folder = tmp_path / "blobs"
    folder.mkdir()
    assert work_and_die(moment, tmp_path) == -signal.SIGKILL
    store = BlobStore(SQLiteCheckpointStore(tmp_path / "runs.db"), folder)
    age_all(folder)
    left = await store.sweep(dry_run=True)
    assert left.files == LEFT[moment]
    if moment == "deleted":
        with pytest.raises(CheckpointConflict, match="deleted"):
            await recover_tool_loop(script(), registry, "run", checkpoints=store, checkpoint_key=KEY)
        named = []
    else:
        result = await recover_tool_loop(script(), registry, "run", checkpoints=store, checkpoint_key=KEY)
        assert results_in(result.messages) == ["1" * 100_000, "2" * 100_000]
        assert (await store.sweep()).files == LEFT[moment], "what the dead one left, and its records do not name"
        assert await Runs(store, checkpoint_key=KEY).verify() == []
        named = files_in(folder)
    await store.sweep()
    assert files_in(folder) == named
    await store.close()


@pytest.mark.parametrize(("name", "commits"), [("one call a reply", "grouped"), ("flow: one after another", "each")])
async def test_no_rule_is_broken_by_a_death_at_any_moment_beside_blobs(name: str, commits: str, tmp_path: Path) -> None:
    folder = tmp_path / "blobs"
    os.mkdir(folder)

    async def make_store() -> BlobStore:
        return BlobStore(MemoryCheckpointStore(), folder, above=200)

    report = await sweep(BY_NAME[name], make_store, store_name="blobs", commits=[commits], depth=1)
    assert report.holds, str(report)
    assert files_in(folder), "bodies were large enough to be blobs"
