"""The terms of a lease that no run can be worked on are refused at the door, and nothing is stored."""

from __future__ import annotations

import pytest

from agent_runtime.errors import InvalidSetting
from agent_runtime.testing.script_model import ScriptModel
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY, Place

WRONG = [(1.0, 0.6), (1.0, 1.0), (0.0, 0.0), (-1.0, -2.0), (10.0, 0.0), (float("inf"), 1.0), (float("nan"), 0.1)]


@pytest.mark.parametrize(("lease", "beat"), WRONG)
async def test_a_lease_shorter_than_two_heartbeats_or_without_a_length_is_refused(
    place: Place, lease: float, beat: float
) -> None:
    store, model, registry = place.open(), ScriptModel.calling("mail"), ToolRegistry()
    with pytest.raises(InvalidSetting, match="a heartbeat comes at least twice a lease"):
        await run_tool_loop(
            model, registry, "go", run_id="run", checkpoints=store, checkpoint_key=KEY,
            lease_seconds=lease, heartbeat_seconds=beat,
        )  # fmt: skip
    with pytest.raises(InvalidSetting, match="a heartbeat comes at least twice a lease"):
        await recover_tool_loop(
            model, registry, "run", checkpoints=store, checkpoint_key=KEY, lease_seconds=lease, heartbeat_seconds=beat
        )
    assert (await store.list_runs(), model.calls) == ([], 0)
