"""Did my own commit happen? The store's row says so: no write is made twice, and none is in conflict with itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agent_runtime.errors import StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, StoredRun
from agent_runtime.journal.store import Answer, AnswerKind, Append
from agent_runtime.testing.manual_clock import ManualClock
from tests.bench import Asked, Bench, Killed, Place, Script, Worker, results_in

STEPS: list[list[Asked]] = [
    [("charge", {"amount": 1})],
    [("charge_i", {"amount": 2}), ("charge", {"amount": 3}), ("lookup", {"name": "a"})],
]
HOWS = ["landed", "lost", "refused twice", "landed late", "landed, and away for a while"]


class Lossy(Worker):
    """The answer to its nth commit is lost, in one of several ways."""

    def __init__(self, place: Place, nth: int, how: str, clock: ManualClock) -> None:
        super().__init__(place, clock=clock)
        self.left, self.how, self.lost, self.looks_lost = nth, how, 0, 0
        self.kept: Sequence[Append] = ()

    async def commit(self, appends: Sequence[Append]) -> list[Answer]:
        self.left -= 1
        if self.kept:
            await super().commit(self.kept)  # the first send lands now, just before the second
            self.kept = ()
        if self.left == 0 or (self.lost == 1 and self.how == "refused twice"):
            self.lost += 1
            return await self._lose(appends)
        return await super().commit(appends)

    async def _lose(self, appends: Sequence[Append]) -> list[Answer]:
        match self.how:
            case "landed" | "landed, and away for a while":
                self.looks_lost = 3 if "away" in self.how else 0
                await super().commit(appends)
                raise ConnectionError("connection lost")
            case "lost":
                raise ConnectionError("connection lost")
            case "landed late":
                self.kept = appends
                return [Answer(AnswerKind.UNKNOWN)] * len(appends)
            case _:
                raise StoreUnavailable("could not serialize access, SQLSTATE 40001")

    async def latest(self, run_id: RunId) -> StoredRun | None:
        if self.looks_lost:
            self.looks_lost -= 1
            raise ConnectionError("still away")
        return await super().latest(run_id)


@pytest.mark.parametrize("commits", ["grouped", "each"])
@pytest.mark.parametrize("how", HOWS)
async def test_whichever_answer_is_lost_the_run_is_as_if_it_had_come(
    place: Place, clock: ManualClock, how: str, commits: str
) -> None:
    undisturbed = await Worker(place).run(Script(*STEPS, "done"), Bench().registry, "undisturbed", commits=commits)
    model_run = await place.load("undisturbed")
    for nth in range(1, 40):
        bench, model, run_id = Bench(), Script(*STEPS, "done"), f"run-{nth}"
        worker = Lossy(place, nth, how, clock)
        result = await worker.run(model, bench.registry, run_id, clock=clock, commits=commits)
        assert list(result.messages) == list(undisturbed.messages)
        assert (bench.effects, bench.entered.total(), model.asked) == (3, 4, 3)
        run = await place.load(run_id)
        assert sorted(facts(run)) == sorted(facts(model_run)), "no record twice, and none more"
        assert run.row.step == model_run.row.step
        assert not any(b"connection" in record.body or b"40001" in record.body for record in run.records)
        if not worker.lost:
            assert nth > 6
            return
    raise AssertionError("the run never had an end")


def facts(run: StoredRun) -> list[tuple[int, str, int]]:
    return [(record.kind, record.call, record.attempt) for record in run.records]


@pytest.mark.parametrize("how", HOWS)
async def test_a_claim_whose_answer_is_lost_is_claimed_once(place: Place, clock: ManualClock, how: str) -> None:
    bench, model = Bench(), Script(*STEPS, "done")
    dying = Worker(place)
    bench.after = lambda *_: dying.die()  # type: ignore[assignment]  # it never returns
    with pytest.raises(Killed):
        await dying.run(model, bench.registry)
    bench.after = Bench().after
    worker = Lossy(place, 1, how, clock)
    result = await worker.recover(model, bench.registry, clock=clock, rerun_in_doubt=True)
    assert worker.lost
    run = await place.load("run")
    assert [record.epoch for record in run.records if record.kind == RecordKind.CLAIMED] == [1, 2]
    assert results_in(result.messages)[0] == "effect 2"
    assert bench.effects == 4


async def test_a_passing_error_is_tried_a_bounded_number_of_times_and_is_never_a_result(
    place: Place, clock: ManualClock
) -> None:
    class Stubborn(Worker):
        tried = 0

        async def commit(self, appends: Sequence[Append]) -> list[Answer]:
            if any(record.kind == RecordKind.STARTED and record.call == "0" for a in appends for record in a.records):
                self.tried += 1
                raise StoreUnavailable("could not serialize access, SQLSTATE 40001")
            return await super().commit(appends)

    bench, worker = Bench(), Stubborn(place)
    with pytest.raises(StoreUnavailable, match="40001"):
        await worker.run(Script(*STEPS, "done"), bench.registry, clock=clock)
    assert 2 <= worker.tried <= 20
    assert bench.entered.total() == 0
    run = await place.load("run")
    assert not any(b"40001" in record.body for record in run.records)
    assert (await Worker(place).recover(Script(*STEPS, "done"), bench.registry)).status == "done"
