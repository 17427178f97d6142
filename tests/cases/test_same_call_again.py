"""The same tool with the same arguments, asked for again on purpose: another call, with a key of its own."""

from __future__ import annotations

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.tools import ToolRegistry, idempotency_key
from tests.bench import Asked, Bench, Place, Script, Worker, results_in

POLL: list[Asked] = [("poll", {"job": 1})]


class Job:
    """A remote job that is done at the third question."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.registry = ToolRegistry()

        @self.registry.tool(pure=True)
        async def poll(job: int) -> str:
            self.keys.append(idempotency_key())
            return "done" if len(self.keys) >= 3 else "pending"


@pytest.mark.parametrize("commits", ["grouped", "each"])
async def test_a_poll_is_live_again_at_each_position_and_recorded_ones_are_not_repeated(place: Place, commits: str) -> None:
    job, model = Job(), Script(POLL, POLL, POLL, "the job is done")
    first = Worker(place).killed_at(CrashPoint.BEFORE_INTENT, 2)
    await first.run_and_die(model, job.registry, commits=commits)
    assert len(job.keys) == 2
    result = await Worker(place).recover(model, job.registry, commits=commits)
    assert results_in(result.messages) == ["pending", "pending", "done"]
    assert job.keys == ["run:0", "run:1", "run:2"]
    assert result.output == "the job is done"


async def test_equal_calls_side_by_side_in_one_reply_are_as_many_acts(place: Place) -> None:
    bench, same = Bench(), ("charge_i", {"amount": 5})
    result = await Worker(place).run(Script([same, same, same], [same], "done"), bench.registry)
    assert bench.remote.keys == ["run:0.0", "run:0.1", "run:0.2", "run:1"]
    assert len(set(results_in(result.messages))) == 4


async def test_equal_runs_share_no_key(place: Place) -> None:
    bench, script = Bench(), [("charge_i", {"amount": 5})]
    for run_id in ("a", "a:0", "a/0", "a%3A0", "A", "a ", "b"):
        await Worker(place).run(Script(script, "done"), bench.registry, run_id)
    assert bench.effects == 7
    assert len(set(bench.remote.keys)) == 7


async def test_a_models_ids_steer_nothing(place: Place) -> None:
    bench = Bench()

    def always_one_id(messages: object) -> object:
        from agent_runtime.messages import Reply, ToolCall

        return Reply("", [ToolCall("same-id-as-ever", "charge_i", {"amount": 5})])

    model = Script(always_one_id, always_one_id, "done")  # type: ignore[arg-type]  # it gives a Reply
    result = await Worker(place).run(model, bench.registry)
    assert bench.remote.keys == ["run:0", "run:1"]
    assert results_in(result.messages) == ["effect 1", "effect 2"]
