"""The same on Postgres: pause, answers through the inbox and by hand, expiry, and workers that die on an approved call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict, VerdictRefused
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, post_message
from agent_runtime.journal.records import RecordKind, RunStatus, StoredRun
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.store import CheckpointStore
from tests.approvals.desk import charging, needing, the_request
from tests.bench import RING, Delegate, KillPlan, Script, Worker, error_of, results_in
from tests.postgres.bench import fresh_store
from tests.servers import Server


class Desk:
    """A store, and workers on it that are closed with it."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._workers: list[Worker] = []

    def worker(self) -> Worker:
        worker = Worker.__new__(Worker)
        Delegate.__init__(worker, self.store.reopen())
        worker.is_dead = False
        worker.plan = KillPlan.of(worker)
        self._workers.append(worker)
        return worker

    async def load(self, run_id: str) -> StoredRun:
        [stored] = await self.store.load_many([RunId(run_id)])
        assert stored is not None
        return stored

    async def close(self) -> None:
        for worker in self._workers:
            await worker.inner.close()


@pytest.fixture
async def desk(one_postgres: Server) -> AsyncIterator[Desk]:
    async with fresh_store(one_postgres) as fresh:
        desk = Desk(fresh)
        yield desk
        await desk.close()


@pytest.mark.parametrize("point", [CrashPoint.BEFORE_INTENT, CrashPoint.AFTER_INTENT, CrashPoint.AFTER_CALL])
async def test_an_edited_call_goes_out_once_however_its_worker_dies(desk: Desk, point: CrashPoint) -> None:
    bench, model = needing(), Script([("charge_i", {"amount": 100})], "done")
    request = the_request(await desk.worker().run(model, bench.registry))
    verdicts = [request.edit({"amount": 7}, by="ana")]
    await desk.worker().killed_at(point).recover_and_die(model, bench.registry, verdicts=verdicts)
    result = await desk.worker().recover(model, bench.registry)
    assert (result.status, model.asked) == ("done", 2)
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 7}]


async def test_a_verdict_in_the_inbox_wakes_the_run_and_the_first_one_stands(desk: Desk) -> None:
    bench, model = needing(), charging()
    request = the_request(await desk.worker().run(model, bench.registry))
    sealer = sealer_for(RING, tenant="", run_id="run")
    for verdict in (request._replace(digest="d").approve(by="x"), request.deny(by="bo"), request.approve(by="ana")):
        await post_message(desk.store, sealer, MessageKind.VERDICT, verdict.to_plain())
    stored = await desk.load("run")
    assert stored.row.wake_at is not None
    assert isinstance(
        await error_of(desk.worker().recover(model, bench.registry, verdicts=[request.approve(by="ana")])), VerdictRefused
    )
    assert (await desk.worker().recover(model, bench.registry)).status == "done"
    assert bench.effects == 0


async def test_two_workers_who_answer_at_the_same_instant_make_one_verdict(desk: Desk) -> None:
    for at in range(5):
        bench, model, run_id = needing(), charging(), f"run-{at}"
        request = the_request(await desk.worker().run(model, bench.registry, run_id))
        ends = await asyncio.gather(
            *(
                desk.worker().recover(model, bench.registry, run_id, verdicts=[verdict])
                for verdict in (request.approve(by="ana"), request.deny(by="bo"))
            ),
            return_exceptions=True,
        )
        for end in ends:
            assert not isinstance(end, BaseException) or isinstance(end, VerdictRefused | CheckpointConflict), end
        stored = await desk.load(run_id)
        assert sum(record.kind == RecordKind.VERDICT for record in stored.records) == 1
        assert stored.row.status == RunStatus.DONE


async def test_a_request_expires_by_the_time_of_the_database(desk: Desk) -> None:
    bench, model = needing(approval_expires=0.05), charging()
    result = await desk.worker().run(model, bench.registry)
    for _ in range(2000):  # a slow machine may take longer to park the run than the request is open
        if result.status == "done":
            break
        await asyncio.sleep(0.01)
        result = await desk.worker().recover(model, bench.registry)
    assert (result.status, bench.effects) == ("done", 0)
    [text] = results_in(result.messages)
    assert text.startswith("error: ApprovalExpired")
