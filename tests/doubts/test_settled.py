"""What somebody says of a call in doubt: checked when it is said, taken up when the run is; no value of it wedges a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from agent_runtime import codec
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointStoreCorrupt, FlowError, InvalidSetting, RecoveryNeedsDecision, Unrecordable
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.inbox import MessageKind
from agent_runtime.journal.records import RunStatus
from agent_runtime.journal.states import Settlement
from agent_runtime.settlements import Outcome, Rerun, read_settled, said_from_plain, said_to_plain, say, settled_body
from agent_runtime.tools import ToolRegistry
from tests.bench import Asked, Killed, Place, Script, Worker, error_of, expect_death, results_in
from tests.doubts.desk import MAIL, Outbox, post, post_settling, settled_in, status
from tests.flow.desk import recover, run


class Receipt(BaseModel):
    number: int


class Fussy(BaseModel):
    """A type whose own check raises what no check should."""

    number: int

    def model_post_init(self, context: object) -> None:
        raise RuntimeError("never content")


PAY: list[Asked] = [("pay", {})]


def paying(result: type) -> ToolRegistry:
    """A tool without a rule, which declares that result and kills its worker."""
    registry = ToolRegistry()

    async def pay() -> Any:
        raise Killed("killed")

    pay.__annotations__["return"] = result
    registry.tool(pay)
    return registry


SAID = [
    (Receipt, {"number": 7}, '{"number":7}'),
    (Receipt, {"number": "7x"}, '{"number":"7x"}'),
    (Receipt, "it is paid", "it is paid"),
    (Receipt, None, "null"),
    (Fussy, {"number": 7}, '{"number":7}'),
    (tuple[int, ...], [1, "two"], '[1,"two"]'),
    (str, 7, "7"),
    (int, "seven", "seven"),
]


@pytest.mark.parametrize(("declared", "value", "shown"), SAID, ids=str)
async def test_a_settled_value_of_another_type_than_the_tool_declares_is_given_as_it_is_and_the_run_goes_on(
    place: Place, declared: type, value: object, shown: str
) -> None:
    registry, model = paying(declared), Script(PAY, "done")
    await expect_death(Worker(place).run(model, registry))
    assert isinstance(await error_of(Worker(place).recover(model, registry)), RecoveryNeedsDecision)
    await post_settling(place, Outcome.done(value))
    for _ in range(2):
        result = await Worker(place).recover(model, registry)
        assert (result.status, results_in(result.messages)) == ("done", [shown])


class Paid(BaseModel):
    receipt: Receipt | None = None


@pytest.mark.parametrize("fits", [True, False])
async def test_a_flow_gets_a_settled_value_as_declared_and_its_own_state_judges_what_is_not(place: Place, fits: bool) -> None:
    flow = Flow("payments", state=Paid).node("pay", Call("pay", args=lambda paid: {}, into="receipt")).end("pay")
    registry = paying(Receipt)
    await expect_death(run(Worker(place), registry, flow, Paid()))
    assert isinstance(await error_of(recover(Worker(place), registry, flow)), RecoveryNeedsDecision)
    await post_settling(place, Outcome.done({"number": 7} if fits else "seven"), call="0/pay")
    if fits:
        assert (await recover(Worker(place), registry, flow)).state == Paid(receipt=Receipt(number=7))
        return
    for _ in range(2):
        with pytest.raises(FlowError, match="receipt"):
            await recover(Worker(place), registry, flow)
    assert len(settled_in(await place.load("run"))) == 1


# In whose hands it is.


async def test_what_was_posted_while_the_worker_lived_is_taken_up_by_that_very_worker_once_it_is_in_doubt(
    place: Place,
) -> None:
    outbox, model = Outbox(probe=None), Script(MAIL, "done")

    async def told_meanwhile() -> None:
        await post_settling(place, Outcome.done("mail 1"))
        raise ValueError("a bug")

    outbox.after = told_meanwhile
    result = await Worker(place).run(model, outbox.registry)
    assert (results_in(result.messages), outbox.entered) == (["mail 1"], 1)
    assert settled_in(await place.load("run"))[0]["by"] == "ana"


async def test_what_a_call_gave_by_itself_is_not_changed_by_what_was_posted(place: Place) -> None:
    outbox, model = Outbox(probe=None), Script(MAIL, "done")

    async def told_meanwhile() -> None:
        await post_settling(place, Outcome.done("something else"))

    outbox.before = told_meanwhile
    result = await Worker(place).run(model, outbox.registry)
    assert (results_in(result.messages), settled_in(await place.load("run"))) == (["mail 1"], [])


async def in_doubt(place: Place, **options: Any) -> tuple[Outbox, Script]:
    outbox, model = Outbox(**{"probe": None, **options}), Script(MAIL, "done")
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).run_and_die(model, outbox.registry)
    assert isinstance(await error_of(Worker(place).recover(model, outbox.registry)), RecoveryNeedsDecision)
    return outbox, model


async def test_the_first_that_holds_is_taken_up_and_what_does_not_hold_blocks_nobody(place: Place) -> None:
    outbox, model = await in_doubt(place)
    genuine = said_to_plain(say("0", 1, Outcome.done("first"), by="ana", why="seen"))
    for wrong in (
        {}, {"call": 0}, {"attempt": "1"}, {"attempt": 2}, {"attempt": True}, {"how": "perhaps"}, {"how": None}, {"by": None},
        {"why": 5}, {"ending": None}, {"ending": {"result": 1, "more": 2}}, {"ending": {"error": 5}}, {"ending": "done"},
        {"how": "rerun"}, {"how": "not_done", "ending": None}, {"how": "not_done", "drained": True}, {"call": "1"},
    ):  # fmt: skip
        await post(place, MessageKind.SETTLE, {**genuine, **wrong} if wrong else {})
    assert isinstance(await error_of(Worker(place).recover(model, outbox.registry)), RecoveryNeedsDecision)
    assert await status(place) == (RunStatus.BLOCKED, None)
    await post(place, MessageKind.SETTLE, genuine)
    await post_settling(place, Outcome.done("second"))
    result = await Worker(place).recover(model, outbox.registry)
    assert (results_in(result.messages), outbox.entered) == (["first"], 1)


async def test_a_posted_permission_runs_the_call_once_and_no_later_attempt(place: Place) -> None:
    outbox, model = await in_doubt(place)
    await post_settling(place, Rerun())
    await Worker(place).killed_at(CrashPoint.AFTER_CALL).recover_and_die(model, outbox.registry)
    assert outbox.entered == 2
    for _ in range(2):
        error = await error_of(Worker(place).recover(model, outbox.registry))
        assert isinstance(error, RecoveryNeedsDecision)
        assert error.doubts[0].attempt == 2
    assert outbox.entered == 2


async def test_a_settlement_goes_before_a_probe_and_before_a_rule(place: Place) -> None:
    registry, entered = ToolRegistry(), list[str]()

    async def probe(key: str, args: dict[str, Any]) -> Outcome:
        return Outcome.done("by the probe")

    @registry.tool(probe=probe)
    async def asked() -> str:
        entered.append("asked")
        raise Killed("killed")

    @registry.tool(idempotent=True)
    async def keyed() -> str:
        entered.append("keyed")
        await asyncio.Event().wait()
        return "never"

    calls: list[Asked] = [("keyed", {}), ("asked", {})]
    model = Script(calls, "done")
    await expect_death(Worker(place).run(model, registry))
    await post_settling(place, Outcome.done("by ana"), call="0.0")
    await post_settling(place, Outcome.done("by ana"), call="0.1")
    result = await Worker(place).recover(model, registry)
    assert (results_in(result.messages), sorted(entered)) == (["by ana", "by ana"], ["asked", "keyed"])


# What is said.


@pytest.mark.parametrize(
    ("settling", "by", "why"),
    [
        (Outcome.unknown(), "ana", "x"), (Outcome(Settlement.RERUN), "ana", "x"), (None, "ana", "x"), ("done", "ana", "x"),
        (Rerun, "ana", "x"), (Outcome.done(1), "", "x"), (Outcome.done(1), " ", "x"), (Outcome.done(1), None, "x"),
        (Outcome.done(1), "ana", ""), (Outcome.done(1), "ana", 5), (Rerun(), "", "x"), (Outcome.not_done(), "ana", "\n"),
    ],
)  # fmt: skip
def test_nothing_is_settled_by_nobody_for_no_reason_or_as_nothing(settling: object, by: object, why: object) -> None:
    with pytest.raises(InvalidSetting):
        say("0", 1, settling, by=by, why=why)


@pytest.mark.parametrize("value", [object(), float("nan"), {1: 2}, b"bytes", {"a": [object()]}], ids=range(5))
def test_a_result_that_cannot_be_recorded_is_refused_when_it_is_said(value: object) -> None:
    with pytest.raises(Unrecordable):
        say("0", 1, Outcome.done(value), by="ana", why="seen")


@pytest.mark.parametrize(
    "settling", [Outcome.done({"a": [1, "\ud800"]}), Outcome.done(), Outcome.not_done(), Rerun()], ids=str
)
def test_what_is_said_is_read_again_as_it_was_from_a_message_and_from_a_record(settling: Any) -> None:
    said = say("1/pay~2", 3, settling, by="ana", why="seen")
    assert said_from_plain(codec.decode(codec.encode(said_to_plain(said, drained=True)))) == said
    settled = read_settled(settled_body(said))
    assert (settled.how, settled.ending) == (said.how, said.ending)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b"null", b'{"how":"perhaps"}', b'{"how":"done"}', b'{"how":"done","ending":{}}', b'{"how":[1]}',
        b'{"how":"done","ending":{"result":1,"more":2}}', b'{"how":"rerun","ending":{"result":1}}', b"\xff", b'{"how":"done"',
        b'{"how":"not_done","ending":{"error":{"type":"a","message":"b"}}}', b"[" * 100_000,
    ],
    ids=range(14),
)  # fmt: skip
def test_a_settlement_that_cannot_be_is_corrupt_and_never_read_as_one(body: bytes) -> None:
    with pytest.raises(CheckpointStoreCorrupt, match="a settlement cannot be read"):
        read_settled(body)
