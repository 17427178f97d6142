"""Workers on several hosts and one Postgres: hosts that are cut off, hosts that lose power, clocks that disagree.

On Linux, as root, the hosts are namespaces with real cables; everywhere, also, workers behind proxies: see hosts.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.testing.tcp_proxy import Way
from tests.postgres.bench import session
from tests.processes.hired import Worker
from tests.processes.hosts import NETWORK, Host, Place, host, kinds
from tests.processes.worker import Order, Remote
from tests.servers import Server, own_origins

LEASE, BEATS = 1.2, 0.3
PATIENCE_SECONDS = 30.0
WAYS = {"to the server": (Way.TO_SERVER,), "back": (Way.TO_CLIENT,), "both ways": ()}
GONE_ASTRAY = ("CheckpointConflict", "StoreUnavailable")

# Everything on the first kind of cable, and what differs most on the other.
CUTS = [(kinds()[0], ways, heals) for ways in WAYS for heals in ("before it goes on", "after it went on")]
CUTS += [(kind, "back", "after it went on") for kind in kinds()[1:]]
OTHERS = [(kinds()[0], 1, False), (kinds()[0], -1, True), *((kind, 1, False) for kind in kinds()[1:])]
on_each_cable = pytest.mark.parametrize("kind", kinds())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that other hosts reach too."""
    [first, *_] = own_origins()
    assert first.bindir is not None
    own = Server(first.bindir, options={"listen_addresses": "0.0.0.0"})
    rules = own.data / "pg_hba.conf"
    rules.write_text(f"{rules.read_text()}host all all {NETWORK} trust\n")
    own.start()
    yield own
    own.close()


class World:
    """The hosts, what they share, and who looks on."""

    def __init__(self, kind: str, server: Server, folder: Path, stack: AsyncExitStack) -> None:
        self.kind, self.server, self._folder, self._stack = kind, server, folder, stack
        self.database = server.database()
        self.remote = Remote(folder / "remote.jsonl")

    async def host(self, *, hours: float = 0.0, is_container: bool = False) -> Host:
        place = Place(self.server, self.database, self.remote.path, self._folder, hours, is_container)
        return await self._stack.enter_async_context(host(self.kind, place))

    async def stored(self, run: str) -> list[Any]:
        """Everything that is kept of the run."""
        async with session(self.server.url_as("postgres", database=self.database)) as db:
            [row] = await db.fetch("SELECT * FROM agent_runtime_runs WHERE run_id = $1", run)
            records = await db.fetch("SELECT * FROM agent_runtime_journal WHERE place >> 24 = $1 ORDER BY place", row["key"])
            return [row, *records]

    async def status(self, run: str) -> tuple[int, int]:
        """Its status, and how often it was claimed."""
        [row, *_] = await self.stored(run)
        return row["status"], row["epoch"]


@pytest.fixture
async def world(kind: str, server: Server, tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(kind, server, tmp_path, stack)


async def hear(worker: Worker) -> dict[str, Any]:
    return await asyncio.to_thread(worker.hear)


async def begin(on: Host, run: str, **options: Any) -> None:
    """Have the run begun there, and wait until its call is on the way."""
    on.worker.order(Order(run, inside="wait", lease=LEASE, heartbeat=BEATS, **options))
    assert (await hear(on.worker))["acting"] == run


async def attempt(on: Host, run: str, **options: Any) -> dict[str, Any]:
    """What comes of recovering it there now."""
    on.worker.order(Order(run, verb="recover", lease=LEASE, heartbeat=BEATS, **options))
    return await hear(on.worker)


async def take_over(on: Host, run: str, **options: Any) -> str:
    """What comes of recovering it there, as soon as its lease allows it."""
    deadline = monotonic() + PATIENCE_SECONDS
    while True:
        said = await attempt(on, run, **options)
        if said["ended"] != "CheckpointConflict":
            ended: str = said["ended"]
            return ended
        assert "is held by process" in said["message"]
        assert monotonic() < deadline
        await SYSTEM_CLOCK.sleep(0.05)


DONE, BLOCKED = 8, 3


@pytest.mark.parametrize(("kind", "ways", "heals"), CUTS)
async def test_a_worker_that_is_cut_off_is_replaced_and_changes_and_starts_nothing_when_it_is_back(
    world: World, ways: str, heals: str
) -> None:
    first, second = await world.host(hours=1), await world.host(hours=-1)
    await begin(first, "run", calls=2)
    assert (await attempt(second, "run", calls=2))["ended"] == "CheckpointConflict", "it lives, and clocks do not matter"

    first.cable.cut(*WAYS[ways])
    assert await take_over(second, "run", calls=2) == "done"
    stored, seen = await world.stored("run"), world.remote.path.read_bytes()
    if heals == "before it goes on":
        first.cable.heal()
    first.worker.go_on()
    assert (await hear(first.worker))["ended"] in GONE_ASTRAY
    first.cable.heal()

    await begin(first, "another")
    first.worker.go_on()
    assert (await hear(first.worker))["ended"] == "done", "it is as good as any again"
    assert await world.stored("run") == stored
    assert world.remote.path.read_bytes().startswith(seen)
    assert [request["key"] for request in world.remote.seen("tool", "run")] == ["run:0", "run:0", "run:1"]
    assert await world.status("run") == (DONE, 2)


@on_each_cable
async def test_a_call_without_a_rule_of_a_worker_that_is_cut_off_waits_for_its_result_or_a_person(world: World) -> None:
    first, second = await world.host(), await world.host()
    await begin(first, "run", idempotent=False)
    first.cable.cut()
    assert await take_over(second, "run", idempotent=False) == "RecoveryNeedsDecision"
    stored = await world.stored("run")
    first.cable.heal()
    first.worker.go_on()
    assert (await hear(first.worker))["ended"] in GONE_ASTRAY
    _, *records = await world.stored("run")
    assert records == stored[1:]
    assert await world.status("run") == (BLOCKED, 2)
    assert await take_over(second, "run", idempotent=False) == "done", "the result that the first worker left is adopted"
    assert len(world.remote.seen("tool", "run")) == 1


@on_each_cable
async def test_a_cut_that_is_shorter_than_the_trust_in_the_lease_takes_nothing_from_anybody(world: World) -> None:
    first, second = await world.host(), await world.host()
    first.worker.order(Order("run", inside="wait", lease=30.0, heartbeat=BEATS))
    assert (await hear(first.worker))["acting"] == "run"
    first.cable.cut()
    first.worker.go_on()
    assert (await attempt(second, "run"))["ended"] == "CheckpointConflict"
    first.cable.heal()
    assert (await hear(first.worker))["ended"] == "done"
    assert len(world.remote.seen("tool", "run")) == 1
    assert await world.status("run") == (DONE, 1)


@pytest.mark.parametrize(("kind", "hours", "is_container"), OTHERS)
async def test_while_its_owner_lives_no_host_takes_a_run_whatever_the_clocks_say(
    world: World, hours: int, is_container: bool
) -> None:
    first = await world.host(is_container=is_container)
    second = await world.host(is_container=is_container, hours=hours)
    lease = 2.5
    first.worker.order(Order("run", inside="wait", lease=lease, heartbeat=BEATS))
    assert (await hear(first.worker))["acting"] == "run"
    until = monotonic() + 1.3 * lease
    while monotonic() < until:
        assert (await attempt(second, "run"))["ended"] == "CheckpointConflict"
        await SYSTEM_CLOCK.sleep(0.05)
    first.worker.go_on()
    assert (await hear(first.worker))["ended"] == "done"
    assert await world.status("run") == (DONE, 1)


@on_each_cable
async def test_the_run_of_a_host_that_lost_its_power_is_taken_when_its_lease_is_over(world: World) -> None:
    first, second = await world.host(hours=1), await world.host(hours=-1)
    await begin(first, "run")
    first.lose_power()
    began = monotonic()
    assert await take_over(second, "run") == "done"
    if world.kind == "namespaces":
        assert first.mark["host"] != second.mark["host"]
        assert first.mark["boot"] != second.mark["boot"]
        assert (first.mark["pid"], second.mark["pid"]) == (1, 1), "a number that says nothing elsewhere"
        assert monotonic() - began > LEASE - BEATS - 0.2, "from another host nobody can tell sooner"
    assert monotonic() - began < LEASE + 3
    assert await world.status("run") == (DONE, 2)
