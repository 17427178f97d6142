"""Taking back what a failed or cancelled run did: in reverse, under keys of its own, and never twice."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from pydantic import BaseModel

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import (
    CheckpointConflict,
    CheckpointNotFound,
    IdentityMismatch,
    InvalidSetting,
    RecoveryNeedsDecision,
    StepLimitReached,
    ToolError,
    UnknownTool,
)
from agent_runtime.executor import Executor
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowRunner
from agent_runtime.journal.records import RecordKind
from agent_runtime.run import RunContext
from agent_runtime.runs import Runs
from agent_runtime.settlements import Outcome
from agent_runtime.testing.faults import FaultyStore, Life, Moment, SimulatedCrash, Where
from agent_runtime.tools import ToolRegistry, idempotency_key
from agent_runtime.undo import UndoResult
from tests.bench import KEY, RING, Asked, Killed, Place, Remote, Script, Worker

FEES: list[Asked] = [("pay", {"amount": 1}), ("book", {"seat": "4a"}), ("look", {"name": "x"})]
MORE: list[Asked] = [("pay", {"amount": 2})]


class Shop:
    """Tools that act, and those that take it back."""

    def __init__(self, *, is_keyed: bool = True) -> None:
        self.remote = Remote()
        self.registry = ToolRegistry()
        self.refuses = False
        self.dies = False

        async def unpay(args: dict[str, Any], result: str) -> str:
            done = self.remote.act("unpay", {**args, "of": result}, idempotency_key())
            if self.dies:
                self.dies = False
                raise Killed("the worker dies in the undo")
            return done

        def unbook(args: dict[str, Any], result: str) -> None:
            if self.refuses:
                raise ToolError("too late")
            self.remote.act("unbook", {**args, "of": result}, idempotency_key())

        @self.registry.tool(idempotent=is_keyed, undo=unpay)
        async def pay(amount: int) -> str:
            return self.remote.act("pay", {"amount": amount}, idempotency_key())

        @self.registry.tool(undo=unbook)
        def book(seat: str) -> str:
            return self.remote.act("book", {"seat": seat}, idempotency_key())

        @self.registry.tool(pure=True)
        async def look(name: str) -> str:
            return name

    def done(self) -> list[tuple[str, str | None]]:
        return [(effect.tool, effect.key) for effect in self.remote.effects]


async def failed(place: Place, shop: Shop) -> None:
    """A run of two decisions that ends by its step limit."""
    with pytest.raises(StepLimitReached):
        await Worker(place).run(Script(FEES, MORE, MORE), shop.registry, max_steps=2)


async def take_back(place: Place, shop: Shop, **options: Any) -> UndoResult:
    said = {"by": "ana", "why": "the order was wrong", **options}
    runs = Runs(Worker(place), checkpoint_key=RING, registry=said.pop("registry", shop.registry))
    return await runs.undo("run", **said)


async def die_while_taking_back(place: Place, shop: Shop) -> None:
    """The worker dies inside the first call that takes one back."""
    shop.dies = True
    with pytest.raises(Killed):
        await take_back(place, shop)


async def test_finished_calls_are_taken_back_in_reverse_under_their_keys_with_undo_behind(place: Place) -> None:
    shop = Shop()
    await failed(place, shop)
    before = await place.load("run")
    result = await take_back(place, shop)
    assert [(undone.call, undone.tool) for undone in result.calls] == [("1", "pay"), ("0.1", "book"), ("0.0", "pay")]
    assert result.holds
    assert shop.done()[3:] == [("unpay", "run:1/undo"), ("unbook", "run:0.1/undo"), ("unpay", "run:0.0/undo")]
    assert [effect.args["of"] for effect in shop.remote.effects[3:]] == ["effect 3", "effect 2", "effect 1"]
    after = await place.load("run")
    assert (after.records, after.row.head) == (before.records, before.row.head), "the run stays as it ended"


async def test_each_undo_is_journaled_and_asking_again_gives_its_result_and_does_nothing(place: Place) -> None:
    shop = Shop()
    await failed(place, shop)
    first = await take_back(place, shop)
    again = await take_back(place, shop)
    assert (again, len(shop.done())) == (first, 6)
    journal = (await place.load("run/undo")).records
    assert [record.call for record in journal if record.kind == RecordKind.STARTED] == ["1/undo", "0.1/undo", "0.0/undo"]
    assert sum(record.kind == RecordKind.ENDED for record in journal) == 1


async def test_an_undo_whose_worker_died_goes_on_under_the_same_key(place: Place) -> None:
    shop = Shop()
    await failed(place, shop)
    await die_while_taking_back(place, shop)
    result = await take_back(place, shop)
    assert (result.holds, len(shop.done())) == (True, 6)
    assert shop.remote.keys.count("run:1/undo") == 2


async def test_an_undo_without_a_repeat_rule_is_in_doubt_after_a_crash_and_needs_a_decision(place: Place) -> None:
    shop = Shop(is_keyed=False)
    await failed(place, shop)
    await die_while_taking_back(place, shop)
    with pytest.raises(RecoveryNeedsDecision) as needed:
        await take_back(place, shop)
    [doubt] = needed.value.doubts
    assert (doubt.run_id, doubt.call, doubt.key) == ("run/undo", "1/undo", "run:1/undo")
    assert shop.remote.keys.count("run:1/undo") == 1
    result = await take_back(place, shop, rerun_in_doubt=[doubt])
    assert (result.holds, shop.remote.keys.count("run:1/undo")) == (True, 2)


class Paid(BaseModel):
    """What a tool declares that it gives."""

    number: int


@pytest.mark.parametrize(("said", "taken"), [({"number": 7}, Paid(number=7)), ("mail-8", "mail-8"), (None, None)])
async def test_a_call_that_a_person_settled_is_taken_back_with_what_they_said(place: Place, said: Any, taken: Any) -> None:
    registry, undone = ToolRegistry(), list[Any]()

    @registry.tool(undo=lambda args, result: undone.append((args, result)))
    async def pay(amount: int) -> Paid:
        raise RuntimeError("after which nobody knows")

    with pytest.raises(RecoveryNeedsDecision):
        await Worker(place).run(Script(MORE), registry)
    runs = Runs(Worker(place), checkpoint_key=KEY, registry=registry)
    await runs.cancel("run", by="ana")
    with pytest.raises(RecoveryNeedsDecision, match="settle it first") as needed:
        await runs.undo("run", by="ana", why="x")
    [doubt] = needed.value.doubts
    assert doubt.key == "run:0"
    await runs.settle("run", "0", Outcome.done(said), by="ana", why="saw it")
    for _ in range(2):
        assert (await runs.undo("run", by="ana", why="x")).holds
    assert undone == [({"amount": 2}, taken)]


async def test_an_undo_in_doubt_is_listed_and_a_person_settles_it(place: Place) -> None:
    shop = Shop(is_keyed=False)
    await failed(place, shop)
    await die_while_taking_back(place, shop)
    runs = Runs(Worker(place), checkpoint_key=KEY)
    with pytest.raises(RecoveryNeedsDecision):
        await take_back(place, shop)
    assert [info.run_id for info in await runs.list(status="in-doubt")] == ["run/undo"]
    assert await runs.settle("run/undo", "1/undo", Outcome.done("paid back"), by="ana", why="saw it")
    assert (await take_back(place, shop)).holds
    assert shop.remote.keys.count("run:1/undo") == 1


class Bill(BaseModel):
    """The state of a flow that books, pays in parts, and fails."""

    parts: list[int] = [1, 2]
    paid: list[str] = []


async def test_a_flow_that_failed_is_taken_back_too(place: Place) -> None:
    shop = Shop()

    @shop.registry.tool
    async def refuse() -> str:
        raise ToolError("no")

    flow = (
        Flow("orders", state=Bill)
        .node("book", Call("book", args=lambda bill: {"seat": "4a"}))
        .map("pay", Call("pay", args=lambda bill, part: {"amount": part}), over="parts", into="paid")
        .node("end", Call("refuse"))
        .edge("book", "pay")
        .edge("pay", "end")
        .end("end")
    )
    runner = FlowRunner(Executor(shop.registry), checkpoints=Worker(place), checkpoint_key=KEY)
    assert (await runner.run(flow, Bill(), run_id="run")).status == "failed"
    result = await take_back(place, shop)
    assert result.holds
    keys = [key for _, key in shop.done()[3:]]
    assert (set(keys[:2]), keys[2:]) == ({"run:1/pay[0]/undo", "run:1/pay[1]/undo"}, ["run:0/book/undo"])


@pytest.mark.parametrize("is_keyed", [True, False])
async def test_whoever_takes_a_run_back_may_die_at_any_write_and_each_undo_is_made_once(
    place: Place, *, is_keyed: bool
) -> None:
    died = 0
    for where in (Where.BEFORE_WRITE, Where.AFTER_WRITE):
        for number in itertools.count(1):
            shop, run = Shop(is_keyed=is_keyed), f"{where.value}-{number}".replace(" ", "-")
            with pytest.raises(StepLimitReached):
                await Worker(place).run(Script(FEES, MORE, MORE), shop.registry, run, max_steps=2)
            ended = await _take_back_until(place, shop, run, Moment(where, number))
            result, permitted = await _bring_home(place, shop, run)
            assert result.holds
            asked = Counter(key for key in shop.remote.keys if key.endswith("/undo"))
            assert set(asked) == {f"{run}:{call}/undo" for call in ("1", "0.1", "0.0")}
            assert asked.total() - 3 <= (1 if is_keyed else permitted), "again under its key, or with a permission"
            assert Counter(effect.key for effect in shop.remote.effects) == dict.fromkeys(
                [key for key in shop.remote.keys if not key.endswith("/undo")] + sorted(asked), 1
            )
            if ended:
                break
            died += 1
    assert died >= 8


async def _take_back_until(place: Place, shop: Shop, run: str, ends: Moment) -> bool:
    """Whether it came to its end before the moment at which its worker dies."""
    store = FaultyStore(place.open(), life=Life(ends))
    try:
        await Runs(store, checkpoint_key=KEY, registry=shop.registry).undo(run, by="ana", why="x")
    except SimulatedCrash:
        return False
    return True


async def _bring_home(place: Place, shop: Shop, run: str) -> tuple[UndoResult, int]:
    """What it comes to, and how often a permission was needed."""
    runs = Runs(Worker(place), checkpoint_key=KEY, registry=shop.registry)
    try:
        return await runs.undo(run, by="ana", why="x"), 0
    except RecoveryNeedsDecision as needed:
        return await runs.undo(run, by="ana", why="x", rerun_in_doubt=needed.doubts), len(needed.doubts)


async def test_a_run_is_not_deleted_while_its_undo_has_not_ended_but_by_force(place: Place) -> None:
    shop = Shop()
    await failed(place, shop)
    await die_while_taking_back(place, shop)
    runs = Runs(Worker(place), checkpoint_key=RING)
    with pytest.raises(CheckpointConflict, match=r"'run' is being taken back by run 'run/undo'"):
        await runs.delete("run", by="ana")
    assert (await take_back(place, shop)).holds
    await runs.delete("run", by="ana")


async def test_a_run_whose_undo_never_ends_is_deleted_by_force(place: Place) -> None:
    shop = Shop()
    await failed(place, shop)
    await die_while_taking_back(place, shop)
    runs = Runs(Worker(place), checkpoint_key=RING)
    await runs.delete("run", by="ana", force=True)
    with pytest.raises(CheckpointConflict, match="was deleted"):
        await runs.show("run")
    assert (await runs.show("run/undo")).info.status == "interrupted"


async def test_an_undo_that_is_refused_is_told_and_the_others_go_on(place: Place) -> None:
    shop = Shop()
    shop.refuses = True
    await failed(place, shop)
    result = await take_back(place, shop)
    assert [undone.error for undone in result.calls] == ["", "ToolError: too late", ""]
    assert not result.holds
    assert await take_back(place, shop) == result


async def test_a_run_that_has_not_come_to_nothing_is_not_taken_back(place: Place) -> None:
    shop = Shop()
    await Worker(place).run(Script(MORE, "done"), shop.registry)
    with pytest.raises(CheckpointConflict, match="run 'run' is done; only a failed or a cancelled run"):
        await take_back(place, shop)
    runs = Runs(Worker(place), checkpoint_key=KEY, registry=shop.registry)
    with pytest.raises(CheckpointNotFound):
        await runs.undo("other", by="ana", why="x")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(Script(MORE, "done"), shop.registry, "cut")
    with pytest.raises(CheckpointConflict, match="is running"):
        await runs.undo("cut", by="ana", why="x")
    assert [tool for tool, _ in shop.done()] == ["pay", "pay"]


@pytest.mark.parametrize("option", ["by", "why"])
@pytest.mark.parametrize("said", ["", " ", None])
async def test_an_undo_is_somebodys_for_a_reason(place: Place, option: str, said: Any) -> None:
    shop = Shop()
    await failed(place, shop)
    with pytest.raises(InvalidSetting, match=f"pass {option}="):
        await take_back(place, shop, **{option: said})


async def test_a_tool_that_is_not_there_stops_an_undo_before_it_does_anything(place: Place) -> None:
    shop = Shop()
    await failed(place, shop)
    with pytest.raises(UnknownTool, match="pay"):
        await take_back(place, shop, registry=ToolRegistry())
    assert len(shop.done()) == 3


async def test_without_tools_and_for_another_identity_nothing_is_taken_back(place: Place) -> None:
    shop = Shop()
    ana = RunContext(user="ana", principal="shop")
    with pytest.raises(StepLimitReached):
        await Worker(place).run(Script(MORE, MORE), shop.registry, max_steps=1, ctx=ana)
    runs = Runs(Worker(place), checkpoint_key=KEY)
    with pytest.raises(InvalidSetting, match="needs their tools"):
        await runs.undo("run", by="ana", why="x")
    with pytest.raises(IdentityMismatch):
        await runs.for_context(RunContext(user="ben")).undo("run", by="ben", why="x", registry=shop.registry)
    assert len(shop.done()) == 1
    result = await runs.for_context(ana).undo("run", by="ana", why="x", registry=shop.registry)
    assert (result.holds, len(shop.done())) == (True, 2)
    assert await runs.undo("run", by="ops", why="x", registry=shop.registry) == result
