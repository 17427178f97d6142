"""The request: what a person is shown is what would be sent, bound by a digest, and it survives being text."""

from __future__ import annotations

import itertools
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel, Field

from agent_runtime.approvals import ApprovalRequest, Decision, Verdict
from agent_runtime.clock import moment
from agent_runtime.errors import InvalidArguments, ToolDefinitionError, VerdictRefused
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tools import ToolRegistry
from tests.approvals.desk import Clamping, charging, needing, paused, resume, the_request
from tests.bench import Bench, Place, Script, Worker, error_of, results_in


class Currency(Enum):
    EUR = "eur"


class Line(BaseModel):
    item: str
    price: Decimal
    at: datetime


class Bill(BaseModel):
    lines: list[Line]
    tags: set[str] = set()


class Rich:
    """A tool with the types that people declare, and what it was called with."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.registry = ToolRegistry()

        @self.registry.tool(needs_approval=True)
        async def pay(bill: Bill, due: date, currency: Currency = Currency.EUR, to: frozenset[str] = frozenset()) -> str:
            self.got.append({"bill": bill, "due": due, "currency": currency, "to": to})
            return "paid"


RICH = {
    "bill": {"lines": [{"item": "a", "price": "1.50", "at": "2030-01-01T10:00:00Z"}], "tags": ["y", "x", "z"]},
    "due": "2030-02-01",
    "to": ["b", "a"],
}


async def test_a_request_says_what_would_be_sent_where_under_which_key_and_until_when(place: Place) -> None:
    clock = ManualClock()
    bench = needing(approval_expires=60)
    request = the_request(await Worker(place, clock=clock).run(charging(), bench.registry, clock=clock))
    assert request[:5] == ("0", "run", request.step, "charge", {"amount": 100})
    assert (request.key, len(request.digest)) == ("run:0", 64)
    assert request.asked_at is not None
    assert request.expires_at is not None
    if place.kind == "memory":
        assert request.expires_at == moment(int(clock.now().timestamp() * 1000) + 60_000)
    stored = await place.load("run")
    assert 1 <= request.step <= stored.row.step


async def test_an_approver_is_shown_what_a_validator_made_of_the_arguments_and_that_is_what_runs(place: Place) -> None:
    tools = Clamping(50)
    request = the_request(await Worker(place).run(charging(), tools.registry))
    assert request.args == {"amount": 50}
    result = await Worker(place).recover(charging(), tools.registry, verdicts=[request.approve(by="ana")])
    assert (result.status, tools.sent) == ("done", [50])


async def test_declared_types_are_shown_as_plain_data_and_arrive_as_declared(place: Place) -> None:
    tools, model = Rich(), Script([("pay", RICH)], "done")
    request = the_request(await Worker(place).run(model, tools.registry))
    assert request.args["bill"] == {
        "lines": [{"item": "a", "price": "1.50", "at": "2030-01-01T10:00:00Z"}],
        "tags": ["x", "y", "z"],
    }
    assert (request.args["due"], request.args["currency"], request.args["to"]) == ("2030-02-01", "eur", ["a", "b"])
    again = ApprovalRequest.from_json(request.to_json())
    assert again == request
    verdict = Verdict.from_json(again.edit({"due": "2031-01-01"}, by="ana").to_json())
    result = await Worker(place).recover(model, tools.registry, verdicts=[verdict])
    assert result.status == "done"
    [got] = tools.got
    line = Line(item="a", price=Decimal("1.50"), at=datetime(2030, 1, 1, 10, tzinfo=UTC))
    assert got == {
        "bill": Bill(lines=[line], tags={"x", "y", "z"}), "due": date(2031, 1, 1), "currency": Currency.EUR,
        "to": frozenset("ab"),
    }  # fmt: skip


def test_sets_are_shown_in_one_order_in_every_process() -> None:
    tool = Rich().registry.get("pay")
    words = [f"word {at}" for at in range(40)]
    orders = {tool.shown(_rich(order)) for order in (words, words[::-1], words[7:] + words[:7])}
    assert len(orders) == 1


def _rich(words: list[str]) -> bytes:
    import json

    return json.dumps({**RICH, "to": words, "bill": {"lines": [], "tags": words}}, separators=(",", ":")).encode()


COUNT = itertools.count()


class Hidden(BaseModel):
    name: str
    secret: str = Field(exclude=True)


@pytest.mark.parametrize(
    "annotation",
    [
        Annotated[str, AfterValidator(lambda value: value + "!")],
        Annotated[str, AfterValidator(lambda value: f"{value[:1]}{next(COUNT)}")],
        Hidden,
    ],
    ids=["grows", "counts", "kept back"],
)
async def test_what_cannot_be_shown_as_it_is_sent_is_answered_as_an_error_and_never_sent(
    place: Place, annotation: Any
) -> None:
    registry, entered = ToolRegistry(), []

    async def charge(amount: Any) -> str:
        entered.append(amount)
        return "charged"

    charge.__annotations__["amount"] = annotation
    registry.tool(needs_approval=True)(charge)
    given = {"name": "a", "secret": "b"} if annotation is Hidden else "a"
    result = await Worker(place).run(Script([("charge", {"amount": given})], "done"), registry)
    assert (result.status, entered) == ("done", [])
    [text] = results_in(result.messages)
    assert text.startswith("error: InvalidArguments"), text


async def test_arguments_that_do_not_fit_are_answered_and_nobody_is_asked(place: Place) -> None:
    bench = needing()
    result = await Worker(place).run(Script([("charge", {"amount": "many"})], "done"), bench.registry)
    assert (result.status, bench.effects) == ("done", 0)


# When a person is asked.


async def test_only_the_calls_for_which_the_predicate_says_so_are_asked_about(place: Place) -> None:
    bench = Bench(needs_approval=lambda args: args.get("amount", 0) > 50)
    model = Script([("charge", {"amount": amount}) for amount in (10, 100, 20)], "done")
    request = the_request(await Worker(place).run(model, bench.registry))
    assert (request.args, bench.remote.count("charge")) == ({"amount": 100}, 2)
    result = await resume(place, bench, request.approve(by="ana"), model=model)
    assert (result.status, bench.remote.count("charge"), model.asked) == ("done", 3, 2)


def fifty(value: int) -> int:
    return min(value, 50)


async def test_the_predicate_is_given_the_checked_arguments_and_cannot_change_what_is_sent(place: Place) -> None:
    registry, seen, sent = ToolRegistry(), [], []

    def needed(args: dict[str, Any]) -> bool:
        seen.append(list(args["items"]))
        args["items"].clear()
        return False

    @registry.tool(needs_approval=needed)
    async def order(items: list[Annotated[int, AfterValidator(fifty)]]) -> str:
        sent.append(items)
        return "ordered"

    await Worker(place).run(Script([("order", {"items": [1, 100]})], "done"), registry)
    assert (seen, sent) == ([[1, 50]], [[1, 50]])


@pytest.mark.parametrize("said", [1, "yes", None, KeyError("amount")], ids=str)
async def test_a_predicate_that_cannot_say_is_a_typed_error_and_nothing_is_called(place: Place, said: object) -> None:
    def needed(args: dict[str, Any]) -> Any:
        if isinstance(said, Exception):
            raise said
        return said

    bench = Bench(needs_approval=needed)
    error = await error_of(Worker(place).run(charging(), bench.registry))
    assert isinstance(error, ToolDefinitionError)
    assert (bench.effects, bench.entered.total()) == (0, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"needs_approval": "yes"}, {"needs_approval": 1}, {"needs_approval": True, "approval_expires": 0},
        {"needs_approval": True, "approval_expires": float("inf")}, {"needs_approval": True, "may_approve": "ana"},
        {"approval_expires": 5}, {"may_approve": lambda by, request: True}, {"no_self_approval": True},
    ],
    ids="-".join,
)  # fmt: skip
def test_a_tool_says_clearly_when_its_calls_need_a_person(options: dict[str, Any]) -> None:
    async def tool() -> None: ...

    with pytest.raises(ToolDefinitionError):
        ToolRegistry().tool(**options)(tool)


def test_who_decides_about_approvals_is_asked_at_once_and_so_is_no_async_function() -> None:
    async def later(given: object) -> bool:
        return True

    for options in ({"needs_approval": later}, {"needs_approval": True, "may_approve": later}):
        given: dict[str, Any] = options
        with pytest.raises(ToolDefinitionError, match="plain function"):
            ToolRegistry().tool(**given)(later)


# As text.


async def test_a_request_and_its_verdicts_survive_being_text(place: Place) -> None:
    request = await paused(place, needing(approval_expires=600))
    again = ApprovalRequest.from_json(request.to_json())
    assert again == request
    for verdict in (again.approve(by="ana", note="ok"), again.deny(by="bo"), again.edit({"amount": 5}, by="ana")):
        assert Verdict.from_json(verdict.to_json()) == verdict


BAD_TEXTS = [
    "", "nothing", "null", "[]", "1", '"yes"', "{}", '{"approve": true}', "[" * 100_000, '{"id": 1}',
    '{"asked_at": 1e30, "expires_at": null}',
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_TEXTS, ids=lambda text: text[:20])
def test_text_that_holds_no_request_or_verdict_is_refused(text: str) -> None:
    for read in (ApprovalRequest.from_json, Verdict.from_json):
        with pytest.raises(VerdictRefused):
            read(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [("id", 1), ("args", [1]), ("args", None), ("digest", None), ("step", "1"), ("expires_at", 10**40), ("more", 1)],
)
async def test_text_with_one_wrong_part_is_refused(name: str, value: object, tmp_path: Any) -> None:
    import json

    place = Place("memory", tmp_path)
    plain = json.loads((await paused(place, needing())).to_json())
    with pytest.raises(VerdictRefused):
        ApprovalRequest.from_json(json.dumps({**plain, name: value}))


def verdict(**changed: Any) -> Verdict:
    return Verdict("run", "0", "d", Decision.APPROVE, "ana")._replace(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"by": ""}, {"by": "  "}, {"by": 5}, {"by": "x" * 501}, {"note": None}, {"note": "x" * 10_001}, {"args": {}},
        {"decision": Decision.EDIT}, {"decision": Decision.EDIT, "args": [1]}, {"decision": Decision.EDIT, "args": {1: 2}},
        {"decision": Decision.EDIT, "args": {"a": float("nan")}}, {"decision": Decision.EDIT, "args": {"a": object()}},
        {"decision": "approve"}, {"digest": b"d"},
    ],
    ids="-".join,
)  # fmt: skip
async def test_a_malformed_verdict_is_refused_wherever_it_comes_from(changed: dict[str, Any], tmp_path: Any) -> None:
    place, bench = Place("memory", tmp_path), needing()
    await paused(place, bench)
    with pytest.raises(VerdictRefused):
        await resume(place, bench, verdict(**changed))
    assert bench.effects == 0


async def test_an_edit_that_does_not_fit_is_refused_and_the_request_stays_open(place: Place) -> None:
    bench = needing()
    request = await paused(place, bench)
    for changes in ({"amount": "many"}, {"amounts": 5}, {"amount": None}):
        error = await error_of(resume(place, bench, request.edit(changes, by="ana")))
        assert isinstance(error, VerdictRefused), changes
        assert "still open" in str(error)
    with pytest.raises(VerdictRefused):
        request.edit([("amount", 5)], by="ana")  # type: ignore[arg-type]
    assert (await resume(place, bench, request.edit({"amount": 5}, by="ana"))).status == "done"
    assert [effect.args for effect in bench.remote.effects] == [{"amount": 5}]


def test_a_check_that_is_not_stable_cannot_be_agreed_to() -> None:
    registry = ToolRegistry()

    @registry.tool(needs_approval=True)
    async def charge(amount: Annotated[int, AfterValidator(lambda value: value + 1)]) -> None: ...

    with pytest.raises(InvalidArguments):
        registry.get("charge").shown(b'{"amount":1}')
