"""Taking back what a failed or cancelled run did: in reverse, under keys of its own, and never twice."""

from __future__ import annotations

from typing import Any

import pytest

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
from agent_runtime.journal.records import RecordKind
from agent_runtime.run import RunContext
from agent_runtime.runs import Runs
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
    shop.dies = True
    with pytest.raises(Killed):
        await take_back(place, shop)
    result = await take_back(place, shop)
    assert (result.holds, len(shop.done())) == (True, 6)
    assert shop.remote.keys.count("run:1/undo") == 2


async def test_an_undo_without_a_repeat_rule_is_in_doubt_after_a_crash_and_needs_a_decision(place: Place) -> None:
    shop = Shop(is_keyed=False)
    await failed(place, shop)
    shop.dies = True
    with pytest.raises(Killed):
        await take_back(place, shop)
    with pytest.raises(RecoveryNeedsDecision) as needed:
        await take_back(place, shop)
    [doubt] = needed.value.doubts
    assert (doubt.run_id, doubt.call, doubt.key) == ("run/undo", "1/undo", "run:1/undo")
    assert shop.remote.keys.count("run:1/undo") == 1
    result = await take_back(place, shop, rerun_in_doubt=[doubt])
    assert (result.holds, shop.remote.keys.count("run:1/undo")) == (True, 2)


async def test_a_run_is_not_deleted_while_its_undo_has_not_ended_but_by_force(place: Place) -> None:
    shop = Shop()
    await failed(place, shop)
    shop.dies = True
    with pytest.raises(Killed):
        await take_back(place, shop)
    runs = Runs(Worker(place), checkpoint_key=RING)
    with pytest.raises(CheckpointConflict, match=r"'run' is being taken back by run 'run/undo'"):
        await runs.delete("run", by="ana")
    assert (await take_back(place, shop)).holds
    await runs.delete("run", by="ana")


async def test_a_run_whose_undo_never_ends_is_deleted_by_force(place: Place) -> None:
    shop = Shop()
    await failed(place, shop)
    shop.dies = True
    with pytest.raises(Killed):
        await take_back(place, shop)
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
