"""Picking a run up: who may, what is decided first, what each state of a run leads to, and what changes nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import (
    AgentRuntimeError,
    CheckpointConflict,
    CheckpointNotFound,
    CheckpointStoreCorrupt,
    Doubt,
    IdentityMismatch,
    RecoveryNeedsDecision,
)
from agent_runtime.ids import RunId
from agent_runtime.journal.journal import guard_of
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus, StoredRecord, StoredRow, StoredRun
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.store import Answer, AnswerKind, Append
from agent_runtime.run import Backing, RunContext, start
from agent_runtime.telemetry import HistorySink
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.store_contract.witness import untouched
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY, RING, Asked, Bench, NoHeartbeat, Place, Script, Worker, error_of, results_in, until
from tests.journal.genuine import Showing

CALL: list[Asked] = [("charge_i", {"amount": 1})]
CHARGE: list[Asked] = [("charge", {"amount": 1})]
ID = RunId("run")


async def abandoned(place: Place, bench: Bench, model: Script, **options: Any) -> None:
    """A run whose worker died in its first call."""
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(model, bench.registry, **options)


async def rewrite(place: Place, status: RunStatus, **changes: Any) -> None:
    """Append to a run, genuinely sealed, what moves it to another status."""
    store = place.open()
    [run] = await store.load_many([ID])
    assert run is not None
    sealer, row = sealer_for(RING, tenant="", run_id=ID), run.row
    kind = RecordKind.QUARANTINED if status is RunStatus.QUARANTINED else RecordKind.RELEASED
    number = row.number + 1
    seal = sealer.record(number, row.epoch, kind, "", 0, row.head, b"{}")
    wished = row._replace(status=status, owner=NO_OWNER, number=number, head=seal, **changes)
    wished = wished._replace(seal=sealer.row(wished))
    record = StoredRecord(number, row.epoch, kind, "", 0, b"{}", seal)
    [answer] = await store.commit([Append(wished, guard_of(row), (record,))])
    assert answer.kind is AnswerKind.OK


async def test_a_run_whose_messages_this_version_does_not_read_is_let_go_by_whoever_picked_it_up(place: Place) -> None:
    given = {"messages": [{"role": "oracle", "content": "go"}]}
    run = start(Backing(place.open(), RING), ID, kind="loop", name="", context=None, given=given)
    await run.barrier()
    run.let_go()
    error = await error_of(Worker(place).recover(Script("done"), ToolRegistry(), take_over=True))
    assert "has role 'oracle'" in str(error)
    row = (await place.load(ID)).row
    assert (row.status, row.owner, row.epoch) == (RunStatus.RUNNING, NO_OWNER, 2)


# Who may.

ANA, BEN = RunContext(user="ana", thread="t-1"), RunContext(user="ben", thread="t-1")
ACTING = RunContext(user="ana", thread="t-1", principal="role/admin")


@pytest.mark.parametrize(
    ("owner", "asking", "may"),
    [
        (None, None, True), (ANA, None, True), (ANA, ANA, True), (ACTING, ACTING, True), (ANA, RunContext("ana", "t-1"), True),
        (ANA, BEN, False), (ANA, RunContext(user="ana"), False), (ANA, RunContext(user="ana", thread="t-2"), False),
        (ANA, RunContext(), False), (ANA, ACTING, False), (None, ANA, False), (RunContext(), ANA, False),
        (ACTING, None, False), (ACTING, ANA, False), (ACTING, RunContext("ana", "t-1", "role/other"), False),
        (RunContext(), RunContext(), True), (None, RunContext(), True), (RunContext(principal="p"), None, False),
        (RunContext(user=""), None, True), (RunContext(user=""), RunContext(), False),
    ],
    ids=str,
)  # fmt: skip
async def test_a_run_is_picked_up_for_whom_it_is_for_and_for_nobody_else(
    place: Place, owner: RunContext | None, asking: RunContext | None, may: bool
) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await abandoned(place, bench, model, ctx=owner)
    if may:
        assert (await Worker(place).recover(model, bench.registry, ctx=asking)).status == "done"
        assert (await Worker(place).recover(model, bench.registry, ctx=asking)).status == "done"
        return
    async with untouched(place.open(), ID):
        with pytest.raises(IdentityMismatch) as refused:
            await Worker(place).recover(model, bench.registry, ctx=asking)
    for revealing in ("ana", "t-1", "role/admin", "charge_i", "effect"):
        assert revealing not in str(refused.value)
    assert (bench.entered.total(), model.asked) == (0, 1)
    assert (await Worker(place).recover(model, bench.registry, ctx=owner)).status == "done"
    with pytest.raises(IdentityMismatch):
        await Worker(place).recover(model, bench.registry, ctx=asking)


@pytest.mark.parametrize("context", [{"user": 5}, {"thread": b"x"}, {"principal": ["a"]}, {"user": "\ud83d\ude00"}])
async def test_an_identity_that_is_no_text_is_refused_before_anything_is_stored(place: Place, context: dict[str, Any]) -> None:
    with pytest.raises(AgentRuntimeError):
        await Worker(place).run(Script("x"), Bench().registry, ctx=RunContext(**context))
    assert await place.open().list_runs() == []


# What each state leads to.


async def test_a_paused_run_is_given_back_as_it_is_and_no_worker_is_used(place: Place) -> None:
    bench, model = Bench(needs_approval=True), Script([("charge", {"amount": 1})], "done")
    await Worker(place).run(model, bench.registry)
    async with untouched(place.open(), ID):
        result = await Worker(place).recover(model, bench.registry)
    assert (result.status, len(result.pending), bench.entered.total(), model.asked) == ("paused", 1, 0, 1)


async def test_a_quarantined_run_is_a_conflict_until_it_is_released(place: Place) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await abandoned(place, bench, model)
    await rewrite(place, RunStatus.QUARANTINED)
    every: list[dict[str, Any]] = [{}, {"take_over": True}, {"rerun_in_doubt": True}]
    for options in every:
        async with untouched(place.open(), ID):
            with pytest.raises(CheckpointConflict, match="quarantined"):
                await Worker(place).recover(model, bench.registry, **options)
    assert bench.entered.total() == 0


async def test_a_run_of_another_program_is_a_conflict_that_says_nothing_of_it(place: Place) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await abandoned(place, bench, model)
    store = place.open()
    [run] = await store.load_many([ID])
    assert run is not None
    row = run.row._replace(kind="flow")
    flow = run._replace(row=row._replace(seal=sealer_for(RING, tenant="", run_id=ID).row(row)))
    shown = Showing(store, flow)
    worker = Worker(place)
    worker.inner = shown
    with pytest.raises(CheckpointConflict, match="another program"):
        await worker.recover(model, bench.registry)
    assert shown.writes == []


async def test_a_deleted_run_is_a_conflict_and_its_id_is_not_used_again(place: Place) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await Worker(place).run(model, bench.registry)
    store = place.open()
    run = await store.latest(ID)
    assert run is not None
    assert (await store.delete(ID, guard=guard_of(run.row))).kind is AnswerKind.OK
    place.is_tampered = True  # nothing is left of it that could be verified
    for work in (Worker(place).recover, Worker(place).run):
        with pytest.raises(CheckpointConflict, match="deleted"):
            await work(model, bench.registry)
    assert bench.effects == 1


async def test_a_living_owner_is_named_with_until_when_and_its_run_is_left_alone(place: Place) -> None:
    bench, model, leave = Bench(), Script(CALL, "done"), asyncio.Event()

    async def before(_: str, __: dict[str, object]) -> None:
        await leave.wait()

    bench.before = before
    task = asyncio.ensure_future(Worker(place).run(model, bench.registry))
    await until(lambda: bench.entered.total() == 1)
    with pytest.raises(CheckpointConflict, match=rf"held by process {os.getpid()} on .* until 20"):
        await Worker(place).recover(model, bench.registry)
    leave.set()
    assert (await task).status == "done"
    assert bench.entered.total() == 1


@pytest.mark.parametrize("lease_ms", [2**31, 2**53, 2**62, 2**63 - 1])
async def test_a_lease_of_any_length_that_somebody_wrote_there_is_a_conflict_and_no_crash(place: Place, lease_ms: int) -> None:
    bench, model, leave = Bench(), Script(CALL, "done"), asyncio.Event()

    async def before(_: str, __: dict[str, object]) -> None:
        await leave.wait()

    bench.before = before
    task = asyncio.ensure_future(Worker(place).run(model, bench.registry))
    await until(lambda: bench.entered.total() == 1)
    run = await place.load("run")
    worker = Worker(place)
    worker.inner = Showing(place.open(), run._replace(row=run.row._replace(lease_ms=lease_ms)))
    with pytest.raises(CheckpointConflict, match="held by process"):
        await worker.recover(model, bench.registry)
    leave.set()
    await task


async def test_what_nobody_stored_is_not_found(place: Place) -> None:
    with pytest.raises(CheckpointNotFound, match="'run'"):
        await Worker(place).recover(Script("x"), Bench().registry)


# What is decided first.


async def test_every_doubt_is_decided_before_anything_acts(place: Place) -> None:
    bench = Bench()
    both: list[Asked] = [
        ("charge_i", {"amount": 1}),
        ("charge", {"amount": 2}),
        ("email", {"to": "a"}),
        ("lookup", {"name": "x"}),
    ]
    model, inside, stuck = Script(both, "done"), 0, asyncio.Event()

    async def before(_: str, __: dict[str, object]) -> None:
        nonlocal inside
        inside += 1
        await stuck.wait()

    bench.before = before
    dying = Worker(place)
    task = asyncio.ensure_future(dying.run(model, bench.registry))
    await until(lambda: inside == 4)
    dying.is_dead = True
    task.cancel()
    await asyncio.wait([task])
    bench.before = Bench().before
    entered, sink = bench.entered.total(), HistorySink()
    with pytest.raises(RecoveryNeedsDecision) as needed:
        await Worker(place).recover(model, bench.registry, sinks=[sink])
    assert [(d.tool, d.call, d.key, d.attempt, dict(d.args)) for d in needed.value.doubts] == [
        ("charge", "0.1", "run:0.1", 1, {"amount": 2}),
        ("email", "0.2", "run:0.2", 1, {"to": "a"}),
    ]
    assert [tool for tool, _ in needed.value.calls] == ["charge", "email"]
    assert bench.entered.total() == entered
    assert sink.names() == ["run.claimed", "call.in_doubt", "call.in_doubt", "run.blocked", "run.left"]
    row = (await place.load("run")).row
    assert (row.status, row.owner) == (RunStatus.BLOCKED, NO_OWNER)
    await half_decided(place, bench, model, needed.value.doubts)


async def half_decided(place: Place, bench: Bench, model: Script, doubts: Sequence[Doubt]) -> None:
    """One of two doubts decided is not enough, and stays decided; only the call's own run and place count."""
    entered, left = bench.entered.total(), doubts
    for permitted in ([], False, doubts[:1], [], False):
        left = doubts[1:] if permitted else left
        with pytest.raises(RecoveryNeedsDecision) as needed:
            await Worker(place).recover(model, bench.registry, rerun_in_doubt=permitted)
        assert [doubt.call for doubt in needed.value.doubts] == [doubt.call for doubt in left]
    assert bench.entered.total() == entered
    result = await Worker(place).recover(model, bench.registry, rerun_in_doubt=doubts[1:])
    assert results_in(result.messages) == ["effect 1", "effect 2", "effect 3", "what is known of x"]
    assert bench.effects == 3
    settled = [record for record in (await place.load("run")).records if record.kind == RecordKind.SETTLED]
    assert [record.call for record in settled] == ["0.1", "0.2"]


async def test_a_doubt_of_another_run_permits_nothing(place: Place) -> None:
    bench, model = Bench(), Script(CHARGE, "done")
    for run_id in ("run", "other"):
        await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(model, bench.registry, run_id)
    with pytest.raises(RecoveryNeedsDecision) as needed:
        await Worker(place).recover(model, bench.registry, "other")
    with pytest.raises(RecoveryNeedsDecision):
        await Worker(place).recover(model, bench.registry, rerun_in_doubt=needed.value.doubts)
    assert bench.entered.total() == 0


async def test_a_call_in_doubt_whose_tool_is_gone_needs_its_tool_and_not_a_permission(place: Place) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await abandoned(place, bench, model)
    for permission in (False, True):
        with pytest.raises(RecoveryNeedsDecision, match="no tool of its name"):
            await Worker(place).recover(model, ToolRegistry(), rerun_in_doubt=permission)
    assert (await Worker(place).recover(model, bench.registry)).status == "done"


async def test_a_rule_given_later_decides_what_was_in_doubt(place: Place) -> None:
    bench, model = Bench(), Script(CHARGE, "done")
    await abandoned(place, bench, model)
    with pytest.raises(RecoveryNeedsDecision):
        await Worker(place).recover(model, bench.registry)
    entered, registry = 0, ToolRegistry()

    @registry.tool(pure=True)
    async def charge(amount: int) -> str:
        nonlocal entered
        entered += 1
        return "seen to be harmless"

    result = await Worker(place).recover(model, registry)
    assert (results_in(result.messages), entered) == (["seen to be harmless"], 1)


async def test_a_blocked_run_with_nothing_new_is_answered_without_a_claim(place: Place) -> None:
    bench, model = Bench(), Script(CHARGE, "done")
    await abandoned(place, bench, model)
    with pytest.raises(RecoveryNeedsDecision) as first:
        await Worker(place).recover(model, bench.registry)
    for _ in range(3):
        async with untouched(place.open(), ID):
            again = await error_of(Worker(place).recover(model, bench.registry))
        assert isinstance(again, RecoveryNeedsDecision)
        assert [doubt.call for doubt in again.doubts] == [doubt.call for doubt in first.value.doubts]


async def test_a_rerun_that_dies_too_needs_a_decision_of_its_own(place: Place) -> None:
    bench, model = Bench(), Script(CHARGE, "done")
    await abandoned(place, bench, model)
    dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
    await dying.recover_and_die(model, bench.registry, rerun_in_doubt=True)
    assert bench.effects == 1
    with pytest.raises(RecoveryNeedsDecision) as needed:
        await Worker(place).recover(model, bench.registry)
    assert needed.value.doubts[0].attempt == 2
    assert bench.effects == 1


async def test_a_permission_whose_worker_died_before_it_ran_is_kept(place: Place) -> None:
    bench, model = Bench(), Script(CHARGE, "done")
    await abandoned(place, bench, model)
    dying = Worker(place).killed_at(CrashPoint.BEFORE_INTENT)
    await dying.recover_and_die(model, bench.registry, rerun_in_doubt=True)
    result = await Worker(place).recover(model, bench.registry)
    assert (results_in(result.messages), bench.effects) == (["effect 1"], 1)


async def test_arguments_that_changed_under_a_started_call_are_corrupt_even_when_every_seal_holds(place: Place) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await abandoned(place, bench, model)
    run = await place.load("run")
    forged = resealed(run, "0", RecordKind.STARTED, lambda body: body.replace(b'"amount":1', b'"amount":2'))
    worker = Worker(place)
    worker.inner = Answering(place.open(), forged)
    with pytest.raises(CheckpointStoreCorrupt, match="other arguments"):
        await worker.recover(model, bench.registry)
    assert bench.entered.total() == 0


class Answering(Showing):
    """Shows a run as a holder of the key has forged it, and takes every write as if it were stored."""

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        return [Answer(AnswerKind.OK)] * len(appends)


def resealed(run: StoredRun, call: str, kind: RecordKind, change: Any) -> StoredRun:
    """The run with another body in one record, sealed anew from there on by the key's own holder."""
    sealer = sealer_for(RING, tenant="", run_id=run.row.run_id)
    previous, records = bytes(32), []
    for record in run.records:
        body = change(record.body) if (record.call, record.kind) == (call, kind) else record.body
        previous = sealer.record(record.number, record.epoch, record.kind, record.call, record.attempt, previous, body)
        records.append(record._replace(body=body, seal=previous))
    row: StoredRow = run.row._replace(head=previous)
    return run._replace(row=row._replace(seal=sealer.row(row)), records=tuple(records))


@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b"5", b"\xff", b"", b'{"context":5}', b"[" * 100_000])
@pytest.mark.parametrize("kind", [RecordKind.OPENED, RecordKind.CLAIMED])
async def test_a_sealed_body_that_cannot_be_read_is_corrupt_and_changes_nothing(
    place: Place, kind: RecordKind, body: bytes
) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await abandoned(place, bench, model)
    forged = resealed(await place.load("run"), "", kind, lambda _: body)
    shown, worker = Showing(place.open(), forged), Worker(place)
    worker.inner = shown
    with pytest.raises(CheckpointStoreCorrupt):
        await worker.recover(model, bench.registry)
    assert shown.writes == []


# Counts.


async def test_attempts_count_claims_without_progress_and_no_more(place: Place) -> None:
    bench, model = Bench(), Script(CALL, CALL, "done")
    await abandoned(place, bench, model, commits="each")
    for attempts in (1, 2, 3):
        dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
        await dying.recover_and_die(model, bench.registry, commits="each")
        assert (await place.load("run")).row.attempts == attempts
    dying = Worker(place).killed_at(CrashPoint.AFTER_CONFIRM)
    await dying.recover_and_die(model, bench.registry, commits="each")
    assert (await place.load("run")).row.attempts == 0


async def test_a_program_that_raises_counts_and_waits_longer_each_time(place: Place) -> None:
    async def broken(messages: Any, tools: Any) -> Any:
        raise ValueError("a bug")

    waits = []
    await error_of(Worker(place).run(broken, Bench().registry))
    for attempts in (1, 2, 3, 4):
        row = (await place.load("run")).row
        assert row.wake_at is not None
        waits.append(row.wake_at - row.updated_at)
        assert isinstance(await error_of(Worker(place).recover(broken, Bench().registry)), ValueError)
        assert (await place.load("run")).row.attempts == attempts
    assert waits == sorted(waits)
    assert waits[-1] >= 4 * waits[0] > 0


async def test_a_recovery_by_another_tenant_or_key_is_refused(place: Place) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await abandoned(place, bench, model)
    async with untouched(place.open(), ID):
        with pytest.raises(CheckpointStoreCorrupt):
            await Worker(place).recover(model, bench.registry, tenant="shop")
        with pytest.raises(CheckpointStoreCorrupt):
            await Worker(place).recover(model, bench.registry, checkpoint_key=KEY[::-1])
    assert bench.entered.total() == 0


async def test_an_owner_that_is_heard_between_the_look_and_the_claim_keeps_its_run(place: Place) -> None:
    clock, bench, model, leave = ManualClock(), Bench(), Script(CHARGE, "done"), asyncio.Event()

    async def before(_: str, __: dict[str, object]) -> None:
        await leave.wait()

    class Waking(Worker):
        """Its owner is heard again, just after this worker has looked."""

        async def load_many(self, run_ids: Sequence[RunId]) -> list[StoredRun | None]:
            found = await super().load_many(run_ids)
            [run] = found
            assert run is not None
            await self.inner.renew(ID, guard=guard_of(run.row))
            return found

    bench.before = before
    owner = asyncio.ensure_future(Worker(place, clock=clock).run(model, bench.registry, clock=clock, offload=NoHeartbeat()))
    await until(lambda: bench.entered.total() == 1)
    clock.advance(3600)
    with pytest.raises(CheckpointConflict, match="held by process"):
        await Waking(place, clock=clock).recover(model, bench.registry, clock=clock, offload=NoHeartbeat())
    leave.set()
    assert (await owner).status == "done"
    assert (bench.effects, (await place.load("run")).row.epoch) == (1, 1)
