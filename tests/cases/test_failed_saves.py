"""The store cannot write: the run stops there, nothing later starts, and once the store works it goes on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agent_runtime.errors import ReadOnlyStore, RecoveryNeedsDecision, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, RunStatus, StoredMessage
from agent_runtime.journal.store import Answer, AnswerKind, Append
from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import Asked, Bench, Place, Script, Worker, error_of, results_in

CALL: list[Asked] = [("charge_i", {"amount": 1})]
CHARGE: list[Asked] = [("charge", {"amount": 1})]


class Full(Worker):
    """Its store refuses every commit from the nth on, in one of several ways, and writes nothing."""

    def __init__(self, place: Place, nth: int, how: object, clock: ManualClock) -> None:
        super().__init__(place, clock=clock)
        self.left, self.how, self.refused = nth, how, 0

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        self.left -= 1
        if self.left >= 0:
            return await super().commit(appends)
        self.refused += 1
        return [self._refuse()] * len(appends)

    async def post(self, run_id: RunId, message: StoredMessage) -> Answer:
        return self._refuse() if self.left < 0 else await super().post(run_id, message)

    def _refuse(self) -> Answer:
        if isinstance(self.how, Exception):
            raise self.how
        return Answer(AnswerKind.UNKNOWN)


FAILURES = {
    "no room": StoreUnavailable("no room"),
    "read only": ReadOnlyStore("read only"),
    "away": ConnectionError("away"),
    "no answer": None,
}


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("written", range(1, 8))
@pytest.mark.parametrize("tool", ["charge", "charge_i"])
async def test_a_save_that_fails_stops_the_run_where_it_stands(
    place: Place, clock: ManualClock, tool: str, written: int, how: str
) -> None:
    bench, step = Bench(), CHARGE if tool == "charge" else CALL
    model = Script(step, step, step, "done")
    worker = Full(place, written, FAILURES[how], clock)
    error = await error_of(worker.run(model, bench.registry, clock=clock))
    assert isinstance(error, StoreUnavailable | ReadOnlyStore)
    asked, entered = model.asked, bench.entered[tool]
    assert (asked, entered) == ((written + 1) // 2, written // 2), "nothing starts whose intent is not written"
    run = await place.load("run")
    assert run.row.status == RunStatus.RUNNING
    started = {record.call for record in run.records if record.kind == RecordKind.STARTED}
    assert len(started) == written
    second = await error_of(Worker(place).recover(model, bench.registry))
    in_doubt = tool == "charge" and written % 2 == 0
    assert isinstance(second, RecoveryNeedsDecision) is in_doubt
    if in_doubt:
        assert bench.effects == entered
        await Worker(place).recover(model, bench.registry, rerun_in_doubt=True)
    else:
        assert second is None
    result = await Worker(place).recover(model, bench.registry)
    assert (result.status, len(results_in(result.messages))) == ("done", 3)
    assert bench.effects == (4 if in_doubt else 3)


@pytest.mark.parametrize("how", FAILURES)
async def test_a_run_whose_very_first_save_fails_was_never_there_and_did_nothing(
    place: Place, clock: ManualClock, how: str
) -> None:
    bench, model = Bench(), Script(CALL, "done")
    error = await error_of(Full(place, 0, FAILURES[how], clock).run(model, bench.registry, clock=clock))
    assert isinstance(error, StoreUnavailable | ReadOnlyStore)
    assert (model.asked, bench.effects) == (0, 0)
    assert await place.open().latest(RunId("run")) is None
    result = await Worker(place).run(model, bench.registry)
    assert (result.status, bench.effects) == ("done", 1)


@pytest.mark.parametrize("how", FAILURES)
async def test_a_claim_that_cannot_be_written_runs_nothing(place: Place, clock: ManualClock, how: str) -> None:
    bench, model = Bench(), Script(CALL, CALL, "done")
    await error_of(Full(place, 2, FAILURES["no room"], clock).run(model, bench.registry, clock=clock))
    entered, before = bench.entered.total(), await place.load("run")
    error = await error_of(Full(place, 0, FAILURES[how], clock).recover(model, bench.registry, clock=clock))
    assert isinstance(error, StoreUnavailable | ReadOnlyStore)
    assert (bench.entered.total(), model.asked) == (entered, 1)
    after = await place.load("run")
    assert after._replace(row=before.row) == before
    assert (await Worker(place).recover(model, bench.registry)).status == "done"
    assert bench.effects == 2


async def test_an_end_that_cannot_be_written_is_no_end(place: Place, clock: ManualClock) -> None:
    bench, model = Bench(), Script(CALL, "done")
    error = await error_of(Full(place, 3, FAILURES["no room"], clock).run(model, bench.registry, clock=clock))
    assert isinstance(error, StoreUnavailable)
    assert (await place.load("run")).row.status == RunStatus.RUNNING
    result = await Worker(place).recover(model, bench.registry)
    assert (result.output, bench.effects, model.asked) == ("done", 1, 3)
