"""The loop: one call and many, bounds, what a model may answer, what is told, and what a run without a store is."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from agent_runtime.crash import CrashPoint
from agent_runtime.errors import (
    CheckpointConflict,
    CheckpointNotFound,
    InvalidKey,
    InvalidRunId,
    InvalidSetting,
    RecoveryNeedsDecision,
    StepLimitReached,
    Unrecordable,
)
from agent_runtime.events import Event
from agent_runtime.ids import RunId
from agent_runtime.journal.records import RecordKind, RunStatus
from agent_runtime.messages import Message, Reply, ToolCall, ToolSpec
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.telemetry import HistorySink
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import Asked, Bench, Counting, Place, Script, Worker, error_of, results_in, until

CALL: list[Asked] = [("charge_i", {"amount": 1})]
THREE: list[Asked] = [("charge_i", {"amount": 1}), ("lookup", {"name": "a"}), ("email", {"to": "b"})]


async def test_a_reply_without_calls_is_the_end(place: Place) -> None:
    model = Script("hello")
    result = await Worker(place).run(model, Bench().registry)
    assert (result.status, result.output, result.run_id, result.steps, result.llm_calls) == ("done", "hello", "run", 0, 1)
    assert list(result.messages) == [Message("user", "go"), Message("assistant", "hello")]
    assert result.pending == ()


async def test_one_call_and_three_calls_give_their_results_in_call_order(place: Place) -> None:
    bench, model = Bench(), Script(CALL, THREE, "done")
    result = await Worker(place).run(model, bench.registry)
    assert results_in(result.messages) == ["effect 1", "effect 2", "what is known of a", "effect 3"]
    names = [message.name for message in result.messages if message.role == "tool"]
    assert names == ["charge_i", "charge_i", "lookup", "email"]
    assert [effect.key for effect in bench.remote.effects] == ["run:0", "run:1.0", None]
    assert (result.steps, result.llm_calls) == (2, 3)


@pytest.mark.parametrize("bound", [1, 2, 3, 16])
async def test_no_more_calls_of_a_reply_run_side_by_side_than_allowed(place: Place, bound: int) -> None:
    bench, running, most = Bench(), 0, 0

    async def before(_: str, __: dict[str, object]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)

    async def after(_: str, __: dict[str, object]) -> None:
        nonlocal running
        running -= 1

    bench.before, bench.after = before, after
    step: list[Asked] = [("charge_i", {"amount": at}) for at in range(6)]
    result = await Worker(place).run(Script(step, "done"), bench.registry, parallel=bound)
    assert most == min(bound, 6)
    assert len(results_in(result.messages)) == 6


async def test_an_unknown_tool_and_arguments_that_do_not_fit_are_answered_and_never_sent(place: Place) -> None:
    bench = Bench()
    wrong: list[Asked] = [
        ("no_such_tool", {"amount": 1}),
        ("charge", {}),
        ("charge", {"amount": "much"}),
        ("charge", {"amount": 1, "more": 2}),
        ("charge_i", {"amount": 7}),
    ]
    for at, steps in enumerate(([wrong], [[each] for each in wrong])):
        model = Script(*steps, "done")
        result = await Worker(place).run(model, bench.registry, f"run-{at}")
        seen = results_in(result.messages)
        assert seen[0].startswith("error: UnknownTool: ")
        assert "charge_i" in seen[0], "it says which there are"
        assert all(text.startswith("error: InvalidArguments: ") for text in seen[1:4])
        assert seen[4].startswith("effect")
        again = await Worker(place).recover(model, bench.registry, f"run-{at}")
        assert results_in(again.messages) == seen
    assert (bench.entered["charge"], bench.entered["charge_i"]) == (0, 2)


async def test_a_tool_that_is_registered_only_later_is_not_run_for_a_call_that_was_answered(place: Place) -> None:
    model = Script([("charge", {"amount": 1})], "done")
    dying = Worker(place).killed_at(CrashPoint.BEFORE_DECIDE, 1)
    await dying.run_and_die(model, ToolRegistry(), commits="each")
    bench = Bench()
    result = await Worker(place).recover(model, bench.registry)
    assert results_in(result.messages)[0].startswith("error: UnknownTool")
    assert bench.entered.total() == 0


NO_REPLIES: list[Any] = [None, "text", {"text": "x"}, Reply(5), Reply("", [], {"input": 1.5})]  # type: ignore[arg-type, dict-item]  # on purpose


@pytest.mark.parametrize("wrong", NO_REPLIES, ids=repr)
async def test_what_is_no_reply_stops_the_run_is_not_recorded_and_leaves_it_to_be_picked_up(place: Place, wrong: Any) -> None:
    bench, model = Bench(), Script(CALL, "done")

    async def wrong_once(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        if len(messages) == 3:
            return wrong  # type: ignore[no-any-return]  # on purpose
        return await model.reply(messages, tools)

    with pytest.raises(InvalidSetting):
        await Worker(place).run(wrong_once, bench.registry)
    run = await place.load("run")
    assert (run.row.status, run.row.owner) == (RunStatus.RUNNING, bytes(16))
    result = await Worker(place).recover(model, bench.registry)
    assert (result.status, bench.effects, result.llm_calls) == ("done", 1, 3)


async def test_two_calls_of_one_id_are_no_reply(place: Place) -> None:
    def twice(_: object) -> Reply:
        return Reply("", [ToolCall("a", "charge_i", {"amount": 1}), ToolCall("a", "charge_i", {"amount": 2})])

    bench = Bench()
    with pytest.raises(InvalidSetting, match="one id"):
        await Worker(place).run(Script(twice), bench.registry)
    assert bench.effects == 0


async def test_arguments_that_cannot_be_recorded_are_not_acted_upon(place: Place) -> None:
    bench = Bench()
    with pytest.raises(Unrecordable, match=r"\.args\.amount"):
        await Worker(place).run(Script([("charge", {"amount": float("nan")})], "done"), bench.registry)
    assert bench.entered.total() == 0


@pytest.mark.parametrize("failure", [OSError("reset"), TimeoutError(), ConnectionError("refused"), EOFError()])
async def test_a_model_call_whose_way_failed_is_made_again_and_counted(
    place: Place, clock: ManualClock, failure: Exception
) -> None:
    bench, model, failures = Bench(), Script(CALL, "done"), [failure, failure]

    async def failing(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        if failures and len(messages) > 1:
            raise failures.pop()
        return await model.reply(messages, tools)

    result = await Worker(place).run(failing, bench.registry, clock=clock)
    assert (result.llm_calls, model.asked, result.steps) == (4, 2, 1)
    assert model.requests[1] == list(result.messages)[:3]
    assert (await Worker(place).recover(model, bench.registry)).llm_calls == 4


async def test_a_model_that_stays_away_is_asked_a_bounded_number_of_times_and_the_run_can_be_picked_up(
    place: Place, clock: ManualClock
) -> None:
    asked = 0

    async def away(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        nonlocal asked
        asked += 1
        raise ConnectionError("away")

    with pytest.raises(ConnectionError):
        await Worker(place).run(away, Bench().registry, clock=clock)
    assert 2 <= asked <= 5
    result = await Worker(place).recover(Script("done"), Bench().registry)
    assert (result.status, result.llm_calls) == ("done", asked + 1)


async def test_a_cancellation_from_inside_the_model_is_none_of_the_caller(place: Place, clock: ManualClock) -> None:
    async def cancelled(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        raise asyncio.CancelledError

    with pytest.raises(ConnectionError):
        await Worker(place).run(cancelled, Bench().registry, clock=clock)
    assert (await Worker(place).recover(Script("done"), Bench().registry)).status == "done"


async def test_a_call_still_queued_when_a_sibling_is_in_doubt_does_not_start(place: Place) -> None:
    bench = Bench()

    async def fail(tool: str, args: dict[str, object]) -> None:
        if tool == "charge":
            raise ValueError("nobody knows what this left behind")

    bench.after = fail
    model = Script([("charge", {"amount": 1}), ("charge_i", {"amount": 2}), ("lookup", {"name": "a"})], "done")
    with pytest.raises(RecoveryNeedsDecision) as needed:
        await Worker(place).run(model, bench.registry, parallel=1)
    assert [tool for tool, _ in needed.value.calls] == ["charge"]
    assert bench.entered == {"charge": 1}
    bench.after = _nothing
    result = await Worker(place).recover(model, bench.registry, rerun_in_doubt=True)
    assert (result.status, model.asked) == ("done", 2)
    assert bench.entered == {"charge": 2, "charge_i": 1, "lookup": 1}


async def _nothing(tool: str, args: dict[str, object]) -> None:
    return None


async def test_a_model_with_a_mistake_of_its_own_is_not_asked_again_by_itself(place: Place) -> None:
    asked = 0

    async def broken(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        nonlocal asked
        asked += 1
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await Worker(place).run(broken, Bench().registry)
    assert asked == 1
    run = await place.load("run")
    assert run.row.wake_at is not None
    assert run.row.owner == bytes(16)


async def test_totals_add_up_what_every_reply_used(place: Place) -> None:
    def using(**usage: int) -> Any:
        return lambda _: Reply("", [ToolCall("a", "lookup", {"name": "x"})], usage)

    model = Script(using(input=10, output=2), using(input=5, cached=7), lambda _: Reply("done", [], {"output": 1}))
    result = await Worker(place).run(model, Bench().registry)
    assert result.usage == {"input": 15, "output": 3, "cached": 7}
    assert (await Worker(place).recover(model, Bench().registry)).usage == result.usage


async def test_a_limit_ends_the_run_for_good(place: Place) -> None:
    bench, model = Bench(), Script(*[CALL] * 10)
    for attempt in range(3):
        work = (
            Worker(place).recover(model, bench.registry) if attempt else Worker(place).run(model, bench.registry, max_steps=3)
        )
        error = await error_of(work)
        assert isinstance(error, StepLimitReached)
        assert "max_steps=3" in str(error)
    assert (model.asked, bench.effects) == (3, 3)
    assert (await place.load("run")).row.status == RunStatus.FAILED


# What is told.


async def told(place: Place, *steps: Any, die: tuple[CrashPoint, int] | None = None, **options: Any) -> HistorySink:
    """All events of a run, and of the recovery after its worker died."""
    sink, model, bench = HistorySink(), Script(*steps, "done"), Bench()
    worker = Worker(place)
    if die is None:
        await worker.run(model, bench.registry, sinks=[sink], **options)
        return sink
    await worker.killed_at(*die).run_and_die(model, bench.registry, sinks=[sink], **options)
    sink.events.append(Event("---", "run"))
    await Worker(place).recover(model, bench.registry, sinks=[sink], **options)
    return sink


@pytest.mark.parametrize("commits", ["grouped", "each"])
async def test_the_events_of_a_run_are_told_in_their_order(place: Place, commits: str) -> None:
    sink = await told(place, CALL, commits=commits)
    assert sink.names() == [
        "run.started", "decision.asked", "decision.returned", "checkpoint.saved", "decision.made", "call.started",
        "call.returned", "call.done", "checkpoint.saved", "decision.asked", "decision.returned", "decision.made",
        "checkpoint.saved", "run.done", "run.left",
    ]  # fmt: skip
    assert all((event.run_id, event.tenant, event.epoch) == ("run", "", 1) for event in sink.events)


async def test_a_checkpoint_says_its_kind_step_status_and_stage_and_nothing_else(place: Place) -> None:
    sink = await told(place, CALL, CALL)
    saved = [dict(event.data) for event in sink.of("checkpoint.saved")]
    assert all(set(data) == {"kind", "step", "status", "stage"} for data in saved)
    assert {data["kind"] for data in saved} == {"loop"}
    assert [data["stage"] for data in saved] == ["reply", "results", "reply", "results", "reply"]
    assert [data["status"] for data in saved] == ["running"] * 4 + ["done"]
    steps = [data["step"] for data in saved]
    assert steps == [1, 2, 3, 4, 5]
    assert (await place.load("run")).row.step == steps[-1]


async def test_a_recovery_says_its_kind_step_and_what_it_replays_and_runs_again_and_nothing_else(place: Place) -> None:
    sink = await told(place, CALL, THREE[:2], CALL, die=(CrashPoint.AFTER_CALL, 2), commits="each")
    [recovered] = sink.of("run.recovered")
    assert set(recovered.data) == {"kind", "step", "replayed", "rerun"}
    assert (recovered.data["kind"], recovered.data["replayed"], recovered.data["rerun"]) == ("loop", 6, 1)
    names = sink.names()[sink.names().index("---") + 1 :]
    assert names == [
        "run.claimed", "run.recovered", "decision.replayed", "decision.replayed", "decision.replayed", "call.started",
        "call.returned", "call.done", "checkpoint.saved", "decision.asked", "decision.returned", "decision.made",
        "checkpoint.saved", "run.done", "run.left",
    ]  # fmt: skip


async def test_a_call_says_what_it_is_and_how_it_ended(place: Place) -> None:
    sink = await told(place, CALL, [("charge", {"amount": "much"})])
    [started], [done, refused] = sink.of("call.started"), sink.of("call.done")
    wanted = {"step": 1, "call": "0", "tool": "charge_i", "key": "run:0", "attempt": 1}
    assert {name: started.data[name] for name in wanted} == wanted
    assert {name: done.data[name] for name in wanted} == wanted
    assert done.data["result"] == "effect 1"
    assert isinstance(done.data["duration"], float)
    assert (refused.data["call"], refused.data["attempt"]) == ("1", 0)
    assert str(refused.data["error"]).startswith("InvalidArguments")


async def test_nothing_is_told_before_it_is_committed(place: Place) -> None:
    seen: list[tuple[str, int]] = []
    counting, worker = Counting(place.open()), Worker(place)
    worker.inner = counting

    def look(event: Event) -> None:
        seen.append((event.name, sum(len(append.records) for append in counting.appends)))

    await worker.run(Script(CALL, THREE, "done"), Bench().registry, sinks=[look])
    run = await place.load("run")
    first = dict(reversed(seen))
    assert first["run.started"] >= 2
    assert first["decision.made"] >= next(r.number for r in run.records if r.call == "0/model" and r.kind == RecordKind.DONE)
    assert first["call.done"] >= next(r.number for r in run.records if r.call == "0" and r.kind == RecordKind.DONE)
    assert first["run.done"] == run.row.number


async def test_a_sink_that_raises_disturbs_no_run_and_no_other_sink(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("a broken sink")

    sink, bench = HistorySink(), Bench()
    with caplog.at_level(logging.ERROR, logger="agent_runtime"):
        result = await Worker(place).run(Script(CALL, "done"), bench.registry, sinks=[broken, sink, broken])
    assert (result.status, bench.effects, sink.names()[-1]) == ("done", 1, "run.left")
    assert any("sink" in record.message for record in caplog.records)


# Without a store, and with the one in memory.


NOT_DURABLE = """
import asyncio
from agent_runtime import Reply, ToolRegistry, run_tool_loop

async def model(messages, tools):
    return Reply("hello")

async def main():
    for _ in range(3):
        result = await run_tool_loop(model, ToolRegistry(), "go")
        print(result.status, len(result.run_id))

asyncio.run(main())
"""


def test_a_loop_without_a_store_runs_and_says_once_that_it_is_not_durable() -> None:
    ended = subprocess.run([sys.executable, "-c", NOT_DURABLE], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split("\n")[:3] == ["done 32"] * 3
    assert ended.stderr.count("not durable") == 1


async def test_what_a_memory_store_gives_is_a_copy(place: Place) -> None:
    store = MemoryCheckpointStore()
    await run_tool_loop(Script(CALL, "done"), Bench().registry, "go", run_id="run", checkpoints=store)
    first = await store.calls(RunId("run"))
    first.clear()
    [run] = await store.load_many([RunId("run")])
    assert run is not None
    assert isinstance(run.records, tuple)
    assert len(await store.calls(RunId("run"))) == len(run.records) > 0


async def test_the_default_id_is_one_that_nobody_can_guess() -> None:
    ids = {(await run_tool_loop(Script("x"), ToolRegistry(), "go")).run_id for _ in range(5)}
    assert len(ids) == 5
    assert all(len(run_id) == 32 for run_id in ids)


# What is refused at the door.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_steps": 0}, InvalidSetting), ({"max_steps": True}, InvalidSetting), ({"max_steps": 1.5}, InvalidSetting),
        ({"parallel": 0}, InvalidSetting), ({"parallel": -1}, InvalidSetting), ({"commits": "sometimes"}, InvalidSetting),
        ({"checkpoint_key": b"short"}, InvalidKey), ({"checkpoint_key": "text of some length"}, InvalidKey),
        ({"heartbeat_seconds": 7}, InvalidSetting), ({"heartbeat_seconds": 0}, InvalidSetting),
        ({"lease_seconds": 0}, InvalidSetting), ({"lease_seconds": -1}, InvalidSetting),
        ({"messages": []}, InvalidSetting), ({"messages": 5}, InvalidSetting),
        ({"messages": [{"role": "robot"}]}, InvalidSetting), ({"lease_seconds": float("nan")}, InvalidSetting),
        ({"lease_seconds": float("inf"), "heartbeat_seconds": 1}, InvalidSetting),
    ],
    ids=str,
)  # fmt: skip
async def test_an_option_that_cannot_be_is_refused_and_nothing_is_stored(
    place: Place, options: dict[str, Any], error: type[Exception]
) -> None:
    model = Script("done")
    with pytest.raises(error):
        await Worker(place).run(model, Bench().registry, **options)
    assert model.asked == 0
    assert await place.open().list_runs() == []


@pytest.mark.parametrize("run_id", ["", "x" * 513, "a\nb", "\ud83d"])
async def test_an_id_that_cannot_be_is_refused_for_starting_and_for_recovering(place: Place, run_id: str) -> None:
    for work in (Worker(place).run, Worker(place).recover):
        with pytest.raises(InvalidRunId):
            await work(Script("done"), Bench().registry, run_id)


@pytest.mark.parametrize("model", [5, None, "openai:gpt-5-mini", lambda messages, tools: Reply("x"), object(), Script])
async def test_what_is_no_model_is_refused_before_anything_is_stored(place: Place, model: Any) -> None:
    with pytest.raises(InvalidSetting):
        await Worker(place).run(model, Bench().registry)
    assert await place.open().list_runs() == []


class Answering:
    async def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        return Reply("called")


class Inherited(Answering):
    pass


@pytest.mark.parametrize("model", [Answering(), Inherited(), Script("called")], ids=lambda model: type(model).__name__)
async def test_an_object_with_reply_and_one_that_is_called_are_models(place: Place, model: Any) -> None:
    assert (await Worker(place).run(model, Bench().registry)).output == "called"


async def test_a_store_that_others_can_read_needs_a_key(place: Place) -> None:
    if place.kind == "sqlite":
        with pytest.raises(InvalidKey, match="none"):
            await run_tool_loop(Script("x"), ToolRegistry(), "go", checkpoints=place.open())
        with pytest.raises(InvalidKey, match="none"):
            await recover_tool_loop(Script("x"), ToolRegistry(), "run", checkpoints=place.open())


async def test_an_id_in_use_is_a_conflict_and_one_that_nobody_used_is_not_found(place: Place) -> None:
    bench, model = Bench(), Script(CALL, "done")
    await Worker(place).run(model, bench.registry)
    with pytest.raises(CheckpointConflict, match="exists already"):
        await Worker(place).run(model, bench.registry)
    with pytest.raises(CheckpointNotFound, match="'other'"):
        await Worker(place).recover(model, bench.registry, "other")
    assert (bench.effects, model.asked) == (1, 2)


async def test_many_runs_of_one_process_share_their_store_and_nothing_else(place: Place) -> None:
    worker, benches = Worker(place), [Bench() for _ in range(20)]
    runs = (worker.run(Script(CALL, THREE, "done"), bench.registry, f"run-{at}") for at, bench in enumerate(benches))
    results = await asyncio.gather(*runs)
    assert {result.status for result in results} == {"done"}
    for at, bench in enumerate(benches):
        assert (bench.effects, bench.remote.keys) == (3, [f"run-{at}:0", f"run-{at}:1.0"])
    assert all(list(result.messages) == list(results[0].messages) for result in results)


async def test_a_run_that_is_cancelled_is_given_back_and_goes_on_later(place: Place) -> None:
    bench, model, inside = Bench(), Script(CALL, CALL, "done"), asyncio.Event()

    async def waits(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Reply:
        if len(messages) > 1:
            inside.set()
            await asyncio.Event().wait()
        return await model.reply(messages, tools)

    task = asyncio.ensure_future(Worker(place).run(waits, bench.registry))
    await until(inside.is_set)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    row = (await place.load("run")).row
    assert (row.status, row.owner, row.attempts, row.wake_at) == (RunStatus.RUNNING, bytes(16), 0, None)
    assert (await Worker(place).recover(model, bench.registry)).status == "done"
    assert bench.effects == 2
