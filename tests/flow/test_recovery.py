"""Picking a flow's run up: what replays, what runs again, what needs a decision, and whose it is."""

from __future__ import annotations

import asyncio

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import (
    CheckpointConflict,
    CheckpointNotFound,
    FlowError,
    IdentityMismatch,
    RecoveryNeedsDecision,
    RunQuarantined,
)
from agent_runtime.flow.calls import NodeRun
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowResult
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus
from agent_runtime.run import RunContext
from agent_runtime.telemetry import HistorySink
from tests.bench import Bench, Counting, Killed, NoHeartbeat, Place, Script, Worker, error_of, kill_when
from tests.flow.desk import CHARGE, DONE, LOOK, MAIL, Order, chain, left, recover, run, run_and_die, runner_on, still

# What replays, and what runs again.


@pytest.mark.parametrize("seq", range(3))
async def test_finished_supersteps_are_not_worked_again(place: Place, seq: int) -> None:
    seen: list[str] = []

    def watched(order: Order) -> dict[str, object]:
        seen.append(order.note)
        return {"amount": order.amount}

    flow = chain(*[Call("charge_i", args=watched, into="note")] * 3)
    bench = Bench()
    await left(place, bench, flow, CrashPoint.AFTER_INTENT, seq)
    before = len(seen)
    result = await recover(Worker(place), bench.registry, flow)
    assert result.state.note == "effect 3"
    assert (result.rerun, result.replayed) == (1, 0)
    assert len(seen) - before == 3 - seq
    assert bench.remote.keys == ["run:0/n0", "run:1/n1", "run:2/n2"]


async def test_a_finished_call_of_the_superstep_that_was_cut_short_replays_by_place_and_arguments(place: Place) -> None:
    async def two(order: Order, run: NodeRun) -> dict[str, object]:
        return {"found": [await run.call("charge_i", amount=1), await run.call("charge_i", amount=2)]}

    flow, bench = Flow("f", state=Order).node("two", two).end("two"), Bench()
    worker = Worker(place)
    worker.plan = worker.killed_at(CrashPoint.AFTER_CALL, 0, nth=2).plan
    await run_and_die(worker, bench.registry, flow)
    history = HistorySink()
    result = await recover(Worker(place), bench.registry, flow, sinks=[history])
    assert (result.state.found, result.replayed, result.rerun) == (["effect 1", "effect 2"], 1, 1)
    assert bench.remote.keys == ["run:0/two.0", "run:0/two.1", "run:0/two.1"]
    [recovered] = [event for event in history.events if event.name == "run.recovered"]
    assert dict(recovered.data) == {"kind": "flow", "step": 1, "replayed": 1, "rerun": 1}


async def test_a_loop_that_is_killed_in_its_second_round_makes_three_visits_in_all(place: Place) -> None:
    def count(order: Order) -> dict[str, object]:
        return {"rounds": order.rounds + 1}

    flow = Flow("f", state=Order).node("pay", CHARGE, max_visits=3).node("count", count).node("end", LOOK)
    flow.edge("pay", "count").edge("count", "pay", when=lambda o: o.rounds < 3).edge(
        "count", "end", when=lambda o: o.rounds == 3
    )
    flow.end("end")
    bench = Bench()
    await left(place, bench, flow, CrashPoint.AFTER_CALL, 2)
    result = await recover(Worker(place), bench.registry, flow)
    assert (result.status, result.state, bench.effects) == ("done", Order(rounds=3, note="what is known of ana"), 3)


async def test_limits_count_over_the_whole_run(place: Place) -> None:
    flow = Flow("f", state=Order).node("pay", CHARGE).edge("pay", "pay").end("pay")
    bench = Bench()
    await left(place, bench, flow, CrashPoint.AFTER_CALL, 3, max_supersteps=5)
    result = await recover(Worker(place), bench.registry, flow, max_supersteps=5)
    assert (result.status, bench.effects) == ("failed", 5)


async def test_a_run_that_is_done_gives_its_stored_result_and_changes_nothing(place: Place) -> None:
    bench, flow = Bench(), chain(CHARGE, LOOK)
    first = await run(Worker(place), bench.registry, flow)
    before = await place.load("run")
    for _ in range(3):
        again = await recover(Worker(place), bench.registry, flow)
        assert again == first
    assert still(await place.load("run")) == still(before)


async def test_recovering_again_and_again_without_progress_ends_in_quarantine_and_totals_never_fall(place: Place) -> None:
    bench, flow = Bench(), chain(CHARGE, CHARGE)
    await left(place, bench, flow, CrashPoint.AFTER_INTENT, 1)
    for _ in range(5):
        with pytest.raises(Killed):
            await recover(Worker(place).killed_at(CrashPoint.AFTER_INTENT, 1), bench.registry, flow)
    error = await error_of(recover(Worker(place), bench.registry, flow))
    assert isinstance(error, RunQuarantined)
    assert "call 1/n1 (attempt 6)" in error.why
    assert bench.effects == 1


async def test_a_run_killed_between_its_last_checkpoint_and_its_end_only_ends(place: Place) -> None:
    bench, flow, worker = Bench(), chain(CHARGE), Worker(place)
    counting = Counting(place.open())
    await run(Worker(place), bench.registry, flow, run_id="other", commits="each")
    worker.inner = counting

    def die_at_the_end(verb: str) -> None:
        if any(record.kind == RecordKind.CHECKPOINT for append in counting.appends for record in append.records):
            worker.is_dead = True
            raise Killed(verb)

    worker.check = die_at_the_end  # type: ignore[method-assign]
    await run_and_die(worker, bench.registry, flow, commits="each")
    result = await recover(Worker(place), bench.registry, flow)
    assert (result.status, bench.entered["charge_i"]) == ("done", 2)


# Doubts.


async def test_a_call_without_a_rule_needs_a_decision_before_anything_acts_and_runs_again_once_permitted(place: Place) -> None:
    flow = Flow("f", state=Order).node("s", LOOK).node("pay", CHARGE)
    flow.node("mail", Call("email", args=lambda order: {"to": order.to}, into="trouble"))
    flow.edge("s", "pay").edge("s", "mail").end("pay", "mail")
    bench, worker = Bench(), Worker(place)
    both = asyncio.Event()

    async def stand(tool: str, args: dict[str, object]) -> None:
        if tool in ("charge_i", "email"):
            if bench.entered["charge_i"] and bench.entered["email"]:
                both.set()
            await asyncio.Event().wait()

    bench.after = stand
    await kill_when(worker, run(worker, bench.registry, flow), both)
    bench.after = Bench().after
    entered = dict(bench.entered)
    error = await error_of(recover(Worker(place), bench.registry, flow))
    assert isinstance(error, RecoveryNeedsDecision)
    assert [tool for tool, _ in error.calls] == ["email"]
    [doubt] = error.doubts
    assert (doubt.call, doubt.key, dict(doubt.args)) == ("1/mail", "run:1/mail", {"to": "ana"})
    assert dict(bench.entered) == entered
    row = (await place.load("run")).row
    assert (row.status, row.owner) == (RunStatus.BLOCKED, NO_OWNER)
    result = await recover(Worker(place), bench.registry, flow, rerun_in_doubt=error.doubts)
    assert (result.status, result.state.note, result.state.trouble) == ("done", "effect 1", "effect 3")
    assert (result.rerun, bench.remote.count("email"), bench.remote.count("charge_i")) == (2, 2, 1)


async def test_a_call_that_gets_in_doubt_in_a_living_run_blocks_it_when_its_siblings_have_ended(place: Place) -> None:
    flow = Flow("f", state=Order).node("s", LOOK).node("mail", MAIL)
    flow.node("pay", Call("charge_i", args=lambda order: {"amount": 1}, into="trouble"))
    flow.edge("s", "mail").edge("s", "pay").end("pay", "mail")
    bench = Bench()

    async def lose(tool: str, args: dict[str, object]) -> None:
        if tool == "email":
            raise ConnectionResetError("lost")
        await asyncio.sleep(0.001)

    bench.after = lose
    error = await error_of(run(Worker(place), bench.registry, flow))
    assert isinstance(error, RecoveryNeedsDecision)
    run_now = await place.load("run")
    assert run_now.row.status == RunStatus.BLOCKED
    assert [r.call for r in run_now.records if r.kind == RecordKind.DONE] == ["0/s", "1/pay"]


async def test_node_code_cannot_swallow_that_a_call_is_in_doubt(place: Place) -> None:
    went_on = False

    async def swallow(order: Order, run: NodeRun) -> dict[str, object]:
        nonlocal went_on
        try:
            await run.call("email", to="ana")
        except Exception:
            went_on = True
        return {"note": "fine"}

    bench = Bench()

    async def lose(tool: str, args: dict[str, object]) -> None:
        raise ConnectionResetError("lost")

    bench.after = lose
    error = await error_of(run(Worker(place), bench.registry, Flow("f", state=Order).node("a", swallow).end("a")))
    assert isinstance(error, RecoveryNeedsDecision)
    assert not went_on


async def test_a_call_that_node_code_gives_up_goes_on_to_its_end(place: Place) -> None:
    bench = Bench()
    entered = asyncio.Event()

    async def impatient(order: Order, run: NodeRun) -> dict[str, object]:
        call = asyncio.ensure_future(run.call("email", to="ana"))
        await entered.wait()
        call.cancel()
        return {"note": "gave up"}

    async def slow(tool: str, args: dict[str, object]) -> None:
        entered.set()
        await asyncio.sleep(0.01)

    bench.before = slow
    result = await run(Worker(place), bench.registry, Flow("f", state=Order).node("a", impatient).end("a"))
    assert (result.status, result.state.note, bench.effects) == ("done", "gave up", 1)
    assert [r.call for r in (await place.load("run")).records if r.kind == RecordKind.DONE] == ["0/a.0"]


# Whose it is, and the table of what each operation does.


async def test_another_program_or_another_flow_cannot_have_a_run_and_learns_nothing_of_it(place: Place) -> None:
    bench, worker = Bench(), Worker(place)
    await run(worker, bench.registry, chain(CHARGE), run_id="mine")
    await worker.run(Script("done"), bench.registry, "loop")
    for work in (
        recover(worker, bench.registry, chain(CHARGE, name="others"), "mine"),
        recover(worker, bench.registry, chain(CHARGE), "loop"),
        worker.recover(Script("done"), bench.registry, "mine"),
    ):
        error = await error_of(work)
        assert isinstance(error, CheckpointConflict)
        assert "orders" not in str(error)
    assert isinstance(await error_of(recover(worker, bench.registry, chain(CHARGE), "none")), CheckpointNotFound)


async def test_two_flows_under_one_name_are_told_apart_by_their_graphs(place: Place) -> None:
    bench = Bench()
    await left(place, bench, chain(CHARGE, LOOK), CrashPoint.AFTER_CALL)
    error = await error_of(recover(Worker(place), bench.registry, chain(LOOK)))
    assert isinstance(error, FlowError)
    assert "another graph of flow 'orders'" in str(error)


ANA = RunContext(user="ana", thread="t-1")


BO = RunContext(user="bo", thread="t-1")


AGENT = RunContext(user="ana", principal="agent-7")


async def test_a_run_is_restored_without_a_context_and_refused_to_another_one(place: Place) -> None:
    bench, flow = Bench(), chain(CHARGE, LOOK)
    await left(place, bench, flow, CrashPoint.AFTER_CALL, ctx=ANA)
    error = await error_of(recover(Worker(place), bench.registry, flow, ctx=BO))
    assert isinstance(error, IdentityMismatch)
    assert "ana" not in str(error)
    assert (await recover(Worker(place), bench.registry, flow)).status == "done"


async def test_resume_needs_the_runs_own_context_and_a_run_that_has_not_ended(place: Place) -> None:
    bench, flow = Bench(), chain(CHARGE, LOOK)
    await left(place, bench, flow, CrashPoint.AFTER_CALL, ctx=ANA)
    runner = runner_on(Worker(place), bench.registry)
    for ctx in (None, BO):
        assert isinstance(await error_of(runner.resume(flow, "run", ctx=ctx)), IdentityMismatch)
    assert (await runner.resume(flow, "run", ctx=ANA)).status == "done"
    assert isinstance(await error_of(runner.resume(flow, "run", ctx=ANA)), CheckpointConflict)
    assert isinstance(await error_of(runner.resume(flow, "none")), CheckpointNotFound)


async def test_a_run_with_a_principal_needs_it_back(place: Place) -> None:
    bench, flow = Bench(), chain(CHARGE, LOOK)
    await left(place, bench, flow, CrashPoint.AFTER_CALL, ctx=AGENT)
    runner = runner_on(Worker(place), bench.registry)
    assert isinstance(await error_of(runner.recover(flow, "run")), IdentityMismatch)
    reported = await runner.recover_all(flow)
    assert [type(each) for each in reported.values()] == [IdentityMismatch]
    [result] = (await runner.recover_all(flow, contexts={"run": AGENT})).values()
    assert isinstance(result, FlowResult)


async def test_start_or_recover_starts_what_is_not_there_goes_on_with_what_is_and_gives_back_what_is_done(
    place: Place,
) -> None:
    bench, flow = Bench(), chain(CHARGE, LOOK)
    killed = runner_on(Worker(place).killed_at(CrashPoint.AFTER_CALL), bench.registry)
    with pytest.raises(Killed):
        await killed.start_or_recover(flow, Order(), run_id="run")
    runner = runner_on(Worker(place), bench.registry)
    assert (await runner.start_or_recover(flow, Order(amount=1), run_id="run")).state == DONE
    assert (await runner.start_or_recover(flow, Order(amount=1), run_id="run")).state == DONE
    assert bench.remote.keys == ["run:0/n0"] * 2


async def test_a_living_owner_keeps_its_run_unless_it_is_taken_over_and_a_thawed_one_starts_and_saves_nothing(
    place: Place,
) -> None:
    bench, flow = Bench(), chain(CHARGE, MAIL, LOOK)
    entered, thaw = asyncio.Event(), asyncio.Event()

    async def freeze(tool: str, args: dict[str, object]) -> None:
        if tool == "charge_i" and not entered.is_set():
            entered.set()
            await thaw.wait()

    bench.after = freeze
    frozen = asyncio.ensure_future(error_of(run(Worker(place), bench.registry, flow, offload=NoHeartbeat())))
    await entered.wait()
    runner = runner_on(Worker(place), bench.registry)
    for work in (
        runner.recover(flow, "run"), runner.resume(flow, "run"), runner.start_or_recover(flow, Order(), run_id="run"),
        runner.run(flow, Order(), run_id="run"),
    ):  # fmt: skip
        assert isinstance(await error_of(work), CheckpointConflict)
    result = await runner.recover(flow, "run", take_over=True)
    before, entered_before = await place.load("run"), dict(bench.entered)
    thaw.set()
    assert isinstance(await frozen, CheckpointConflict)
    assert (result.state, bench.entered) == (DONE, entered_before)
    assert still(await place.load("run")) == still(before)
    assert bench.remote.count("email") == 1


async def test_of_two_that_recover_at_the_same_moment_one_wins_and_the_other_ran_nothing_fifty_times(place: Place) -> None:
    for at in range(50):
        bench = Bench()
        asked: list[str] = []

        def args(order: Order, who: list[str] = asked) -> dict[str, object]:
            who.append(order.to)
            return {"amount": order.amount}

        flow, run_id = chain(Call("charge_i", args=args, into="note"), LOOK), f"run-{at}"
        await left(place, bench, flow, CrashPoint.AFTER_CALL, run_id=run_id)
        asked.clear()
        results = await asyncio.gather(
            *(recover(Worker(place), bench.registry, flow, run_id) for _ in range(2)), return_exceptions=True
        )
        assert sorted(type(result).__name__ for result in results) == ["CheckpointConflict", "FlowResult"]
        assert (len(asked), bench.effects, bench.entered["charge_i"], bench.entered["lookup"]) == (1, 1, 2, 1)
