"""A flow on Postgres: its worker dies at each point of each superstep, and another one brings it to the same end."""

from __future__ import annotations

from typing import Any

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import RecoveryNeedsDecision
from agent_runtime.executor import Executor
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.runner import FlowRunner
from agent_runtime.journal.store import CheckpointStore
from tests.bench import KEY, Bench, Delegate, Killed, KillPlan, Worker, error_of
from tests.flow.desk import CHARGE, LOOK, MAIL, Order, chain
from tests.postgres.bench import fresh_store
from tests.servers import Server

POINTS = (CrashPoint.BEFORE_INTENT, CrashPoint.AFTER_INTENT, CrashPoint.AFTER_CALL, CrashPoint.AFTER_CONFIRM)
"""Those that a flow passes; the others are of a model's decisions."""


def worker_on(store: CheckpointStore) -> Worker:
    worker = Worker.__new__(Worker)
    Delegate.__init__(worker, store.reopen())
    worker.is_dead = False
    worker.plan = KillPlan.of(worker)
    return worker


def runner_of(worker: Worker, bench: Bench, **options: Any) -> FlowRunner:
    return FlowRunner(Executor(bench.registry), checkpoints=worker, checkpoint_key=KEY, crash=worker.plan, **options)


@pytest.mark.parametrize("commits", ["grouped", "each"])
async def test_a_flow_dies_at_each_point_of_each_superstep_and_comes_to_the_same_end(postgres: Server, commits: str) -> None:
    flow: Flow[Order] = chain(CHARGE, MAIL, LOOK)
    async with fresh_store(postgres) as store:
        for point in POINTS:
            for superstep in range(3):
                bench, run_id = Bench(), f"{point.value}-{superstep}"
                dying, living = worker_on(store), worker_on(store)
                killed = runner_of(dying.killed_at(point, superstep), bench, commits=commits)
                with pytest.raises(Killed):
                    await killed.run(flow, Order(), run_id=run_id)
                runner = runner_of(living, bench)
                mailed = superstep == 1 and point in (CrashPoint.AFTER_INTENT, CrashPoint.AFTER_CALL)
                # In grouped mode the point after the ending is passed before the ending is durable.
                mailed |= superstep == 1 and point is CrashPoint.AFTER_CONFIRM and commits == "grouped"
                if mailed:
                    assert isinstance(await error_of(runner.recover(flow, run_id)), RecoveryNeedsDecision)
                [result] = (await runner.recover_all(flow, rerun_in_doubt=True)).values()
                assert not isinstance(result, Exception)
                assert (result.status, result.state.note) == ("done", "what is known of ana")
                assert bench.remote.count("charge_i") == 1
                assert bench.remote.count("email") == (2 if mailed and point is not CrashPoint.AFTER_INTENT else 1)
                for worker in (dying, living):
                    await worker.close()
