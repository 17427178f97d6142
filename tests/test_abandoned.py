"""Which runs are worth a worker, and what it costs to find them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime import abandoned
from agent_runtime.abandoned import Lookout, Seen, is_due
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointStoreCorrupt
from agent_runtime.ids import RunId
from agent_runtime.journal.journal import new_row
from agent_runtime.journal.records import NO_OWNER, RunStatus
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.lease import mark_of_child, own_mark
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.store_contract import Draft
from tests.bench import RING, Asked, Bench, Counting, Place, Script, Worker, until

CALL: list[Asked] = [("charge_i", {"amount": 1})]
OWNER = b"an owner, 128 b."
NOW_MS = 1_900_000_000_000
GONE = own_mark()._replace(pid=2**22 - 1)
ELSEWHERE = own_mark()._replace(host="elsewhere", boot="another")


def seen(*, mark: Any = ELSEWHERE, status: int = RunStatus.RUNNING, **changes: Any) -> Seen:
    sealer = sealer_for(RING, tenant="", run_id="run")
    row = new_row(sealer, run_id=RunId("run"), kind="loop", name="", owner=OWNER, lease_ms=12_000)
    return Seen(row._replace(status=status, **changes), mark)


FREE: dict[str, Any] = {"owner": NO_OWNER, "mark": None}


@pytest.mark.parametrize(
    ("run", "due"),
    [
        (seen(), False),
        (seen(mark=GONE), True),
        (seen(mark=None), False),
        (seen(idle_ms=12_000), True),
        (seen(mark=None, idle_ms=12_000), True),
        (seen(**FREE), True),
        (seen(**FREE, wake_at=NOW_MS), True),
        (seen(**FREE, wake_at=NOW_MS + 1), False),
        (seen(**FREE, wake_at=NOW_MS + 300_000), False),
        (seen(**FREE, wake_at=NOW_MS + 300_001), True),  # another clock's: no worker sets so much
        (seen(**FREE, wake_at=NOW_MS - 3_600_000), True),
        *[(seen(**FREE, status=parked), False) for parked in (RunStatus.PAUSED, RunStatus.BLOCKED)],
        *[(seen(**FREE, status=parked, wake_at=NOW_MS), True) for parked in (RunStatus.PAUSED, RunStatus.BLOCKED)],
        *[(seen(**FREE, status=parked, wake_at=NOW_MS + 1), False) for parked in (RunStatus.PAUSED, RunStatus.BLOCKED)],
        (seen(status=RunStatus.BLOCKED, wake_at=NOW_MS), False),  # a thread of it still runs
        (seen(**FREE, status=RunStatus.QUARANTINED), False),
        (seen(**FREE, status=RunStatus.QUARANTINED, wake_at=NOW_MS), False),
        (seen(**FREE, status=RunStatus.DONE), False),
        (seen(**FREE, status=77), False),
    ],
)
def test_a_run_is_worth_a_worker_where_nobody_has_it_and_no_time_and_no_person_is_waited_for(run: Seen, due: bool) -> None:
    assert is_due(run, NOW_MS) is due


def test_where_leases_are_not_to_be_trusted_only_a_dead_owner_is_none() -> None:
    assert not is_due(seen(idle_ms=12_000), NOW_MS, trust_leases=False)
    assert is_due(seen(mark=GONE), NOW_MS, trust_leases=False)
    assert is_due(seen(**FREE), NOW_MS, trust_leases=False)


def lookout(store: CheckpointStore, clock: ManualClock, *, name: str = "", poll: float = 3.0) -> Lookout:
    return Lookout(store, name=name, kind="loop", poll_seconds=poll, clock=clock)


def anything(_: RunId) -> bool:
    return True


async def test_who_holds_a_run_is_read_once_a_claim(place: Place) -> None:
    clock, bench = ManualClock(), Bench()
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(Script(CALL, "done"), bench.registry)
    store = Counting(place.open())
    watch = lookout(store, clock)
    for _ in range(3):
        look = await watch.look(anything, trust_leases=True)
        assert look.held["run"].mark == own_mark()  # type: ignore[index]  # a run id is text
        assert [each.row.run_id for each in look.due] == ["run"], "this process works it no more"
    assert store.verbs["calls"] == 1
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).recover_and_die(Script(CALL, "done"), bench.registry)
    await watch.look(anything, trust_leases=True)
    assert store.verbs["calls"] == 2


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_wall_clock_that_jumps_makes_no_living_owner_look_dead(tmp_path: Path, hours: int) -> None:
    clock = ManualClock()
    for store in (MemoryCheckpointStore(clock=clock), SQLiteCheckpointStore(tmp_path / "runs.db", clock=clock)):
        draft = Draft.of("run", name="", kind="loop")
        await store.commit([draft.open(b"input")])
        clock.jump_wall(3600 * hours)
        look = await lookout(store, clock).look(anything, trust_leases=True)
        assert (look.due, look.unfinished) == ([], 1)
        run = await store.latest(RunId("run"))
        assert run is not None
        clock.advance(run.row.lease_ms / 1000)
        assert [each.row.run_id for each in (await lookout(store, clock).look(anything, trust_leases=True)).due] == ["run"]
        await store.close()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_a_store_with_many_runs_is_read_with_each_poll_and_its_dead_owners_are_seen_in_between(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abandoned, "FEW_RUNS", 3)
    monkeypatch.setattr(abandoned, "PAGE", 2)
    clock = ManualClock()
    store = Counting(MemoryCheckpointStore(clock=clock))
    for i in range(5):
        await store.commit([Draft.of(f"run-{i}", name="", kind="loop").open(b"input")])
    watch = lookout(store, clock)
    assert (await watch.look(anything, trust_leases=True)).unfinished == 5
    pages = store.verbs["list_unfinished"]
    assert pages == 4
    run = RunId("run-3")
    watch.last.held[run] = watch.last.held[run]._replace(mark=mark_of_child(child.pid))
    clock.advance(1)
    assert (await watch.look(anything, trust_leases=True)).due == []
    child.kill()
    child.wait()
    assert [each.row.run_id for each in (await watch.look(anything, trust_leases=True)).due] == [run]
    assert store.verbs["list_unfinished"] == pages, "the store was left alone"
    clock.advance(2)
    await watch.look(anything, trust_leases=True)
    assert store.verbs["list_unfinished"] == 2 * pages


async def test_a_store_that_answers_slowly_is_looked_at_less_often_and_with_each_poll_all_the_same() -> None:
    clock = ManualClock()

    class Slow(Counting):
        def check(self, verb: str) -> None:
            super().check(verb)
            if verb == "list_unfinished":
                clock.advance(0.03)

    store = Slow(MemoryCheckpointStore(clock=clock))
    watch = lookout(store, clock)
    looks = []
    for _ in range(20):  # three seconds are a poll here
        clock.advance(0.5)
        await watch.look(anything, trust_leases=True)
        looks.append(store.verbs["list_unfinished"])
    assert looks[-1] == 7, "no more than a fiftieth of the time goes into looking"
    for _ in range(2):
        clock.advance(3)
        await watch.look(anything, trust_leases=True)
    assert store.verbs["list_unfinished"] == 9


async def test_a_run_whose_journal_cannot_be_read_hides_no_other(place: Place) -> None:
    bench = Bench()
    for run in ("a", "b"):
        await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(Script(CALL, "done"), bench.registry, run)

    class Torn(Counting):
        async def calls(self, run_id: RunId, *, since: int = 0) -> Any:
            if run_id == "a":
                raise CheckpointStoreCorrupt("run 'a' is torn")
            return await super().calls(run_id, since=since)

    look = await lookout(Torn(place.open()), ManualClock()).look(anything, trust_leases=True)
    assert [each.row.run_id for each in look.due] == ["b"]
    assert set(look.held) == {"a", "b"}


async def test_a_run_that_moved_since_it_was_seen_is_not_due_any_more(place: Place) -> None:
    bench, model, stuck = Bench(), Script(CALL, "done"), asyncio.Event()
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(model, bench.registry)
    watch = lookout(place.open(), ManualClock())
    [found] = (await watch.look(anything, trust_leases=True)).due
    assert await watch.look_again(found, trust_leases=True)

    async def before(_: str, __: dict[str, object]) -> None:
        await stuck.wait()

    bench.before = before
    task = asyncio.ensure_future(Worker(place).recover(model, bench.registry))
    await until(lambda: bench.entered["charge_i"] == 1)
    assert not await watch.look_again(found, trust_leases=True)
    stuck.set()
    assert (await task).status == "done"
    assert not await watch.look_again(found, trust_leases=True)


async def test_runs_of_another_name_or_kind_are_not_looked_at(place: Place) -> None:
    bench = Bench()
    for run, name in (("a", "ours"), ("b", "theirs")):
        dying = Worker(place).killed_at(CrashPoint.AFTER_INTENT)
        await dying.run_and_die(Script(CALL, "done"), bench.registry, run, name=name)
    ours = await lookout(place.open(), ManualClock(), name="ours").look(anything, trust_leases=True)
    assert [each.row.run_id for each in ours.due] == ["a"]
    flows = Lookout(place.open(), name="ours", kind="flow", poll_seconds=3.0, clock=ManualClock())
    assert (await flows.look(anything, trust_leases=True)).due == []
