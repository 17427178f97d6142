"""Every event that is announced has its line, or none; no event of any program disturbs the sink that writes them."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence

import pytest
from pydantic import BaseModel

from agent_runtime.errors import RecoveryNeedsDecision
from agent_runtime.events import Sink
from agent_runtime.executor import Executor
from agent_runtime.flow.graph import Flow
from agent_runtime.flow.nodes import Call
from agent_runtime.flow.runner import FlowRunner
from agent_runtime.ids import RunId
from agent_runtime.inbox import MessageKind, post_message
from agent_runtime.journal.seal import sealer_for
from agent_runtime.telemetry import LogSink
from tests.bench import RING, Asked, Bench, Place, Script, Worker

CALL: list[Asked] = [("charge", {"amount": 5})]


class Count(BaseModel):
    """The state of the flow."""

    said: str = ""


def written(log: io.StringIO) -> list[str]:
    return [line.split("run=run ")[-1].removesuffix("\n") for line in log.getvalue().splitlines()]


@pytest.fixture(autouse=True)
def _no_sink_may_fail(caplog: pytest.LogCaptureFixture) -> object:
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_what_people_say_of_a_run_has_its_lines(place: Place) -> None:
    bench, log = Bench(needs_approval=True), io.StringIO()
    sinks: Sequence[Sink] = [LogSink(log, payloads=True)]
    model = Script(CALL, [("charge", {"amount": 6})], CALL, "done")
    paused = await Worker(place).run(model, bench.registry, sinks=sinks)
    [request] = paused.pending
    paused = await Worker(place).recover(model, bench.registry, verdicts=[request.approve(by="ana")], sinks=sinks)
    [request] = paused.pending
    await Worker(place).recover(model, bench.registry, verdicts=[request.deny(by="ben", note="too much")], sinks=sinks)
    sealer = sealer_for(RING, tenant="", run_id="run")
    await post_message(place.open(), sealer, MessageKind.CANCEL, {"by": "ana", "why": "enough"})
    await Worker(place).recover(model, bench.registry, sinks=sinks)
    lines = written(log)
    assert 'seq=0 tool=charge args={"amount": 5}' in lines
    assert 'seq=0 decision=approve by=ana note=""' in lines
    assert 'seq=1 decision=deny by=ben note="too much"' in lines
    assert 'seq=1 tool=charge error="Denied: ben did not approve this call: too much"' in lines
    assert 'pending=["0"]' in lines
    assert lines[-1] == "by=ana why=enough"
    verbs = [line.split()[1] for line in log.getvalue().splitlines()]
    assert [verb for verb in verbs if verb in ("asking", "verdict", "paused", "cancelled")] == [
        "asking", "paused", "verdict", "asking", "paused", "verdict", "asking", "paused", "cancelled",
    ]  # fmt: skip


async def test_a_settlement_has_its_line(place: Place) -> None:
    bench, log = Bench(timeout=0.001), io.StringIO()

    async def fail(_: str, __: dict[str, object]) -> None:
        bench.after = Bench().after
        raise TimeoutError

    bench.after = fail
    with pytest.raises(RecoveryNeedsDecision):
        await Worker(place).run(Script(CALL, "done"), bench.registry)
    await Worker(place).recover(Script(CALL, "done"), bench.registry, rerun_in_doubt=True, sinks=[LogSink(log, payloads=True)])
    assert any("settled" in line and "how=rerun" in line for line in log.getvalue().splitlines())


async def test_the_runs_of_flows_are_written_like_those_of_loops() -> None:
    bench, log = Bench(), io.StringIO()
    flow = Flow("pay", state=Count).node("pay", Call("charge", args=lambda _: {"amount": 5}, into="said")).end("pay")
    result = await FlowRunner(Executor(bench.registry), sinks=[LogSink(log, payloads=True)]).run(
        flow, Count(), run_id=RunId("run")
    )
    assert result.status == "done"
    assert [line.split()[1] for line in log.getvalue().splitlines()] == ["started", "calling", "confirmed", "done"]
