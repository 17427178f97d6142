"""A flow's run from its start to its end: what nodes may be, what they write, where they lead, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, computed_field, field_validator

from agent_runtime.errors import CallFailed, CheckpointConflict, FlowError, InvalidSetting, ToolError, Unrecordable
from agent_runtime.executor import Executor
from agent_runtime.flow.calls import NodeRun
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowResult, FlowRunner
from agent_runtime.flow.state import append, extend
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.telemetry import HistorySink
from tests.bench import KEY, Bench, Counting, Place, Worker, error_of
from tests.flow.desk import CHARGE, LOOK, MAIL, Order, chain, recover, run, runner_on


def noting(what: str) -> Callable[[Order], dict[str, object]]:
    return lambda order: {"notes": f"{what} of {len(order.notes)}"}


async def end_of(
    flow: Flow[Any], state: BaseModel | None = None, bench: Bench | None = None, **options: Any
) -> FlowResult[Any]:
    """What a flow comes to in memory."""
    given = {"checkpoints": MemoryCheckpointStore(), "checkpoint_key": KEY, **options}
    return await FlowRunner(Executor((bench or Bench()).registry), **given).run(flow, state or Order())


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


# Errors.


def refusing() -> Bench:
    bench = Bench()

    async def refuse(tool: str, args: dict[str, object]) -> None:
        if tool == "lookup":
            raise ToolError("not today")

    bench.before = refuse
    return bench


async def test_a_tools_error_fails_the_run_with_what_the_others_wrote_and_recovery_gives_the_same(place: Place) -> None:
    flow = Flow("f", state=Order).node("a", CHARGE).node("b", Call("lookup", args=lambda o: {"name": "x"}, into="to"))
    flow.node("c", MAIL).edge("a", "b").edge("a", "c").edge("b", "c").end("c")
    bench = refusing()
    result = await run(Worker(place), bench.registry, flow)
    assert (result.status, result.state.note) == ("failed", "effect 2")
    assert result.error == ("b", "lookup", "ToolError", "not today")
    again = await recover(Worker(place), bench.registry, flow)
    assert again[:3] == result[:3]
    assert again.error == result.error
    assert (await place.load("run")).row.status == RunStatus.FAILED


async def test_on_error_leads_on_with_the_error_in_its_field_and_nothing_else_written() -> None:
    flow = Flow("f", state=Order).node("a", LOOK, on_error="mend", error_into="trouble").node("b", CHARGE)
    flow.node("mend", noting("mended")).edge("a", "b").end("b", "mend")
    result = await end_of(flow, None, refusing())
    assert (result.status, result.state) == ("done", Order(trouble="ToolError: not today", notes=["mended of 0"]))


async def test_arguments_that_the_tool_refuses_fail_the_node_and_are_never_sent() -> None:
    wrong = Call("charge_i", args=lambda order: {"amount": "much"})
    flow = (
        Flow("f", state=Order)
        .node("a", wrong, on_error="mend", error_into="trouble")
        .node("mend", noting("m"))
        .end("a", "mend")
    )
    bench = Bench()
    result = await end_of(flow, None, bench)
    assert result.state.trouble.startswith("InvalidArguments: ")
    assert bench.effects == 0


async def test_node_code_may_catch_what_a_call_failed_with_and_else_the_node_has_failed() -> None:
    async def careful(order: Order, run: NodeRun) -> dict[str, object]:
        try:
            await run.call("lookup", name="x")
        except CallFailed as failed:
            return {"trouble": f"{failed.tool}, {failed.error_type}, {failed.message}"}
        return {}

    async def careless(order: Order, run: NodeRun) -> None:
        await asyncio.gather(run.call("charge_i", amount=1), run.call("lookup", name="x"), run.call("email", to="ana"))

    bench = refusing()
    flow = Flow("f", state=Order).node("a", careful).node("b", careless).edge("a", "b").end("b")
    result = await end_of(flow, None, bench)
    assert result.state.trouble == "lookup, ToolError, not today"
    assert (result.status, result.error) == ("failed", ("b", "lookup", "ToolError", "not today"))
    assert bench.effects == 2, "the others went on to their end"


async def test_one_item_that_fails_fails_its_map_and_an_inner_flow_that_fails_fails_its_node() -> None:
    each = Call("lookup", args=lambda order, name: {"name": name})
    inner = Flow("in", state=Order).map("see", each, over="names", into="found").end("see")
    flow = Flow("f", state=Order).node("in", inner, writes=["found"]).end("in")
    result = await end_of(flow, Order(names=["a"]), refusing())
    assert result.error == ("in/see", "lookup", "ToolError", "not today")


# What is wrong is named, and nothing is lost.


class Strict(BaseModel):
    amount: int = 1
    note: str = ""

    @field_validator("note")
    @classmethod
    def short(cls, note: str) -> str:
        if len(note) > 10:
            raise ValueError("too long")
        return note


def broken(*_: object) -> Any:
    raise ZeroDivisionError("oh")


def one(work: Any, **options: Any) -> Flow[Any]:
    return Flow("f", state=Strict).node("a", work, **options).end("a")


def calling(args: Any) -> Flow[Any]:
    return one(Call("lookup", args=args))


def mapping(over: Any) -> Flow[Any]:
    return Flow("f", state=Strict).map("a", Call("lookup"), over=over, into="note").end("a")


def nothing(state: object) -> None:
    return None


def two(left: Any, right: Any, when: Callable[[Any], object] | None = None) -> Flow[Any]:
    """Two nodes, `a` and `b`, side by side, the first of which a condition may keep away."""
    flow = Flow("f", state=Strict).node("s", nothing).node("a", left).node("b", right)
    return flow.edge("s", "a", when=when).edge("s", "b")


def yes(state: object) -> bool:
    return True


def no(state: object) -> bool:
    return False


def write(**values: object) -> Callable[[object], dict[str, object]]:
    return lambda state: values


SAME_FIELD = "'a' and 'b' write field 'note' in one superstep"
MISTAKES: dict[str, tuple[Callable[[], Flow[Any]], str]] = {
    "an unknown field": (lambda: one(write(x=1)), "'a' gave a value to 'x'"),
    "a value that does not fit": (lambda: one(write(amount="x")), "a wrote does not fit Strict: amount:"),
    "a value that a validator refuses": (lambda: one(write(note="x" * 11)), "note: Value error, too long"),
    "no dict": (lambda: one(lambda state: 7), "found int"),
    "a field that it did not declare": (lambda: one(write(note=""), writes=["amount"]), "declares writes=['amount']"),
    "a `when` that raises": (
        lambda: Flow("f", state=Strict).node("a", nothing).edge("a", "a", when=broken).end("a"),
        "`when` of the edge 'a' → 'a' raised ZeroDivisionError",
    ),
    "no edge that leads on": (
        lambda: Flow("f", state=Strict).node("a", nothing).node("b", LOOK).edge("a", "b", when=no).end("b"),
        "no edge leads on from 'a'",
    ),
    "args that raise": (lambda: calling(broken), "args function of node 'a' of flow 'f' raised Zero"),
    "args that are no dict": (lambda: calling(lambda state: 3), "found int"),
    "an argument that cannot be recorded": (lambda: calling(lambda state: {"name": object()}), "at $.name"),
    "over that raises": (lambda: mapping(broken), "`over` of node 'a'"),
    "over that is no list": (lambda: mapping("note"), "maps over a list, found str"),
    "enter that raises": (lambda: one(chain(LOOK), enter=broken), "`enter` of node 'a'"),
    "leave that raises": (lambda: one(chain(LOOK), enter=lambda state: Order(), leave=broken), "`leave` of node 'a'"),
    "two writers that meet": (lambda: two(write(note="a"), write(note="b")).end("a", "b"), SAME_FIELD),
    "two writers that a condition lets meet": (lambda: two(LOOK, LOOK, yes).end("a", "b"), SAME_FIELD),
    "a join that waits for ever": (
        lambda: two(nothing, nothing, no).node("j", nothing).edge("a", "j").edge("b", "j").join("j").end("j"),
        "join 'j' waits for ['a']",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_mistake_is_named_and_leaves_the_run_to_be_recovered_with_the_mended_code(mistake: str, place: Place) -> None:
    build, told = MISTAKES[mistake]
    error = await error_of(run(Worker(place), Bench().registry, build(), Strict()))
    assert isinstance(error, FlowError)
    assert told in str(error)
    row = (await place.load("run")).row
    assert (row.status, row.owner, row.attempts) == (RunStatus.RUNNING, NO_OWNER, 0)


async def test_a_reducer_that_raises_is_named() -> None:
    class Bad(BaseModel):
        total: Annotated[int, broken] = 0

    error = await error_of(end_of(Flow("f", state=Bad).node("a", lambda s: {"total": 1}).end("a"), Bad()))
    assert isinstance(error, FlowError)
    assert "reducer of field 'total' raised ZeroDivisionError" in str(error)


async def test_a_bug_in_node_code_leaves_the_run_as_it_is_with_its_calls_on_record(place: Place) -> None:
    bench = Bench()
    is_mended = False

    async def buggy(order: Order, run: NodeRun) -> dict[str, object]:
        note = await run.call("charge_i", amount=1)
        if not is_mended:
            raise KeyError("a bug")
        return {"note": note}

    flow = Flow("f", state=Order).node("a", buggy, on_error="a").end("a")
    error = await error_of(run(Worker(place), bench.registry, flow))
    assert isinstance(error, KeyError), "it is no answer of a tool, so on_error is not its way"
    assert "node 'a' of flow 'f'" in error.__notes__[0]
    is_mended = True
    result = await recover(Worker(place), bench.registry, flow)
    assert (result.status, result.state.note, result.replayed, bench.entered["charge_i"]) == ("done", "effect 1", 1, 1)


async def test_a_state_that_does_not_come_back_is_refused_before_it_is_saved(place: Place) -> None:
    class Odd(BaseModel):
        when: Any = 0

    error = await error_of(
        run(Worker(place), Bench().registry, Flow("f", state=Odd).node("a", lambda s: {"when": (1,)}).end("a"), Odd())
    )
    assert isinstance(error, Unrecordable)
    assert (await place.load("run")).checkpoint is None


async def test_what_no_run_can_start_from_is_refused_and_nothing_is_written(place: Place) -> None:
    bench, worker = Bench(), Worker(place)
    flow = chain(LOOK)
    changed = Order()
    changed.amount = "x"  # type: ignore[assignment]
    unknown = Flow("f", state=Order).node("in", chain(Call("fly")), writes=["note"]).end("in")
    for work, told in (
        (run(worker, bench.registry, flow, Strict()), "starts from a Order, found Strict"),
        (run(worker, bench.registry, flow, changed), "the state that was given does not fit Order: amount"),
        (run(worker, bench.registry, unknown), "node 'in/n0' of flow 'f' calls tool 'fly'"),
        (run(worker, bench.registry, Flow("f", state=Order).node("a", LOOK)), "is not complete"),
    ):
        error = await error_of(work)
        assert isinstance(error, FlowError)
        assert told in str(error)
    for options in ({"parallel": 0}, {"max_supersteps": 0}):
        with pytest.raises(InvalidSetting):
            runner_on(worker, bench.registry, **options)
    assert await worker.inner.list_runs() == []


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


async def test_a_failed_run_says_where_and_why(place: Place) -> None:
    history = HistorySink()
    await run(Worker(place), refusing().registry, chain(LOOK), sinks=[history])
    assert history.names()[-2:] == ["run.failed", "run.left"]
    assert dict(history.events[-2].data) == {"kind": "flow", "step": 1, "node": "n0", "error": "ToolError: not today"}


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


async def test_node_code_that_lets_a_cancellation_of_its_own_out_is_named_and_its_call_ends(place: Place) -> None:
    async def careless(order: Order, run: NodeRun) -> None:
        call = asyncio.ensure_future(run.call("charge_i", amount=1))
        await asyncio.sleep(0)
        call.cancel()
        await call

    bench = Bench()
    error = await error_of(run(Worker(place), bench.registry, Flow("f", state=Order).node("a", careless).end("a")))
    assert isinstance(error, FlowError)
    assert "let the cancellation" in str(error)
    assert bench.effects == 1
    assert [r.call for r in (await place.load("run")).records if r.kind == RecordKind.DONE] == ["0/a.0"]


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


async def test_calls_in_a_task_group_fail_their_node_as_the_first_of_them_and_end_before_it_does() -> None:
    async def grouped(order: Order, run: NodeRun) -> None:
        async with asyncio.TaskGroup() as group:
            for name in ("lookup", "charge_i", "lookup"):
                group.create_task(run.call(name, **({"amount": 1} if name == "charge_i" else {"name": "x"})))

    bench = refusing()
    result = await end_of(Flow("f", state=Order).node("a", grouped).end("a"), None, bench)
    assert (result.status, result.error) == ("failed", ("a", "lookup", "ToolError", "not today"))
    assert bench.effects == 1


async def test_a_group_with_another_error_in_it_is_a_bug_as_that_error_is() -> None:
    async def grouped(order: Order, run: NodeRun) -> None:
        raise ExceptionGroup("both", [CallFailed("lookup", "ToolError", "no"), KeyError("a bug")])

    error = await error_of(end_of(Flow("f", state=Order).node("a", grouped).end("a")))
    assert isinstance(error, ExceptionGroup)


async def test_a_function_may_give_run_a_default() -> None:
    async def either(order: Order, run: NodeRun | None = None) -> dict[str, object]:
        return {"note": "alone" if run is None else await run.call("lookup", name="x")}

    assert (await end_of(Flow("f", state=Order).node("a", either).end("a"))).state.note == "what is known of x"


async def test_node_code_cannot_swallow_a_mistake_of_its_own_call(place: Place) -> None:
    async def swallow(order: Order, run: NodeRun) -> dict[str, object]:
        try:
            await run.call("lookup", name=object())
        except Exception:
            return {"note": "fine"}
        return {}

    error = await error_of(run(Worker(place), Bench().registry, Flow("f", state=Order).node("a", swallow).end("a")))
    assert isinstance(error, FlowError)
    assert "at $.name" in str(error)
    assert (await place.load("run")).checkpoint is None
