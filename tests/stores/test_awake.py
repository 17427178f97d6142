"""What a supervisor reads of a store: as much as is to be worked, however many runs wait for somebody."""

from __future__ import annotations

from typing import Any

from agent_runtime.abandoned import Lookout
from agent_runtime.clock import SYSTEM_CLOCK, milliseconds
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.store import CheckpointStore, Sifting
from agent_runtime.stores.blobs import BlobStore
from agent_runtime.tool_loop import KIND
from tests.bench import Bench, Delegate, Place, Worker
from tests.standing import bring_to, operator, script

DUE = ["answered", "dead"]
WAITING = ["asking", "blocked", "expiring", "quarantined"]


async def filled(place: Place) -> None:
    for state, run in (("dead", "dead"), ("paused", "asking"), ("blocked", "blocked"), ("quarantined", "quarantined")):
        await bring_to(place, state, run)
    await bring_to(place, "done", "over")
    await Worker(place).run(script(), Bench(needs_approval=True, approval_expires=3600).registry, "expiring")
    await bring_to(place, "paused", "answered")
    [request] = await operator(place).pending("answered")
    await operator(place).approve(request, by="ana")


async def found(store: CheckpointStore) -> Any:
    look = await Lookout(store, name="", kind=KIND, poll_seconds=0.0, clock=SYSTEM_CLOCK).look(
        lambda run_id: True, trust_leases=True
    )
    return sorted(seen.row.run_id for seen in look.due), sorted(look.free), sorted(look.held)


async def test_what_is_to_be_worked_is_the_same_whether_or_not_the_store_passes_over_what_waits(every_place: Place) -> None:
    await filled(every_place)
    store = every_place.open()
    assert not isinstance(Delegate(store), Sifting)
    assert await found(store) == await found(Delegate(store)) == (DUE, DUE, ["dead"])


async def test_runs_that_wait_for_somebody_are_not_read(every_place: Place) -> None:
    await filled(every_place)
    bare = every_place.open()
    if not isinstance(bare, Sifting):
        assert every_place.kind in ("memory", "redis", "redis cluster"), "what has statements sifts"
        return
    folder = every_place.path.parent / "blobs"
    folder.mkdir(mode=0o700)
    for store in (bare, BlobStore(bare, folder, above=4096)):
        assert isinstance(store, Sifting)
        now_ms = milliseconds(await store.now())
        listed = await store.list_awake(at=now_ms)
        assert [(row.run_id, row.status) for row in listed] == [("answered", RunStatus.PAUSED), ("dead", RunStatus.RUNNING)]
        assert [row.run_id for row in await store.list_awake(at=now_ms, limit=1)] == DUE[:1]
        assert [row.run_id for row in await store.list_awake(at=now_ms, after=listed[0].run_id)] == DUE[1:]
        assert await store.list_awake(at=now_ms, name="another") == []
        assert [row.run_id for row in await store.list_awake(at=now_ms + 3_700_000)] == sorted([*DUE, "expiring"])
        assert [row.run_id for row in await store.list_unfinished()] == sorted([*DUE, *WAITING])
    beside = BlobStore(Delegate(bare), folder, above=4096)
    assert len(await beside.list_awake(at=0)) == len([*DUE, *WAITING]), "what does not sift itself lists all"
