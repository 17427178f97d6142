"""Attempts one after another: that nothing went out this time says nothing of the times before."""

from __future__ import annotations

import asyncio

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import NotSent, RecoveryNeedsDecision
from agent_runtime.journal.records import RunStatus
from agent_runtime.settlements import Outcome
from agent_runtime.tools import ToolRegistry, idempotency_key
from tests.bench import Asked, Bench, Place, Script, Worker, error_of, results_in
from tests.doubts.desk import MAIL, Frozen, Outbox, says, status

CHARGE: list[Asked] = [("charge_i", {"amount": 5})]


async def test_a_call_that_may_have_gone_out_once_is_never_answered_as_not_sent(place: Place) -> None:
    """The first attempt acts and its answer is lost; after that the remote takes no connection."""
    bench, model = Bench(), Script(CHARGE, "done")

    async def lose(_: str, __: dict[str, object]) -> None:
        raise ConnectionResetError("the answer is lost")

    async def refuse(_: str, __: dict[str, object]) -> None:
        if bench.entered["charge_i"] > 1:
            raise NotSent("no connection")

    bench.before, bench.after = refuse, lose
    error = await error_of(Worker(place).run(model, bench.registry))
    assert isinstance(error, RecoveryNeedsDecision)
    assert error.doubts[0].why == "nothing went out this time, yet it may have before: no connection"
    assert (bench.entered["charge_i"], bench.effects, model.asked) == (3, 1, 1)
    where, wake_at = await status(place)
    assert where is RunStatus.BLOCKED
    assert wake_at is not None, "it may run again by its rule"
    bench.before = bench.after = Bench().before
    result = await Worker(place).recover(model, bench.registry)
    assert (results_in(result.messages), bench.effects) == (["effect 1"], 1)


@pytest.mark.parametrize("point", [CrashPoint.AFTER_INTENT, CrashPoint.AFTER_CALL])
async def test_the_same_after_a_death_and_after_a_permission(place: Place, point: CrashPoint) -> None:
    bench, model = Bench(), Script([("charge", {"amount": 5})], "done")
    await Worker(place).killed_at(point).run_and_die(model, bench.registry)
    effects = bench.effects

    async def refuse(_: str, __: dict[str, object]) -> None:
        raise NotSent("no connection")

    bench.before = refuse
    error = await error_of(Worker(place).recover(model, bench.registry, rerun_in_doubt=True))
    assert isinstance(error, RecoveryNeedsDecision)
    assert error.doubts[0].attempt == 2
    again = await error_of(Worker(place).recover(model, bench.registry))
    assert isinstance(again, RecoveryNeedsDecision), "and it stays so"
    assert (bench.effects, model.asked) == (effects, 1)


async def test_what_did_not_happen_before_is_no_reason_to_doubt_what_was_not_sent_now(place: Place) -> None:
    """Two attempts died, of which the second was permitted; then the remote says that neither happened."""
    outbox, model = Outbox(attempts=2), Script(MAIL, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_INTENT).run_and_die(model, outbox.registry)
    outbox.saying = says(Outcome.unknown())
    dying = Worker(place).killed_at(CrashPoint.AFTER_INTENT)
    await dying.recover_and_die(model, outbox.registry, rerun_in_doubt=True)

    async def refuse() -> None:
        raise NotSent("no connection")

    outbox.before, outbox.saying = refuse, None
    result = await Worker(place).recover(model, outbox.registry)
    assert results_in(result.messages) == ["error: NotSent: no connection"]


async def test_a_call_did_not_happen_only_once_every_attempt_that_may_have_sent_is_over(place: Place) -> None:
    """The first worker is frozen before it sends, a second one that was permitted to try again is dead."""
    outbox, model = Outbox(), Script(MAIL, "done")
    frozen = Frozen(place, outbox, model)
    await frozen.inside()
    dying = Worker(place).killed_at(CrashPoint.AFTER_INTENT)
    outbox.saying = says(Outcome.unknown())
    await dying.recover_and_die(model, outbox.registry, take_over=True, rerun_in_doubt=True)
    outbox.saying = None
    error = await error_of(Worker(place).recover(model, outbox.registry))
    assert isinstance(error, RecoveryNeedsDecision)
    assert (error.doubts[0].attempt, len(outbox.asked)) == (2, 2)
    assert "not known to be gone" in error.doubts[0].why
    frozen.thawed.set()
    await error_of(frozen.work)
    assert results_in((await Worker(place).recover(model, outbox.registry)).messages) == ["mail 1"]
    assert outbox.sent == ["run:0"]


@pytest.mark.parametrize("is_keyed", [True, False], ids=["keyed", "keyless"])
async def test_a_timeout_shorter_than_the_remotes_work_is_unknown_and_never_failed(place: Place, is_keyed: bool) -> None:
    """The remote acts at once and answers after 0.3 s; the tool gives it 0.2 s."""
    registry, model, bench = ToolRegistry(), Script([("pay", {})], "done"), Bench()

    @registry.tool(idempotent=is_keyed, timeout=0.2, attempts=2, pause=0.001)
    async def pay() -> str:
        is_first = not bench.remote.effects
        result = bench.remote.act("pay", {}, idempotency_key() if is_keyed else None)
        if is_first:
            await asyncio.sleep(0.3)
        return result

    if is_keyed:
        result = await Worker(place).run(model, registry)
        assert (results_in(result.messages), bench.remote.keys) == (["effect 1"], ["run:0"] * 2)
    else:
        with pytest.raises(RecoveryNeedsDecision, match=r"it took longer than 0\.2 s; the remote may have acted"):
            await Worker(place).run(model, registry)
    assert bench.effects == 1
