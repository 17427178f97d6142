"""What a node fails with: a tool's error, an error of its code, a mistake in the flow; each is named, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, field_validator

from agent_runtime.errors import CallFailed, FlowError, InvalidSetting, ToolError, Unrecordable
from agent_runtime.flow.calls import NodeRun
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.journal.records import NO_OWNER, RecordKind, RunStatus
from agent_runtime.telemetry import HistorySink
from tests.bench import Bench, Place, Worker, error_of
from tests.flow.desk import CHARGE, LOOK, MAIL, Order, chain, end_of, noting, recover, run, runner_on

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


async def test_a_failed_run_says_where_and_why(place: Place) -> None:
    history = HistorySink()
    await run(Worker(place), refusing().registry, chain(LOOK), sinks=[history])
    assert history.names()[-2:] == ["run.failed", "run.left"]
    assert dict(history.events[-2].data) == {"kind": "flow", "step": 1, "node": "n0", "error": "ToolError: not today"}
