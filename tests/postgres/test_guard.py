"""The guard on a real server, in interleavings that let a fenced owner's write through where it is a sub-query."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from agent_runtime.journal.store import Append
from agent_runtime.stores.postgres import PostgresCheckpointStore
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.draft import BOB
from tests.postgres.bench import fresh_store, opened, session, until_blocked
from tests.servers import Server, fresh_schema


class Ending(NamedTuple):
    """What became of an owner's confirm and another worker's claim, both guarded by the same row."""

    confirmed: bool
    claimed: bool
    records: int


class Stage:
    """Two sessions with open transactions, one for each writer, and one that looks on."""

    def __init__(self, store: PostgresCheckpointStore, draft: Draft, confirm: Any, claim: Any, watcher: Any) -> None:
        self.store = store
        self.confirm, self.claim, self.watcher = confirm, claim, watcher
        self.confirmation, self.claiming = draft.add(b"confirmed"), draft.claim(BOB)
        self._keys = {draft.run_id: store._keys[draft.run_id]}

    async def write(self, connection: Any, append: Append) -> bool:
        """The store's own statement, in the transaction that is open on that connection; whether it landed."""
        return bool(await self.store._write_batch(connection, [append], self._keys))

    async def held_up(self, connection: Any, append: Append) -> asyncio.Task[bool]:
        """The same, begun, and waiting for a lock."""
        task = asyncio.create_task(self.write(connection, append))
        await until_blocked(self.watcher, connection.get_server_pid())
        return task


async def the_confirm_comes_first(on: Stage) -> tuple[bool, bool]:
    await on.confirm.execute("BEGIN")
    confirmed = await on.write(on.confirm, on.confirmation)
    await on.claim.execute("BEGIN")
    claiming = await on.held_up(on.claim, on.claiming)
    await on.confirm.execute("COMMIT")
    claimed = await claiming
    await on.claim.execute("COMMIT")
    return confirmed, claimed


async def the_claim_comes_first(on: Stage) -> tuple[bool, bool]:
    await on.claim.execute("BEGIN")
    claimed = await on.write(on.claim, on.claiming)
    await on.confirm.execute("BEGIN")
    confirming = await on.held_up(on.confirm, on.confirmation)
    await on.claim.execute("COMMIT")
    confirmed = await confirming
    await on.confirm.execute("COMMIT")
    return confirmed, claimed


async def the_confirm_is_blocked_before_the_claim(on: Stage) -> tuple[bool, bool]:
    """The confirm waits, over its old view of the row, for a heartbeat whose transaction then claims."""
    await on.claim.execute("BEGIN")
    await on.claim.execute(f"UPDATE {on.store._sql.table('runs')} SET heartbeat_at = heartbeat_at + 1")
    confirming = await on.held_up(on.confirm, on.confirmation)
    claimed = await on.write(on.claim, on.claiming)
    await on.claim.execute("COMMIT")
    return await confirming, claimed


Interleaving = Callable[[Stage], Awaitable[tuple[bool, bool]]]
INTERLEAVINGS = [the_confirm_comes_first, the_claim_comes_first, the_confirm_is_blocked_before_the_claim]


async def play(interleaving: Interleaving, server: Server, store: PostgresCheckpointStore) -> Ending:
    draft = await opened(store)
    async with session(server.url) as confirm, session(server.url) as claim, session(server.url) as watcher:
        confirmed, claimed = await interleaving(Stage(store, draft, confirm, claim, watcher))
    return Ending(confirmed, claimed, len(await store.calls(draft.run_id)))


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
async def test_of_a_confirm_and_a_claim_over_one_row_the_first_lands_alone(
    interleaving: Interleaving, postgres: Server
) -> None:
    async with fresh_store(postgres) as store:
        found = await play(interleaving, postgres, store)
    is_first = interleaving is the_confirm_comes_first
    assert found == Ending(confirmed=is_first, claimed=not is_first, records=2)


class GuardsBySubQuery(PostgresCheckpointStore):
    """Planted: looks at the row to guard a write, instead of letting the update itself look."""

    def plant(self) -> None:
        self._sql.appends = [self._planted(text, "$1::int8") for text in self._sql.appends]
        self._sql._sql["append_batch"] = self._planted(self._sql["append_batch"], "r.key")

    def _planted(self, text: str, key: str) -> str:
        start = text.index("u.epoch = ", text.rindex("WHERE u.key = "))
        end = text.index("RETURNING", start)
        guard = text[start:end].replace("u.", "x.")
        runs = self._sql.table("runs")
        return f"{text[:start]}EXISTS (SELECT FROM {runs} x WHERE x.key = {key} AND {guard})\n    {text[end:]}"


@pytest.mark.parametrize("interleaving", INTERLEAVINGS)
async def test_a_guard_by_sub_query_lets_both_through_which_these_tests_see(
    interleaving: Interleaving, postgres: Server
) -> None:
    async with fresh_schema(postgres.url) as schema:
        store = GuardsBySubQuery(postgres.url, schema=schema)
        await store.now()
        postgres.sql(f"DROP INDEX {schema}.agent_runtime_numbers")  # a second fence, which would hide the first one's hole
        store.plant()
        found = await play(interleaving, postgres, store)
        await store.close()
    assert found == Ending(confirmed=True, claimed=True, records=3)


async def test_two_batches_over_the_same_runs_never_wait_for_each_other_in_a_ring(postgres: Server) -> None:
    async with fresh_store(postgres) as store:
        drafts = [await opened(store, f"run-{i:02}") for i in range(40)]
        before = deadlocks(postgres)
        others = [store.reopen() for _ in range(3)]
        for i in range(10):
            forks = [[draft.add(b"%d of %d" % (i, j)) for draft in drafts] for j in range(4)]
            for fork in forks[::2]:
                fork.reverse()
            answers = await asyncio.gather(*(each.commit(f) for each, f in zip([store, *others], forks, strict=True)))
            landed = {append.row.run_id: append for fork, told in zip(forks, answers, strict=True)
                      for append, answer in zip(fork, told, strict=True) if answer.kind.value == "ok"}  # fmt: skip
            assert len(landed) == len(drafts)
            drafts = [draft.after(landed[draft.run_id]) for draft in drafts]
        assert deadlocks(postgres) == before
        for other in others:
            await other.close()


def deadlocks(server: Server) -> str:
    return server.sql("SELECT pg_stat_clear_snapshot(), deadlocks FROM pg_stat_database WHERE datname = 'postgres'")
