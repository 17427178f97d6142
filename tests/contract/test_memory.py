"""The store in memory passes the contract."""

import re

import pytest

from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.store_contract import Draft, StoreContract, cases, run_contract


async def make_store() -> CheckpointStore:
    return MemoryCheckpointStore()


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> CheckpointStore:
        return MemoryCheckpointStore()


async def test_the_contract_runs_without_pytest_and_holds() -> None:
    report = await run_contract(make_store)
    assert report.failed == {}
    assert report.holds
    assert report.passed == tuple(cases())
    assert str(report) == f"{len(cases())} passed, 0 failed"


def test_the_contract_has_many_cases_and_each_is_a_sentence() -> None:
    assert len(cases()) >= 180
    for name in cases():
        assert re.fullmatch(r"[a-z0-9]+( [a-z0-9]+){3,}", name), name


async def test_an_append_that_no_guard_could_make_right_is_refused_at_the_door() -> None:
    store = MemoryCheckpointStore()
    draft = Draft.of()
    opening = draft.open(b"one", b"two")
    for wrong in (
        opening._replace(records=()),
        opening._replace(records=opening.records[1:]),
        opening._replace(records=opening.records[::-1]),
        opening._replace(row=opening.row._replace(head=b"\x55" * 32)),
        opening._replace(row=opening.row._replace(step=1)),
    ):
        with pytest.raises(AssertionError):
            await store.commit([Draft.of("another").open(), wrong])
    assert await store.list_runs() == []


async def test_idleness_and_heartbeats_follow_the_clock_that_the_store_was_given() -> None:
    clock = ManualClock()
    store = MemoryCheckpointStore(clock=clock)
    draft = Draft.of()
    opening = draft.open()
    await store.commit([opening])
    draft = draft.after(opening)
    clock.jump_wall(-3600)
    clock.advance(2.5)
    first = await store.latest(draft.run_id)
    assert first is not None
    assert first.row.idle_ms == 2500
    await store.renew(draft.run_id, guard=draft.guard)
    await store.renew(draft.run_id, guard=draft.guard)
    second = await store.latest(draft.run_id)
    assert second is not None
    assert (second.row.idle_ms, second.row.heartbeat_at - first.row.heartbeat_at) == (0, 2_500_001)
    assert await store.now() == clock.now()
