"""Flows pause and resume as loops do: what was done before a pause is not done again, and a node asks for what it asks for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_runtime import CallFailed, NodeRun, RunContext
from agent_runtime.approvals import ApprovalRequest, Verdict
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict, FlowError, IdentityMismatch, VerdictRefused
from agent_runtime.executor import Executor
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowResult, FlowRunner
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.testing.faults import FaultyStore, Life, Moment, SimulatedCrash, Where
from tests.approvals.desk import Mixed, kinds, stands, the_request
from tests.bench import KEY, Counting, Place, Worker, error_of, expect_death
from tests.flow.desk import CHARGE, LOOK, MAIL, Order, chain, runner_on

REFUND = Call("refund", args=lambda order: {"amount": order.amount}, into="note")


def runner_of(place: Place, bench: Mixed, **options: Any) -> FlowRunner:
    return runner_on(Worker(place), bench.registry, **options)


async def first(place: Place, bench: Mixed, flow: Flow[Any], state: Order | None = None, **options: Any) -> FlowResult[Any]:
    ctx = options.pop("ctx", None)
    return await runner_of(place, bench, **options).run(flow, state or Order(), run_id="run", ctx=ctx)


async def resume(place: Place, bench: Mixed, flow: Flow[Any], *verdicts: Verdict, **options: Any) -> FlowResult[Any]:
    ctx = options.pop("ctx", None)
    return await runner_of(place, bench, **options).resume(flow, "run", verdicts, ctx=ctx)


def code(function: Any, **options: Any) -> Flow[Order]:
    """A flow of one function."""
    return Flow("orders", state=Order).node("work", function, **options).end("work")


async def test_a_flow_pauses_at_a_call_and_goes_on_with_what_was_shown(place: Place) -> None:
    bench, flow = Mixed(), chain(CHARGE, REFUND, MAIL)
    request = the_request(await first(place, bench, flow))
    assert (request.id, request.tool, request.args) == ("1/n1", "refund", {"amount": 40})
    again = await runner_of(place, bench).recover(flow, "run")
    assert the_request(again) == request
    assert (await resume(place, bench, flow)).status == "paused"
    result = await resume(place, bench, flow, request.approve(by="ana"))
    assert (result.status, [effect.tool for effect in bench.remote.effects]) == ("done", ["charge_i", "refund", "email"])


async def test_a_sweep_over_all_runs_waits_beside_none_of_them(place: Place) -> None:
    bench = Mixed()
    flow = chain(REFUND)
    for run_id in ("run", "other"):
        await runner_of(place, bench).run(flow, Order(), run_id=run_id)
    found = await asyncio.wait_for(runner_of(place, bench, wait_seconds=600).recover_all(flow, at_once=1), 20)
    assert [getattr(result, "status", result) for result in found.values()] == ["paused", "paused"]


async def test_an_approval_in_a_flow_adds_two_commits(place: Place) -> None:
    appends = []
    for bench, tool, run_id in ((Mixed(), "charge_i", "plain"), (Mixed(), "refund", "asked")):
        store, flow = Counting(place.open()), chain(Call(tool, args=lambda order: {"amount": order.amount}, into="note"))
        runner = FlowRunner(Executor(bench.registry), checkpoints=store, checkpoint_key=KEY)
        result = await runner.run(flow, Order(), run_id=run_id)
        if run_id == "asked":
            await runner.resume(flow, run_id, [the_request(result).approve(by="ana")])
        appends.append(len(store.appends))
    assert appends[1] - appends[0] == 2


async def test_a_denied_call_fails_its_node_and_on_error_leads_on(place: Place) -> None:
    bench = Mixed()

    def told(order: Order) -> dict[str, object]:
        return {"trouble": "denied"}

    flow = Flow("orders", state=Order).node("pay", REFUND, on_error="told").node("told", told)
    flow = flow.node("ok", MAIL).edge("pay", "ok").end("told", "ok")
    request = the_request(await first(place, bench, flow))
    result = await resume(place, bench, flow, request.deny(by="bo", note="no"))
    assert (result.status, result.state.trouble, bench.effects) == ("done", "denied", 0)


async def test_a_denied_call_reaches_node_code_as_a_failed_call_with_the_note(place: Place) -> None:
    bench, seen = Mixed(), []

    async def work(order: Order, run: NodeRun) -> dict[str, object]:
        try:
            await run.call("refund", amount=1)
        except CallFailed as failed:
            seen.append(str(failed))
        return {"note": await run.call("charge_i", amount=2)}

    request = the_request(await first(place, bench, code(work)))
    result = await resume(place, bench, code(work), request.deny(by="bo", note="too much"))
    assert (result.status, result.state.note) == ("done", "effect 1")
    assert ["too much" in text for text in seen] == [True]


async def test_an_edited_call_keeps_its_place_as_asked_and_the_edit_through_a_crash(place: Place) -> None:
    bench, flow = Mixed(), chain(REFUND, CHARGE)
    request = the_request(await first(place, bench, flow))
    dying = Worker(place).killed_at(CrashPoint.BEFORE_INTENT, 1)
    killed = runner_on(dying, bench.registry, commits="each")
    await expect_death(killed.resume(flow, "run", [request.edit({"amount": 7}, by="ana")]))
    result = await runner_of(place, bench).recover(flow, "run")
    assert result.status == "done"
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 7}, {"amount": 40}]


async def test_a_call_whose_edit_was_spent_replays_where_its_superstep_is_worked_again(place: Place) -> None:
    bench = Mixed()

    async def work(order: Order, run: NodeRun) -> dict[str, object]:
        one = await run.call("refund", amount=1)
        two = await run.call("refund", amount=2)
        return {"found": [one, two]}

    flow = code(work)
    one = the_request(await first(place, bench, flow))
    two = the_request(await resume(place, bench, flow, one.edit({"amount": 10}, by="ana")))
    assert (one.id, two.id) == ("0/work.0", "0/work.1")
    result = await resume(place, bench, flow, two.approve(by="ana"))
    assert (result.status, result.state.found, result.replayed) == ("done", ["effect 1", "effect 2"], 1)
    assert [effect.args["amount"] for effect in bench.remote.effects] == [10, 2]


@pytest.mark.parametrize("commits", ["grouped", "each"])
async def test_work_before_a_pause_is_not_done_again_at_each_of_several_decisions(place: Place, commits: str) -> None:
    bench, asked = Mixed(), 0

    async def upstream(order: Order, run: NodeRun) -> dict[str, object]:
        nonlocal asked
        asked += 1
        return {"note": await run.call("email", to="ana")}

    async def work(order: Order, run: NodeRun) -> dict[str, object]:
        fee = await run.call("charge_i", amount=1)
        return {"found": [fee, *[await run.call("refund", amount=at) for at in (10, 20, 30)]]}

    flow = Flow("orders", state=Order).node("up", upstream).node("work", work).edge("up", "work").end("work")
    result = await first(place, bench, flow, commits=commits)
    for at in (10, 20, 30):
        request = ApprovalRequest.from_json(the_request(result).to_json())
        assert request.args == {"amount": at}
        result = await resume(place, bench, flow, request.approve(by="ana"), commits=commits)
        assert (bench.remote.count("charge_i"), bench.remote.count("email"), asked) == (1, 1, 1)
    assert result.status == "done"
    assert [effect.args.get("amount") for effect in bench.remote.effects] == [None, 1, 10, 20, 30]


async def test_the_items_of_a_map_wait_and_go_on_one_by_one(place: Place) -> None:
    bench = Mixed()
    each = Call("refund", args=lambda order, name: {"amount": int(name)})
    flow = Flow("orders", state=Order).map("all", each, over="names", into="found").end("all")
    result = await first(place, bench, flow, Order(names=["1", "2", "3"]))
    one, two, three = result.pending
    assert [request.id for request in result.pending] == ["0/all[0]", "0/all[1]", "0/all[2]"]
    result = await resume(place, bench, flow, two.approve(by="ana"))
    assert [request.id for request in result.pending] == ["0/all[0]", "0/all[2]"]
    result = await resume(place, bench, flow, three.edit({"amount": 33}, by="ana"), one.approve(by="bo"))
    assert (result.status, sorted(effect.args["amount"] for effect in bench.remote.effects)) == ("done", [1, 2, 33])  # type: ignore[type-var]
    assert result.state.found[1] == "effect 1"


async def test_a_flow_inside_a_node_pauses_and_goes_on(place: Place) -> None:
    bench, inner = Mixed(), chain(CHARGE, REFUND, LOOK, name="inner")
    flow = Flow("orders", state=Order).node("in", inner, writes=["note"]).node("mail", MAIL).edge("in", "mail").end("mail")
    request = the_request(await first(place, bench, flow))
    assert request.id == "0/in/1/n1"
    result = await resume(place, bench, flow, request.approve(by="ana"))
    assert (result.status, [effect.tool for effect in bench.remote.effects]) == ("done", ["charge_i", "refund", "email"])


async def test_nodes_side_by_side_end_while_one_waits_and_are_not_worked_again(place: Place) -> None:
    bench = Mixed()
    flow = Flow("orders", state=Order).node("start", lambda order: {})
    flow = flow.node("pay", Call("refund", args=lambda o: {"amount": 1}))
    flow = flow.node("fee", CHARGE).node("mail", Call("email", args=lambda o: {"to": "bo"}))
    for name in ("pay", "fee", "mail"):
        flow = flow.edge("start", name)
    flow = flow.end("pay", "fee", "mail")
    request = the_request(await first(place, bench, flow))
    assert [effect.tool for effect in bench.remote.effects] == ["charge_i", "email"]
    result = await resume(place, bench, flow, request.approve(by="ana"))
    assert (result.status, bench.effects) == ("done", 3)


async def test_node_code_cannot_swallow_a_pause(place: Place) -> None:
    bench, after = Mixed(), []

    async def work(order: Order, run: NodeRun) -> dict[str, object]:
        try:
            await run.call("refund", amount=1)
        except BaseException:
            after.append("swallowed")
        return {"note": "went on"}

    request = the_request(await first(place, bench, code(work)))
    assert (bench.effects, (await place.load("run")).row.status) == (0, RunStatus.PAUSED)
    result = await resume(place, bench, code(work), request.approve(by="ana"))
    assert (result.status, bench.effects, after) == ("done", 1, ["swallowed"])


@pytest.mark.parametrize("group", [False, True], ids=["gather", "task group"])
async def test_calls_that_code_makes_side_by_side_wait_side_by_side(place: Place, group: bool) -> None:
    bench = Mixed()

    async def work(order: Order, run: NodeRun) -> dict[str, object]:
        asked = [("refund", 1), ("charge_i", 2), ("refund", 3)]
        if not group:
            return {"found": list(await asyncio.gather(*(run.call(tool, amount=at) for tool, at in asked)))}
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(run.call(tool, amount=at)) for tool, at in asked]
        return {"found": [task.result() for task in started]}

    flow = code(work)
    result = await first(place, bench, flow)
    assert [request.args["amount"] for request in result.pending] == [1, 3]
    assert [effect.args["amount"] for effect in bench.remote.effects] == [2]
    result = await resume(place, bench, flow, *(request.approve(by="ana") for request in result.pending))
    assert (result.status, bench.effects) == ("done", 3)


async def test_a_loop_with_a_pause_in_each_round_asks_once_a_round(place: Place) -> None:
    bench = Mixed()

    async def again(order: Order, run: NodeRun) -> dict[str, object]:
        return {"rounds": order.rounds + 1, "note": await run.call("refund", amount=5)}

    flow = Flow("orders", state=Order).node("again", again, max_visits=3)
    flow = flow.edge("again", "again", when=lambda order: order.rounds < 3).end("again")
    result = await first(place, bench, flow)
    ids = []
    while result.status == "paused":
        request = the_request(result)
        ids.append(request.id)
        result = await resume(place, bench, flow, request.approve(by="ana"))
    assert (ids, bench.effects) == (["0/again.0", "1/again.0", "2/again.0"], 3)


async def test_a_request_that_its_node_asks_no_more_is_withdrawn_and_an_answer_to_it_is_refused(place: Place) -> None:
    bench = Mixed()

    def asking(amount: int, tool: str = "refund") -> Flow[Order]:
        async def work(order: Order, run: NodeRun) -> dict[str, object]:
            return {"note": await run.call(tool, amount=amount)}

        flow = Flow("orders", state=Order).node("work", work).node("last", REFUND).edge("work", "last")
        return flow.end("last")

    old = the_request(await first(place, bench, asking(1)))
    new = the_request(await resume(place, bench, asking(2, "charge_i"), old.approve(by="ana")))
    assert new.id == "1/last"
    assert kinds(await place.load("run"), old.id)[-1] is RecordKind.DONE
    error = await error_of(resume(place, bench, asking(2, "charge_i"), old.deny(by="bo")))
    assert isinstance(error, VerdictRefused)
    assert [effect.tool for effect in bench.remote.effects] == ["charge_i"]
    assert (await resume(place, bench, asking(2, "charge_i"), new.approve(by="ana"))).status == "done"


async def test_an_approval_lets_out_nothing_that_the_node_asks_for_instead(place: Place) -> None:
    bench = Mixed()

    def asking(amount: int) -> Flow[Order]:
        async def work(order: Order, run: NodeRun) -> dict[str, object]:
            return {"note": await run.call("refund", amount=amount)}

        return code(work)

    old = the_request(await first(place, bench, asking(1)))
    result = await resume(place, bench, asking(999), old.approve(by="ana"))
    new = next(request for request in result.pending if request.id != old.id)
    assert (new.args, new.id, bench.effects) == ({"amount": 999}, "0/work.0~1", 0)
    assert isinstance(
        await error_of(resume(place, bench, asking(999), old._replace(id=new.id).approve(by="a"))), VerdictRefused
    )
    assert (await resume(place, bench, asking(999), new.approve(by="ana"))).status == "done"
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 999}]


async def test_cancelling_the_task_of_a_node_that_waits_for_a_person_is_a_cancel(place: Place) -> None:
    bench, inside = Mixed(), asyncio.Event()

    async def before(tool: str, args: dict[str, object]) -> None:
        if tool == "charge_i":
            inside.set()
            await asyncio.Event().wait()

    async def work(order: Order, run: NodeRun) -> dict[str, object]:
        return {"found": list(await asyncio.gather(run.call("refund", amount=1), run.call("charge_i", amount=2)))}

    bench.before = before
    task = asyncio.ensure_future(first(place, bench, code(work)))
    await asyncio.wait_for(inside.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    bench.before = Mixed().before
    request = the_request(await runner_of(place, bench).recover(code(work), "run"))
    assert (await resume(place, bench, code(work), request.approve(by="ana"))).status == "done"
    assert bench.effects == 2


async def test_another_identity_or_none_is_refused_and_learns_nothing(place: Place) -> None:
    bench, flow, own = Mixed(), chain(REFUND), RunContext(user="u", thread="t")
    request = the_request(await first(place, bench, flow, ctx=own))
    before = await stands(place)
    for ctx in (None, RunContext(user="eve"), RunContext(user="u")):
        error = await error_of(resume(place, bench, flow, request.approve(by="ana"), ctx=ctx))
        assert isinstance(error, IdentityMismatch)
        assert "refund" not in str(error)
    assert (await stands(place), bench.effects) == (before, 0)
    assert (await resume(place, bench, flow, request.approve(by="ana"), ctx=own)).status == "done"


@pytest.mark.parametrize("given", [None, "yes", [None], {"0/n0": True}, [True]], ids=str)
async def test_nothing_but_verdicts_resumes_a_flow(place: Place, given: Any) -> None:
    bench, flow = Mixed(), chain(REFUND)
    request = the_request(await first(place, bench, flow))
    before = await stands(place)
    assert isinstance(await error_of(runner_of(place, bench).resume(flow, "run", given)), VerdictRefused)
    assert (await stands(place), bench.effects) == (before, 0)
    assert (await resume(place, bench, flow, request.approve(by="ana"))).status == "done"
    assert isinstance(await error_of(resume(place, bench, flow, request.approve(by="ana"))), CheckpointConflict)


async def test_a_graph_that_changed_is_refused_before_a_verdict_is_stored(place: Place) -> None:
    bench, flow = Mixed(), chain(REFUND)
    request = the_request(await first(place, bench, flow))
    before = await stands(place)
    error = await error_of(resume(place, bench, chain(REFUND, MAIL), request.approve(by="ana")))
    assert isinstance(error, FlowError)
    assert await stands(place) == before
    assert (await resume(place, bench, flow, request.approve(by="ana"))).status == "done"


async def test_the_port_of_a_runner_is_asked_for_its_flows(place: Place) -> None:
    bench, flow = Mixed(), chain(REFUND, CHARGE)
    result = await first(place, bench, flow, approvals=lambda request: request.edit({"amount": 3}, by="ana"))
    assert (result.status, [effect.args["amount"] for effect in bench.remote.effects]) == ("done", [3, 40])


async def test_a_worker_that_dies_at_any_write_of_a_flow_with_two_approvals_leaves_it_right(place: Place) -> None:
    """Every write is the last one of some worker: nobody is asked twice, and each call is made once."""

    async def work(order: Order, run: NodeRun) -> dict[str, object]:
        return {"found": list(await asyncio.gather(run.call("refund", amount=1), run.call("refund", amount=2)))}

    flow = Flow("orders", state=Order).node("work", work).node("fee", CHARGE).edge("work", "fee").end("fee")
    for where in (Where.BEFORE_WRITE, Where.AFTER_WRITE):
        number, is_over = 0, False
        while not is_over:
            number += 1
            bench, run_id = Mixed(idempotent=True), f"{where.value}-{number}"
            is_over = await _answered_once(place, bench, flow, run_id, Moment(where, number))


async def _answered_once(place: Place, bench: Mixed, flow: Flow[Any], run_id: str, ends: Moment) -> bool:
    """Whether the worker lived to the run's end; its run is answered, and brought to its end by others."""
    result = await runner_of(place, bench).run(flow, Order(), run_id=run_id)
    texts = [request.to_json() for request in result.pending]
    assert len(texts) == 2
    verdicts = [ApprovalRequest.from_json(text).approve(by="ana") for text in texts]
    store = FaultyStore(place.open(), life=Life(ends))
    dying = FlowRunner(Executor(bench.registry), checkpoints=store, checkpoint_key=KEY)
    try:
        await dying.resume(flow, run_id, verdicts)
        is_over = True
    except SimulatedCrash:
        is_over = False
    stored = await place.load(run_id)
    has_verdicts = sum(record.kind == RecordKind.VERDICT for record in stored.records)
    assert has_verdicts in (0, 2), "both answers land together, or neither"
    if not is_over:
        found = await runner_of(place, bench).recover(flow, run_id)
        if not has_verdicts:
            assert len(found.pending) == 2
            found = await runner_of(place, bench).resume(flow, run_id, verdicts)
        assert found.status == "done"
    assert sum(record.kind == RecordKind.VERDICT for record in (await place.load(run_id)).records) == 2
    assert sorted(int(str(effect.args["amount"])) for effect in bench.remote.effects) == [1, 2, 40]
    return is_over
