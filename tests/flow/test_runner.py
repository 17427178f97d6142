"""A flow's run from its start to its end: what nodes may be, what they write, where they lead, and what it costs."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import BaseModel, ConfigDict, computed_field

from agent_runtime.errors import CheckpointConflict
from agent_runtime.flow.calls import NodeRun
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.state import append, extend
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus
from agent_runtime.telemetry import HistorySink
from tests.bench import Bench, Counting, Place, Worker, error_of
from tests.flow.desk import CHARGE, LOOK, MAIL, Order, chain, end_of, noting, recover, run

# What nodes do.


async def test_calls_run_one_after_another_under_the_keys_of_their_places_and_write_their_fields(place: Place) -> None:
    bench = Bench()
    result = await run(Worker(place), bench.registry, chain(CHARGE, MAIL, LOOK))
    assert (result.status, result.state.note, result.run_id) == ("done", "what is known of ana", "run")
    assert bench.remote.keys == ["run:0/n0"]
    assert [effect.tool for effect in bench.remote.effects] == ["charge_i", "email"]
    row = (await place.load("run")).row
    assert (row.kind, row.name, row.status, row.owner) == ("flow", "orders", RunStatus.DONE, NO_OWNER)


async def test_a_function_of_the_state_returns_the_changed_fields_and_cannot_change_the_state_itself() -> None:
    def spoil(order: Order) -> dict[str, object]:
        order.notes.append("spoilt")
        order.amount = 0
        return {"to": "bo"}

    async def nothing(order: Order) -> None:
        order.notes.append("spoilt")

    flow = Flow("f", state=Order).node("a", spoil).node("b", nothing).node("c", LOOK).edge("a", "b").edge("b", "c").end("c")
    result = await end_of(flow)
    assert result.state == Order(to="bo", note="what is known of bo")


async def test_a_function_that_takes_run_makes_calls_in_order_and_side_by_side() -> None:
    async def shop(order: Order, run: NodeRun) -> dict[str, object]:
        first = await run.call("charge_i", amount=order.amount)
        both = await asyncio.gather(run.call("lookup", name="a"), run.call("charge_i", amount=2))
        return {"found": [run.run_id, first, *both]}

    bench = Bench()
    result = await end_of(Flow("f", state=Order).node("shop", shop).end("shop"), None, bench)
    assert result.state.found == [result.run_id, "effect 1", "what is known of a", "effect 2"]
    assert bench.remote.keys == [f"{result.run_id}:0/shop.0", f"{result.run_id}:0/shop.2"]


async def test_a_map_works_each_item_and_keeps_their_order_whatever_order_they_end_in() -> None:
    bench = Bench()
    ended: list[object] = []

    async def later_first(tool: str, args: dict[str, object]) -> None:
        for _ in range({"a": 9, "b": 5, "c": 1}[str(args["name"])]):
            await asyncio.sleep(0)
        ended.append(args["name"])

    bench.before = later_first
    each = Call("lookup", args=lambda order, name: {"name": name})
    flow = Flow("f", state=Order).map("see", each, over="names", into="found").end("see")
    result = await end_of(flow, Order(names=["a", "b", "c"]), bench)
    assert ended == ["c", "b", "a"]
    assert result.state.found == ["what is known of a", "what is known of b", "what is known of c"]


async def test_a_map_may_be_over_what_a_function_gives_with_a_function_for_each_item_or_over_nothing() -> None:
    async def each(order: Order, at: int, run: NodeRun) -> str:
        return str(await run.call("lookup", name=f"{order.to} {at}"))

    flow = Flow("f", state=Order).map("see", each, over=lambda order: list(range(order.amount)), into="found").end("see")
    assert (await end_of(flow, Order(amount=2))).state.found == ["what is known of ana 0", "what is known of ana 1"]
    assert (await end_of(flow, Order(amount=0))).state.found == []


class Payment(BaseModel):
    amount: int
    note: str = ""


async def test_a_flow_inside_a_node_shares_fields_of_one_name_or_what_enter_and_leave_say() -> None:
    pay = Flow("pay", state=Payment).node("charge", CHARGE).end("charge")
    bench = Bench()
    shared = Flow("f", state=Order).node("pay", pay).end("pay")
    result = await end_of(shared, None, bench)
    assert result.state == Order(note="effect 1")
    assert bench.remote.keys == [f"{result.run_id}:0/pay/0/charge"]
    told = Flow("f", state=Order).node(
        "pay", pay, enter=lambda order: Payment(amount=7), leave=lambda order, paid: {"trouble": f"{paid.amount} {paid.note}"}
    )
    assert (await end_of(told.end("pay"))).state == Order(trouble="7 effect 1")


# Where they lead.


async def test_edges_fan_out_a_join_waits_for_all_and_reducers_take_the_order_of_the_nodes() -> None:
    flow = Flow("f", state=Order).node("a", noting("a")).node("b", noting("b")).node("c", noting("c"))
    flow.node("long", noting("long")).node("j", noting("j"))
    flow.edge("a", "c").edge("a", "b").edge("b", "long").edge("c", "j").edge("long", "j").join("j").end("j")
    result = await end_of(flow)
    assert result.state.notes == ["a of 0", "b of 1", "c of 1", "long of 3", "j of 4"]


async def test_without_join_a_node_runs_each_time_that_something_leads_to_it() -> None:
    flow = Flow("f", state=Order).node("a", noting("a")).node("b", noting("b")).node("c", noting("c")).node("j", noting("j"))
    flow.edge("a", "b").edge("a", "j").edge("b", "c").edge("c", "j").end("j")
    assert (await end_of(flow)).state.notes == ["a of 0", "b of 1", "j of 1", "c of 3", "j of 4"]


async def test_a_condition_chooses_the_way_and_a_loop_goes_round_as_often_as_it_holds() -> None:
    def count(order: Order) -> dict[str, object]:
        return {"rounds": order.rounds + 1}

    flow = Flow("f", state=Order).node("count", count, max_visits=3).node("end", noting("end"))
    flow.edge("count", "count", when=lambda order: order.rounds < 3).edge("count", "end", when=lambda o: o.rounds == 3)
    result = await end_of(flow.end("end"))
    assert (result.status, result.state.rounds) == ("done", 3)


async def test_an_end_that_has_edges_goes_on_where_one_is_taken() -> None:
    def count(order: Order) -> dict[str, object]:
        return {"rounds": order.rounds + 1}

    flow = Flow("f", state=Order).node("count", count).edge("count", "count", when=lambda order: order.rounds < 5).end("count")
    assert (await end_of(flow)).state.rounds == 5


async def test_too_many_visits_fail_the_run_and_name_the_node() -> None:
    flow = Flow("f", state=Order).node("a", noting("a"), max_visits=2).edge("a", "a").end("a")
    result = await end_of(flow)
    assert (result.status, len(result.state.notes)) == ("failed", 2)
    assert result.error is not None
    assert result.error[:3] == ("a", "", "StepLimitReached")


async def test_too_many_supersteps_fail_the_run(place: Place) -> None:
    flow = Flow("f", state=Order).node("a", noting("a")).edge("a", "a").end("a")
    result = await run(Worker(place), Bench().registry, flow, max_supersteps=4)
    assert (result.status, len(result.state.notes)) == ("failed", 4)
    assert result.error is not None
    assert "max_supersteps counts over the whole run" in result.error.message


async def test_an_id_in_use_is_a_conflict_and_nothing_of_the_flow_was_run(place: Place) -> None:
    bench, seen = Bench(), list[str]()
    await run(Worker(place), bench.registry, chain(LOOK))

    def args(order: Order) -> dict[str, object]:
        seen.append(order.to)
        return {"name": order.to}

    error = await error_of(run(Worker(place), bench.registry, chain(Call("lookup", args=args))))
    assert isinstance(error, CheckpointConflict)
    assert "exists already" in str(error)
    assert seen == []


# What it costs, and tells.


async def test_no_result_reaches_node_code_before_it_is_durable_and_no_node_starts_before_the_last_superstep_is_saved(
    place: Place,
) -> None:
    seen: list[tuple[list[str], bool]] = []

    async def look(order: Order, run: NodeRun) -> None:
        for at in range(3):
            stored = await place.load("run")
            ended = [record.call for record in stored.records if record.kind == RecordKind.DONE]
            seen.append((ended, stored.checkpoint is not None))
            if at < 2:
                await asyncio.gather(run.call("charge_i", amount=at), run.call("lookup", name="x"))

    flow = Flow("f", state=Order).node("pay", CHARGE).node("look", look).edge("pay", "look").end("look")
    await run(Worker(place), Bench().registry, flow)
    assert [(set(ended), saved) for ended, saved in seen] == [
        ({"0/pay", *(f"1/look.{at}" for at in range(2 * calls))}, True) for calls in range(3)
    ]


async def test_a_superstep_with_one_idempotent_call_costs_two_commits(place: Place) -> None:
    async def commits(supersteps: int) -> int:
        counting, worker = Counting(place.open()), Worker(place)
        worker.inner = counting
        await run(worker, Bench().registry, chain(*[CHARGE] * supersteps), run_id=f"run-{supersteps}")
        return len(counting.appends)

    assert await commits(11) - await commits(1) == 20


async def test_no_more_calls_of_a_run_are_on_their_way_than_parallel_says() -> None:
    bench, running, most = Bench(), 0, 0

    async def enter(tool: str, args: dict[str, object]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)

    async def leave(tool: str, args: dict[str, object]) -> None:
        nonlocal running
        running -= 1

    async def many(order: Order, run: NodeRun) -> dict[str, object]:
        return {"notes": "".join(await asyncio.gather(*(run.call("lookup", name=f"{at}") for at in range(4))))}

    bench.before, bench.after = enter, leave
    flow = Flow("f", state=Order).node("s", noting("s")).node("many", many)
    flow.map("see", Call("lookup", args=lambda order, name: {"name": name}), over="names", into="found")
    flow.edge("s", "many").edge("s", "see").end("many", "see")
    assert (await end_of(flow, Order(names=list("abcd")), bench, parallel=3)).status == "done"
    assert most == 3


async def test_events_tell_what_the_page_says(place: Place) -> None:
    history = HistorySink()
    await run(Worker(place), Bench().registry, chain(CHARGE, LOOK), sinks=[history])
    told = [(event.name, dict(event.data)) for event in history.events if not event.name.startswith("call.")]
    assert told == [
        ("run.started", {"kind": "flow", "step": 0, "name": "orders"}),
        ("checkpoint.saved", {"kind": "flow", "step": 1, "status": "running", "flow": "orders"}),
        ("checkpoint.saved", {"kind": "flow", "step": 2, "status": "done", "flow": "orders"}),
        ("run.done", {"kind": "flow", "step": 2}),
        ("run.left", {"kind": "flow", "step": 2, "status": "done"}),
    ]
    calls = [(event.name, event.data["call"], event.data["key"]) for event in history.events if event.name.startswith("call.")]
    assert calls == [
        (name, call, f"run:{call}")
        for call in ("0/n0", "1/n1")
        for name in ("call.started", "call.returned", "call.done")
    ]  # fmt: skip


def test_the_reducers_that_come_along() -> None:
    held: list[str] = ["a"]
    assert (append(held, "b"), extend(held, ["b", "c"]), held) == (["a", "b"], ["a", "b", "c"], ["a"])


async def test_a_worker_that_is_cancelled_stops_its_calls_and_leaves_the_run_to_the_next(place: Place) -> None:
    bench, entered = Bench(), asyncio.Event()

    async def hang(tool: str, args: dict[str, object]) -> None:
        if bench.entered["charge_i"] == 1:
            entered.set()
            await asyncio.Event().wait()

    async def leave_one_running(order: Order, run: NodeRun) -> dict[str, object]:
        call = asyncio.ensure_future(run.call("charge_i", amount=1))
        await asyncio.sleep(0)  # it is begun
        await entered.wait()
        return {"note": "left" if not call.done() else "ended"}

    bench.after = hang
    flow = Flow("f", state=Order).node("a", leave_one_running).end("a")
    working = asyncio.ensure_future(run(Worker(place), bench.registry, flow))
    await entered.wait()
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    row = (await place.load("run")).row
    assert (row.status, row.owner) == (RunStatus.RUNNING, NO_OWNER)
    result = await recover(Worker(place), bench.registry, flow)
    assert (result.status, result.rerun, bench.effects) == ("done", 1, 1)


async def test_a_state_with_what_is_computed_from_its_fields_is_stored_without_it() -> None:
    class Total(BaseModel):
        model_config = ConfigDict(extra="forbid")
        amount: int = 1

        @computed_field  # type: ignore[prop-decorator]
        @property
        def double(self) -> int:
            return 2 * self.amount

    result = await end_of(Flow("f", state=Total).node("a", lambda state: {"amount": state.double}).end("a"), Total())
    assert (result.state.amount, result.state.double) == (2, 4)


async def test_a_function_may_give_run_a_default() -> None:
    async def either(order: Order, run: NodeRun | None = None) -> dict[str, object]:
        return {"note": "alone" if run is None else await run.call("lookup", name="x")}

    assert (await end_of(Flow("f", state=Order).node("a", either).end("a"))).state.note == "what is known of x"
