"""A worker dies at each of its writes, from the verdict that is stored to the recorded result: nobody is asked twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, product
from typing import Any

import pytest

from agent_runtime.approvals import ApprovalRequest, Verdict
from agent_runtime.errors import RecoveryNeedsDecision
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.testing.faults import FaultyStore, Life, LosesReply, Moment, SimulatedCrash, Where
from tests.approvals.desk import kinds, needing, the_request
from tests.bench import Place, Script, Worker, decisions_in, error_of, results_in

Say = Callable[[ApprovalRequest], Verdict]

ANSWERS: dict[str, tuple[Say, list[int]]] = {
    "approve": (lambda request: request.approve(by="ana", note="ok"), [100]),
    "edit": (lambda request: request.edit({"amount": 7}, by="ana"), [7]),
    "deny": (lambda request: request.deny(by="ana"), []),
}


async def _ask_nobody(request: ApprovalRequest) -> Verdict:
    raise AssertionError(f"asked again: {request}")


class Lives:
    """A run that is answered once, and the workers that die on it."""

    def __init__(self, place: Place, run_id: str, tool: str, commits: str) -> None:
        self.place, self.run_id, self.commits = place, run_id, commits
        self.bench, self.model = needing(), Script([(tool, {"amount": 100})], "done")
        self.permitted = 0

    async def pause(self) -> ApprovalRequest:
        return the_request(await Worker(self.place).run(self.model, self.bench.registry, self.run_id))

    async def work(self, ends: Moment | None = None, **options: Any) -> Any:
        """One more worker, which dies there; None where it did."""
        store = FaultyStore(self.place.open(), life=Life(ends))
        given = {"checkpoints": store, "commits": self.commits, **options}
        try:
            return await Worker(self.place).recover(self.model, self.bench.registry, self.run_id, **given)
        except SimulatedCrash:
            return None

    async def bring_home(self) -> Any:
        """Recover it until it is done, with a permission where a call without a rule is in doubt."""
        for _ in range(3):
            end = await error_of(self.work(approvals=_ask_nobody))
            if not isinstance(end, RecoveryNeedsDecision):
                assert end is None, end
                break
            self.permitted += 1
            await self.work(approvals=_ask_nobody, rerun_in_doubt=end.doubts)
        return await self.work()

    def asked_to_decide(self) -> int:
        """How often the model was asked for the decision that paused the run; a later answer may be lost with a worker."""
        return sum(decisions_in(messages) == 0 for messages in self.model.requests)

    async def verdicts(self) -> int:
        return kinds(await self.place.load(self.run_id), "0").count(RecordKind.VERDICT)


@pytest.mark.parametrize(("tool", "commits"), [("charge_i", "grouped"), ("charge", "each")])
@pytest.mark.parametrize("answer", list(ANSWERS))
async def test_after_a_death_at_any_write_the_person_is_not_asked_again_and_the_call_is_made_once(
    place: Place, answer: str, tool: str, commits: str
) -> None:
    say, wanted = ANSWERS[answer]
    died = 0
    for where in (Where.BEFORE_WRITE, Where.AFTER_WRITE):
        for number in count(1):
            lives = Lives(place, f"{where.value}-{number}", tool, commits)
            verdict = say(ApprovalRequest.from_json((await lives.pause()).to_json()))
            ended = await lives.work(Moment(where, number), verdicts=[verdict])
            if await lives.verdicts() == 0:  # it died before anything was stored: the request is still open
                assert (lives.bench.effects, number, where) == (0, 1, Where.BEFORE_WRITE)
                the_request(await lives.work())
                await lives.work(verdicts=[verdict])
            result = await lives.bring_home()
            assert (result.status, lives.asked_to_decide()) == ("done", 1)
            assert await lives.verdicts() == 1
            sent = [effect.args["amount"] for effect in lives.bench.remote.effects]
            assert set(sent) == set(wanted)
            assert len(sent) <= len(wanted) + lives.permitted
            assert len(results_in(result.messages)) == 1
            if ended is not None:
                break
            died += 1
    assert died >= 4


@pytest.mark.parametrize("answer", list(ANSWERS))
async def test_an_answer_of_the_store_that_is_lost_loses_no_verdict(place: Place, answer: str) -> None:
    say, wanted = ANSWERS[answer]
    for at in (1, 2, 3):
        lives = Lives(place, f"lost-{at}", "charge_i", "each")
        request = await lives.pause()
        store = FaultyStore(place.open(), LosesReply(at=at))
        result = await Worker(place).recover(
            lives.model, lives.bench.registry, lives.run_id, checkpoints=store, verdicts=[say(request)]
        )
        assert result.status == "done"
        assert [effect.args["amount"] for effect in lives.bench.remote.effects] == wanted


STANDING = ["open", "approved", "edited", "denied", "done"]


@pytest.mark.parametrize("standing", list(product(STANDING, repeat=2)), ids="-".join)
async def test_of_two_requests_each_goes_on_from_where_its_own_record_stands(place: Place, standing: tuple[str, ...]) -> None:
    """Each as it was when the worker died: nobody had answered, somebody had and it was not spent, or it had ended."""
    bench, model = needing(), Script([("charge_i", {"amount": at}) for at in (1, 2)], "done")
    requests = list(zip((await Worker(place).run(model, bench.registry)).pending, standing, strict=True))
    ended = [request.approve(by="ana") for request, how in requests if how == "done"]
    said = [_answer(request, how) for request, how in requests if how not in ("open", "done")]
    if said:
        store = FaultyStore(place.open(), life=Life(Moment(Where.AFTER_WRITE, 1)))
        with pytest.raises(SimulatedCrash):
            await Worker(place).recover(model, bench.registry, checkpoints=store, verdicts=said)
        stored = await place.load("run")
        assert [kinds(stored, request.id)[1:] for request, _ in requests] == [
            [RecordKind.VERDICT] if how not in ("open", "done") else [] for _, how in requests
        ]
    result = await Worker(place).recover(model, bench.registry, verdicts=ended)
    left = [request.id for request, how in requests if how == "open"]
    assert [request.id for request in result.pending] == left
    if left:
        verdicts = [request.approve(by="bo") for request in result.pending]
        result = await Worker(place).recover(model, bench.registry, verdicts=verdicts)
    assert (result.status, model.asked) == ("done", 2)
    wanted = [20 + at if how == "edited" else at for at, how in enumerate(standing, 1) if how != "denied"]
    assert sorted(int(str(effect.args["amount"])) for effect in bench.remote.effects) == sorted(wanted)


def _answer(request: ApprovalRequest, how: str) -> Verdict:
    if how == "denied":
        return request.deny(by="ana")
    if how == "edited":
        return request.edit({"amount": 20 + int(str(request.args["amount"]))}, by="ana")
    return request.approve(by="ana")


async def test_a_verdict_outlives_any_number_of_workers_that_die_before_they_spend_it(place: Place) -> None:
    lives = Lives(place, "run", "charge", "grouped")
    request = await lives.pause()
    assert await lives.work(Moment(Where.AFTER_WRITE, 1), verdicts=[request.approve(by="ana")]) is None
    for _ in range(4):
        assert await lives.work(Moment(Where.AFTER_WRITE, 1)) is None
    assert (await place.load("run")).row.status == RunStatus.RUNNING
    result = await lives.work(approvals=_ask_nobody)
    assert (result.status, lives.bench.effects, await lives.verdicts()) == ("done", 1, 1)
