"""What the runtime itself counts and knows survives a restart: results, steps, limits, requests and usage."""

from __future__ import annotations

from typing import Any

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import StepLimitReached
from agent_runtime.journal.records import RunStatus
from agent_runtime.telemetry import HistorySink
from agent_runtime.testing.store_contract.witness import untouched
from tests.bench import Asked, Bench, Place, Script, Worker, transcript

CALL: list[Asked] = [("charge_i", {"amount": 1})]


async def test_recovering_a_run_that_is_done_gives_its_result_and_touches_nothing(place: Place) -> None:
    bench, model = Bench(), Script(CALL, CALL, "all is done")
    result = await Worker(place).run(model, bench.registry)
    run_id = (await place.load("run")).row.run_id
    for _ in range(3):
        async with untouched(place.open(), run_id):
            again = await Worker(place).recover(model, bench.registry)
        assert (again.status, again.output, again.steps) == ("done", "all is done", 2)
        assert transcript(again) == transcript(result)
        assert (again.usage, again.llm_calls) == (result.usage, result.llm_calls)
    assert (bench.entered.total(), model.asked) == (2, 3)


@pytest.mark.parametrize("commits", ["grouped", "each"])
@pytest.mark.parametrize("dies_at", [1, 2, 3])
async def test_a_limit_of_steps_counts_over_restarts(place: Place, dies_at: int, commits: str) -> None:
    bench, endless = Bench(), Script(*[CALL] * 50)
    options: dict[str, Any] = {"max_steps": 4, "commits": commits}
    first = Worker(place).killed_at(CrashPoint.AFTER_DECIDE, dies_at - 1)
    await first.run_and_die(endless, bench.registry, **options)
    asked = endless.asked
    assert asked == dies_at
    repeated = 0 if commits == "each" else 1  # a reply that was not yet written down is asked for again
    with pytest.raises(StepLimitReached, match="max_steps=4"):
        await Worker(place).recover(endless, bench.registry, **options)
    assert endless.asked == 4 + repeated
    assert (bench.entered.total(), bench.effects) == (4, 4)
    assert (await place.load("run")).row.status == RunStatus.FAILED


async def test_a_limit_of_steps_holds_after_three_replies_and_a_death_between_two_commits(place: Place) -> None:
    bench, endless = Bench(), Script(*[CALL] * 50)
    first = Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 3)
    await first.run_and_die(endless, bench.registry, max_steps=4)
    assert endless.asked == 3
    for _ in range(2):
        with pytest.raises(StepLimitReached):
            await Worker(place).recover(endless, bench.registry, max_steps=4)
        assert endless.asked == 4
        assert bench.effects == 4


async def test_totals_never_go_down_over_recoveries_without_progress(place: Place) -> None:
    bench, model = Bench(), Script(CALL, CALL, "done")
    await Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 2).run_and_die(model, bench.registry, commits="each")
    claims = []
    for _ in range(3):
        sink = HistorySink()
        await Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 2).recover_and_die(model, bench.registry, sinks=[sink])
        [recovered] = sink.of("run.recovered")
        claims.append((recovered.data["replayed"], (await place.load("run")).row.step, (await place.load("run")).row.epoch))
    assert [replayed for replayed, _, _ in claims] == [4, 4, 4]
    assert claims == sorted(claims)
    assert [epoch for _, _, epoch in claims] == [2, 3, 4]
    result = await Worker(place).recover(model, bench.registry)
    undisturbed = await Worker(place).run(Script(CALL, CALL, "done"), Bench().registry, "undisturbed")
    assert (result.steps, result.usage, bench.effects, model.asked) == (2, undisturbed.usage, 2, 3)
    assert result.llm_calls == 3


async def test_a_lost_request_is_counted_and_a_replayed_one_is_not(place: Place) -> None:
    bench, model = Bench(), Script(CALL, CALL, "done")
    first = Worker(place).killed_at(CrashPoint.AFTER_DECIDE_BEFORE_JOURNAL, 1)
    await first.run_and_die(model, bench.registry)
    result = await Worker(place).recover(model, bench.registry)
    assert model.asked == result.llm_calls == 4
    assert result.steps == 2
    assert bench.effects == 2


async def test_flags_of_one_recovery_are_nothing_to_the_next_run_of_the_process(place: Place) -> None:
    bench, model = Bench(), Script(CALL, CALL, CALL, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL, 1).run_and_die(model, bench.registry)
    await Worker(place).recover(model, bench.registry)
    fresh, fresh_bench = Script(CALL, CALL, CALL, "done"), Bench()
    result = await Worker(place).run(fresh, fresh_bench.registry, "fresh")
    assert (fresh.asked, fresh_bench.effects, result.steps) == (4, 3, 3)
