"""A write of which nobody learns whether it landed, on a real server: what networks, operators and crashes make of it.

Each kind of record is struck on the wire or in the server. What the run then holds is what one without trouble holds,
record by record; the remote has acted once; and where a run cannot go on, it says so and the next worker ends it.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.errors import CheckpointConflict, CheckpointStoreCorrupt, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.store import Answer, AnswerKind, Append
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.testing.faults import Fault, FaultyStore, Write, holds
from agent_runtime.testing.tcp_proxy import How, Strike, TcpProxy, Way
from tests.conftest import NOWHERE
from tests.crash.test_unknown import CLAIM, KINDS, RUN, UNDISTURBED, Stage, die_after_the_act
from tests.postgres.bench import PATIENCE_SECONDS, session
from tests.servers import Server, fresh_schema, own_origins, start

SHORT_SECONDS, USUAL_SECONDS = 0.4, 5.0
"""After which a statement without an answer is unknown: where nothing else tells the worker, and elsewhere."""

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One of this module alone: it is killed."""
    own = start(next(iter(own_origins()), NOWHERE))
    yield own
    own.close()


class Wired(Stage):
    """The stage, whose workers reach the server through a proxy. What is looked at is read past it."""

    proxy: TcpProxy

    async def head(self) -> bytes:
        """That of the last record that is there."""
        run = await self.store.latest(RunId(RUN))
        return b"" if run is None else run.row.head


class Scene(Wired):
    """That of a Postgres."""

    def __init__(self, server: Server, schema: str, proxy: TcpProxy) -> None:
        super().__init__(PostgresCheckpointStore(server.url, schema=schema))
        self.server, self.proxy, self._schema = server, proxy, schema

    def open(self, fault: Fault | None = None) -> FaultyStore:
        url = f"postgresql://postgres@127.0.0.1:{self.proxy.port}/postgres"
        waits = SHORT_SECONDS if getattr(fault, "is_silent", False) else USUAL_SECONDS
        store = PostgresCheckpointStore(url, schema=self._schema, timeout_seconds=waits)
        opened = FaultyStore(store, fault, life=self.life)
        self._opened.append(opened)
        return opened

    def restart(self) -> None:
        """Start the server again that was killed."""
        self.server.start()
        self.store = self.store.reopen()
        self._opened.append(self.store)

    @property
    def runs(self) -> str:
        return f'"{self._schema}"."agent_runtime_runs"'


@pytest.fixture
async def scene(server: Server) -> AsyncIterator[Scene]:
    async with fresh_schema(server.url) as schema, TcpProxy("127.0.0.1", server.port) as proxy:
        on = Scene(server, schema, proxy)
        await on.store.now()  # the tables are made
        yield on
        await on.close()


class Trouble(Fault):
    """What happens to the one write that holds a record; `landed` says whether it was there before it was sent again."""

    landed = False
    is_silent = False
    """Whether the worker only learns of it by waiting."""

    def __init__(self, scene: Wired, at: Callable[[Write], bool]) -> None:
        self._scene = scene
        self._at = at
        self.struck: Write | None = None
        self.seen: object = None
        """What the store answered, and whether the write was there then."""

    async def carry(self, write: Write) -> list[Answer]:
        if self.struck is not None or not self._at(write):
            return await write.land()
        self.struck = write
        try:
            answers = await self.meet(write)
        except Exception as error:  # the run would take it for one more write of which nobody knows
            self.seen = error
            raise
        self.seen = (answers[0].kind, await self._scene.head() == self._head(write))
        return answers

    @abstractmethod
    async def meet(self, write: Write) -> list[Answer]:
        """Let it run into the trouble."""

    def _head(self, write: Write) -> bytes:
        return write.appends[0].row.head

    def _strike(self, write: Write, how: How, way: Way) -> Strike:
        return self._scene.proxy.strike(how, way, matching=self._head(write))


def on_the_wire(how: How, way: Way) -> type[Trouble]:
    class OnTheWire(Trouble):
        landed = way is Way.TO_CLIENT
        is_silent = how is How.SILENT

        async def meet(self, write: Write) -> list[Answer]:
            strike = self._strike(write, how, way)
            answers = await write.land()
            assert strike.struck.is_set()
            return answers

    return OnTheWire


class Late(Trouble):
    """Held up on the way, given up by the worker, and there before that looks what became of it."""

    landed = True
    is_silent = True

    async def meet(self, write: Write) -> list[Answer]:
        strike = self._strike(write, How.HELD, Way.TO_SERVER)
        answers = await write.land()
        strike.release()
        await eventually(lambda: self._is_there(write))
        return answers

    async def _is_there(self, write: Write) -> bool:
        return await self._scene.head() == self._head(write)


class Behind(Trouble):
    """The same, and it comes to the server once it was sent again and has landed so."""

    is_silent = True

    async def meet(self, write: Write) -> list[Answer]:
        self._late = self._strike(write, How.HELD, Way.TO_SERVER)
        return await write.land()

    async def carry(self, write: Write) -> list[Answer]:
        is_first = self.struck is None
        answers = await super().carry(write)
        if not is_first and not self._late_is_released:
            self._late_is_released = True
            self._late.release()
        return answers

    _late_is_released = False


class InTheServer(Trouble):
    """What happens inside of Postgres."""

    _scene: Scene


class TerminatedBefore(InTheServer):
    """An operator ends the session while the write waits in it."""

    async def meet(self, write: Write) -> list[Answer]:
        async with session(self._scene.server.url) as operator, blocked(self._scene):
            landing = asyncio.ensure_future(write.land())
            await eventually(lambda: operator.fetchval(f"SELECT count(*) = 1 {_WAITING_FOR_LOCK}"))
            assert await operator.fetchval(f"SELECT bool_and(pg_terminate_backend(pid)) {_WAITING_FOR_LOCK}")
            return await landing


class TerminatedAfter(InTheServer):
    """An operator ends the session when the write is durable and its answer is not yet on the way."""

    landed = True

    async def meet(self, write: Write) -> list[Answer]:
        async with session(self._scene.server.url) as operator, waiting_for_standbys(operator, self._scene.server.url):
            landing = asyncio.ensure_future(write.land())
            await eventually(lambda: operator.fetchval(f"SELECT count(*) = 1 {_WAITING_FOR_STANDBY}"))
            assert await operator.fetchval(f"SELECT bool_and(pg_terminate_backend(pid)) {_WAITING_FOR_STANDBY}")
            return await landing


class KilledBefore(InTheServer):
    """The server dies while the write waits in it, and is started again."""

    async def meet(self, write: Write) -> list[Answer]:
        server = self._scene.server
        async with session(server.url) as operator, blocked(self._scene):
            landing = asyncio.ensure_future(write.land())
            await eventually(lambda: operator.fetchval(f"SELECT count(*) = 1 {_WAITING_FOR_LOCK}"))
            server.kill()
            answers = await landing
        self._scene.restart()
        return answers


class KilledAfter(InTheServer):
    """The server dies when the write is durable and its answer is not yet on the way, and is started again."""

    landed = True

    async def meet(self, write: Write) -> list[Answer]:
        server = self._scene.server
        async with session(server.url) as operator, waiting_for_standbys(operator, server.url, until_killed=True):
            landing = asyncio.ensure_future(write.land())
            await eventually(lambda: operator.fetchval(f"SELECT count(*) = 1 {_WAITING_FOR_STANDBY}"))
            (server.data / "postgresql.auto.conf").write_text("")  # it starts again without them
            server.kill()
            answers = await landing
        self._scene.restart()
        return answers


TROUBLES: dict[str, type[Trouble]] = {
    "its request is lost": on_the_wire(How.LOST, Way.TO_SERVER),
    "half of its request arrives": on_the_wire(How.CUT, Way.TO_SERVER),
    "its request vanishes and the connection stays": on_the_wire(How.SILENT, Way.TO_SERVER),
    "its reply is lost": on_the_wire(How.LOST, Way.TO_CLIENT),
    "half of its reply arrives": on_the_wire(How.CUT, Way.TO_CLIENT),
    "its reply vanishes and the connection stays": on_the_wire(How.SILENT, Way.TO_CLIENT),
    "it lands before it is sent again": Late,
    "it lands behind itself": Behind,
    "its session is ended before it commits": TerminatedBefore,
    "its session is ended once it has committed": TerminatedAfter,
}
DEATHS: dict[str, type[Trouble]] = {
    "the server dies before it commits": KilledBefore,
    "the server dies once it has committed": KilledAfter,
}


async def assert_ends_undisturbed(scene: Wired, kind: str, trouble: type[Trouble]) -> None:
    fault = trouble(scene, holds(*KINDS[kind]))
    # No heartbeat comes in between: it would be one more write that waits in the server.
    result = await scene.run(scene.open(fault), lease_seconds=120, heartbeat_seconds=60)
    assert (result.status, result.output, result.llm_calls) == ("done", "sent", 2)
    assert scene.remote.count() == scene.remote.count_requests() == 1
    assert await scene.records() == UNDISTURBED
    assert fault.seen == (AnswerKind.UNKNOWN, fault.landed)


@every_kind
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_run_on_a_server_ends_as_if_nothing_had_happened(scene: Scene, kind: str, trouble: str) -> None:
    scene.commits = "each"
    await assert_ends_undisturbed(scene, kind, TROUBLES[trouble])


@every_kind
@pytest.mark.parametrize("trouble", ["its request is lost", "its reply is lost", "it lands before it is sent again"])
async def test_so_does_one_whose_records_share_a_commit(scene: Scene, kind: str, trouble: str) -> None:
    await assert_ends_undisturbed(scene, kind, TROUBLES[trouble])


@every_kind
@pytest.mark.parametrize("death", DEATHS)
async def test_a_server_that_is_killed_and_started_again_ends_no_run(scene: Scene, kind: str, death: str) -> None:
    scene.commits = "each"
    await assert_ends_undisturbed(scene, kind, DEATHS[death])


@pytest.mark.parametrize("trouble", TROUBLES | DEATHS)
async def test_a_recovery_on_a_server_whose_claim_is_struck_claims_once(scene: Scene, trouble: str) -> None:
    scene.registry = scene.idempotent
    await die_after_the_act(scene)
    fault = (TROUBLES | DEATHS)[trouble](scene, holds(*CLAIM))
    result = await scene.recover(scene.open(fault))
    assert (result.status, result.output, result.llm_calls) == ("done", "sent", 2)
    assert (scene.remote.count(), scene.remote.count_requests()) == (1, 2)
    claims = [record for record in await scene.records() if record[0] is RecordKind.CLAIMED]
    assert len(claims) == 2
    assert fault.seen == (AnswerKind.UNKNOWN, fault.landed)


@every_kind
@pytest.mark.parametrize("way", Way)
async def test_a_run_that_is_cancelled_while_a_write_is_on_the_wire_recovers(scene: Scene, kind: str, way: Way) -> None:
    await cancel_while_a_write_is_on_the_wire(scene, kind, way)


async def cancel_while_a_write_is_on_the_wire(scene: Scene, kind: str, way: Way) -> None:
    scene.commits = "each"
    fault = Cancels(scene, holds(*KINDS[kind]), way)
    task = asyncio.ensure_future(scene.run(scene.open(fault)))
    await asyncio.wait_for(fault.reached.wait(), PATIENCE_SECONDS)
    task.cancel()
    fault.strike.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    await scene.must_finish()


class Cancels(Fault):
    """Holds the write up on its way there, or its reply on the way back, so that the test can cancel the run."""

    def __init__(self, scene: Wired, at: Callable[[Write], bool], way: Way) -> None:
        self._scene, self._at, self._way = scene, at, way
        self.reached = asyncio.Event()

    async def carry(self, write: Write) -> list[Answer]:
        if self.reached.is_set() or not self._at(write):
            return await write.land()
        self.strike = self._scene.proxy.strike(How.HELD, self._way, matching=write.appends[0].row.head)
        landing = asyncio.ensure_future(write.land())
        await asyncio.wait_for(self.strike.struck.wait(), PATIENCE_SECONDS)
        self.reached.set()
        return await landing


@pytest.mark.parametrize("kind", ["a reply", "the intent of a call", "the ending of a call"])
@pytest.mark.parametrize("ways", [(Way.TO_SERVER,), (Way.TO_CLIENT,), ()], ids=["to the server", "back", "both ways"])
async def test_a_worker_that_is_cut_off_for_longer_than_its_lease_starts_nothing_more_and_the_run_recovers(
    scene: Scene, kind: str, ways: tuple[Way, ...]
) -> None:
    fault = CutsOff(scene, holds(*KINDS[kind]), ways)
    with pytest.raises(StoreUnavailable):
        await scene.run(scene.open(fault), lease_seconds=1.0, heartbeat_seconds=0.3)
    asked = (scene.model.calls, scene.remote.count())
    run = await scene.store.latest(RunId(RUN))
    assert run is not None
    assert run.row.status == RunStatus.RUNNING
    scene.proxy.reset()  # what was withheld is lost: where it landed after all, the call would be in doubt
    scene.proxy.heal()
    await once_free(scene.must_finish)
    assert asked == {"a reply": (1, 0), "the intent of a call": (1, 0), "the ending of a call": (1, 1)}[kind]


class CutsOff(Fault):
    """From the write on nothing passes any more."""

    is_silent = True

    def __init__(self, scene: Wired, at: Callable[[Write], bool], ways: tuple[Way, ...]) -> None:
        self._scene, self._at, self._ways = scene, at, ways

    async def carry(self, write: Write) -> list[Answer]:
        if self._at(write):
            self._scene.proxy.partition(*self._ways)
        return await write.land()


# What these tests are worth.


class BelievesALostAnswer(PostgresCheckpointStore):
    """Planted: takes a write whose answer was lost for one that landed."""

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        answers = await super().commit(appends)
        return [Answer(AnswerKind.OK) if answer.kind is AnswerKind.UNKNOWN else answer for answer in answers]


async def test_a_store_that_takes_a_lost_write_for_a_landed_one_is_seen_here(scene: Scene) -> None:
    worker = scene.open(TROUBLES["its request is lost"](scene, holds(*KINDS["a reply"])))
    worker.inner.__class__ = BelievesALostAnswer
    with pytest.raises(CheckpointStoreCorrupt):
        await scene.run(worker)


# How the server is brought to wait.

_OURS = "FROM pg_stat_activity WHERE application_name = 'agent-runtime'"
_WAITING_FOR_LOCK = f"{_OURS} AND wait_event_type = 'Lock'"
_WAITING_FOR_STANDBY = f"{_OURS} AND wait_event = 'SyncRep'"


@asynccontextmanager
async def blocked(scene: Scene) -> AsyncIterator[None]:
    """Writes of runs wait, and reads do not."""
    async with session(scene.server.url) as holder:
        await holder.execute(f"BEGIN; LOCK TABLE {scene.runs} IN EXCLUSIVE MODE")
        yield


@asynccontextmanager
async def waiting_for_standbys(operator: Any, url: str, *, until_killed: bool = False) -> AsyncIterator[None]:
    """Commits, once they are durable, wait for a standby that does not exist."""
    await _set_standbys(operator, "nobody")
    try:
        await _until_commits_wait(operator, url)
        yield
    except BaseException:
        await _set_standbys(operator, "")  # else whatever commits on this server waits for ever
        raise
    if not until_killed:
        await _set_standbys(operator, "")


async def _until_commits_wait(operator: Any, url: str) -> None:
    """Commit until a commit waits: the process that tells all sessions to may hear of the setting later than they do."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            async with session(url) as probe:
                pid = probe.get_server_pid()
                writing = asyncio.ensure_future(probe.execute("SELECT pg_logical_emit_message(true, 'probe', '')"))
                waits = False
                while not (waits or writing.done()):
                    waits = await operator.fetchval(
                        "SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'SyncRep'", pid
                    )
                if waits:
                    await operator.execute("SELECT pg_terminate_backend($1)", pid)
                await asyncio.gather(writing, return_exceptions=True)
                if waits:
                    return


async def _set_standbys(operator: Any, names: str) -> None:
    await operator.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    await operator.execute("SELECT pg_reload_conf()")

    async def is_set() -> bool:
        found: str = await operator.fetchval("SHOW synchronous_standby_names")
        return found == names

    await eventually(is_set)


async def eventually(happened: Callable[[], Awaitable[object]]) -> None:
    """Look until it has happened."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await happened():
            await SYSTEM_CLOCK.sleep(0.005)


async def once_free(attempt: Callable[[], Awaitable[object]]) -> None:
    """As soon as the dead owner's lease is over."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await attempt()
                return
            except CheckpointConflict:
                await SYSTEM_CLOCK.sleep(0.02)
