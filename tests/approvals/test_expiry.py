"""A request that nobody answers in time: answered as expired, which is never a person's denial, and the run goes on."""

from __future__ import annotations

import pytest

from agent_runtime.abandoned import Seen, is_due
from agent_runtime.clock import milliseconds
from agent_runtime.errors import VerdictRefused
from agent_runtime.executor import Executor
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowRunner
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tools import ToolRegistry
from tests.approvals.desk import charging, kinds, needing, the_request
from tests.bench import KEY, Bench, Place, Script, Worker, error_of, results_in
from tests.flow.desk import Order, chain

EXPIRED = "error: ApprovalExpired: nobody answered the request for approval by"
PAY = Call("charge", args=lambda order: {"amount": order.amount}, into="note")


def expiring() -> Bench:
    return needing(approval_expires=60)


async def test_an_expired_request_is_answered_as_expired_and_not_as_denied_by_a_person(
    place: Place, clock: ManualClock
) -> None:
    bench, model = expiring(), charging()
    request = the_request(await Worker(place, clock=clock).run(model, bench.registry, clock=clock))
    clock.advance(59)
    assert the_request(await Worker(place, clock=clock).recover(model, bench.registry, clock=clock)) == request
    clock.advance(1)
    result = await Worker(place, clock=clock).recover(model, bench.registry, clock=clock)
    assert (result.status, bench.effects) == ("done", 0)
    [text] = results_in(model.requests[-1])
    assert text.startswith(EXPIRED)
    assert kinds(await place.load("run"), "0") == [RecordKind.PENDING, RecordKind.DONE]


async def test_a_verdict_that_comes_too_late_is_refused_and_says_so(place: Place, clock: ManualClock) -> None:
    bench, model = expiring(), charging()
    request = the_request(await Worker(place, clock=clock).run(model, bench.registry, clock=clock))
    clock.advance(60)
    for verdict in (request.approve(by="ana"), request.deny(by="ana"), request.edit({"amount": 1}, by="ana")):
        again = Worker(place, clock=clock).recover(model, bench.registry, clock=clock, verdicts=[verdict])
        error = await error_of(again)
        assert isinstance(error, VerdictRefused)
        assert "expired" in str(error)
    assert bench.effects == 0
    assert (await Worker(place, clock=clock).recover(model, bench.registry, clock=clock)).status == "done"


async def test_a_verdict_for_a_request_that_was_closed_as_expired_is_refused(place: Place, clock: ManualClock) -> None:
    bench = Bench(needs_approval=True, approval_expires=60)
    model = Script([("charge", {"amount": 1})], [("charge", {"amount": 2})], "done")
    request = the_request(await Worker(place, clock=clock).run(model, bench.registry, clock=clock))
    clock.advance(60)
    other = the_request(await Worker(place, clock=clock).recover(model, bench.registry, clock=clock))
    verdicts = [request.approve(by="ana")]
    error = await error_of(Worker(place, clock=clock).recover(model, bench.registry, clock=clock, verdicts=verdicts))
    assert isinstance(error, VerdictRefused)
    assert "closed" in str(error)
    verdicts = [other.approve(by="ana")]
    result = await Worker(place, clock=clock).recover(model, bench.registry, clock=clock, verdicts=verdicts)
    assert (result.status, [effect.args for effect in bench.remote.effects]) == ("done", [{"amount": 2}])


@pytest.mark.parametrize("late", [False, True])
async def test_a_stored_approval_that_expires_before_it_is_spent_lets_nothing_out(
    place: Place, clock: ManualClock, late: bool
) -> None:
    from agent_runtime.testing.faults import FaultyStore, Life, Moment, SimulatedCrash, Where

    bench, model = expiring(), charging()
    request = the_request(await Worker(place, clock=clock).run(model, bench.registry, clock=clock))
    store = FaultyStore(place.open(clock), life=Life(Moment(Where.AFTER_WRITE, 1)))
    with pytest.raises(SimulatedCrash):
        await Worker(place, clock=clock).recover(
            model, bench.registry, clock=clock, checkpoints=store, verdicts=[request.approve(by="ana")]
        )
    clock.advance(60 if late else 30)
    result = await Worker(place, clock=clock).recover(model, bench.registry, clock=clock)
    assert (result.status, bench.effects) == ("done", 0 if late else 1)
    [text] = results_in(model.requests[-1])
    assert text.startswith(EXPIRED) is late


async def test_a_run_that_was_approved_and_started_in_time_is_not_asked_again_when_time_has_passed(
    place: Place, clock: ManualClock
) -> None:
    from agent_runtime.crash import CrashPoint

    bench, model = expiring(), Script([("charge_i", {"amount": 1})], "done")
    request = the_request(await Worker(place, clock=clock).run(model, bench.registry, clock=clock))
    dying = Worker(place, clock=clock).killed_at(CrashPoint.AFTER_CALL)
    await dying.recover_and_die(model, bench.registry, clock=clock, verdicts=[request.approve(by="ana")])
    clock.advance(600)
    result = await Worker(place, clock=clock).recover(model, bench.registry, clock=clock)
    assert (result.status, bench.effects, bench.entered["charge_i"]) == ("done", 1, 2)


async def test_a_paused_run_is_nobodys_business_until_its_request_expires(place: Place, clock: ManualClock) -> None:
    bench = expiring()
    request = the_request(await Worker(place, clock=clock).run(charging(), bench.registry, clock=clock))
    assert request.expires_at is not None
    seen = Seen((await place.load("run")).row, None)
    expires_ms = milliseconds(request.expires_at)
    assert [is_due(seen, expires_ms + at) for at in (-1, 0, 1)] == [False, True, True]
    never = needing()
    await Worker(place, clock=clock).run(charging(), never.registry, "never", clock=clock)
    assert not is_due(Seen((await place.load("never")).row, None), expires_ms + 10**12)


async def test_a_run_with_several_requests_wakes_with_the_first_and_waits_on_for_the_others(
    place: Place, clock: ManualClock
) -> None:
    registry, sent = ToolRegistry(), []
    for name, seconds in (("soon", 60), ("later", 600), ("never", None)):

        async def act(amount: int, name: str = name) -> str:
            sent.append(name)
            return name

        act.__defaults__ = (name,)
        registry.tool(name=name, needs_approval=True, approval_expires=seconds)(act)
    model = Script([(name, {"amount": 1}) for name in ("never", "later", "soon")], "done")
    await Worker(place, clock=clock).run(model, registry, clock=clock)
    result = None
    for left in (["0.0", "0.1"], ["0.0"]):
        wake_at = (await place.load("run")).row.wake_at
        assert wake_at is not None
        clock.advance((wake_at - clock.now_ms()) / 1000)
        result = await Worker(place, clock=clock).recover(model, registry, clock=clock)
        assert [request.id for request in result.pending] == left
    assert (await place.load("run")).row.wake_at is None
    assert result is not None
    [never] = result.pending
    result = await Worker(place, clock=clock).recover(model, registry, clock=clock, verdicts=[never.approve(by="ana")])
    assert (result.status, sent) == ("done", ["never"])
    assert [text[:22] for text in results_in(model.requests[-1])] == ["never", EXPIRED[:22], EXPIRED[:22]]


async def test_a_flow_expires_in_the_same_way_and_recover_all_goes_on_with_it(place: Place, clock: ManualClock) -> None:
    bench, flow = expiring(), chain(PAY)

    def runner() -> FlowRunner:
        worker = Worker(place, clock=clock)
        return FlowRunner(Executor(bench.registry), checkpoints=worker, checkpoint_key=KEY, clock=clock)

    the_request(await runner().run(flow, Order(), run_id="run"))
    clock.advance(30)
    [waiting] = (await runner().recover_all(flow)).values()
    assert not isinstance(waiting, Exception)
    assert waiting.status == "paused"
    clock.advance(30)
    [failed] = (await runner().recover_all(flow)).values()
    assert not isinstance(failed, Exception)
    assert failed.error is not None
    assert (failed.status, failed.error.type, bench.effects) == ("failed", "ApprovalExpired", 0)
    assert (await place.load("run")).row.status == RunStatus.FAILED
