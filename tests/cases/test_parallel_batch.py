"""A reply asks for several calls and the worker dies among them: each call has its own record and its own ending."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest

from agent_runtime.clock import Clock
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import RecoveryNeedsDecision, ToolError
from agent_runtime.journal.records import RecordKind
from tests.bench import Asked, Bench, KillPlan, Place, Script, Worker, kill_when, results_in, until

ABC: list[Asked] = [("charge_i", {"amount": 1}), ("charge_i", {"amount": 2}), ("charge_i", {"amount": 3})]
MODES = ["grouped", "each"]


async def doubts_of(place: Place, model: Script, bench: Bench) -> RecoveryNeedsDecision:
    with pytest.raises(RecoveryNeedsDecision) as needed:
        await Worker(place).recover(model, bench.registry)
    return needed.value


@pytest.mark.parametrize("commits", MODES)
async def test_the_calls_that_never_ran_run_and_the_one_that_ended_does_not(place: Place, commits: str) -> None:
    bench, model = Bench(), Script(ABC, "done")
    first = Worker(place).killed_at(CrashPoint.BEFORE_INTENT, nth=2)
    await first.run_and_die(model, bench.registry, parallel=1, commits=commits)
    assert (bench.effects, bench.entered["charge_i"]) == (1, 1)
    result = await Worker(place).recover(model, bench.registry, commits=commits)
    assert [effect.args["amount"] for effect in bench.remote.effects] == [1, 2, 3]
    assert (bench.entered["charge_i"], model.asked) == (3, 2)
    assert results_in(model.requests[-1]) == results_in(result.messages) == ["effect 1", "effect 2", "effect 3"]


@pytest.mark.parametrize("commits", MODES)
async def test_one_call_in_doubt_is_named_alone_and_holds_back_what_never_ran(place: Place, commits: str) -> None:
    bench = Bench()
    model = Script([ABC[0], ("charge", {"amount": 2}), ABC[2]], "done")
    first = Worker(place).killed_at(CrashPoint.AFTER_INTENT, nth=2)
    await first.run_and_die(model, bench.registry, parallel=1, commits=commits)
    needed = await doubts_of(place, model, bench)
    for _ in range(2):
        needed = await doubts_of(place, model, bench)
        [(tool, _)], [doubt] = needed.calls, needed.doubts
        assert (tool, doubt.call, doubt.key, dict(doubt.args)) == ("charge", "0.1", "run:0.1", {"amount": 2})
        assert (bench.remote.count("charge_i"), bench.remote.count("charge")) == (1, 0)
    result = await Worker(place).recover(model, bench.registry, rerun_in_doubt=needed.doubts, commits=commits)
    assert results_in(result.messages) == ["effect 1", "effect 2", "effect 3"]
    assert [effect.args["amount"] for effect in bench.remote.effects] == [1, 2, 3]
    assert (bench.entered.total(), model.asked) == (3, 2)


# Every way in which three calls may stand when the worker dies.

STANDINGS = ("waiting", "started", "done", "failed")


class Held(KillPlan):
    """Holds back the calls that are not to start yet, by the order in which they come to their intent."""

    waiting: Sequence[bool]
    held: list[int]

    async def reach(self, point: CrashPoint, seq: int, *, recovering: bool, clock: Clock) -> None:
        if point is CrashPoint.BEFORE_INTENT:
            at = self.reached[point, seq]
            self.reached[point, seq] += 1
            if self.waiting[at]:
                self.held.append(at)
                await asyncio.Event().wait()


def holding(standing: Sequence[str]) -> Held:
    plan = Held()
    plan.reached, plan.waiting, plan.held = Counter(), [each == "waiting" for each in standing], []
    return plan


async def stand(place: Place, bench: Bench, model: Script, standing: Sequence[str]) -> None:
    """Let a worker get that far with each of its three calls, and kill it there."""
    worker, inside = Worker(place), 0

    async def before(_: str, args: dict[str, object]) -> None:
        if standing[int(str(args["amount"])) - 1] == "failed":
            raise ToolError("no")

    async def after(_: str, args: dict[str, object]) -> None:
        nonlocal inside
        if standing[int(str(args["amount"])) - 1] == "started":
            inside += 1
            await asyncio.Event().wait()

    bench.before, bench.after = before, after
    plan, there = holding(standing), asyncio.Event()
    # Where nothing begins, only the reply's own commit makes it visible.
    commits = "each" if set(standing) == {"waiting"} else "grouped"
    work = asyncio.ensure_future(worker.run(model, bench.registry, crash=plan, commits=commits))
    ended = sum(s in ("done", "failed") for s in standing)
    await until(lambda: inside == standing.count("started") and len(plan.held) == standing.count("waiting"))
    await place.becomes("run", lambda run: sum(record.kind == RecordKind.DONE for record in run.records) == 1 + ended)
    there.set()
    await kill_when(worker, work, there)
    bench.before, bench.after = Bench().before, Bench().after


@pytest.mark.parametrize("tool", ["charge", "charge_i"])
@pytest.mark.parametrize(
    "standing", [s for s in product(STANDINGS, repeat=3) if not set(s) <= {"done", "failed"}], ids="-".join
)
async def test_each_of_three_calls_is_treated_by_its_own_record_alone(
    place: Place, standing: tuple[str, ...], tool: str
) -> None:
    bench, model = Bench(), Script([(tool, {"amount": at}) for at in (1, 2, 3)], "done")
    await stand(place, bench, model, standing)
    entered = bench.entered[tool]
    assert entered == 3 - standing.count("waiting")
    in_doubt = [f"0.{at}" for at, s in enumerate(standing) if s == "started"]
    if tool == "charge" and in_doubt:
        needed = await doubts_of(place, model, bench)
        assert [doubt.call for doubt in needed.doubts] == in_doubt
        assert bench.entered[tool] == entered
    result = await Worker(place).recover(model, bench.registry, rerun_in_doubt=tool == "charge")
    assert bench.entered[tool] == entered + standing.count("waiting") + standing.count("started")
    effects = 3 - standing.count("failed") + (standing.count("started") if tool == "charge" else 0)
    assert bench.effects == effects
    seen = results_in(result.messages)
    assert [text.startswith("error: ToolError") for text in seen] == [s == "failed" for s in standing]
    assert model.asked == 2
    assert len(set(seen) - {"error: ToolError: no"}) == 3 - standing.count("failed")


@pytest.mark.parametrize("ends_first", [0, 1, 2])
async def test_results_keep_the_order_of_the_calls_whichever_ended_first(place: Place, ends_first: int) -> None:
    bench, model, done = Bench(), Script(ABC, "done"), asyncio.Event()

    async def after(_: str, args: dict[str, object]) -> None:
        if args["amount"] == ends_first + 1:
            done.set()
        else:
            await done.wait()

    bench.after = after
    result = await Worker(place).run(model, bench.registry)
    amounts = [effect.args["amount"] for effect in bench.remote.effects]
    assert results_in(result.messages) == [f"effect {amounts.index(at) + 1}" for at in (1, 2, 3)]
    again = await Worker(place).recover(model, bench.registry)
    assert results_in(again.messages) == results_in(result.messages)
