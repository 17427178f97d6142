"""Messages in Postgres are heard through one session, whatever becomes of it, and behind a pooler without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_runtime import doorbell as doorbells
from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.doorbell import doorbell
from agent_runtime.errors import StoreUnavailable
from agent_runtime.ids import MAX_RUN_ID, RunId
from agent_runtime.journal.store import CheckpointStore, Ear
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.stores.postgres_link import Held, Link
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.tcp_proxy import TcpProxy
from tests.conftest import NOWHERE, Servers
from tests.postgres.bench import fresh_store, opened, session
from tests.processes.posting import post_elsewhere
from tests.servers import Pooler, Server, fresh_schema, own_origins, start

SECONDS = 40
LISTENING = "FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"


@pytest.fixture(autouse=True)
def _brief_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbells, "LINGER_SECONDS", 0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One of this module alone: it is stopped, and its sessions are counted."""
    own = start(next(iter(own_origins()), NOWHERE))
    yield own
    own.close()


@pytest.fixture(scope="module")
def pooled(servers: Servers) -> Iterator[tuple[Server, Pooler]]:
    behind = servers(next(iter(own_origins()), NOWHERE))
    before = Pooler(behind)
    yield behind, before
    before.close()


@asynccontextmanager
async def waiting_for(store: CheckpointStore, *run_ids: str, seen: int = 0) -> AsyncIterator[asyncio.Future[list[int]]]:
    """Somebody waits for each of the runs, and each was looked at."""
    bell = doorbell(store)
    waiting = asyncio.gather(*(bell.wait(RunId(run_id), seen=seen) for run_id in run_ids))
    await asyncio.sleep(0)
    async with asyncio.timeout(SECONDS):
        while bell._due:
            await SYSTEM_CLOCK.sleep(0.005)
    try:
        yield waiting
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


def kept_by(store: PostgresCheckpointStore) -> list[Held]:
    """The connections of the store that nobody else is lent."""
    assert isinstance(store._link, Link)
    return store._link._kept


async def post(store: CheckpointStore, draft: Draft, body: bytes = b"approved") -> None:
    await store.post(draft.run_id, draft.message(body))


async def until_count(server: Server, expected: int, what: str = f"SELECT count(*) {LISTENING}") -> None:
    async with session(server.url) as watcher, asyncio.timeout(SECONDS):
        while await watcher.fetchval(what) != expected:
            await SYSTEM_CLOCK.sleep(0.01)


async def test_another_process_that_posts_is_heard(server: Server) -> None:
    async with fresh_schema(server.url) as schema:
        store = PostgresCheckpointStore(server.url, schema=schema)
        draft = await opened(store)
        async with waiting_for(store, draft.run_id) as waiting:
            await post_elsewhere(server.url, draft.run_id, "approved", schema=schema)
            assert await asyncio.wait_for(waiting, SECONDS) == [1]
        await store.close()


async def test_a_thousand_who_wait_share_one_session_and_none_is_left_once_nobody_waits(server: Server) -> None:
    ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'agent-runtime'"
    async with fresh_store(server) as store:
        drafts = [Draft.of(f"run-{i}") for i in range(1000)]
        await store.commit([draft.open() for draft in drafts])
        async with session(server.url) as watcher:
            before = await watcher.fetchval(ours)
            async with waiting_for(store, *(draft.run_id for draft in drafts)) as waiting:
                assert await watcher.fetchval(f"SELECT count(*) {LISTENING}") <= 1, "it may just have asked something else"
                assert await watcher.fetchval(ours) == before + 1
                for draft in drafts:
                    await post(store, draft)
                assert await asyncio.wait_for(waiting, SECONDS) == [1] * 1000
        await until_count(server, before, ours)


async def test_a_run_with_the_longest_of_ids_is_heard(server: Server) -> None:
    async with fresh_store(server) as store:
        draft = await opened(store, "\N{WOMAN}" * MAX_RUN_ID)
        ear = await store.listen(lambda: None)
        await post(store, draft)
        async with asyncio.timeout(SECONDS):
            while not (heard := await ear.heard()):
                await SYSTEM_CLOCK.sleep(0.002)
        assert set(heard) == {draft.run_id}


async def test_messages_to_other_tables_are_not_heard(server: Server) -> None:
    async with fresh_store(server) as one, fresh_store(server) as other, fresh_store(server, prefix="x_") as prefixed:
        rung: list[str] = []
        ears = [await store.listen(lambda: rung.append("")) for store in (one, other, prefixed)]
        draft = await opened(one)
        await opened(other)
        await opened(prefixed)
        await post(one, draft)
        async with asyncio.timeout(SECONDS):
            while not rung:
                await SYSTEM_CLOCK.sleep(0.002)
        await other.now()
        assert [set(await ear.heard() or ()) for ear in ears] == [{draft.run_id}, set(), set()]


async def test_who_rings_without_a_message_tells_nobody_anything(server: Server) -> None:
    async with fresh_store(server) as store:
        draft = await opened(store)
        async with waiting_for(store, draft.run_id) as waiting:
            for payload in (draft.run_id, "", "another", "\N{WOMAN}" * 1900):
                server.sql(f"SELECT pg_notify('{store._sql.channel}', '{payload}')")
            await post(store, draft)
            assert await asyncio.wait_for(waiting, SECONDS) == [1]


async def test_a_message_that_is_taken_back_or_had_come_before_rings_nobody(server: Server) -> None:
    async with fresh_store(server) as store, session(server.url) as other:
        draft = await opened(store)
        await post(store, draft)
        rung: list[str] = []
        ear = await store.listen(lambda: rung.append(""))
        await post(store, draft)
        transaction = other.transaction()
        await transaction.start()
        await post_in(other, store, draft, b"never")
        await transaction.rollback()
        assert await ear.posted([draft.run_id]) == [1], "asked through the session that would have been told by now"
        assert (rung, await ear.heard()) == ([], set())
        await post(store, draft, b"more")
        async with asyncio.timeout(SECONDS):
            while not rung:
                await SYSTEM_CLOCK.sleep(0.002)


# What becomes of the session.


async def test_what_is_posted_while_the_listening_session_is_away_is_told(server: Server) -> None:
    async with fresh_store(server) as store:
        drafts = [await opened(store, f"run-{i}") for i in range(20)]
        async with waiting_for(store, *(draft.run_id for draft in drafts)) as waiting:
            for draft in drafts:
                for kept in kept_by(store):
                    server.sql(f"SELECT pg_terminate_backend({pid_of(kept)})")
                await post(store, draft)
            assert await asyncio.wait_for(waiting, SECONDS) == [1] * 20


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_server_that_is_started_again_is_listened_to_again(server: Server, how: str) -> None:
    async with fresh_schema(server.url) as schema:
        store = PostgresCheckpointStore(server.url, schema=schema)
        first, second = [await opened(store, run_id) for run_id in ("first", "second")]
        async with waiting_for(store, first.run_id) as one, waiting_for(store, second.run_id) as two:
            (server.stop if how == "stopped" else server.kill)()
            server.start()
            poster = store.reopen()
            await post(poster, first)
            assert await asyncio.wait_for(one, SECONDS) == [1]
            assert not two.done()
            await post(poster, second)
            assert await asyncio.wait_for(two, SECONDS) == [1]
            await poster.close()
        await store.close()


async def test_a_message_that_is_posted_while_the_way_to_the_server_is_cut_is_told_once_it_is_not(server: Server) -> None:
    async with fresh_schema(server.url) as schema, TcpProxy("127.0.0.1", server.port) as proxy:
        store = PostgresCheckpointStore(f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres", schema=schema)
        direct = PostgresCheckpointStore(server.url, schema=schema)
        draft = await opened(direct)
        async with waiting_for(store, draft.run_id) as waiting:
            proxy.refuse()
            await post(direct, draft)
            await asyncio.wait([waiting], timeout=0.3)
            assert not waiting.done()
            proxy.heal()
            assert await asyncio.wait_for(waiting, SECONDS) == [1]
        await direct.close()
        await store.close()


async def test_a_server_that_has_fallen_silent_is_noticed_by_the_next_look(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbells, "LOOK_SECONDS", 0.2)
    async with fresh_schema(server.url) as schema, TcpProxy("127.0.0.1", server.port) as proxy:
        url = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres"
        store = PostgresCheckpointStore(url, schema=schema, timeout_seconds=1.0)
        direct = PostgresCheckpointStore(server.url, schema=schema)
        draft = await opened(direct)
        async with waiting_for(store, draft.run_id) as waiting:
            proxy.partition()
            await post(direct, draft)
            await until_lost(store)
            assert not waiting.done()
            proxy.reset()  # what was withheld is never delivered
            proxy.heal()
            assert await asyncio.wait_for(waiting, SECONDS) == [1]
        await direct.close()
        await store.close()


def pid_of(connection: Any) -> int:
    pid: int = connection.get_server_pid()
    return pid


async def until_lost(store: PostgresCheckpointStore) -> None:
    async with asyncio.timeout(SECONDS):
        while kept_by(store):
            await SYSTEM_CLOCK.sleep(0.005)


async def test_a_closed_store_lets_go_of_the_listening_session(server: Server) -> None:
    async with fresh_store(server) as store:
        ear = await store.listen(lambda: None)
        await until_count(server, 1)
        await store.close()
        await until_count(server, 0)
        with pytest.raises(StoreUnavailable, match="listen again"):
            await ear.heard()
        with pytest.raises(StoreUnavailable):
            await ear.posted([RunId("run-1")])
        await ear.close()


# Behind a pooler.


async def test_behind_a_pooler_a_message_is_found_without_a_listening_session(pooled: tuple[Server, Pooler]) -> None:
    server, pooler = pooled
    async with fresh_schema(server.url) as schema:
        store = PostgresCheckpointStore(pooler.url, schema=schema, pooler=True)
        direct = PostgresCheckpointStore(server.url, schema=schema)
        draft = await opened(store)
        listening = int(server.sql(f"SELECT count(*) {LISTENING}"))
        async with waiting_for(store, draft.run_id) as waiting:
            assert int(server.sql(f"SELECT count(*) {LISTENING}")) == listening
            await post(direct, draft)
            assert await asyncio.wait_for(waiting, SECONDS) == [1]
        async with waiting_for(direct, draft.run_id, seen=1) as waiting:
            await post(store, draft, b"through the pooler")
            assert await asyncio.wait_for(waiting, SECONDS) == [2]
        await direct.close()
        await store.close()


async def test_a_poll_finds_a_message_that_becomes_visible_after_a_later_one(server: Server) -> None:
    """The lower id belongs to the transaction that ends last."""
    async with fresh_schema(server.url) as schema, session(server.url) as slow:
        store = PostgresCheckpointStore(server.url, schema=schema, pooler=True)
        late, soon = [await opened(store, run_id) for run_id in ("late", "soon")]
        ear = await store.listen(lambda: None)
        await until_it_can_tell(ear)
        async with slow.transaction():
            await post_in(slow, store, late)
            await post(store, soon)
            assert [await ear.heard() for _ in range(4)] == [{soon.run_id}, set(), set(), set()]
        assert [await ear.heard() for _ in range(3)] == [{late.run_id}, set(), set()]
        await store.close()


async def until_it_can_tell(ear: Ear) -> None:
    """It has to know who writes before it can, and the server may write too."""
    async with asyncio.timeout(SECONDS):
        while await ear.heard() is None:
            await SYSTEM_CLOCK.sleep(0.005)


async def post_in(connection: Any, store: PostgresCheckpointStore, draft: Draft, body: bytes = b"approved") -> None:
    """Post through a connection that may be in a transaction."""
    message = draft.message(body)
    values = (draft.run_id, message.digest, message.kind, message.body, message.seal)
    assert len(await connection.fetch(store._sql["post"], *values)) == 1


async def test_a_poll_that_begins_while_messages_are_on_their_way_has_every_run_looked_at_until_they_came(
    server: Server,
) -> None:
    async with fresh_schema(server.url) as schema, session(server.url) as slow:
        store = PostgresCheckpointStore(server.url, schema=schema, pooler=True)
        late, soon = [await opened(store, run_id) for run_id in ("late", "soon")]
        async with slow.transaction():
            await post_in(slow, store, late)
            await post(store, soon)
            ear = await store.listen(lambda: None)
            assert [await ear.heard() for _ in range(4)] == [None] * 4
        assert await ear.heard() is None
        await until_it_can_tell(ear)
        await post(store, soon, b"again")
        assert await ear.heard() == {soon.run_id}
        await store.close()
