"""Two tenants in one server or folder are strangers, whatever their names: in every verb, with runs of one id."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest

from agent_runtime import Outcome, Runs
from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointStoreCorrupt
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.store import AnswerKind, Append, CheckpointStore
from agent_runtime.testing.store_contract import Draft
from agent_runtime.testing.store_contract.draft import BOB
from agent_runtime.testing.store_contract.witness import land, snapshot, untouched
from agent_runtime.tool_loop import recover_tool_loop
from tests.golden.make import worker_on
from tests.golden.program import KEY, Ask, Tools
from tests.redis_servers import RedisServer
from tests.servers import Server
from tests.tenants.house import PREFIXED, SOME, House

OK, FENCED = AnswerKind.OK, AnswerKind.FENCED
LISTENS_SECONDS = 30.0
NEIGHBOURS = {
    "sqlite": [("t1", "t1%"), ("t1", "T1")],
    "aiosqlite": [("t1", "t1 ")],
    "postgres": [("t1", "t1_"), ("t1", "t1_x")],
    PREFIXED: [("t1_", "t1_x_"), ("", "t1_"), ("t1_", "t11"), ("t1_", "t1_runs"), ("t1", "t1_")],
    "asyncpg": [("t1", "t1_x")],
    "psycopg": [("t1", "t1_x")],
    "redis": [("t1", "t1:"), ("t1", "T1"), ("t1", "t1:store"), ("t1", "t1:x"), ("t-", "t_"), ("t.", "tx"), ("t1:", "t1::")],
}
PAIRS = [(kind, one, other) for kind, pairs in NEIGHBOURS.items() for one, other in pairs]


@pytest.mark.parametrize(("kind", "one", "other"), PAIRS, ids=lambda value: repr(value) if value not in NEIGHBOURS else value)
async def test_tenants_whose_names_look_alike_are_strangers_in_every_verb(
    kind: str, one: str, other: str, tmp_path: Path, one_postgres: Server, redis_server: RedisServer
) -> None:
    house = House(kind, tmp_path, f"h{secrets.token_hex(6)}", one_postgres, redis_server)
    try:
        mine, theirs = house.open(one), house.open(other)
        await strangers(mine, theirs, "run")
        await strangers(theirs, mine, "the other way round")
    finally:
        await house.close()


async def strangers(mine: CheckpointStore, theirs: CheckpointStore, run_id: str) -> None:
    """What one does with a run, and with all runs, is nothing to the other, who has a run of the same id."""
    own, foreign = Draft.of(run_id), Draft.of(run_id)
    own = await land(mine, own, own.open(b"mine", checkpoint=b"my state"))
    assert await theirs.load_many([own.run_id]) == [None]
    for listed in (theirs.list_runs(), theirs.list_unfinished(), theirs.list_recent()):
        assert run_id not in {row.run_id for row in await listed}
    assert (await theirs.post(own.run_id, own.message())).kind is FENCED
    assert (await theirs.renew(own.run_id, guard=own.guard)).kind is FENCED
    assert (await theirs.delete(own.run_id, guard=own.guard)).kind is FENCED
    assert [answer.kind for answer in await theirs.commit([own.add(b"one"), own.claim(BOB)])] == [FENCED, FENCED]

    foreign = await land(theirs, foreign, foreign.open(b"theirs"))
    async with untouched(mine, own.run_id):
        foreign = await land(theirs, foreign, foreign.step_on(b"one", checkpoint=b"their state"))
        assert (await theirs.post(foreign.run_id, foreign.message(b"for them"))).kind is OK
        foreign = await land(theirs, foreign, foreign.claim(BOB))
        assert (await theirs.renew(foreign.run_id, guard=own.guard)).kind is FENCED
    await hear_their_own(mine, theirs, run_id)
    async with untouched(theirs, foreign.run_id):
        assert (await mine.delete(own.run_id, guard=own.guard)).kind is OK
        again = Draft.of(run_id).open(b"again")
        assert [answer.kind for answer in await mine.commit([again])] == [FENCED]
    assert run_id not in {row.run_id for row in await theirs.list_runs(status=RunStatus.DELETED)}
    foreign = await land(theirs, foreign, foreign.end())
    assert run_id in {row.run_id for row in await theirs.list_recent(status=RunStatus.DONE)}
    assert await mine.list_recent(status=RunStatus.DONE) == await mine.list_recent(status=RunStatus.FAILED) == []
    assert (await theirs.delete(foreign.run_id, guard=foreign.guard)).kind is OK


async def hear_their_own(mine: CheckpointStore, theirs: CheckpointStore, run_id: str) -> None:
    """A message to one tenant's run wakes nobody who listens for the other's."""
    to_me, to_them = Draft.of(f"me {run_id}"), Draft.of(f"them {run_id}")
    to_me, to_them = await land(mine, to_me, to_me.open()), await land(theirs, to_them, to_them.open())
    ear = await theirs.listen(lambda: None)
    try:
        first = await ear.heard()
        await mine.post(to_me.run_id, to_me.message())
        await theirs.post(to_them.run_id, to_them.message())
        assert await ear.posted([to_me.run_id, to_them.run_id]) == [None, 1]
        heard = set(first or ())
        give_up_at = SYSTEM_CLOCK.monotonic() + LISTENS_SECONDS
        while to_them.run_id not in heard:
            found = await ear.heard()
            heard |= {to_them.run_id} if found is None else set(found)
            assert SYSTEM_CLOCK.monotonic() < give_up_at
            await asyncio.sleep(0.005)
        assert to_me.run_id not in heard
    finally:
        await ear.close()
    for store, draft in ((mine, to_me), (theirs, to_them)):
        assert (await store.delete(draft.run_id, guard=draft.guard)).kind is OK


# A run is sealed for its tenant.


@pytest.mark.parametrize("house", SOME, indirect=True)
async def test_a_run_that_was_copied_to_another_tenant_is_refused_there_as_corrupt(house: House) -> None:
    store, theirs = house.open("t1"), house.open("t2")
    tools, dying = Tools(), worker_on(store)
    options = {"checkpoint_key": KEY, "ctx": None, "tenant": "t1"}
    await dying.killed_at(CrashPoint.AFTER_DECIDE).run_and_die(Ask("send"), tools.registry, "run", **options)
    await dying.inner.close()
    [run] = await store.load_many([RunId("run")])
    assert run is not None
    assert run.row.step == 0, "as a run begins"
    for run_row in (run.row, run.row._replace(tenant="t2")):
        copy = Append(run_row._replace(run_id=RunId("run")), None, run.records, run.checkpoint)
        place = house.open(f"t{2 if run_row is run.row else 3}")
        assert [answer.kind for answer in await place.commit([copy])] == [OK]
        await refused_everywhere(place, tools)
    assert tools.acted.total() == 0
    assert [verified.holds async for verified in Runs(store, checkpoint_key=KEY, tenant="t1").verify_each()] == [True]
    assert len(await theirs.list_runs()) == 1


async def refused_everywhere(place: CheckpointStore, tools: Tools) -> None:
    runs = Runs(place, checkpoint_key=KEY, tenant="t2")
    before = await snapshot(place, RunId("run"))
    [info] = await runs.list()
    assert (info.status, info.kind, info.step) == ("corrupt", "", 0)
    [verified] = await runs.verify()
    assert not verified.holds
    for verb in (
        runs.show("run"), runs.pending("run"), runs.cancel("run", by="eve"), runs.delete("run", by="eve"),
        runs.settle("run", "0", Outcome.done(1), by="eve", why="x"),
        recover_tool_loop(Ask("send"), tools.registry, "run", checkpoints=place, checkpoint_key=KEY, tenant="t2"),
    ):  # fmt: skip
        with pytest.raises(CheckpointStoreCorrupt):
            await verb
    assert await snapshot(place, RunId("run")) == before
