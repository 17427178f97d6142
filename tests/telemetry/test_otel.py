"""Spans of the real SDK: their names, whose children they are, how they end, and how they are linked across a crash."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import BaseModel

from agent_runtime.clock import wall_ns
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import (
    CheckpointConflict,
    InvalidSetting,
    KeyConflict,
    NotSent,
    RecoveryNeedsDecision,
    RunQuarantined,
    StepLimitReached,
)
from agent_runtime.events import Event
from agent_runtime.executor import Executor
from agent_runtime.flow.calls import NodeRun
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowRunner
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, post_message
from agent_runtime.journal.records import RecordKind
from agent_runtime.journal.seal import sealer_for
from agent_runtime.journal.store import Answer, Append
from agent_runtime.messages import Message, Reply, ToolSpec
from agent_runtime.redaction import Part
from agent_runtime.run import RunContext
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.stores.sqlite import SQLiteCheckpointStore
from agent_runtime.telemetry_otel import OpenTelemetrySink
from agent_runtime.tool_loop import recover_tool_loop, run_tool_loop
from agent_runtime.tools import ToolRegistry
from tests.bench import LONG_SECONDS, RING, Asked, Bench, Counting, Place, Script, Worker, error_of
from tests.telemetry.mortal import CALLS, KEY, OneByOne, tools
from tests.telemetry.spans import Spans, attributes, calls_of, links, own, parent

CALL: list[Asked] = [("charge_i", {"amount": 5})]
PAIR: list[Asked] = [("charge_i", {"amount": 1}), ("lookup", {"name": "x"})]


class Named(Script):
    """A model with a name."""

    model = "script-1"


# What a span says.


async def test_a_run_its_decisions_and_its_calls_have_spans_with_the_names_of_the_conventions(place: Place) -> None:
    spans = Spans(provider="acme")
    await Worker(place).run(
        Named(CALL, "done"), Bench().registry, sinks=[spans.sink], name="seller", ctx=RunContext(thread="t-7")
    )
    run, call = spans.one("invoke_agent seller"), spans.one("execute_tool charge_i")
    first, last = spans.named("chat script-1")
    common = {
        "gen_ai.provider.name": "acme", "gen_ai.conversation.id": "t-7", "agent_runtime.run.id": "run",
        "agent_runtime.run.epoch": 1,
    }  # fmt: skip
    assert attributes(run) == {
        **common, "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "seller", "agent_runtime.run.kind": "loop",
        "agent_runtime.run.status": "done", "agent_runtime.run.step": 3,
    }  # fmt: skip
    assert attributes(call) == {
        **common, "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "charge_i", "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "run:0", "agent_runtime.call": "0", "agent_runtime.key": "run:0", "agent_runtime.step": 1,
        "agent_runtime.attempt": 1,
    }  # fmt: skip
    assert attributes(first) == {
        **common, "gen_ai.operation.name": "chat", "gen_ai.request.model": "script-1", "agent_runtime.seq": 0,
        "agent_runtime.step": 0, "agent_runtime.attempt": 1, "agent_runtime.calls": 1, "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 1,
    }  # fmt: skip
    assert attributes(last)["gen_ai.usage.input_tokens"] == 3
    assert [span.kind for span in (run, first, call)] == [SpanKind.INTERNAL, SpanKind.CLIENT, SpanKind.INTERNAL]
    assert {parent(span) for span in (first, last, call)} == {own(run)}
    assert {span.status.status_code for span in spans.all} == {StatusCode.UNSET}


async def test_a_span_ends_when_the_act_is_over_and_not_when_its_record_is_written(place: Place) -> None:
    spans, worker, written = Spans(), Worker(place), dict[str, int]()

    class Timed(Counting):
        async def commit(self, appends: Sequence[Append]) -> list[Answer]:
            done = [record.call for append in appends for record in append.records if record.kind == RecordKind.DONE]
            written.update(dict.fromkeys(done, wall_ns()))
            return await super().commit(appends)

    worker.inner = Timed(worker.inner)
    await worker.run(Script(CALL, "done"), Bench().registry, sinks=[spans.sink])
    [decision, _], call = spans.named("chat"), spans.one("execute_tool charge_i")
    assert (decision.end_time or 0) <= written["0/model"]
    assert (call.end_time or 0) <= written["0"]


async def test_no_payload_is_an_attribute_unless_it_is_asked_for_and_then_redacted(place: Place) -> None:
    quiet, loud = (
        Spans(),
        Spans(payloads=True, redact=lambda value, part: f"<{part.value}>" if part is Part.ARGUMENT else value),
    )
    await Worker(place).run(
        Script([("email", {"to": "canary-1"})], "canary-2"),
        Bench().registry,
        sinks=[quiet.sink, loud.sink],
        messages="canary-3",
    )
    assert "canary" not in "".join(span.to_json() for span in quiet.all)
    call = attributes(loud.one("execute_tool email"))
    assert call["gen_ai.tool.call.arguments"] == '"<argument>"'
    assert call["gen_ai.tool.call.result"] == '"effect 1"'
    assert "canary" not in "".join(span.to_json() for span in loud.all)


async def test_a_flow_is_a_workflow_and_calls_side_by_side_are_children_of_its_span() -> None:
    class State(BaseModel):
        a: str = ""
        b: str = ""

    spans = Spans()
    flow = Flow("pay", state=State).node("s", Call("lookup", args=lambda _: {"name": "s"}))
    flow.node("l", Call("lookup", args=lambda _: {"name": "l"}, into="a"))
    flow.node("r", Call("lookup", args=lambda _: {"name": "r"}, into="b")).edge("s", "l").edge("s", "r").end("l", "r")
    runner = FlowRunner(Executor(Bench().registry), checkpoints=MemoryCheckpointStore(), sinks=[spans.sink])
    await runner.run(flow, State())
    run = spans.one("invoke_workflow pay")
    assert [parent(span) for span in spans.named("execute_tool lookup")] == [own(run)] * 3
    assert attributes(run)["gen_ai.operation.name"] == "invoke_workflow"
    assert spans.open.names == {}


async def test_a_call_that_is_tried_again_keeps_its_span(place: Place) -> None:
    spans, bench = Spans(), Bench()

    async def fail_once(tool: str, args: dict[str, object]) -> None:
        if bench.entered[tool] == 1:
            raise NotSent("nothing went out")

    bench.before = fail_once
    await Worker(place).run(Script(CALL, "done"), bench.registry, sinks=[spans.sink])
    call = spans.one("execute_tool charge_i")
    assert [event.name for event in call.events] == ["attempt"]
    assert (attributes(call)["agent_runtime.attempt"], call.status.status_code) == (2, StatusCode.UNSET)


async def test_a_call_that_answers_with_an_error_is_one_by_its_type(place: Place) -> None:
    spans, bench = Spans(), Bench()

    async def refuse(tool: str, args: dict[str, object]) -> None:
        raise ValueError("canary")

    bench.before = refuse
    await Worker(place).run(Script(CALL, "done"), bench.registry, sinks=[spans.sink])
    call = spans.one("execute_tool charge_i")
    assert (call.status.status_code, call.status.description) == (StatusCode.ERROR, "ValueError")
    assert attributes(call)["error.type"] == "ValueError"
    assert spans.one("invoke_agent").status.status_code is StatusCode.UNSET


async def test_a_call_that_is_refused_unsent_is_an_event_and_no_span(place: Place) -> None:
    spans = Spans()
    await Worker(place).run(Script([("charge_i", {"amount": "much"})], "done"), Bench().registry, sinks=[spans.sink])
    assert calls_of(spans.all) == []
    [refused] = spans.one("invoke_agent").events
    assert (refused.name, (refused.attributes or {})["error.type"]) == ("call.done", "InvalidArguments")


# Whose child a span is.


async def test_a_run_is_a_child_of_the_span_it_is_started_in_and_leaves_that_span_current(place: Place) -> None:
    spans = Spans()
    with spans.tracer.start_as_current_span("request") as request:
        await Worker(place).run(Script(CALL, "done"), Bench().registry, sinks=[spans.sink])
        assert trace.get_current_span() is request
    assert parent(spans.one("invoke_agent")) == own(spans.one("request"))
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_what_a_tool_and_a_model_trace_themselves_are_children_of_their_call_and_their_decision(place: Place) -> None:
    spans, registry = Spans(), ToolRegistry()

    @registry.tool(pure=True)
    async def on_the_loop() -> str:
        with spans.tracer.start_as_current_span("on_the_loop"):
            await asyncio.sleep(0)
        return "here"

    @registry.tool(pure=True)
    def on_a_thread() -> str:
        with spans.tracer.start_as_current_span("on_a_thread"):
            return "there"

    async def model(messages: Sequence[Message], specs: Sequence[ToolSpec]) -> Reply:
        with spans.tracer.start_as_current_span("http"):
            return await script.reply(messages, specs)

    script = Script([("on_the_loop", {}), ("on_a_thread", {})], [("on_a_thread", {})], "done")
    await Worker(place).run(model, registry, sinks=[spans.sink])
    for tool, count in (("on_the_loop", 1), ("on_a_thread", 2)):
        calls = {own(span) for span in spans.named(f"execute_tool {tool}")}
        assert len(calls) == count
        assert {parent(span) for span in spans.named(tool)} == calls
    assert {parent(span) for span in spans.named("http")} == {own(span) for span in spans.named("chat")}
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_what_a_nodes_code_traces_is_inside_the_run_and_its_calls_inside_that() -> None:
    class State(BaseModel):
        said: str = ""

    spans = Spans()

    async def node(state: State, run: NodeRun) -> dict[str, object]:
        with spans.tracer.start_as_current_span("by hand"):
            return {"said": await run.call("lookup", name="x")}

    flow = Flow("f", state=State).node("n", node).end("n")
    runner = FlowRunner(Executor(Bench().registry), checkpoints=MemoryCheckpointStore(), sinks=[spans.sink])
    await runner.run(flow, State())
    by_hand = spans.one("by hand")
    assert parent(by_hand) == own(spans.one("invoke_workflow f"))
    assert parent(spans.one("execute_tool lookup")) == own(by_hand)


async def test_a_run_inside_a_call_is_a_child_of_that_call(place: Place) -> None:
    spans, registry, worker = Spans(), ToolRegistry(), Worker(place)

    @registry.tool(pure=True)
    async def delegate() -> str:
        inner = await worker.run(Script(CALL, "inner done"), Bench().registry, "inner", sinks=[spans.sink], name="inner")
        return inner.output

    await worker.run(Script([("delegate", {})], "done"), registry, "outer", sinks=[spans.sink], name="outer")
    assert parent(spans.one("invoke_agent inner")) == own(spans.one("execute_tool delegate"))
    assert parent(spans.one("execute_tool delegate")) == own(spans.one("invoke_agent outer"))


# How spans end.


def status_of(span: ReadableSpan) -> tuple[object, object, object]:
    return attributes(span)["agent_runtime.run.status"], span.status.status_code, attributes(span).get("error.type")


async def test_a_paused_run_ends_its_span_and_the_next_one_links_to_it(place: Place) -> None:
    spans, bench, model = Spans(), Bench(needs_approval=True), Script(CALL, "done")
    paused = await Worker(place).run(model, bench.registry, sinks=[spans.sink])
    assert status_of(spans.one("invoke_agent")) == ("paused", StatusCode.UNSET, None)
    assert spans.open.names == {}
    [request] = paused.pending
    await Worker(place).recover(model, bench.registry, verdicts=[request.approve(by="ana")], sinks=[spans.sink])
    first, second = spans.named("invoke_agent")
    assert links(second) == [own(first)]
    assert [event.name for event in (*first.events, *second.events)] == ["approval.requested", "approval.decided"]
    assert calls_of(spans.all) == ["0"]


async def test_a_blocked_run_ends_its_span_as_an_error_and_the_call_in_doubt_too(place: Place) -> None:
    spans, bench = Spans(), Bench()

    async def lose(tool: str, args: dict[str, object]) -> None:
        raise TimeoutError("canary")

    bench.after = lose
    needed = await error_of(Worker(place).run(Script([("charge", {"amount": 5})]), bench.registry, sinks=[spans.sink]))
    assert isinstance(needed, RecoveryNeedsDecision)
    assert status_of(spans.one("invoke_agent")) == ("blocked", StatusCode.ERROR, "RecoveryNeedsDecision")
    call = spans.one("execute_tool charge")
    assert (call.status.status_code, attributes(call)["error.type"]) == (StatusCode.ERROR, "in doubt")
    assert "canary" not in "".join(span.to_json() for span in spans.all)
    assert spans.open.names == {}


async def test_a_fenced_worker_ends_its_spans_and_the_one_that_took_over_links_to_its_own(place: Place) -> None:
    spans, bench, model = Spans(), Bench(), Script(CALL, "done")
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def hang(tool: str, args: dict[str, object]) -> None:
        if bench.entered[tool] == 1:
            entered.set()
            await go_on.wait()

    bench.before = hang
    first = asyncio.ensure_future(Worker(place).run(model, bench.registry, sinks=[spans.sink]))
    await asyncio.wait_for(entered.wait(), LONG_SECONDS)
    await Worker(place).recover(model, bench.registry, take_over=True, sinks=[spans.sink])
    go_on.set()
    assert isinstance(await error_of(first), CheckpointConflict)
    by_epoch = {attributes(span)["agent_runtime.run.epoch"]: span for span in spans.named("invoke_agent")}
    assert status_of(by_epoch[1]) == ("running", StatusCode.ERROR, "CheckpointConflict")
    assert status_of(by_epoch[2]) == ("done", StatusCode.UNSET, None)
    assert links(by_epoch[2]) == [own(by_epoch[1])]
    assert spans.open.names == {}


async def test_a_failed_a_cancelled_and_a_corrupt_run_end_their_spans(place: Place) -> None:
    spans = Spans()
    worker = Worker(place)
    limit = await error_of(worker.run(Script(CALL, CALL), Bench().registry, "failed", max_steps=1, sinks=[spans.sink]))
    assert isinstance(limit, StepLimitReached)

    bench = Bench()

    async def cancel(tool: str, args: dict[str, object]) -> None:
        sealer = sealer_for(RING, tenant="", run_id=RunId("cancelled"))
        await post_message(worker.inner, sealer, MessageKind.CANCEL, {"by": "ana", "why": "enough"})

    bench.before = cancel
    result = await worker.run(Script(CALL, CALL, "done"), bench.registry, "cancelled", sinks=[spans.sink])
    assert result.status == "cancelled"

    bench = Bench()

    async def conflict(tool: str, args: dict[str, object]) -> None:
        raise KeyConflict("other arguments")

    bench.before = conflict
    assert isinstance(await error_of(worker.run(Script(PAIR), bench.registry, "corrupt", sinks=[spans.sink])), KeyConflict)
    ended = {attributes(span)["agent_runtime.run.id"]: status_of(span) for span in spans.named("invoke_agent")}
    assert ended == {
        "failed": ("failed", StatusCode.ERROR, "StepLimitReached"),
        "cancelled": ("cancelled", StatusCode.UNSET, None),
        "corrupt": ("running", StatusCode.ERROR, "KeyConflict"),
    }
    assert spans.open.names == {}
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_a_worker_that_is_told_to_stop_ends_its_spans_and_the_run_is_no_error(place: Place) -> None:
    spans, bench, entered = Spans(), Bench(), asyncio.Event()

    async def hang(tool: str, args: dict[str, object]) -> None:
        entered.set()
        await asyncio.Event().wait()

    bench.before = hang
    work = asyncio.ensure_future(Worker(place).run(Script(PAIR), bench.registry, sinks=[spans.sink]))
    await asyncio.wait_for(entered.wait(), LONG_SECONDS)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert status_of(spans.one("invoke_agent")) == ("running", StatusCode.UNSET, None)
    assert spans.one("execute_tool charge_i").status.status_code is StatusCode.ERROR
    assert spans.open.names == {}


def test_a_run_whose_loop_is_thrown_away_leaves_no_span_open() -> None:
    spans = Spans()
    entered: list[asyncio.Event] = []

    async def model(messages: Sequence[Message], specs: Sequence[ToolSpec]) -> Reply:
        entered[0].set()
        await asyncio.Event().wait()
        raise AssertionError("nobody wakes it")

    async def abandon() -> None:
        entered.append(asyncio.Event())
        task = asyncio.ensure_future(run_tool_loop(model, Bench().registry, "go", sinks=[spans.sink]))
        await asyncio.wait_for(entered[0].wait(), LONG_SECONDS)
        assert not task.done()

    asyncio.run(abandon())
    assert {span.name for span in spans.all} == {"invoke_agent", "chat"}
    assert spans.open.names == {}


async def test_a_run_that_is_set_aside_ends_its_span_as_an_error(place: Place) -> None:
    spans, bench = Spans(), Bench()
    terms: dict[str, Any] = {"max_attempts": 1, "commits": "each"}
    worker = Worker(place).killed_at(CrashPoint.BEFORE_INTENT)
    await worker.run_and_die(Script(CALL), bench.registry, **terms)
    await (
        Worker(place)
        .killed_at(CrashPoint.BEFORE_INTENT)
        .recover_and_die(Script(CALL), bench.registry, **terms, take_over=True)
    )
    quarantined = await error_of(
        Worker(place).recover(Script(CALL), bench.registry, **terms, sinks=[spans.sink], take_over=True)
    )
    assert isinstance(quarantined, RunQuarantined)
    assert status_of(spans.one("invoke_agent")) == ("quarantined", StatusCode.ERROR, "RunQuarantined")
    assert spans.open.names == {}


async def test_a_run_that_was_not_opened_has_no_span(place: Place) -> None:
    spans, worker = Spans(), Worker(place)
    await worker.run(Script("done"), Bench().registry)
    assert isinstance(await error_of(worker.run(Script("done"), Bench().registry, sinks=[spans.sink])), CheckpointConflict)
    assert spans.all == []
    assert trace.get_current_span() is trace.INVALID_SPAN


# Across a crash.


async def test_across_a_kill_both_owners_are_linked_and_every_call_has_one_span(tmp_path: Path) -> None:
    store, file = tmp_path / "runs.db", tmp_path / "spans"
    killed = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("mortal.py")), str(store), str(file)
    )
    assert await asyncio.wait_for(killed.wait(), LONG_SECONDS) == -signal.SIGKILL
    before = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [span["name"] for span in before] == ["chat counting-1", "execute_tool charge", "chat counting-1"]
    spans = Spans()
    checkpoints = SQLiteCheckpointStore(store)
    result = await recover_tool_loop(
        OneByOne(), tools(dies_at=None), "run", checkpoints=checkpoints, checkpoint_key=KEY, sinks=[spans.sink]
    )
    assert result.status == "done"
    run = spans.one("invoke_agent")
    [linked] = links(run)
    places = {(int(span["context"]["trace_id"], 16), int(span["parent_id"], 16)) for span in before}
    assert places == {linked}, "what the dead one told hangs below the place that is linked to"
    assert own(run)[0] != linked[0]
    assert attributes(run)["agent_runtime.replayed"] == 3
    assert attributes(run)["agent_runtime.rerun"] == 1
    told = [span["attributes"]["agent_runtime.call"] for span in before if span["name"].startswith("execute")]
    assert sorted(told + calls_of(spans.all)) == [str(seq) for seq in range(CALLS)]
    assert len(spans.named("chat counting-1")) + 2 == CALLS + 1
    [again] = [span for span in spans.named("execute_tool charge") if attributes(span)["agent_runtime.call"] == "1"]
    assert attributes(again)["agent_runtime.attempt"] == 2
    [stored] = await checkpoints.load_many([RunId("run")])
    assert stored is not None
    claims = [json.loads(record.body) for record in stored.records if record.kind == RecordKind.CLAIMED]
    assert [claim["trace"].split("-")[2] for claim in claims] == [f"{linked[1]:016x}", f"{own(run)[1]:016x}"]
    await checkpoints.close()


async def test_a_run_that_is_over_is_given_back_without_a_span(place: Place) -> None:
    spans, bench = Spans(), Bench()
    await Worker(place).run(Script(CALL, "done"), bench.registry)
    await Worker(place).recover(Script(CALL, "done"), bench.registry, sinks=[spans.sink])
    assert spans.all == []
    assert spans.open.names == {}


async def test_a_place_in_a_trace_that_cannot_be_read_is_no_link() -> None:
    for broken in ("", "00", "00-zz-zz-zz", "00-0-0-0"):
        spans = Spans()
        spans.sink(Event("run.claimed", "run", {"kind": "loop", "trace": broken, "why": "recovery"}, "", 2))
        spans.sink(Event("run.left", "run", {"kind": "loop", "step": 1, "status": "done"}, "", 2))
        assert links(spans.one("invoke_agent")) == []


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InvalidSetting, match=r"durable-agent-runtime\[otel\]"):
        OpenTelemetrySink()


async def test_without_a_provider_nothing_is_traced_and_no_place_is_written_down(place: Place) -> None:
    await Worker(place).run(Script(CALL, "done"), Bench().registry, sinks=[OpenTelemetrySink()])
    claims = [record.body for record in (await place.load("run")).records if record.kind == RecordKind.CLAIMED]
    assert all(b"trace" not in body for body in claims)
