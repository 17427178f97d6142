"""A tool's result is given back as it was after a crash, or the call is known to have run without a result."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, field_serializer

from agent_runtime.crash import CrashPoint
from agent_runtime.endings import read_ending
from agent_runtime.errors import RecoveryNeedsDecision, ToolError, Unrecordable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind
from agent_runtime.messages import Message
from agent_runtime.tool_loop import LoopResult
from agent_runtime.tools import ToolRegistry
from tests.bench import Place, Remote, Script, Worker, error_of, results_in


class Kind(Enum):
    RED = "red"


@dataclass
class Order:
    show: str
    seats: int
    total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.total = self.seats * 40


@dataclass
class Counted:
    show: str
    calls: int = field(init=False, default=0)


class Seat(BaseModel):
    row: int
    kind: Kind


class Booking(BaseModel):
    seats: list[Seat]
    price: Decimal


class OneWay(BaseModel):
    amount: int

    @field_serializer("amount")
    def as_text(self, amount: int) -> str:
        return f"{amount} EUR"


def number(value: object) -> str:
    """No name of a value: some of them have none."""
    return type(value).__name__


def counted(show: str, calls: int) -> Counted:
    made = Counted(show)
    made.calls = calls
    return made


def tool_giving(annotation: object, value: object, remote: Remote) -> ToolRegistry:
    """A registry with one tool, without a repeat rule, that acts and then gives that value."""
    registry = ToolRegistry()

    async def charge() -> Any:
        remote.act("charge", {})
        return value

    charge.__annotations__ = {"return": annotation}
    registry.tool(charge)
    return registry


async def value_after_a_crash(place: Place, registry: ToolRegistry) -> tuple[object, LoopResult]:
    """What the recorded result is to a worker that comes after, and what its run comes to."""
    model = Script([("charge", {})], "done")
    await Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 1).run_and_die(model, registry, commits="each")
    [run] = await place.open().load_many([RunId("run")])
    assert run is not None
    [ending] = [record.body for record in run.records if (record.call, record.kind) == ("0", RecordKind.DONE)]
    value = read_ending(ending, registry.get("charge")).value
    return value, await Worker(place).recover(model, registry)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Order, Order("Hamlet", 2)),
        (frozenset[tuple[int, str]], frozenset({(1, "a"), (2, "b")})),
        (Kind, Kind.RED),
        (Booking, Booking(seats=[Seat(row=1, kind=Kind.RED)], price=Decimal("12.50"))),
        (dict[int, bool], {1: True, 2: True}),
        (int, 2**256),
        (dict[str, Any], {"a": [{"h": 2**256}]}),
        (int, UUID(int=2**127 + 1).int),
        (Fraction, Fraction(1, 3)),
        (Decimal, Decimal("0.1")),
        (str, "ok \ud83d"),
        (object, {"\ud83d": ["\ude00", None, 1, True, 1.0, -0.0]}),
    ],
    ids=number,
)
async def test_a_value_comes_back_equal_and_of_its_type(place: Place, annotation: object, value: object) -> None:
    remote = Remote()
    again, result = await value_after_a_crash(place, tool_giving(annotation, value, remote))
    assert (type(again), again) == (type(value), value)
    assert (len(remote.effects), result.status) == (1, "done")


@pytest.mark.parametrize(
    ("annotation", "value", "path", "found"),
    [
        (object, {"a": [{"h": Decimal("0.1")}]}, "$.a[0].h", "decimal.Decimal"),
        (object, {"a": [{"h": range(3)}]}, "$.a[0].h", "range"),
        (object, {1: "a", "1": "b"}, "$", "the key 1"),
        (object, {(1, 2): 3}, "$", "the key (1, 2)"),
        (object, {"done": {1: True}}, "$.done", "the key 1"),
        (object, {"a": float("nan")}, "$.a", "nan"),
        (object, {"a": 2**20_000}, "$.a", "digits"),
        (object, ["\ud83d\ude00"], "$[0]", "halves"),
        (dict[int | str, str], {1: "a", "1": "b"}, "$", "comes back as another one"),
        (Counted, counted("Hamlet", 7), "$.calls", "comes back as another one"),
        (OneWay, OneWay(amount=5), "$", "does not give back"),
        (Booking, {"seats": []}, "$", "does not give back"),
        (object, Order("Hamlet", 2), "$", "Order"),
        (object, "x" * (16 * 1024 * 1024), "$", "bytes"),
    ],
    ids=number,
)
async def test_what_cannot_come_back_is_known_to_have_run_and_never_run_again_by_itself(
    place: Place, annotation: object, value: object, path: str, found: str
) -> None:
    remote = Remote()
    registry = tool_giving(annotation, value, remote)
    model = Script([("charge", {})], "done")
    error = await error_of(Worker(place).run(model, registry))
    assert isinstance(error, Unrecordable)
    assert (error.path, error.tool) == (path, "charge")
    assert found in str(error)
    assert "'charge'" in str(error)
    for _ in range(2):
        with pytest.raises(RecoveryNeedsDecision, match="could not be stored"):
            await Worker(place).recover(model, registry)
    kinds = [record.kind for record in (await place.load("run")).records if record.call == "0"]
    assert kinds == [RecordKind.STARTED, RecordKind.UNRECORDABLE]
    assert (len(remote.effects), model.asked) == (1, 1)


async def test_work_that_is_looked_up_by_a_number_is_still_found_after_a_crash(place: Place) -> None:
    remote, paid = Remote(), dict[int, bool]()
    registry = ToolRegistry()

    @registry.tool
    async def finished() -> dict[int, bool]:
        return {1: True, 2: True}

    model = Script([("finished", {})], "done")
    await Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 1).run_and_die(model, registry, commits="each")
    [ending] = [r.body for r in (await place.load("run")).records if (r.call, r.kind) == ("0", RecordKind.DONE)]
    paid = read_ending(ending, registry.get("finished")).value
    for job in (1, 2):
        if not paid.get(job):
            remote.act("charge", {"job": job})
    assert remote.effects == []


# A type that is no longer what it was.


async def test_a_type_that_moved_to_another_module_still_reads_what_was_written(place: Place) -> None:
    remote = Remote()
    model = Script([("charge", {})], "done")
    await (
        Worker(place)
        .killed_at(CrashPoint.BEFORE_DECIDE, 1)
        .run_and_die(
            model, tool_giving(Booking, Booking(seats=[Seat(row=1, kind=Kind.RED)], price=Decimal(1)), remote), commits="each"
        )
    )
    moved = type("Booking", (Booking,), {"__module__": "elsewhere"})
    result = await Worker(place).recover(model, tool_giving(moved, None, remote))
    assert results_in(result.messages) == ['{"seats":[{"row":1,"kind":"red"}],"price":"1"}']
    assert len(remote.effects) == 1


async def test_a_type_that_no_longer_fits_what_was_written_is_named_and_never_read_as_nothing(place: Place) -> None:
    class Booking(BaseModel):
        guests: int

    remote, model = Remote(), Script([("charge", {})], "done")
    first = tool_giving(dict[int, bool], {1: True}, remote)
    await Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 1).run_and_die(model, first, commits="each")
    before = await place.load("run")
    error = await error_of(Worker(place).recover(model, tool_giving(Booking, None, remote)))
    assert error is not None
    assert "guests" in str(error)
    after = await place.load("run")
    assert after.records[: len(before.records)] == before.records
    assert after.row.status == before.row.status
    result = await Worker(place).recover(model, first)
    assert (result.status, len(remote.effects)) == ("done", 1)


# Broken text, wherever it comes from.


def broken_everywhere(messages: object) -> Any:
    from agent_runtime.messages import Reply, ToolCall

    return Reply("thinking \ud83d", [ToolCall("id-\ude00", "charge", {"note": "cut \ud83d"})])


@pytest.mark.parametrize("fails", [False, True], ids=["result", "error"])
async def test_a_lone_half_of_a_character_poisons_nothing(place: Place, fails: bool) -> None:
    entered = 0
    registry = ToolRegistry()

    @registry.tool(idempotent=True)
    async def charge(note: str) -> dict[str, str]:
        nonlocal entered
        entered += 1
        if fails:
            raise ToolError("bad \ud83d")
        return {"note": note, "\ud83d": "ok \ude00"}

    model = Script(broken_everywhere, [("charge", {"note": "plain"})], [("charge", {"note": "\udfff"})], "done \udfff")
    first = Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 2)
    await first.run_and_die(model, registry, messages="hello \ud83d", commits="each")
    result = await Worker(place).recover(model, registry)
    assert (result.status, model.asked) == ("done", 4)
    for request in model.requests:
        for message in request:
            json.dumps([message.content, *(dict(call.args) for call in message.tool_calls)], ensure_ascii=False).encode()
    again = await Worker(place).recover(model, registry)
    assert list(again.messages) == list(result.messages)
    assert [row.run_id for row in await place.open().list_runs()] == ["run"]
    sound = [seen for seen in results_in(result.messages) if "\ufffd" in seen or "?" in seen or "fit" in seen]
    assert len(sound) == 3


# What is kept is nobody's to change.


async def test_what_was_loaded_or_saved_may_be_changed_and_the_store_keeps_what_it_had(place: Place) -> None:
    given: list[Message | dict[str, object]] = [{"role": "user", "content": "go"}]
    args, kept = {"note": ["a"]}, list[dict[str, object]]()
    registry = ToolRegistry()

    @registry.tool
    async def charge(note: list[str]) -> dict[str, object]:
        note.append("changed by the tool")
        kept.append({"paid": True})
        return kept[-1]

    model = Script([("charge", args)], "done")
    result = await Worker(place).run(model, registry, messages=given)
    args["note"].append("changed by the model")
    kept[0]["paid"] = False
    given[0]["content"] = "changed by the caller"  # type: ignore[index]  # it is the dict
    texts = [message.content for message in result.messages]
    for _ in range(2):
        again = await Worker(place).recover(model, registry)
        assert [message.content for message in again.messages] == texts == ["go", "answer 1", '{"paid":true}', "done"]
        assert [dict(call.args) for message in again.messages for call in message.tool_calls] == [{"note": ["a"]}]
        for message in again.messages:
            for call in message.tool_calls:
                call.args["note"].append("changed by a reader")  # type: ignore[attr-defined]  # it is a list
    stored = await place.load("run")
    assert b"changed" not in b"".join(record.body for record in stored.records)


async def test_metadata_of_a_result_comes_back_or_is_refused_and_never_dropped(place: Place) -> None:
    class Reading(BaseModel):
        value: int
        meta: dict[str, Any]

    whole = Reading(value=1, meta={"source": "x", "trace": [1, 2]})
    again, _ = await value_after_a_crash(place, tool_giving(Reading, whole, Remote()))
    assert again == whole
    partly = tool_giving(Reading, Reading(value=1, meta={"handle": object()}), Remote())
    assert isinstance(await error_of(Worker(place).run(Script([("charge", {})], "done"), partly, "other")), Unrecordable)
