"""What a remote's memory of keys is worth: for a time only, for failed answers too, and never for other arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointStoreCorrupt, Doubt, KeyConflict, RecoveryNeedsDecision, RunQuarantined
from agent_runtime.ids import MAX_KEY
from agent_runtime.journal.records import RunStatus
from agent_runtime.telemetry import HistorySink
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tools import ToolRegistry, idempotency_key
from tests.bench import Asked, Bench, Counting, Killed, Place, Remote, Script, Worker, error_of, expect_death, results_in
from tests.doubts.desk import status

HOUR, DAY = 3600.0, 86_400.0
PAY: list[Asked] = [("pay", {"amount": 5})]


class Bank:
    """A remote that knows a key for a day after its first request, and the tool that declares so."""

    def __init__(self, clock: ManualClock, **options: Any) -> None:
        self.remote, self.entered, self.dies = Remote(), 0, False
        self.trouble: Exception | None = None
        self.registry = ToolRegistry()
        self._clock, self._known = clock, dict[str, float]()
        given = {"name": "pay", "idempotent": True, "key_retention": DAY, "pause": 0.001, **options}
        self.registry.tool(**given)(self._pay())

    def _pay(self) -> Any:
        async def pay(amount: int) -> str:
            self.entered += 1
            key, now = idempotency_key(), self._clock.monotonic()
            if now - self._known.get(key, now) >= DAY:
                del self._known[key]
                self.remote = self._forgotten()
            self._known.setdefault(key, now)
            result = self.remote.act("pay", {"amount": amount}, key)
            if self.dies:
                raise Killed("killed")
            if self.trouble is not None:
                raise self.trouble
            return result

        return pay

    def _forgotten(self) -> Remote:
        remote = Remote()
        remote.effects = self.remote.effects
        return remote

    @property
    def effects(self) -> int:
        return len(self.remote.effects)


async def die(bank: Bank, work: Any) -> None:
    bank.dies = True
    await expect_death(work)
    bank.dies = False


@pytest.mark.parametrize("hours", [0, 1, 23])
async def test_a_key_that_the_remote_still_knows_is_sent_again(place: Place, clock: ManualClock, hours: int) -> None:
    bank, model = Bank(clock), Script(PAY, "done")
    await die(bank, Worker(place, clock=clock).run(model, bank.registry, clock=clock))
    clock.advance(hours * HOUR)
    result = await Worker(place, clock=clock).recover(model, bank.registry, clock=clock)
    assert (results_in(result.messages), bank.entered, bank.effects) == (["effect 1"], 2, 1)


@pytest.mark.parametrize(("retention", "asked"), [(None, 0), (DAY, 1)], ids=["for ever", "for a day"])
async def test_the_store_is_asked_for_the_time_only_where_time_may_forbid_the_rerun(
    place: Place, clock: ManualClock, retention: float | None, asked: int
) -> None:
    bank, model = Bank(clock, key_retention=retention), Script(PAY, "done")
    await die(bank, Worker(place, clock=clock).run(model, bank.registry, clock=clock))
    store = Counting(place.open(clock))
    await Worker(place, clock=clock).recover(model, bank.registry, clock=clock, checkpoints=store)
    assert (store.verbs["now"], bank.entered, bank.effects) == (asked, 2, 1)


@pytest.mark.parametrize("skew", [0.0, 2 * HOUR, -2 * HOUR], ids=["right", "two hours ahead", "two hours behind"])
async def test_a_key_that_it_may_have_forgotten_needs_a_decision_and_the_error_says_so(
    place: Place, clock: ManualClock, skew: float
) -> None:
    bank, model, workers = Bank(clock), Script(PAY, "done"), ManualClock(auto=True)
    workers.jump_wall(skew)
    await die(bank, Worker(place, clock=clock).run(model, bank.registry, clock=workers))
    clock.advance(25 * HOUR)
    doubts: Sequence[Doubt] = ()
    for _ in range(2):
        error = await error_of(Worker(place, clock=clock).recover(model, bank.registry, clock=clock))
        assert isinstance(error, RecoveryNeedsDecision)
        doubts = error.doubts
        assert "the remote knows its key for a time only, and may have forgotten it, after 86400 s" in error.doubts[0].why
        assert "key run:0" in str(error)
        assert await status(place) == (RunStatus.BLOCKED, None), "no time helps"
    assert (bank.entered, bank.effects) == (1, 1)
    result = await Worker(place, clock=clock).recover(model, bank.registry, clock=clock, rerun_in_doubt=doubts)
    assert (result.status, bank.effects) == ("done", 2), "somebody said so, knowing it"


@pytest.mark.parametrize("skew", [0.0, 2 * HOUR, -2 * HOUR], ids=["right", "two hours ahead", "two hours behind"])
async def test_it_is_the_first_attempt_whose_time_counts_and_no_workers_clock_makes_it_later(
    place: Place, clock: ManualClock, skew: float
) -> None:
    """A second worker dies an hour before the key is forgotten: that makes the key no younger."""
    bank, model, workers = Bank(clock), Script(PAY, "done"), ManualClock(auto=True)
    workers.jump_wall(skew)
    await die(bank, Worker(place, clock=clock).run(model, bank.registry, clock=workers))
    clock.advance(21 * HOUR)
    await die(bank, Worker(place, clock=clock).recover(model, bank.registry, clock=workers))
    assert (bank.entered, bank.effects) == (2, 1)
    clock.advance(3.5 * HOUR)
    error = await error_of(Worker(place, clock=clock).recover(model, bank.registry, clock=clock))
    assert isinstance(error, RecoveryNeedsDecision)
    assert (error.doubts[0].attempt, bank.entered, bank.effects) == (2, 2, 1)


async def test_a_living_worker_does_not_send_a_forgotten_key_again_either(place: Place, clock: ManualClock) -> None:
    bank, model = Bank(clock, attempts=100, pause=HOUR), Script(PAY, "done")
    bank.trouble = ConnectionResetError("gone")
    error = await error_of(Worker(place, clock=clock).run(model, bank.registry, clock=clock))
    assert isinstance(error, RecoveryNeedsDecision)
    assert "may have forgotten it" in error.doubts[0].why
    assert (bank.entered, bank.effects) == (5, 1), "after 0, 1, 3, 7 and 15 hours, and not after 31"
    assert clock.monotonic() < 16 * HOUR, "nor is that waited for"
    assert await status(place) == (RunStatus.BLOCKED, None)


async def test_a_permission_for_a_forgotten_key_is_for_one_attempt(place: Place, clock: ManualClock) -> None:
    bank, model = Bank(clock), Script(PAY, "done")
    await die(bank, Worker(place, clock=clock).run(model, bank.registry, clock=clock))
    clock.advance(25 * HOUR)
    bank.trouble = ConnectionResetError("gone")
    recovery = Worker(place, clock=clock).recover(model, bank.registry, clock=clock, rerun_in_doubt=True)
    error = await error_of(recovery)
    assert isinstance(error, RecoveryNeedsDecision)
    assert (bank.entered, bank.effects) == (2, 2)


# Answers that the remote keeps under the key.


async def test_a_remote_that_answers_its_stored_failure_for_ever_ends_with_an_error_that_shows_the_key(place: Place) -> None:
    bench, model = Bench(), Script([("charge_i", {"amount": 5})], "done")

    async def fail(_: str, __: dict[str, object]) -> None:
        raise ConnectionError("500, as the first time")

    bench.after = fail
    error = await error_of(Worker(place).run(model, bench.registry, max_attempts=2))
    assert isinstance(error, RecoveryNeedsDecision)
    assert "key run:0" in str(error)
    assert bench.entered["charge_i"] == 3
    ended: Exception | None = None
    for _ in range(4):
        ended = await error_of(Worker(place).recover(model, bench.registry, max_attempts=2))
        if isinstance(ended, RunQuarantined):
            break
    assert isinstance(ended, RunQuarantined)
    assert (bench.entered["charge_i"], bench.effects, model.asked) == (5, 1, 1)


async def test_a_stored_failure_that_the_tool_reads_is_the_calls_answer_and_no_attempt_is_made_again(place: Place) -> None:
    bench, model, sink = Bench(), Script([("charge_i", {"amount": 5})], "done"), HistorySink()

    async def fail(_: str, __: dict[str, object]) -> None:
        raise RuntimeError("the bank answered 500")

    bench.after = fail
    result = await Worker(place).run(model, bench.registry, sinks=[sink])
    assert results_in(result.messages) == ["error: RuntimeError: the bank answered 500"]
    assert bench.entered["charge_i"] == 1
    [done] = [event.data for event in sink.events if event.name == "call.done"]
    assert done["key"] == "run:0"


RAISED: dict[str, Callable[[], Exception]] = {
    "alone": lambda: KeyConflict("other amounts"),
    "in a group": lambda: ExceptionGroup("tasks", [ValueError("x"), KeyConflict("other amounts")]),
}


@pytest.mark.parametrize("how", RAISED)
@pytest.mark.parametrize("rule", [{"idempotent": True}, {}, {"probe": None}], ids=["idempotent", "none", "no probe"])
@pytest.mark.parametrize("answers", [(), (Exception,), (CheckpointStoreCorrupt,)], ids=["none", "all", "corrupt"])
async def test_the_same_key_with_other_arguments_stops_the_run_as_corrupt_whatever_the_tool_calls_an_answer(
    place: Place, how: str, rule: dict[str, Any], answers: tuple[type[Exception], ...]
) -> None:
    registry, model, entered = ToolRegistry(), Script([("pay", {})], "done"), list[str]()

    @registry.tool(answers=answers, **rule)
    async def pay() -> str:
        entered.append(idempotency_key())
        raise RAISED[how]()

    with pytest.raises(CheckpointStoreCorrupt, match="other amounts"):
        await Worker(place).run(model, registry)
    assert (entered, model.asked) == (["run:0"], 1)
    run = await place.load("run")
    assert run.row.status == RunStatus.RUNNING, "nothing was answered, and nothing has ended"


async def test_a_conflict_that_comes_after_the_deadline_is_an_alarm_too(place: Place) -> None:
    registry, model = ToolRegistry(), Script([("pay", {})], "done")

    @registry.tool(idempotent=True, timeout=0.02)
    async def pay() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise KeyConflict("other amounts") from None
        return "never"

    with pytest.raises(KeyConflict, match="other amounts"):
        await Worker(place).run(model, registry)


async def test_a_run_id_of_300_characters_keeps_one_short_key_for_each_call_over_a_death(place: Place) -> None:
    bench, ids = Bench(), ["é" * 150 + "x" * 150, "é" * 150 + "x" * 149 + "y"]
    calls: list[Asked] = [("charge_i", {"amount": 1}), ("charge_i", {"amount": 2})]
    for run_id in ids:
        model = Script(calls, "done")
        await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(model, bench.registry, run_id)
        assert (await Worker(place).recover(model, bench.registry, run_id)).status == "done"
    keys = set(bench.remote.keys)
    assert (len(keys), bench.effects) == (4, 4)
    assert all(len(key) <= MAX_KEY and key.isascii() for key in keys)
