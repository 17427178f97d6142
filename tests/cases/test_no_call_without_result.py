"""Whatever happens, each request is a conversation that providers accept, and the same one as without a mishap."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict, RecoveryNeedsDecision
from agent_runtime.ids import RunId
from agent_runtime.messages import Message, Reply, ToolSpec
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.store_contract.witness import untouched
from tests.bench import Asked, Bench, Place, Script, Worker, assert_acceptable, kill_when, transcript, until

TURNS: list[list[Asked]] = [
    [("charge_i", {"amount": 1})],
    [("lookup", {"name": "a"}), ("charge_i", {"amount": 2}), ("no_such_tool", {}), ("charge_i", {"amount": "much"})],
    [("charge_i", {"amount": 3})],
]
GIVEN: list[Message | dict[str, object]] = [
    {"role": "system", "content": "be good"},
    Message("user", "charge three times"),
]


class Steady(Script):
    """A model that says the same whenever it is asked the same: so two histories can be compared to the letter."""

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        asked, self.asked = self.asked, sum(message.role == "assistant" for message in messages)
        try:
            return await super().reply(messages, tools)
        finally:
            self.asked = asked + 1


async def undisturbed(place: Place) -> list[Message]:
    result = await Worker(place).run(Steady(*TURNS, "done"), Bench().registry, "undisturbed", messages=GIVEN)
    return transcript(result)


@pytest.mark.parametrize("commits", ["grouped", "each"])
@pytest.mark.parametrize("seq", [0, 1, 2])
@pytest.mark.parametrize("point", CrashPoint)
async def test_after_a_death_at_any_point_the_requests_and_the_history_are_those_of_the_undisturbed_run(
    place: Place, point: CrashPoint, seq: int, commits: str
) -> None:
    expected, bench, model = await undisturbed(place), Bench(), Steady(*TURNS, "done")
    await Worker(place).killed_at(point, seq).run_and_die(model, bench.registry, messages=GIVEN, commits=commits)
    if await place.open().latest(RunId("run")) is None:
        assert (point, seq, commits) == (CrashPoint.BEFORE_DECIDE, 0, "grouped"), "a run is there with its first request"
        result = await Worker(place).run(model, bench.registry, messages=GIVEN)
    else:
        result = await Worker(place).recover(model, bench.registry, commits=commits)
    assert transcript(result) == expected
    assert bench.effects == 3
    for request in model.requests:
        assert_acceptable(request)
        assert request == expected[: len(request)]
    ids = [call.id for message in result.messages for call in message.tool_calls]
    assert sorted(ids) == sorted(m.tool_call_id for m in result.messages if m.tool_call_id is not None)


@pytest.mark.parametrize("commits", ["grouped", "each"])
async def test_a_death_in_every_turn_and_three_recoveries_without_progress_double_nothing(place: Place, commits: str) -> None:
    expected, bench, model = await undisturbed(place), Bench(), Steady(*TURNS, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL, 0).run_and_die(model, bench.registry, messages=GIVEN, commits=commits)
    for seq in (1, 2):
        for _ in range(4):
            dying = Worker(place).killed_at(CrashPoint.AFTER_CALL, seq)
            await dying.recover_and_die(model, bench.registry, commits=commits)
    result = await Worker(place).recover(model, bench.registry, commits=commits)
    assert transcript(result) == expected
    for request in model.requests:
        assert request == expected[: len(request)]
    again = await Worker(place).recover(model, bench.registry)
    assert transcript(again) == expected
    assert bench.effects == 3


async def test_a_model_call_that_fails_and_is_made_again_loses_and_doubles_no_message(
    place: Place, clock: ManualClock
) -> None:
    expected, bench, model = await undisturbed(place), Bench(), Steady(*TURNS, "done")
    failures = [OSError("reset"), TimeoutError(), None, ConnectionError("refused"), None, None, EOFError()]

    async def failing(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        if failures and (failure := failures.pop(0)) is not None:
            raise failure
        return await model.reply(messages, tools)

    result = await Worker(place).run(failing, bench.registry, messages=GIVEN, clock=clock)
    assert transcript(result) == expected
    assert failures == []
    assert result.llm_calls == model.asked + 4
    assert [message.role for message in result.messages[:2]] == ["system", "user"]


async def test_a_result_that_comes_after_another_worker_finished_the_turn_is_refused_and_not_appended(place: Place) -> None:
    expected, bench, model, thaw = await undisturbed(place), Bench(), Steady(*TURNS, "done"), asyncio.Event()
    frozen = [thaw]

    async def after(tool: str, _: dict[str, object]) -> None:
        if tool == "lookup" and frozen:
            await frozen.pop().wait()

    bench.after = after
    old = asyncio.ensure_future(Worker(place).run(model, bench.registry, messages=GIVEN))
    await until(lambda: bench.entered["lookup"] == 1)
    result = await Worker(place).recover(model, bench.registry, take_over=True)
    assert transcript(result) == expected
    async with untouched(place.open(), RunId("run")):
        thaw.set()
        with pytest.raises(CheckpointConflict):
            await old
    assert bench.entered["lookup"] == 2
    assert transcript(await Worker(place).recover(model, bench.registry)) == expected


async def test_a_call_in_doubt_leaves_the_run_to_be_picked_up_and_not_bricked(place: Place) -> None:
    bench, model, moment = Bench(), Script([("charge", {"amount": 1}), ("lookup", {"name": "a"})], "done"), asyncio.Event()

    async def after(tool: str, _: dict[str, object]) -> None:
        if tool == "charge" and not moment.is_set():
            moment.set()
            await asyncio.Event().wait()

    bench.after = after
    dying = Worker(place)
    await kill_when(dying, dying.run(model, bench.registry), moment)
    for _ in range(3):
        with pytest.raises(RecoveryNeedsDecision):
            await Worker(place).recover(model, bench.registry)
    result = await Worker(place).recover(model, bench.registry, rerun_in_doubt=True)
    assert result.status == "done"
    assert model.asked == 2
