"""No sink tells payload unless it is asked to, and then through what redacts it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from agent_runtime.errors import RecoveryNeedsDecision
from agent_runtime.events import Event, Sink
from agent_runtime.executor import Executor
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowRunner
from agent_runtime.ids import RunId
from agent_runtime.messages import Message, Reply, ToolCall
from agent_runtime.redaction import UNREDACTED, Part
from agent_runtime.run import RunContext
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.telemetry import JsonLinesSink, LoggingSink, LogSink
from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.tools import ToolRegistry
from tests.bench import Place, Script, Worker, error_of

CANARY = "canary-8261"
"""Stands in every argument, result, error, note and reply."""


class Count(BaseModel):
    """The state of a flow."""

    said: str = ""


def leaky() -> ToolRegistry:
    """Tools that take and give the canary, and one that fails with it."""
    registry = ToolRegistry()

    @registry.tool
    async def tell(secret: str) -> str:
        return f"{secret} again"

    @registry.tool(idempotent=True)
    async def fail(secret: str) -> str:
        raise ValueError(f"cannot do it with {secret}")

    @registry.tool(needs_approval=True)
    async def guarded(secret: str) -> str:
        return secret

    @registry.tool
    async def lost(secret: str) -> str:
        raise RuntimeError(f"nobody knows about {secret}")

    return registry


def asking(tool: str) -> list[tuple[str, dict[str, object]]]:
    return [(tool, {"secret": CANARY})]


async def everything(sinks: Sequence[Sink], place: Place) -> None:
    """Runs in which every event that holds payload is told."""
    model = Script(asking("tell"), asking("fail"), [("nothing_of_that_name", {"secret": CANARY})], asking("guarded"), CANARY)
    options: dict[str, Any] = {"sinks": sinks, "ctx": RunContext(thread="t-1")}
    paused = await Worker(place).run(model, leaky(), "people", messages=CANARY, **options)
    [request] = paused.pending
    await Worker(place).recover(model, leaky(), "people", verdicts=[request.deny(by="ana", note=CANARY)], **options)

    async def broken_desk(_: object) -> Any:
        raise ValueError(CANARY)

    await Worker(place).run(Script(asking("guarded"), "done"), leaky(), "desk", approvals=broken_desk, sinks=sinks)
    assert isinstance(
        await error_of(Worker(place).run(Script(asking("lost"), "done"), leaky(), "lost", sinks=sinks)), RecoveryNeedsDecision
    )
    flow = Flow("f", state=Count).node("n", Call("fail", args=lambda _: {"secret": CANARY}, into="said")).end("n")
    result = await FlowRunner(Executor(leaky()), checkpoints=MemoryCheckpointStore(), sinks=sinks).run(flow, Count())
    assert result.status == "failed"


def log_lines(**options: Any) -> tuple[Sink, Callable[[], str]]:
    stream = io.StringIO()
    return LogSink(stream, **options), stream.getvalue


def json_lines(**options: Any) -> tuple[Sink, Callable[[], str]]:
    stream = io.StringIO()
    return JsonLinesSink(stream, **options), stream.getvalue


def log_records(**options: Any) -> tuple[Sink, Callable[[], str]]:
    told: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(json.dumps(vars(record), default=repr))

    logger = logging.Logger("apart", logging.DEBUG)
    logger.addHandler(Keep())
    return LoggingSink(logger, **options), lambda: "\n".join(told)


SINKS = [log_lines, json_lines, log_records]


@pytest.mark.parametrize("make", SINKS)
async def test_no_sink_tells_payload_by_default_and_every_one_does_where_it_is_asked(make: Any, place: Place) -> None:
    (quiet, quietly), (loud, loudly) = make(), make(payloads=True)
    await everything([quiet, loud], place)
    assert CANARY not in quietly()
    assert "tell" in quietly()
    assert "ValueError" in quietly(), "an error is told by its type"
    assert loudly().count(CANARY) >= 10


@pytest.mark.parametrize("make", SINKS)
async def test_payload_goes_through_what_redacts_it(make: Any, place: Place) -> None:
    parts: set[Part] = set()

    def redact(value: object, part: Part) -> object:
        parts.add(part)
        return "***"

    sink, told = make(payloads=True, redact=redact)
    await everything([sink], place)
    assert CANARY not in told()
    assert "***" in told()
    assert parts == set(Part)


async def test_a_redaction_that_fails_tells_nothing() -> None:
    def redact(value: object, part: Part) -> object:
        raise KeyError(value)

    sink, told = json_lines(payloads=True, redact=redact)
    sink(Event("call.done", "run", {"call": "0", "result": CANARY}))
    assert json.loads(told())["result"] == UNREDACTED


def test_a_json_line_holds_when_what_and_whose() -> None:
    stream = io.StringIO()
    sink = JsonLinesSink(stream, clock=ManualClock())
    sink(Event("call.started", "run", {"call": "0", "tool": "tell", "args": {"secret": CANARY}}, "acme", 3))
    assert json.loads(stream.getvalue()) == {
        "at": "2030-01-01T00:00:00.000+00:00",
        "event": "call.started",
        "run": "run",
        "tenant": "acme",
        "epoch": 3,
        "call": "0",
        "tool": "tell",
    }


def test_a_log_record_has_its_level_and_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    sink = LoggingSink("apart")
    with caplog.at_level(logging.DEBUG, logger="apart"):
        for name in ("run.started", "call.returned", "call.in_doubt", "run.failed"):
            sink(Event(name, "run", {"kind": "loop", "error": f"ValueError: {CANARY}"}, "acme", 2))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.DEBUG, logging.WARNING, logging.ERROR]
    last = vars(caplog.records[-1])
    told = {name: last[name] for name in ("event", "run_id", "tenant", "epoch", "data")}
    assert told == {
        "event": "run.failed",
        "run_id": "run",
        "tenant": "acme",
        "epoch": 2,
        "data": {"kind": "loop", "error": "ValueError"},
    }
    assert caplog.records[-1].getMessage() == "run.failed run=run"


async def test_an_epoch_and_a_tenant_stand_in_every_event_of_a_run(place: Place) -> None:
    seen: list[Event] = []

    def reply(messages: Sequence[Message]) -> Reply:
        return Reply("", [ToolCall("a", "tell", {"secret": CANARY})])

    await Worker(place).run(Script(reply, "done"), leaky(), sinks=[seen.append])
    assert {(event.run_id, event.tenant, event.epoch) for event in seen} == {(RunId("run"), "", 1)}
