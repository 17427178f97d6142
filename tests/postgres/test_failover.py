"""A primary that dies, and the standby that takes its place: what was acknowledged is there, and nothing is done twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from agent_runtime.cli import main
from agent_runtime.errors import CheckpointStoreCorrupt, ReadOnlyStore, RecoveryNeedsDecision, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.seal import KeyRing, open_run
from agent_runtime.journal.store import AnswerKind, CheckpointStore
from agent_runtime.messages import Message, Reply, ToolSpec
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.stores.postgres_link import Link
from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
from agent_runtime.testing.remote import Remote
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.tcp_proxy import TcpProxy
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY
from tests.conftest import NOWHERE
from tests.load import Load, asks, assert_is_there
from tests.postgres.bench import PATIENCE_SECONDS, kinds, land, opened
from tests.processes.job import Job, until
from tests.servers import Server, free_port, own_origins, start

OK, FENCED, MOVED, UNKNOWN = AnswerKind
WAITING = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


class Pair:
    """A primary, and a standby that its commits wait for."""

    def __init__(self, primary: Server, standby: Server) -> None:
        self.primary, self.standby = primary, standby

    @property
    def url(self) -> str:
        """Both, as a worker is given them."""
        return f"postgresql://postgres@127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}/postgres"


@contextmanager
def started_pair() -> Iterator[Pair]:
    primary = start(next(iter(own_origins()), NOWHERE))
    try:
        with primary.standby() as standby:
            primary.wait_for_standbys("*")
            yield Pair(primary, standby)
    finally:
        primary.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two servers of this test alone: the primary dies."""
    with started_pair() as own:
        yield own


@pytest.fixture(scope="module")
def lasting() -> Iterator[Pair]:
    """Two that several tests use, and nobody kills."""
    with started_pair() as shared:
        yield shared


async def asks_thrice(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
    return asks(messages, 3)


@pytest.mark.parametrize("driver", ["", "psycopg"])
async def test_no_acknowledged_record_is_lost_when_the_primary_dies_under_load_and_every_run_ends_once(
    pair: Pair, driver: str
) -> None:
    async with store_at(pair, driver) as store, closing(PostgresCheckpointStore(pair.standby.url)) as later:
        load = Load(store)
        running = load.start()
        await load.is_under_way()
        with pair.standby.receiving_late():
            await asyncio.to_thread(pair.primary.until, f"SELECT count(*) > 0 {WAITING}")
            pair.primary.kill()
        before = list(load.store.acknowledged)
        await asyncio.to_thread(pair.standby.promote)
        await assert_is_there(later, before)
        await load.assert_ended_once(running, later)


async def renew_for_ever(store: CheckpointStore, draft: Draft) -> None:
    """Until its session has heard of the setting."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            await store.renew(draft.run_id, guard=draft.guard)


@asynccontextmanager
async def closing(store: CheckpointStore) -> AsyncIterator[CheckpointStore]:
    yield store
    await store.close()


@asynccontextmanager
async def store_at(pair: Pair, driver: str = "", timeout_seconds: float = 5.0) -> AsyncIterator[CheckpointStore]:
    """A store that is given both servers; by SQLAlchemy, if a driver of its is named."""
    url, _, most = pair.url.partition("@")
    hosts, _, database = most.partition("/")
    both = "&".join(f"host={host}" for host in hosts.split(","))
    by_engine = f"{url.replace(':', f'+{driver}:', 1)}@/{database}?{both}&target_session_attrs=read-write"
    store: CheckpointStore = PostgresCheckpointStore(pair.url, timeout_seconds=timeout_seconds)
    if driver:
        store = SQLAlchemyCheckpointStore(by_engine, timeout_seconds=timeout_seconds)
    yield store
    await store.close()


@pytest.mark.parametrize("driver", ["", "psycopg"])
async def test_what_a_dead_standby_never_had_counts_for_nothing_although_it_can_be_read(pair: Pair, driver: str) -> None:
    """A commit that waits for the standby is visible once it is interrupted, and the standby never had it."""
    async with store_at(pair, driver, timeout_seconds=0.5) as store:
        draft = await opened(store)
        await asyncio.to_thread(pair.standby.fall_behind)
        append, message = draft.add(b"on the primary alone"), draft.message()
        committing = asyncio.ensure_future(store.commit([append]))
        await asyncio.to_thread(pair.primary.until, f"SELECT count(*) = 1 {WAITING}")
        pair.primary.sql(f"SELECT pg_terminate_backend(pid) {WAITING}")
        assert kinds(await committing) == [UNKNOWN]
        assert pair.primary.sql("SELECT max(number) FROM agent_runtime_runs") == "2", "everybody sees it"
        with pytest.raises(StoreUnavailable, match="synchronous_standby_names"):
            await store.latest(draft.run_id)
        assert kinds([*await store.commit([append]), await store.post(draft.run_id, message)]) == [UNKNOWN] * 2
        assert (await store.post(draft.run_id, message)).kind is UNKNOWN, "it was posted before, on the primary alone"
        posting = asyncio.ensure_future(store.post(draft.run_id, draft.message(b"another")))
        await asyncio.to_thread(pair.primary.until, f"SELECT count(*) = 1 {WAITING}")
        pair.primary.sql(f"SELECT pg_cancel_backend(pid) {WAITING}")
        assert (await posting).kind is UNKNOWN, "the server says that it did it, and warns"
        pair.primary.kill()
        await asyncio.to_thread(pair.standby.promote)
        run = await store.latest(draft.run_id)
        assert run is not None
        assert (run.row.head, run.row.posted) == (draft.row.head, 0)
        assert (await store.post(draft.run_id, message)).kind is OK
        await land(store, draft, append)


async def test_of_several_hosts_the_one_that_can_be_written_is_found_although_another_hangs_or_is_a_replica(
    lasting: Pair,
) -> None:
    async with TcpProxy("127.0.0.1", lasting.primary.port) as hangs:
        hangs.partition()
        hosts = (hangs.port, lasting.standby.port, free_port(), lasting.primary.port)
        url = f"postgresql://postgres@{','.join(f'127.0.0.1:{port}' for port in hosts)}/postgres"
        store = PostgresCheckpointStore(url, timeout_seconds=0.3)
        draft = await opened(store)
        await land(store, draft, draft.add(b"one"))
        assert isinstance(store._link, Link)
        assert store._link._urls[0] == lasting.primary.url, "it is asked first from now on"
        await store.close()


@pytest.mark.parametrize("asked", ["", "?target_session_attrs=read-write"])
async def test_replicas_alone_are_refused_and_a_replica_beside_a_server_that_is_away_is_waited_for(
    lasting: Pair, asked: str
) -> None:
    url = f"{lasting.url}{asked}"
    replicas = PostgresCheckpointStore(url.replace(f":{lasting.primary.port}", f":{lasting.standby.port}"))
    with pytest.raises(ReadOnlyStore, match="is a read replica, and a store is written; name the primary server"):
        await replicas.list_runs()
    await replicas.close()
    one_away = PostgresCheckpointStore(url.replace(f":{lasting.primary.port}", f":{free_port()}"))
    with pytest.raises(StoreUnavailable, match=r"none takes writes now: .*does not answer.*; .*is a read replica"):
        await one_away.list_runs()
    await one_away.close()


async def test_a_primary_that_became_read_only_under_an_open_store_has_written_nothing_and_says_so(lasting: Pair) -> None:
    async with store_at(lasting) as both, closing(PostgresCheckpointStore(lasting.primary.url)) as alone:
        draft = await opened(both, "read-only")
        await alone.latest(draft.run_id)
        append = draft.add(b"one")
        lasting.primary.sql("ALTER SYSTEM SET default_transaction_read_only = on")
        lasting.primary.sql("SELECT pg_reload_conf()")
        for store, said in ((alone, ReadOnlyStore), (both, StoreUnavailable)):
            with pytest.raises(said, match=r"cannot be written \(cannot execute .* in a read-only transaction\)"):
                await renew_for_ever(store, draft)
            with pytest.raises((ReadOnlyStore, StoreUnavailable)):
                await store.commit([append])
        lasting.primary.sql("ALTER SYSTEM RESET default_transaction_read_only")
        lasting.primary.sql("SELECT pg_reload_conf()")
        await asyncio.to_thread(lasting.primary.until, "SELECT NOT current_setting('transaction_read_only')::boolean")
        assert kinds(await both.commit([append])) == [OK]
        await land(alone, draft.after(append), draft.after(append).add(b"two"))


# A standby that nobody waited for.


async def test_an_owner_whose_acknowledged_writes_a_failover_lost_stops_as_corrupt_and_starts_nothing_further(
    pair: Pair,
) -> None:
    pair.primary.wait_for_standbys("")
    remote, registry = Remote(), ToolRegistry()

    @registry.tool
    async def charge(n: int) -> str:
        receipt = await remote.act("charge", {"n": n})
        if n == 1:
            await in_step(pair)
            await asyncio.to_thread(pair.standby.fall_behind)
        if n == 2:
            pair.primary.kill()
            await asyncio.to_thread(pair.standby.promote)
        return receipt.result

    async with store_at(pair) as store:
        with pytest.raises(CheckpointStoreCorrupt):
            await run_tool_loop(
                asks_thrice, registry, "go", run_id="run-1", checkpoints=store, checkpoint_key=KEY, commits="each"
            )
        assert remote.count() == 3, "nothing further was started"
        [run] = await store.load_many([RunId("run-1")])
        assert run is not None
        open_run(KeyRing.of(KEY), run, tenant="")  # an older state of it, which is whole
        with pytest.raises(RecoveryNeedsDecision):
            await recover_tool_loop(asks_thrice, registry, "run-1", checkpoints=store, checkpoint_key=KEY)
        assert remote.count() == 3, "what it did before is not done again by itself"


async def test_the_owner_of_a_run_that_a_failover_lost_whole_is_told_that_it_has_none(pair: Pair) -> None:
    pair.primary.wait_for_standbys("")
    async with store_at(pair) as store:
        await opened(store, "kept")
        await in_step(pair)
        await asyncio.to_thread(pair.standby.fall_behind)
        draft = await opened(store, "lost")
        pair.primary.kill()
        await asyncio.to_thread(pair.standby.promote)
        append = draft.add(b"one")
        answers = kinds(await store.commit([append]))
        if answers == [UNKNOWN]:  # over the connection to the server that is gone
            answers = kinds(await store.commit([append]))
        assert answers == [FENCED]
        assert [row.run_id for row in await store.list_runs()] == ["kept"]


async def in_step(pair: Pair) -> None:
    """Wait until the standby has what the primary has."""
    place = pair.primary.sql("SELECT pg_current_wal_lsn()")
    await asyncio.to_thread(pair.standby.until, f"SELECT pg_last_wal_replay_lsn() >= '{place}'")


# Processes.


def test_a_supervisor_and_the_workers_it_starts_go_on_with_the_standby(pair: Pair, tmp_path: Path) -> None:
    job = Job(tmp_path, url=pair.url)
    assert job.run(RUN_ID="before", CRASH_AT="after_call").code == 1
    with job.started(module=("agent_runtime.supervisor", "--json"), LEASE="12", POLL="3", HEARTBEAT="3") as supervisor:
        supervisor.wait_for('"worker-exited"')
        pair.primary.kill()
        supervisor.wait_for('"store-away"')
        pair.standby.promote()
        supervisor.wait_for('"store-back"')
        assert job.run(RUN_ID="after", CRASH_AT="after_call").code == 1
        until(lambda: supervisor.out.read_text().count('"worker-exited"') == 2, "the other run is worked too")
    ended = pair.standby.sql("SELECT run_id, status FROM agent_runtime_runs ORDER BY run_id").splitlines()
    assert ended == [f"after|{RunStatus.DONE:d}", f"before|{RunStatus.DONE:d}"]
    assert job.saw().kinds == {"server": 2, "database": 2, "dns_record": 2}


def test_the_doctor_says_what_a_failover_keeps(lasting: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(url: str) -> tuple[str, str]:
        assert main(["doctor", "--json", "--store", url]) == 0
        facts = json.loads(capsys.readouterr().out)
        return facts["failover"], " ".join(facts["warnings"])

    stranger = lasting.primary.url_as(lasting.primary.user())
    assert told(lasting.url)[0] == "protected: commits wait for '*', 1 connected"
    assert "standby" not in told(lasting.url)[1]
    assert told(stranger)[0] == "protected by a standby, if one of '*' is connected"
    assert told(lasting.standby.url)[0] == "cannot be told"
    assert "is a read replica" in told(lasting.standby.url)[1]
    try:
        lasting.primary.wait_for_standbys("")
        assert told(lasting.url)[0] == "not protected: no commit waits for a standby, 1 connected"
        assert "1 standby(s) that no commit waits for" in told(lasting.url)[1]
        lasting.primary.wait_for_standbys("nobody", is_there=False)
        assert told(lasting.url)[0] == "stands still: commits wait for 'nobody', none connected"
        assert "writes stay unknown until one is" in told(lasting.url)[1]
    finally:
        lasting.primary.wait_for_standbys("*")
