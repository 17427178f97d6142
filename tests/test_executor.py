"""What a tool's ending means, for each repeat rule: counted at the remote, on every store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from agent_runtime.errors import (
    CheckpointConflict,
    KeyConflict,
    NotSent,
    RecoveryNeedsDecision,
    ToolError,
    Unrecordable,
)
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.tool_loop import LoopResult
from agent_runtime.tools import ToolRegistry, idempotency_key
from tests.bench import LONG_SECONDS, Killed, Place, Remote, Script, Worker, error_of, results_in, until

RULES: dict[str, dict[str, Any]] = {"none": {}, "idempotent": {"idempotent": True}, "pure": {"pure": True}}
UNRECORDABLE = object()
GROUP_WITH_CONFLICT = ExceptionGroup("all", [OSError(), ExceptionGroup("inner", [KeyConflict("409")])])


class Declared(Exception):
    """What a tool declares to be its answer."""


class Odd(Exception):
    """An error that cannot be made again from its message."""

    def __init__(self, *, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code = code


@dataclass
class Act:
    """One tool that does, each time it is entered, what comes next in a list: give a value, or raise."""

    endings: list[object]
    is_async: bool = True
    remote: Remote = field(default_factory=Remote)
    keys: list[str] = field(default_factory=list)

    @property
    def entered(self) -> int:
        return len(self.keys)

    def registry(self, **options: Any) -> ToolRegistry:
        registry = ToolRegistry()
        options = {"name": "act", "pause": 0.001, **options}
        registry.tool(**options)(self._async() if self.is_async else self._sync())
        return registry

    def _async(self) -> Callable[..., Any]:
        async def act(amount: int) -> object:
            return self._end(amount)

        return act

    def _sync(self) -> Callable[..., Any]:
        def act(amount: int) -> object:
            return self._end(amount)

        return act

    def _end(self, amount: int) -> object:
        self.keys.append(idempotency_key())
        ending = self.endings[min(len(self.keys), len(self.endings)) - 1]
        if not isinstance(ending, NotSent):
            self.remote.act("act", {"amount": amount}, idempotency_key())
        if isinstance(ending, BaseException):
            raise ending
        return ending


def script() -> Script:
    return Script([("act", {"amount": 5})], "done")


async def tried(place: Place, act: Act, **options: Any) -> LoopResult | Exception:
    """What becomes of a run with that one call."""
    try:
        return await Worker(place).run(script(), act.registry(**options))
    except Exception as error:
        return error


async def status(place: Place) -> int:
    return (await place.load("run")).row.status


async def kinds(place: Place, call: str = "0") -> list[RecordKind]:
    return [RecordKind(record.kind) for record in (await place.load("run")).records if record.call == call]


Ended = tuple[str, int]
"""`done`, the error's name that the model saw, `doubt` or what was raised; and how often the tool was entered."""
ENDINGS: list[tuple[str, list[object], dict[str, Any], Ended, Ended]] = [
    ("it returns", ["fine"], {}, ("done", 1), ("done", 1)),
    ("it returns nothing", [None], {}, ("done", 1), ("done", 1)),
    ("it answers with an error", [ToolError("no seats")], {}, ("ToolError", 1), ("ToolError", 1)),
    ("it answers with a declared error", [Declared("no")], {"answers": Declared}, ("Declared", 1), ("Declared", 1)),
    ("one of several declared", [OSError("no")], {"answers": (Declared, OSError)}, ("OSError", 1), ("OSError", 1)),
    ("a subclass of a declared one", [KeyError("k")], {"answers": LookupError}, ("KeyError", 1), ("KeyError", 1)),
    ("nothing went out, then it did", [NotSent("busy"), "fine"], {}, ("done", 2), ("done", 2)),
    ("nothing ever went out", [NotSent("busy")], {"attempts": 4}, ("NotSent", 4), ("NotSent", 4)),
    ("nothing went out, and it is tried once", [NotSent("busy"), "x"], {"attempts": 1}, ("NotSent", 1), ("NotSent", 1)),
    ("it raises something else", [ValueError("?")], {}, ("doubt", 1), ("ValueError", 1)),
    ("it raises what nobody can make again", [Odd(code=7, where="x")], {}, ("doubt", 1), ("Odd", 1)),
    ("its text is broken", [ValueError("\ud83d")], {}, ("doubt", 1), ("ValueError", 1)),
    ("its way failed once", [ConnectionError("reset"), "fine"], {}, ("doubt", 1), ("done", 2)),
    ("its way always fails", [OSError("down")], {"attempts": 3}, ("doubt", 1), ("doubt", 3)),
    ("its remote was silent once", [TimeoutError(), "fine"], {}, ("doubt", 1), ("done", 2)),
    ("its answer broke off", [EOFError(), "fine"], {}, ("doubt", 1), ("done", 2)),
    ("several ways failed", [ExceptionGroup("all", [OSError(), ValueError()]), "fine"], {}, ("doubt", 1), ("done", 2)),
    ("a known key among them", [GROUP_WITH_CONFLICT], {}, ("KeyConflict", 1), ("KeyConflict", 1)),
    ("it was cancelled inside", [asyncio.CancelledError(), "fine"], {}, ("doubt", 1), ("done", 2)),
    ("it always is cancelled inside", [asyncio.CancelledError()], {"attempts": 2}, ("doubt", 1), ("doubt", 2)),
    ("a result nobody can store, then one", [UNRECORDABLE, "fine"], {}, ("Unrecordable", 1), ("done", 2)),
    ("a result nobody can ever store", [UNRECORDABLE], {"attempts": 5}, ("Unrecordable", 1), ("Unrecordable", 2)),
    ("the key is known with other arguments", [KeyConflict("409")], {}, ("KeyConflict", 1), ("KeyConflict", 1)),
    ("a stop that is no error", [StopIteration(3)], {}, ("doubt", 1), ("RuntimeError", 1)),
]  # fmt: skip


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("how", "endings", "options", "without_rule", "with_rule"), ENDINGS, ids=[row[0].replace(" ", "_") for row in ENDINGS]
)
async def test_an_ending_means_what_the_page_says(
    place: Place,
    is_async: bool,
    rule: str,
    how: str,
    endings: list[object],
    options: dict[str, Any],
    without_rule: Ended,
    with_rule: Ended,
) -> None:
    act = Act(endings, is_async)
    result = await tried(place, act, **RULES[rule], **options)
    expected, entered = without_rule if rule == "none" else with_rule
    assert act.entered == entered, how
    assert set(act.keys) == {"run:0"}
    went_out = not all(isinstance(ending, NotSent) for ending in endings[: act.entered])
    assert len(act.remote.effects) == int(went_out)
    match expected:
        case "doubt":
            assert isinstance(result, RecoveryNeedsDecision), result
            assert result.calls[0][0] == "act"
            assert await status(place) == RunStatus.BLOCKED
        case "Unrecordable":
            assert isinstance(result, Unrecordable), result
            assert "'act'" in str(result)
            assert await status(place) == RunStatus.BLOCKED
        case "KeyConflict":
            assert isinstance(result, KeyConflict), result
            assert await status(place) == RunStatus.RUNNING
        case _:
            assert isinstance(result, LoopResult), result
            [seen] = results_in(result.messages)
            assert seen.startswith(f"error: {expected}: ") if expected != "done" else seen in ("fine", "null")
            assert await status(place) == RunStatus.DONE


@pytest.mark.parametrize("rule", RULES)
async def test_what_is_in_doubt_stays_so_until_somebody_decides_and_what_ended_is_replayed(place: Place, rule: str) -> None:
    act = Act([OSError("down")])
    await tried(place, act, **RULES[rule], attempts=2)
    entered = act.entered
    act.endings = ["fine"]
    if rule == "none":
        for _ in range(3):
            with pytest.raises(RecoveryNeedsDecision):
                await Worker(place).recover(script(), act.registry(attempts=2))
        assert act.entered == entered
    again_allowed = act.registry(**RULES[rule], attempts=2)
    result = await Worker(place).recover(script(), again_allowed, rerun_in_doubt=rule == "none")
    assert results_in(result.messages) == ["fine"]
    assert (act.entered, len(act.remote.effects), set(act.keys)) == (entered + 1, 1, {"run:0"})
    again = await Worker(place).recover(script(), act.registry(**RULES[rule]))
    assert list(again.messages) == list(result.messages)
    assert act.entered == entered + 1


@pytest.mark.parametrize("rule", RULES)
async def test_a_call_whose_tries_are_used_up_wakes_its_run_where_its_rule_lets_it_and_is_tried_once_more_then(
    place: Place, rule: str
) -> None:
    act = Act([OSError("down")])
    await tried(place, act, **RULES[rule], attempts=2)
    row, entered = (await place.load("run")).row, act.entered
    assert (row.status, row.wake_at is None, row.attempts) == (RunStatus.BLOCKED, rule == "none", 0)
    assert entered == (1 if rule == "none" else 2)
    with pytest.raises(RecoveryNeedsDecision):
        await Worker(place).recover(script(), act.registry(**RULES[rule], attempts=2))
    again = (await place.load("run")).row
    assert act.entered == (entered if rule == "none" else entered + 1)
    assert (again.status, again.wake_at is None, again.attempts) == (RunStatus.BLOCKED, rule == "none", int(rule != "none"))


async def test_an_unrecordable_result_is_never_forgotten_and_never_run_again_by_its_rule(place: Place) -> None:
    act = Act([UNRECORDABLE])
    assert isinstance(await tried(place, act, idempotent=True), Unrecordable)
    assert await kinds(place) == [RecordKind.STARTED, RecordKind.UNRECORDABLE] * 2
    with pytest.raises(RecoveryNeedsDecision, match="could not be stored"):
        await Worker(place).recover(script(), act.registry(idempotent=True))
    assert act.entered == 2
    act.endings = ["fine"]
    result = await Worker(place).recover(script(), act.registry(idempotent=True), rerun_in_doubt=True)
    assert results_in(result.messages) == ["fine"]
    assert (act.entered, len(act.remote.effects)) == (3, 1)


@pytest.mark.parametrize("error", [ToolError("no"), ValueError("bad"), Odd(code=3, where="there"), KeyError("k"), Declared()])
async def test_an_error_replays_with_its_name_and_message(place: Place, error: Exception) -> None:
    act = Act([error])
    worker = Worker(place)
    registry = act.registry(idempotent=True, answers=Declared)
    step = script().steps[0]

    def die(_: object) -> Any:
        worker.die()

    await worker.run_and_die(Script(step, die), registry, commits="each")
    result = await Worker(place).recover(script(), registry)
    assert results_in(result.messages) == [f"error: {type(error).__name__}: {error}"]
    assert act.entered == 1


async def test_an_endless_message_is_cut_and_the_run_goes_on(place: Place) -> None:
    result = await tried(place, Act([ToolError("x" * 10_000_000)]))
    assert isinstance(result, LoopResult)
    [seen] = results_in(result.messages)
    assert len(seen) < 20_000


# Deadlines.


LATE_SECONDS = 1000.0
"""A deadline that a busy machine does not miss."""


@pytest.fixture
async def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Lets every deadline pass, from any thread: the event loop's own clock goes ahead."""
    loop = asyncio.get_running_loop()
    real = loop.time

    def go_ahead() -> None:
        monkeypatch.setattr(loop, "time", lambda: real() + LATE_SECONDS)

    return lambda: loop.call_soon_threadsafe(go_ahead)


@dataclass
class Slow:
    """A tool that acts at once and answers only when it is told to; `late` is told that it has acted for the first time."""

    is_async: bool
    late: Callable[[], object] = bool
    remote: Remote = field(default_factory=Remote)
    keys: list[str] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    def registry(self, **options: Any) -> ToolRegistry:
        registry = ToolRegistry()

        def enter() -> str:
            self.keys.append(idempotency_key())
            effect = self.remote.act("act", {}, idempotency_key())
            if len(self.keys) == 1:
                self.late()
            return effect

        async def slowly(amount: int) -> str:
            answer = enter()
            if len(self.keys) == 1:
                await asyncio.Event().wait()
            return answer

        def in_thread(amount: int) -> str:
            answer = enter()
            if len(self.keys) == 1:
                assert self.answers.wait(LONG_SECONDS)
                self.left.set()
            return answer

        registry.tool(**{"name": "act", "pause": 0.001, **options})(slowly if self.is_async else in_thread)
        return registry


@pytest.mark.parametrize("answers", [(), TimeoutError, OSError, Exception], ids=str)
@pytest.mark.parametrize("rule", RULES)
async def test_a_deadline_is_never_an_answer_whatever_the_tool_declares(
    place: Place, rule: str, answers: type[Exception] | tuple[()], late: Callable[[], object]
) -> None:
    slow = Slow(is_async=True, late=late)
    registry = slow.registry(timeout=LATE_SECONDS, answers=answers, **RULES[rule])
    if rule == "none":
        with pytest.raises(RecoveryNeedsDecision):
            await Worker(place).run(script(), registry)
        assert (len(slow.keys), await status(place)) == (1, RunStatus.BLOCKED)
    else:
        result = await Worker(place).run(script(), registry)
        assert results_in(result.messages) == ["effect 1"]
        assert slow.keys == ["run:0"] * 2
    assert len(slow.remote.effects) == 1


@pytest.mark.parametrize("answers", [(), OSError], ids=str)
@pytest.mark.parametrize("rule", RULES)
async def test_a_thread_that_outlives_its_deadline_is_never_joined_by_a_second_and_keeps_its_owner_alive(
    place: Place, rule: str, answers: type[Exception] | tuple[()], late: Callable[[], object]
) -> None:
    slow = Slow(is_async=False, late=late)
    registry = slow.registry(timeout=LATE_SECONDS, answers=answers, **RULES[rule])
    try:
        with pytest.raises(RecoveryNeedsDecision, match="thread still runs"):
            await Worker(place).run(script(), registry)
        assert len(slow.keys) == 1
        for permission in (False, True):
            with pytest.raises(CheckpointConflict, match="is held by process"):
                await Worker(place).recover(script(), registry, rerun_in_doubt=permission)
        assert len(slow.keys) == 1
    finally:
        slow.answers.set()
    await until(slow.left.is_set)
    error: Exception | None = None
    for _ in range(1000):
        error = await error_of(Worker(place).recover(script(), registry, rerun_in_doubt=rule == "none"))
        if not isinstance(error, CheckpointConflict):
            break
        await asyncio.sleep(0.005)
    assert error is None
    assert slow.keys == ["run:0"] * 2
    assert len(slow.remote.effects) == 1


async def test_a_worker_that_is_stopped_while_a_thread_works_for_it_stays_the_owner_until_that_ends(place: Place) -> None:
    slow = Slow(is_async=False)
    registry = slow.registry(idempotent=True)
    task = asyncio.ensure_future(Worker(place).run(script(), registry))
    try:
        await until(lambda: len(slow.keys) == 1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        with pytest.raises(CheckpointConflict):
            await Worker(place).recover(script(), registry)
    finally:
        slow.answers.set()
    await until(slow.left.is_set)
    error: Exception | None = None
    for _ in range(1000):
        error = await error_of(Worker(place).recover(script(), registry))
        if not isinstance(error, CheckpointConflict):
            break
        await asyncio.sleep(0.005)
    assert error is None
    assert (len(slow.keys), len(slow.remote.effects)) == (2, 1)


async def test_a_cancelled_call_is_in_doubt_and_not_failed(place: Place) -> None:
    slow = Slow(is_async=True)
    task = asyncio.ensure_future(Worker(place).run(script(), slow.registry()))
    await until(lambda: len(slow.keys) == 1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert await status(place) == RunStatus.RUNNING
    assert await kinds(place) == [RecordKind.STARTED]
    with pytest.raises(RecoveryNeedsDecision):
        await Worker(place).recover(script(), slow.registry())
    assert len(slow.keys) == 1


async def test_a_signal_out_of_a_tool_passes_through_and_leaves_the_call_in_doubt(place: Place) -> None:
    for is_async in (True, False):
        act = Act([Killed("the process ends")], is_async)
        with pytest.raises(Killed):
            await Worker(place).run(script(), act.registry(), f"run-{is_async}")
        with pytest.raises(RecoveryNeedsDecision):
            await Worker(place).recover(script(), act.registry(), f"run-{is_async}")
        assert act.entered == 1


# Arguments.


async def test_each_attempt_gets_arguments_of_its_own(place: Place) -> None:
    seen: list[list[int]] = []
    registry = ToolRegistry()

    @registry.tool(idempotent=True, pause=0.001)
    async def act(amounts: list[int]) -> str:
        seen.append(list(amounts))
        amounts.append(99)
        if len(seen) < 3:
            raise ConnectionError
        return "fine"

    result = await Worker(place).run(Script([("act", {"amounts": [1, 2]})], "done"), registry)
    assert seen == [[1, 2]] * 3
    assert result.status == "done"


async def test_a_result_changed_by_its_tool_afterwards_is_what_it_was(place: Place) -> None:
    kept: list[dict[str, int]] = []
    registry = ToolRegistry()

    @registry.tool
    async def act(amount: int) -> dict[str, int]:
        kept.append({"amount": amount})
        return kept[-1]

    def change(_: object) -> Any:
        kept[0]["amount"] = 666
        return script().steps[0]

    model = Script([("act", {"amount": 5})], [("act", {"amount": 6})], "done")
    result = await Worker(place).run(model, registry)
    kept[0]["amount"] = 666
    assert results_in(result.messages) == ['{"amount":5}', '{"amount":6}']
    again = await Worker(place).recover(model, registry)
    assert results_in(again.messages) == ['{"amount":5}', '{"amount":6}']
