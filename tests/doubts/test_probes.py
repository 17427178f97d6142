"""A tool whose remote can be asked: what its probe says of a call in doubt is recorded, believed or not, never invented."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict, NotSent, RecoveryNeedsDecision
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.journal.states import Settlement
from agent_runtime.settlements import Outcome
from agent_runtime.telemetry import HistorySink
from agent_runtime.tool_loop import LoopResult
from agent_runtime.tools import ToolRegistry
from tests.bench import Asked, Killed, Place, Script, Worker, error_of, expect_death, results_in
from tests.doubts.desk import MAIL, Frozen, Outbox, says, settled_in, status


async def killed(place: Place, outbox: Outbox, model: Script, at: CrashPoint = CrashPoint.AFTER_CALL) -> None:
    """A run whose worker died around its call, and is known to be gone."""
    await Worker(place).killed_at(at).run_and_die(model, outbox.registry)


async def test_what_the_remote_says_was_done_is_recorded_and_the_call_is_not_made_again(place: Place) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")
    await killed(place, outbox, model)
    sink = HistorySink()
    result = await Worker(place).recover(model, outbox.registry, sinks=[sink])
    assert (results_in(result.messages), outbox.entered, len(outbox.sent)) == (["mail 1"], 1, 1)
    assert outbox.asked == [("run:0", {"to": "ana"})]
    [settled] = settled_in(await place.load("run"))
    told = {"how": "done", "by": "its probe", "why": "the remote says that it happened", "call": "0", "attempt": 1}
    assert settled == {**told, "ending": {"result": "mail 1"}}
    assert "call.settled" in sink.names()
    again = await Worker(place).recover(model, outbox.registry)
    assert (again.messages, len(outbox.asked)) == (result.messages, 1)


async def test_what_the_remote_says_did_not_happen_runs_once_the_worker_is_gone(place: Place) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")
    await killed(place, outbox, model, CrashPoint.AFTER_INTENT)
    result = await Worker(place).recover(model, outbox.registry)
    assert (results_in(result.messages), outbox.sent) == (["mail 1"], ["run:0"])
    assert [settled["how"] for settled in settled_in(await place.load("run"))] == ["not_done"]


async def test_while_the_old_worker_may_still_send_nobody_believes_that_it_did_not_happen(place: Place) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")
    frozen = Frozen(place, outbox, model)
    await frozen.inside()
    for take_over in (True, False, False):
        error = await error_of(Worker(place).recover(model, outbox.registry, take_over=take_over))
        assert isinstance(error, RecoveryNeedsDecision)
        assert "did not happen, but its worker is not known to be gone" in error.doubts[0].why
        assert await status(place) == (RunStatus.BLOCKED, None), "no time will help"
    frozen.thawed.set()
    with pytest.raises(CheckpointConflict):
        await frozen.work
    result = await Worker(place).recover(model, outbox.registry)
    assert (results_in(result.messages), outbox.sent, outbox.entered) == (["mail 1"], ["run:0"], 1)


async def test_an_attempt_that_ended_while_its_probe_was_asked_is_not_believed_to_be_undone(place: Place) -> None:
    """The remote says "not done", the worker sends, and is gone before anybody looks whether it is."""
    outbox, model = Outbox(), Script(MAIL, "done")
    frozen = Frozen(place, outbox, model, at="before")
    await frozen.inside()

    async def send_after_the_answer() -> None:
        raise Killed("killed once it has sent")

    async def look_then_it_sends(key: str) -> object:
        assert key not in outbox.sent
        outbox.saying, outbox.after = None, send_after_the_answer
        frozen.thawed.set()
        await expect_death(frozen.work)
        assert key in outbox.sent
        return Outcome.not_done()

    outbox.saying = look_then_it_sends
    error = await error_of(Worker(place).recover(model, outbox.registry, take_over=True))
    assert isinstance(error, RecoveryNeedsDecision)
    outbox.after = Outbox().after
    result = await Worker(place).recover(model, outbox.registry)
    assert (results_in(result.messages), outbox.sent) == (["mail 1"], ["run:0"])


NO_ANSWERS: dict[str, tuple[object, str]] = {
    "unknown": (Outcome.unknown(), "does not know either"),
    "raises": (ConnectionError("down"), "could not say: ConnectionError: down"),
    "raises that nothing went out": (NotSent("busy"), "could not say: NotSent"),
    "is cancelled": (asyncio.CancelledError(), "could not say: it was cancelled"),
    "gives None": (None, "gave no Outcome, but None"),
    "gives True": (True, "gave no Outcome, but True"),
    "gives text": ("done", "gave no Outcome, but 'done'"),
    "gives a tuple": ((Settlement.DONE, 7), "gave no Outcome, but "),
    "gives a rerun": (Outcome(Settlement.RERUN), "gave no Outcome, but "),
    "gives a word": (Outcome("done"), "gave no Outcome, but "),  # type: ignore[arg-type]  # what a careless probe gives
    "gives the class": (Outcome, "gave no Outcome, but "),
    "gives what cannot be recorded": (Outcome.done(object()), "cannot be recorded"),
    "gives NaN": (Outcome.done(float("nan")), "cannot be recorded"),
}


@pytest.mark.parametrize("how", NO_ANSWERS)
async def test_a_probe_that_does_not_answer_leaves_the_call_to_a_person(place: Place, how: str) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")
    await killed(place, outbox, model)
    said, why = NO_ANSWERS[how]
    outbox.saying = says(said)
    for _ in range(2):
        error = await error_of(Worker(place).recover(model, outbox.registry))
        assert isinstance(error, RecoveryNeedsDecision)
        assert why in error.doubts[0].why
        assert await status(place) == (RunStatus.BLOCKED, None)
    assert (outbox.entered, settled_in(await place.load("run"))) == (1, [])
    result = await Worker(place).recover(model, outbox.registry, rerun_in_doubt=True)
    assert (result.status, outbox.entered) == ("done", 2)


@pytest.mark.parametrize("is_stubborn", [False, True], ids=["stops when told", "does not let itself be stopped"])
async def test_a_probe_that_hangs_is_given_up(place: Place, is_stubborn: bool) -> None:
    outbox, model, never = Outbox(timeout=0.05), Script(MAIL, "done"), asyncio.Event()
    await killed(place, outbox, model)

    async def hang(_: str) -> object:
        while True:
            try:
                await never.wait()
                return Outcome.not_done()
            except asyncio.CancelledError:
                if not is_stubborn:
                    raise

    outbox.saying = hang
    error = await error_of(Worker(place).recover(model, outbox.registry))
    assert isinstance(error, RecoveryNeedsDecision)
    assert "did not answer within 0.05 s" in error.doubts[0].why
    never.set()
    assert outbox.entered == 1


async def test_a_recovery_that_is_cancelled_while_it_asks_has_decided_nothing(place: Place) -> None:
    outbox, model, asked = Outbox(), Script(MAIL, "done"), asyncio.Event()
    await killed(place, outbox, model)

    async def hang(_: str) -> object:
        asked.set()
        await asyncio.Event().wait()
        return None

    outbox.saying = hang
    task = asyncio.ensure_future(Worker(place).recover(model, outbox.registry))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    outbox.saying = None
    assert results_in((await Worker(place).recover(model, outbox.registry)).messages) == ["mail 1"]


async def test_no_probe_is_asked_for_a_call_that_is_done_or_never_started(place: Place) -> None:
    outbox, model = Outbox(), Script(MAIL, MAIL, "done")
    for at, seq in ((CrashPoint.AFTER_CONFIRM, 0), (CrashPoint.BEFORE_INTENT, 1)):
        dying = Worker(place).killed_at(at, seq)
        await (dying.recover_and_die if seq else dying.run_and_die)(model, outbox.registry, commits="each")
    assert (await Worker(place).recover(model, outbox.registry)).status == "done"
    assert (outbox.asked, outbox.sent) == ([], ["run:0", "run:1"])


class Receipt(BaseModel):
    number: int
    lines: tuple[str, ...] = ()


GIVEN: dict[str, tuple[object, object | None]] = {
    "the type itself": (Receipt(number=7, lines=("a",)), Receipt(number=7, lines=("a",))),
    "plain data that fits": ({"number": 7, "lines": ["a"]}, Receipt(number=7, lines=("a",))),
    "plain data that does not": ({"number": "seven"}, None),
    "another type": (Outbox, None),
    "nothing": (None, None),
}


@pytest.mark.parametrize("given", GIVEN)
async def test_what_a_probe_gives_is_recorded_as_the_declared_type_or_not_at_all(place: Place, given: str) -> None:
    registry, model, value = ToolRegistry(), Script([("pay", {})], "done"), GIVEN[given]

    async def probe(key: str, args: dict[str, Any]) -> Outcome:
        return Outcome.done(value[0])

    @registry.tool(probe=probe)
    async def pay() -> Receipt:
        raise Killed("killed")

    await expect_death(Worker(place).run(model, registry))
    error = await error_of(Worker(place).recover(model, registry))
    if value[1] is None:
        assert isinstance(error, RecoveryNeedsDecision)
        assert "cannot be recorded" in error.doubts[0].why
        return
    assert error is None
    assert results_in((await Worker(place).recover(model, registry)).messages) == ['{"number":7,"lines":["a"]}']


async def test_of_two_that_ask_at_the_same_moment_one_goes_on_and_the_call_has_one_outcome(place: Place) -> None:
    for point in (CrashPoint.AFTER_INTENT, CrashPoint.AFTER_CALL):
        outbox, model, run_id = Outbox(), Script(MAIL, "done"), point.name
        await Worker(place).killed_at(point).run_and_die(model, outbox.registry, run_id)
        both = asyncio.Barrier(2)

        async def together(key: str, outbox: Outbox = outbox, both: asyncio.Barrier = both) -> object:
            await both.wait()
            return Outcome.done("mail 1") if key in outbox.sent else Outcome.not_done()

        outbox.saying = together
        work = [Worker(place).recover(model, outbox.registry, run_id) for _ in range(2)]
        ended = await asyncio.gather(*work, return_exceptions=True)
        results = [each for each in ended if isinstance(each, LoopResult)]
        assert results
        assert all(isinstance(each, LoopResult | CheckpointConflict) for each in ended)
        assert {tuple(results_in(result.messages)) for result in results} == {("mail 1",)}
        assert (outbox.sent, len(settled_in(await place.load(run_id)))) == ([f"{run_id}:0"], 1)


# Several at once.


def mixed() -> tuple[Outbox, list[Asked], Callable[[], list[str]]]:
    """Four calls side by side, each of another rule, all killed once they have acted."""
    outbox, acted, inside = Outbox(), list[str](), asyncio.Barrier(4)

    async def act(name: str) -> str:
        acted.append(name)
        if acted.count(name) == 1:
            await inside.wait()
            raise Killed(name)
        return name

    @outbox.registry.tool(idempotent=True)
    async def charge_i() -> str:
        return await act("charge_i")

    @outbox.registry.tool(pure=True)
    async def look() -> str:
        return await act("look")

    @outbox.registry.tool
    async def bare() -> str:
        return await act("bare")

    async def mail_too() -> None:
        await act("mail")

    outbox.after = mail_too
    return outbox, [("charge_i", {}), *MAIL, ("look", {}), ("bare", {})], lambda: acted


async def test_every_doubt_is_decided_before_anything_acts_whatever_the_rules(place: Place) -> None:
    outbox, calls, acted = mixed()
    model = Script(calls, "done")
    await expect_death(Worker(place).run(model, outbox.registry))
    acted().clear()
    acted().extend(["charge_i", "look", "bare", "mail"])
    error = await error_of(Worker(place).recover(model, outbox.registry))
    assert isinstance(error, RecoveryNeedsDecision)
    assert [doubt.call for doubt in error.doubts] == ["0.3"]
    assert (len(acted()), len(outbox.sent)) == (4, 1), "nothing has acted"
    assert [each["call"] for each in settled_in(await place.load("run"))] == ["0.1"], "what was learned is kept"
    result = await Worker(place).recover(model, outbox.registry, rerun_in_doubt=error.doubts)
    assert results_in(result.messages) == ["charge_i", "mail 1", "look", "bare"]
    assert sorted(acted()[4:]) == ["bare", "charge_i", "look"]
    assert len(outbox.asked) == 1


async def test_a_permission_for_one_attempt_is_none_for_the_next(place: Place) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")
    await killed(place, outbox, model)
    outbox.saying = says(Outcome.unknown())
    error = await error_of(Worker(place).recover(model, outbox.registry))
    assert isinstance(error, RecoveryNeedsDecision)
    dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
    await dying.recover_and_die(model, outbox.registry, rerun_in_doubt=error.doubts)
    again = await error_of(Worker(place).recover(model, outbox.registry, rerun_in_doubt=error.doubts))
    assert isinstance(again, RecoveryNeedsDecision)
    assert (again.doubts[0].attempt, outbox.entered) == (2, 2)
    assert (await Worker(place).recover(model, outbox.registry, rerun_in_doubt=again.doubts)).status == "done"
    assert outbox.entered == 3


async def test_a_probe_that_knows_goes_before_a_permission_to_rerun(place: Place) -> None:
    outbox, model = Outbox(), Script(MAIL, "done")
    await killed(place, outbox, model)
    result = await Worker(place).recover(model, outbox.registry, rerun_in_doubt=True)
    assert (results_in(result.messages), outbox.entered) == (["mail 1"], 1)


async def test_a_probe_asks_with_the_arguments_that_were_sent_also_where_a_person_changed_them(place: Place) -> None:
    outbox = Outbox(needs_approval=True)
    model = Script(MAIL, "done")
    paused = await Worker(place).run(model, outbox.registry)
    [request] = paused.pending
    dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
    await expect_death(dying.run(model, outbox.registry, messages=None, verdicts=[request.edit({"to": "ben"}, by="ana")]))
    result = await Worker(place).recover(model, outbox.registry)
    assert (results_in(result.messages), outbox.asked, outbox.entered) == (["mail 1"], [("run:0", {"to": "ben"})], 1)


async def test_a_call_without_a_probe_or_a_rule_is_never_made_by_the_executor_alone(place: Place) -> None:
    """Whatever recovery overlooks, a call that has a start and no end is not simply made."""
    from agent_runtime.doubts import Case, Decider, Decisions

    outbox, model = Outbox(probe=None), Script(MAIL, "done")
    await killed(place, outbox, model)

    async def overlook(self: Decider, case: Case) -> Decisions:
        return Decisions()

    decide, Decider.__call__ = Decider.__call__, overlook  # type: ignore[method-assign]  # the defect that is planted
    try:
        error = await error_of(Worker(place).recover(model, outbox.registry))
    finally:
        Decider.__call__ = decide  # type: ignore[method-assign]  # and taken out again
    assert isinstance(error, RecoveryNeedsDecision)
    assert outbox.entered == 1
    assert RecordKind.ENDED not in [record.kind for record in (await place.load("run")).records]
