"""Stores of every layout that was ever released: read, gone on with to the right end, migrated, and read again."""

from __future__ import annotations

from typing import Any

import pytest

from agent_runtime import Outcome, Rerun, Runs
from agent_runtime.errors import CheckpointConflict, RecoveryNeedsDecision
from agent_runtime.executor import Executor
from agent_runtime.flow.runner import FlowRunner
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus, StoredRun
from agent_runtime.journal.store import CheckpointStore, recency
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from tests.golden.program import CTX, HOSTILE, KEY, TENANT, Ask, Tools, orders
from tests.tenants.house import GOLDEN, NATIVE, SOME, House

LAYOUTS = sorted(int(path.name.removeprefix("layout-")) for path in GOLDEN.glob("layout-*"))
STOOD = {
    "done": "done", HOSTILE: "done", "approved": "done", "flow": "done", "failed": "failed", "cancelled": "cancelled",
    "paused": "paused", "answered": "paused", "blocked": "in-doubt", "quarantined": "quarantined",
    "interrupted": "interrupted", "interrupted in a call": "interrupted", "doubtful": "interrupted",
    "interrupted flow": "interrupted",
}  # fmt: skip
BEST = {run: stood if stood in ("failed", "cancelled") else "done" for run, stood in STOOD.items()}
OPTIONS: dict[str, Any] = {"checkpoint_key": KEY, "tenant": TENANT}


def operator(store: CheckpointStore) -> Runs:
    return Runs(store, **OPTIONS)


async def held(store: CheckpointStore) -> dict[str, tuple[StoredRun | None, object]]:
    """All that is stored of each run, but for how long ago its owner was heard."""
    rows = [*await store.list_runs(limit=1000), *await store.list_runs(status=RunStatus.DELETED)]
    found: dict[str, tuple[StoredRun | None, object]] = {}
    for row in rows:
        [run] = await store.load_many([row.run_id])
        assert run is not None
        found[row.run_id] = run._replace(row=run.row._replace(idle_ms=0)), await store.inbox(row.run_id)
    return found


async def judge(store: CheckpointStore, expected: dict[str, str]) -> None:
    """Every run verifies, and stands as is expected; the lists agree with each other."""
    runs = operator(store)
    assert [verified for verified in await runs.verify() if not verified.holds] == []
    assert {info.run_id: info.status for info in await runs.list()} == expected
    for run_id in expected:
        assert (await runs.show(run_id)).info.run_id == run_id
    assert [row.run_id for row in await store.list_runs(status=RunStatus.DELETED)] == ["deleted"]
    rows = sorted(await store.list_runs(limit=1000), key=recency, reverse=True)
    assert [row.run_id for row in await store.list_recent(limit=1000)] == [row.run_id for row in rows]
    assert {row.run_id for row in await store.list_recent(status=RunStatus.DELETED)} == {"deleted"}


async def bring_to_an_end(store: CheckpointStore) -> Tools:
    """Work every run that can be worked, and decide what only a person can."""
    tools, runs = Tools(), operator(store)

    async def recover(run_id: str, *asked: str) -> None:
        result = await recover_tool_loop(Ask(*asked), tools.registry, run_id, checkpoints=store, ctx=CTX, **OPTIONS)
        assert (result.status, result.output) == ("done", "all is done")

    await recover("interrupted", "send", "charge")
    await recover("interrupted in a call", "send")
    with pytest.raises(RecoveryNeedsDecision, match="charge"):
        await recover("doubtful", "charge")
    await runs.settle("doubtful", "0", Outcome.done("charged 5"), by="ana", why="it is on the statement")
    await recover("doubtful", "charge")
    await runs.settle("blocked", "0", Rerun(), by="ana", why="twice is fine")
    await recover("blocked", "charge")
    await runs.approve((await runs.pending("paused"))[0], by="bo")
    await recover("paused", "refund")
    await recover("answered", "refund")
    await runs.release("quarantined", by="ana")
    await recover("quarantined", "send")
    runner = FlowRunner(Executor(tools.registry), checkpoints=store, **OPTIONS)
    result = await runner.recover(orders(), "interrupted flow", ctx=CTX)
    assert (result.status, result.state.note) == ("done", "sent to ana")
    with pytest.raises(CheckpointConflict):
        await run_tool_loop(Ask("send"), tools.registry, "go", run_id="deleted", checkpoints=store, **OPTIONS)
    return tools


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("house", "is_migrated_first"),
    [(kind, first) for kind in SOME for first in (True, False) if kind in NATIVE or not first],
    indirect=["house"],
    ids=lambda value: {True: "migrated first", False: "as it is"}.get(value, value),
)
async def test_every_run_of_an_old_store_is_read_and_comes_to_its_right_end(
    house: House, layout: int, is_migrated_first: bool
) -> None:
    house.put_golden(layout)
    store = house.open()
    if is_migrated_first:
        before = await held(store)
        await house.open().migrate()
        assert await held(store) == before, "a migration touches no run"
        store = house.open()
    await judge(store, STOOD)
    tools = await bring_to_an_end(store)
    assert tools.acted == {"charge": 2, "send": 3, "refund": 2}
    await judge(store, BEST)
    before = await held(store)
    found = await store.migrate()
    assert found.found == (found.newest if is_migrated_first else layout)
    again = house.open()
    assert await held(again) == before
    await judge(again, BEST)
    assert (await again.read_layout()) == (found.newest, found.newest)


def test_a_golden_store_is_kept_of_each_layout_up_to_the_one_before_this() -> None:
    newest = max(newest_layouts())
    assert set(range(1, newest)) <= set(LAYOUTS), "run tests/golden/make.py with the version that still makes it"


def newest_layouts() -> list[int]:
    from agent_runtime.stores import postgres_schema, redis_open, sqlite_file

    return [postgres_schema.LAYOUT, redis_open.LAYOUT, sqlite_file.LAYOUT]


@pytest.mark.parametrize("house", NATIVE, indirect=True)
async def test_a_golden_run_is_refused_to_every_other_tenant_and_key(house: House) -> None:
    house.put_golden(1)
    store = house.open()
    for options in ({"tenant": "another"}, {"tenant": ""}, {"checkpoint_key": b"another key, which is as long as that"}):
        for verified in await Runs(store, **{**OPTIONS, **options}).verify():
            assert not verified.holds
    [run] = await store.load_many([RunId("done")])
    assert run is not None
