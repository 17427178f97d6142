"""A write of which nobody learns whether it landed, on a real Redis: what networks and crashes make of it.

The troubles are those that the store in Postgres meets; each kind of record is struck. What the run then holds is what one
without trouble holds, record by record; the remote has acted once; and a run that cannot go on says so and is ended later.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from agent_runtime.errors import CheckpointStoreCorrupt, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.store import Answer, AnswerKind, Append
from agent_runtime.stores import open_store
from agent_runtime.stores.redis import RedisCheckpointStore
from agent_runtime.testing.faults import Fault, FaultyStore, Write, holds
from agent_runtime.testing.tcp_proxy import How, TcpProxy, Way
from tests.crash.test_unknown import CLAIM, KINDS, RUN, die_after_the_act
from tests.postgres.bench import PATIENCE_SECONDS
from tests.postgres.test_unknown import (
    SHORT_SECONDS,
    Behind,
    Cancels,
    CutsOff,
    Late,
    Trouble,
    Wired,
    assert_ends_undisturbed,
    eventually,
    every_kind,
    on_the_wire,
    once_free,
)
from tests.redis_servers import RedisServer, redis_origins

USUAL_SECONDS = 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One of this module alone: it is killed."""
    with RedisServer(redis_origins()[0].program) as own:
        yield own


class Scene(Wired):
    """That of a Redis."""

    store: RedisCheckpointStore

    def __init__(self, server: RedisServer, proxy: TcpProxy) -> None:
        self.server, self.proxy = server, proxy
        self._query = f"?prefix=t{secrets.token_hex(8)}"
        super().__init__(self._through(server.port, USUAL_SECONDS))

    def open(self, fault: Fault | None = None) -> FaultyStore:
        waits = SHORT_SECONDS if getattr(fault, "is_silent", False) else USUAL_SECONDS
        opened = FaultyStore(self._through(self.proxy.port, waits), fault, life=self.life)
        self._opened.append(opened)
        return opened

    def _through(self, port: int, waits: float) -> RedisCheckpointStore:
        store = open_store(f"redis://127.0.0.1:{port}/0{self._query}&timeout_seconds={waits}")
        assert isinstance(store, RedisCheckpointStore)
        return store


@pytest.fixture
async def scene(server: RedisServer) -> AsyncIterator[Scene]:
    async with TcpProxy("127.0.0.1", server.port) as proxy:
        on = Scene(server, proxy)
        await on.store.open()
        yield on
        await on.close()


class InTheServer(Trouble):
    """What happens to the server itself."""

    _scene: Scene


class KilledBefore(InTheServer):
    """The server dies while the write is on its way to it, and is started again."""

    async def meet(self, write: Write) -> list[Answer]:
        server = self._scene.server
        strike = self._strike(write, How.HELD, Way.TO_SERVER)
        landing = asyncio.ensure_future(write.land())
        await asyncio.wait_for(strike.struck.wait(), PATIENCE_SECONDS)
        server.kill()
        strike.release()
        answers = await landing
        server.start()
        return answers


class Disconnected(InTheServer):
    """An operator ends the connection while the script waits in the server."""

    async def meet(self, write: Write) -> list[Answer]:
        server = self._scene.server
        await write._inner.now()  # the first verb marks the store, which is not what is struck
        server.tell("CLIENT", "PAUSE", 60_000, "WRITE")
        try:
            landing = asyncio.ensure_future(write.land())
            await eventually(self._waits)
            server.tell("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            return await landing
        finally:
            server.tell("CLIENT", "UNPAUSE")

    async def _waits(self) -> bool:
        return bool(self._scene.server.facts("clients")["blocked_clients"])


class KilledAfter(InTheServer):
    """The server dies when the write is on its disk and the answer is on the way, and is started again."""

    landed = True

    async def meet(self, write: Write) -> list[Answer]:
        strike = self._strike(write, How.HELD, Way.TO_CLIENT)
        landing = asyncio.ensure_future(write.land())
        await asyncio.wait_for(strike.struck.wait(), PATIENCE_SECONDS)
        await eventually(self._is_there)
        self._scene.server.kill()
        self._scene.proxy.reset()
        strike.release()
        answers = await landing
        self._scene.server.start()
        return answers

    async def _is_there(self) -> bool:
        assert self.struck is not None
        return await self._scene.head() == self._head(self.struck)


TROUBLES: dict[str, type[Trouble]] = {
    "its request is lost": on_the_wire(How.LOST, Way.TO_SERVER),
    "half of its request arrives": on_the_wire(How.CUT, Way.TO_SERVER),
    "its request vanishes and the connection stays": on_the_wire(How.SILENT, Way.TO_SERVER),
    "its reply is lost": on_the_wire(How.LOST, Way.TO_CLIENT),
    "half of its reply arrives": on_the_wire(How.CUT, Way.TO_CLIENT),
    "its reply vanishes and the connection stays": on_the_wire(How.SILENT, Way.TO_CLIENT),
    "its connection is ended while its script waits": Disconnected,
    "it lands before it is sent again": Late,
    "it lands behind itself": Behind,
    "the server dies before it gets to it": KilledBefore,
    "the server dies once it has done it": KilledAfter,
}


@every_kind
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_run_on_redis_ends_as_if_nothing_had_happened(scene: Scene, kind: str, trouble: str) -> None:
    scene.commits = "each"
    await assert_ends_undisturbed(scene, kind, TROUBLES[trouble])


@every_kind
@pytest.mark.parametrize("trouble", ["its request is lost", "its reply is lost"])
async def test_so_does_one_on_redis_whose_records_share_a_commit(scene: Scene, kind: str, trouble: str) -> None:
    await assert_ends_undisturbed(scene, kind, TROUBLES[trouble])


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_recovery_on_redis_whose_claim_is_struck_claims_once(scene: Scene, trouble: str) -> None:
    scene.registry = scene.idempotent
    await die_after_the_act(scene)
    fault = TROUBLES[trouble](scene, holds(*CLAIM))
    result = await scene.recover(scene.open(fault))
    assert (result.status, result.output, result.llm_calls) == ("done", "sent", 2)
    assert (scene.remote.count(), scene.remote.count_requests()) == (1, 2)
    claims = [record for record in await scene.records() if record[0] is RecordKind.CLAIMED]
    assert len(claims) == 2
    assert fault.seen == (AnswerKind.UNKNOWN, fault.landed)


@pytest.mark.parametrize("kind", ["the opening and the claim", "a reply", "the ending of a call"])
@pytest.mark.parametrize("way", Way)
async def test_a_run_on_redis_that_is_cancelled_while_a_write_is_on_the_wire_recovers(
    scene: Scene, kind: str, way: Way
) -> None:
    scene.commits = "each"
    fault = Cancels(scene, holds(*KINDS[kind]), way)
    task = asyncio.ensure_future(scene.run(scene.open(fault)))
    await asyncio.wait_for(fault.reached.wait(), PATIENCE_SECONDS)
    task.cancel()
    fault.strike.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    await scene.must_finish()


@pytest.mark.parametrize("ways", [(Way.TO_SERVER,), (Way.TO_CLIENT,)], ids=["to the server", "back"])
async def test_a_worker_cut_off_from_redis_for_longer_than_its_lease_starts_nothing_more(
    scene: Scene, ways: tuple[Way, ...]
) -> None:
    fault = CutsOff(scene, holds(*KINDS["the intent of a call"]), ways)
    with pytest.raises(StoreUnavailable):
        await scene.run(scene.open(fault), lease_seconds=1.0, heartbeat_seconds=0.3)
    asked = (scene.model.calls, scene.remote.count())
    run = await scene.store.latest(RunId(RUN))
    assert run is not None
    assert run.row.status == RunStatus.RUNNING
    scene.proxy.reset()  # what was withheld is lost: where it landed after all, the call would be in doubt
    scene.proxy.heal()
    await once_free(scene.must_finish)
    assert asked == (1, 0)


# What these tests are worth.


class BelievesALostAnswer(RedisCheckpointStore):
    """Planted: takes a write whose answer was lost for one that landed."""

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        answers = await super().commit(appends)
        return [Answer(AnswerKind.OK) if answer.kind is AnswerKind.UNKNOWN else answer for answer in answers]


async def test_a_redis_store_that_takes_a_lost_write_for_a_landed_one_is_seen_here(scene: Scene) -> None:
    worker = scene.open(TROUBLES["its request is lost"](scene, holds(*KINDS["a reply"])))
    worker.inner.__class__ = BelievesALostAnswer
    with pytest.raises(CheckpointStoreCorrupt):
        await scene.run(worker)
