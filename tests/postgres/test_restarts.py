"""What an operator does to a server under running work: restarts it, sets limits, runs out of sessions. No run is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from time import monotonic

import pytest

from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.errors import CheckpointConflict, RecoveryNeedsDecision, StoreRefused, StoreUnavailable
from agent_runtime.journal.records import RunStatus
from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.stores.postgres_link import Link
from agent_runtime.testing.remote import Remote
from agent_runtime.tool_loop import LoopResult, recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY
from tests.conftest import NOWHERE
from tests.postgres.bench import session
from tests.servers import Server, free_port, fresh_schema, own_origins, start

RUNS = 5
OURS = "FROM pg_stat_activity WHERE application_name = 'agent-runtime'"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One of this module alone: it is stopped."""
    own = start(next(iter(own_origins()), NOWHERE))
    yield own
    own.close()


class Work:
    """Runs of one call each, which all wait in it, or before it in the model, until they are let go."""

    def __init__(self, store: PostgresCheckpointStore, *, waits_in: str = "tool") -> None:
        self.store = store
        self.remote = Remote()
        self.waiting = 0
        self._waits_in = waits_in
        self._go = asyncio.Event()
        self.registry = ToolRegistry()

        @self.registry.tool
        async def mail(to: str) -> str:
            receipt = await self.remote.act("mail", {"to": to})
            if waits_in == "tool":
                await self._wait()
            return receipt.result

    async def model(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        if messages[-1].role == "tool":
            return Reply("sent")
        if self._waits_in == "model":
            await self._wait()
        return Reply(tool_calls=[ToolCall("a", "mail", {"to": "ana"})])

    def let_go(self) -> None:
        self._go.set()

    async def all_wait(self, many: int = RUNS) -> None:
        async with asyncio.timeout(20):
            while self.waiting < many:
                await SYSTEM_CLOCK.sleep(0.005)

    def run(self, run_id: str, **options: float) -> Awaitable[LoopResult]:
        terms = {"lease_seconds": 12.0, "heartbeat_seconds": 3.0, **options}
        return run_tool_loop(
            self.model, self.registry, "go", run_id=run_id, checkpoints=self.store, checkpoint_key=KEY,
            lease_seconds=terms["lease_seconds"], heartbeat_seconds=terms["heartbeat_seconds"],
        )  # fmt: skip

    def start_all(self, **options: float) -> asyncio.Future[list[LoopResult]]:
        return asyncio.gather(*(self.run(f"run-{i}", **options) for i in range(RUNS)))

    def recover(self, run_id: str) -> Awaitable[LoopResult]:
        return recover_tool_loop(self.model, self.registry, run_id, checkpoints=self.store, checkpoint_key=KEY)

    async def _wait(self) -> None:
        self.waiting += 1
        await self._go.wait()


@pytest.fixture
async def store(server: Server) -> AsyncIterator[PostgresCheckpointStore]:
    async with fresh_schema(server.url) as schema:
        store = PostgresCheckpointStore(server.url, schema=schema)
        yield store
        await store.close()


async def until_it_is_missed(store: PostgresCheckpointStore) -> None:
    """From now on the store is refused a session, and is in no doubt about a statement."""
    assert isinstance(store._link, Link)
    async with asyncio.timeout(20):
        while not all(connection.is_closed() for connection in store._link._idle):
            await SYSTEM_CLOCK.sleep(0.005)


async def assert_all_done(work: Work, results: list[LoopResult], *, epoch: int = 1) -> None:
    assert [result.status for result in results] == ["done"] * RUNS
    assert work.remote.count() == RUNS
    rows = await work.store.list_runs(status=RunStatus.DONE)
    assert [row.epoch for row in rows] == [epoch] * RUNS


@pytest.mark.parametrize("waits_in", ["model", "tool"])
@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_server_that_is_away_for_a_while_under_running_work_ends_no_run(
    server: Server, store: PostgresCheckpointStore, waits_in: str, how: str
) -> None:
    work = Work(store, waits_in=waits_in)
    running = work.start_all()
    await work.all_wait()
    (server.stop if how == "stopped" else server.kill)()
    await until_it_is_missed(store)
    work.let_go()
    await asyncio.wait([running], timeout=1.0)
    assert not running.done(), "each waits for its server"
    server.start()
    await assert_all_done(work, await asyncio.wait_for(running, 20))


async def test_a_server_that_stays_away_is_given_up_before_the_lease_ends_and_the_runs_recover(
    server: Server, store: PostgresCheckpointStore
) -> None:
    work = Work(store, waits_in="model")
    running = asyncio.gather(
        *(work.run(f"run-{i}", lease_seconds=1.5, heartbeat_seconds=0.5) for i in range(RUNS)), return_exceptions=True
    )
    await work.all_wait()
    server.stop()
    await until_it_is_missed(work.store)
    began = monotonic()
    work.let_go()
    endings = await asyncio.wait_for(running, 20)
    assert monotonic() - began < 1.5
    assert {type(ending) for ending in endings} == {StoreUnavailable}
    assert work.remote.count() == 0, "what was not written down is not done"
    server.start()
    results = await asyncio.gather(*(_once_free(work, f"run-{i}") for i in range(RUNS)))
    await assert_all_done(work, results, epoch=2)


async def _once_free(work: Work, run_id: str) -> LoopResult:
    async with asyncio.timeout(20):
        while True:
            try:
                return await work.recover(run_id)
            except (CheckpointConflict, StoreUnavailable):
                await SYSTEM_CLOCK.sleep(0.05)


async def test_a_run_that_cannot_be_begun_says_so_soon() -> None:
    store = PostgresCheckpointStore(f"postgresql://postgres@127.0.0.1:{free_port()}/postgres")
    began = monotonic()
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await Work(store).run("run-0")
    assert monotonic() - began < 3
    await store.close()


async def test_a_right_that_is_taken_away_under_running_work_is_said_at_once(server: Server) -> None:
    user = server.user()
    server.sql(f"CREATE SCHEMA {user} AUTHORIZATION {user}")
    store = PostgresCheckpointStore(server.url_as(user), schema=user)
    work = Work(store)
    running = asyncio.ensure_future(work.run("run-0"))
    await work.all_wait(1)
    server.sql(f"REVOKE INSERT ON {user}.agent_runtime_journal FROM {user}")
    began = monotonic()
    work.let_go()
    with pytest.raises(StoreRefused, match="permission denied"):
        await running
    assert monotonic() - began < 3
    await store.close()


# Sessions.


@pytest.mark.parametrize("waits_in", ["model", "tool"])
async def test_while_a_model_or_a_tool_works_no_session_is_busy_or_in_a_transaction(
    server: Server, store: PostgresCheckpointStore, waits_in: str
) -> None:
    work = Work(store, waits_in=waits_in)
    running = work.start_all()
    await work.all_wait()
    async with session(server.url) as watcher:
        async with asyncio.timeout(20):  # the last commit may still be on its way back
            while await watcher.fetchval(f"SELECT count(*) {OURS} AND state <> 'idle'"):
                await SYSTEM_CLOCK.sleep(0.005)
        states = [row["state"] for _ in range(20) for row in await watcher.fetch(f"SELECT state {OURS}")]
    assert set(states) == {"idle"}
    assert len(states) <= 20 * 8, "few sessions are enough for many runs"
    work.let_go()
    await assert_all_done(work, await running)


async def test_sessions_that_the_server_ends_for_being_idle_cost_no_run(server: Server) -> None:
    user = server.user(options="SUPERUSER")
    server.sql(f"ALTER ROLE {user} SET idle_session_timeout = '150ms'")
    server.sql(f"ALTER ROLE {user} SET idle_in_transaction_session_timeout = '150ms'")
    async with fresh_schema(server.url) as schema:
        store = PostgresCheckpointStore(server.url_as(user), schema=schema)
        work = Work(store, waits_in="model")
        running = work.start_all()
        await work.all_wait()
        async with session(server.url) as watcher, asyncio.timeout(20):
            while await watcher.fetchval(f"SELECT count(*) {OURS} AND usename = '{user}'"):
                await SYSTEM_CLOCK.sleep(0.01)
        work.let_go()
        await assert_all_done(work, await running)
        await store.close()


async def test_a_server_without_a_free_session_is_waited_for(server: Server) -> None:
    user = server.user()
    server.sql(f"CREATE SCHEMA {user} AUTHORIZATION {user}")
    store = PostgresCheckpointStore(server.url_as(user), schema=user)
    work = Work(store)
    running = work.start_all()
    await work.all_wait()
    server.sql(f"ALTER ROLE {user} CONNECTION LIMIT 0")
    server.terminate_backends(user=user)
    await until_it_is_missed(store)
    work.let_go()
    await asyncio.wait([running], timeout=0.5)
    assert not running.done()
    server.sql(f"ALTER ROLE {user} CONNECTION LIMIT -1")
    await assert_all_done(work, await running)
    await store.close()


# Clocks.


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_clock_of_the_server_that_jumps_lets_a_run_be_taken_early_and_nothing_is_lost_or_done_twice(
    server: Server, store: PostgresCheckpointStore, hours: int
) -> None:
    work = Work(store)
    running = asyncio.ensure_future(work.run("run-0"))
    await work.all_wait(1)
    # What the owner's last beat looks like once the clock has jumped by so much.
    await store._link.write(
        lambda db: db.execute(f"UPDATE {store._sql.table('runs')} SET heartbeat_at = heartbeat_at - {hours * 3_600_000_000}")
    )
    with pytest.raises(RecoveryNeedsDecision):
        await work.recover("run-0")
    work.let_go()
    with pytest.raises(CheckpointConflict, match="this worker has stopped"):
        await running
    assert work.remote.count() == 1
    [row] = await store.list_runs()
    assert (row.status, row.epoch) == (RunStatus.BLOCKED, 2)
