"""The key of a call depends on the run and the call's place, and on nothing that can differ the next time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.ids import MAX_KEY
from agent_runtime.messages import Message, Reply, ToolCall
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tools import ToolRegistry, idempotency_key
from tests.bench import Bench, Place, Script, Worker, decisions_in


class Fickle(Script):
    """A model that would ask for another amount if it were asked again, under another id."""

    async def reply(self, messages: Sequence[Message], tools: object) -> Reply:
        self.asked += 1
        if decisions_in(messages):
            return Reply("done")
        return Reply("", [ToolCall(f"id-{self.asked}", "charge_i", {"amount": 4 + self.asked})])


def with_token(bench: Bench, token: str, seen: list[tuple[str, str]]) -> ToolRegistry:
    """The same tool as a worker has it that holds that access token."""
    registry = ToolRegistry()

    @registry.tool(idempotent=True)
    async def charge_i(amount: int) -> str:
        seen.append((idempotency_key(), token))
        result = bench.remote.act("charge_i", {"amount": amount}, idempotency_key())
        await bench.after("charge_i", {"amount": amount})
        return result

    return registry


@pytest.mark.parametrize("deaths", [1, 2, 5])
async def test_the_key_is_one_over_deaths_tokens_days_and_modes(place: Place, deaths: int) -> None:
    bench, model, seen = Bench(), Fickle(), list[tuple[str, str]]()
    for death in range(deaths):
        clock = ManualClock(datetime(2030, 1, 1 + 3 * death, 5 * death % 24, tzinfo=UTC), auto=True)
        worker = Worker(place).killed_at(CrashPoint.AFTER_CALL)
        registry = with_token(bench, f"token-{death}", seen)
        commits = ("grouped", "each")[death % 2]
        if death:
            await worker.recover_and_die(model, registry, clock=clock, commits=commits)
        else:
            await worker.run_and_die(model, registry, clock=clock, commits=commits)
        clock.advance(1000)  # whatever still waits for this clock may end
    result = await Worker(place).recover(model, with_token(bench, "last", seen))
    assert {key for key, _ in seen} == {"run:0"}
    assert len({token for _, token in seen}) == len(seen) == deaths + 1
    assert [dict(effect.args) for effect in bench.remote.effects] == [{"amount": 5}]
    assert (model.asked, result.status) == (2, "done")


async def test_a_long_run_id_gives_a_key_that_is_short_enough_the_same_each_time_and_nobody_elses(place: Place) -> None:
    bench, ids = Bench(), ["r" * 300, "r" * 299 + "s", "r" * 512, "ü" * 300, "r" * 251, "r" * 253]
    for run_id in ids:
        model = Script([("charge_i", {"amount": 5})], "done")
        await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(model, bench.registry, run_id)
        await Worker(place).recover(model, bench.registry, run_id)
    assert bench.effects == len(ids)
    keys = bench.remote.keys
    assert keys[::2] == keys[1::2]
    assert all(len(key) <= MAX_KEY and key.isascii() for key in keys)
    assert len(set(keys)) == len(ids)
