"""What is counted and measured, read back from the exposition that Prometheus reads."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agent_runtime import telemetry_prometheus
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import CheckpointConflict, InvalidSetting, NotSent, RecoveryNeedsDecision
from agent_runtime.events import Event
from agent_runtime.journal.commits import watch_commits
from agent_runtime.settings import read_settings
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.telemetry_prometheus import OTHER, UNKNOWN, PrometheusSink, SupervisorMetrics, serve_metrics
from agent_runtime.tool_loop import run_tool_loop
from tests.bench import KEY, LONG_SECONDS, Asked, Bench, Place, Script, Worker, error_of
from tests.processes.job import until

CALL: list[Asked] = [("charge_i", {"amount": 5})]


class Meter:
    """A sink on a registry of its own, read as Prometheus reads it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sink = PrometheusSink(self.registry)

    def read(self) -> Mapping[str, float]:
        """Every sample that is not zero, `name{label,…}`; a histogram by its count."""
        return read(generate_latest(self.registry).decode())


def read(exposition: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name.endswith(("_created", "_bucket", "_sum")) or not sample.value:
                continue
            labels = f"{{{','.join(sample.labels.values())}}}" if sample.labels else ""
            found[sample.name.removeprefix("agent_runtime_") + labels] = sample.value
    return found


async def test_a_run_is_counted_by_what_it_did(place: Place) -> None:
    meter, bench = Meter(), Bench()

    async def fail_once(tool: str, args: dict[str, object]) -> None:
        if tool == "charge_i" and bench.entered[tool] == 1:
            raise NotSent("nothing went out")
        if tool == "lookup":
            raise ValueError("not there")

    bench.before = fail_once
    model = Script(CALL, [("lookup", {"name": "x"}), ("charge_i", {"amount": "much"}), ("made up", {})], "done")
    await Worker(place).run(model, bench.registry, sinks=[meter.sink])
    assert meter.read() == {
        "runs_total{started}": 1,
        "runs_total{done}": 1,
        "attempts_total{charge_i}": 2,
        "attempts_total{lookup}": 1,
        "calls_total{done,charge_i}": 1,
        "calls_total{refused,charge_i}": 1,
        "calls_total{error,lookup}": 1,
        f"calls_total{{refused,{UNKNOWN}}}": 1,
        "call_seconds_count{charge_i}": 1,
        "call_seconds_count{lookup}": 1,
        "model_requests_total{answered}": 3,
        "model_seconds_count": 3,
        "model_tokens_total{input}": 1 + 3 + 7,
        "model_tokens_total{output}": 3,
    }


async def test_a_takeover_is_counted_and_what_it_replays_is_not(place: Place) -> None:
    meter = Meter()
    await (
        Worker(place)
        .killed_at(CrashPoint.AFTER_CALL, 1)
        .run_and_die(Script(CALL, CALL, "done"), Bench().registry, commits="each")
    )
    await Worker(place).recover(Script(CALL, CALL, "done"), Bench().registry, commits="each", sinks=[meter.sink])
    told = meter.read()
    assert told["takeovers_total"] == told["runs_total{recovered}"] == told["runs_total{done}"] == 1
    assert told["calls_total{done,charge_i}"] == told["attempts_total{charge_i}"] == 1
    assert told["model_requests_total{answered}"] == 1
    assert "runs_total{started}" not in told
    assert "runs_open" not in told


async def test_doubts_settlements_approvals_and_the_ways_a_run_stops_are_counted(place: Place) -> None:
    meter, bench = Meter(), Bench(needs_approval=True)
    options: dict[str, Any] = {"sinks": [meter.sink]}
    paused = await Worker(place).run(Script(CALL, "done"), bench.registry, **options)
    [request] = paused.pending
    await Worker(place).recover(Script(CALL, "done"), bench.registry, verdicts=[request.approve(by="ana")], **options)

    bench = Bench()

    async def lose(tool: str, args: dict[str, object]) -> None:
        bench.after = Bench().after
        raise TimeoutError

    bench.after = lose
    model = Script([("charge", {"amount": 5})], "done")
    assert isinstance(await error_of(Worker(place).run(model, bench.registry, "lost", **options)), RecoveryNeedsDecision)
    await Worker(place).recover(model, bench.registry, "lost", rerun_in_doubt=True, **options)
    told = meter.read()
    wanted = {
        "runs_total{started}": 2, "runs_total{paused}": 1, "runs_total{blocked}": 1, "runs_total{recovered}": 2,
        "runs_total{done}": 2, "takeovers_total": 2, "doubts_total{charge}": 1, "settlements_total{rerun}": 1,
        "approvals_total{requested}": 1, "approvals_total{approve}": 1, "attempts_total{charge}": 2,
    }  # fmt: skip
    assert {name: told.get(name) for name in wanted} == wanted
    assert "runs_open" not in told


async def test_runs_that_are_worked_now_are_a_gauge(place: Place) -> None:
    meter, bench, go_on = Meter(), Bench(), asyncio.Event()
    entered = asyncio.Event()

    async def hang(tool: str, args: dict[str, object]) -> None:
        if bench.entered[tool] == 2:
            entered.set()
        await go_on.wait()

    bench.before = hang
    worker = Worker(place)
    runs = [asyncio.ensure_future(worker.run(Script(CALL), bench.registry, f"r{at}", sinks=[meter.sink])) for at in (1, 2)]
    await asyncio.wait_for(entered.wait(), LONG_SECONDS)
    assert meter.read()["runs_open"] == 2
    for run in runs:
        run.cancel()
    await asyncio.wait(runs)
    assert "runs_open" not in meter.read()


async def test_a_run_that_was_not_opened_is_no_open_one(place: Place) -> None:
    meter, worker = Meter(), Worker(place)
    await worker.run(Script("done"), Bench().registry)
    taken = await error_of(worker.run(Script("done"), Bench().registry, sinks=[meter.sink]))
    assert isinstance(taken, CheckpointConflict)
    assert meter.read() == {"runs_total{fenced}": 1}


async def test_commits_and_how_many_runs_share_one_are_measured_without_a_sink_on_the_runs(place: Place) -> None:
    meter, store = Meter(), Worker(place)
    meter.sink.observe(store)
    options: dict[str, Any] = {"checkpoints": store, "checkpoint_key": KEY}
    await asyncio.gather(
        *(run_tool_loop(Script(CALL, "done"), Bench().registry, "go", run_id=f"r{at}", **options) for at in range(8))
    )
    told = meter.read()
    assert told["commit_seconds_count"] == told["group_size_count"] > 0
    appended = re.search(r"agent_runtime_group_size_sum (\S+)", generate_latest(meter.registry).decode())
    assert appended is not None
    assert float(appended[1]) == 8 * 4
    assert told["group_size_count"] < 8 * 4, "runs share a write"


async def test_a_lone_append_is_measured_too_and_a_watcher_that_fails_stops_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    store, seen = place.open(), list[int]()

    def broken(seconds: float, size: int) -> None:
        raise RuntimeError("broken")

    await run_tool_loop(Script("done"), Bench().registry, "go", checkpoints=store, checkpoint_key=KEY)
    watch_commits(store, broken)
    watch_commits(store, lambda seconds, size: seen.append(size))  # found by a group commit that exists already
    result = await run_tool_loop(Script(CALL, "done"), Bench().registry, "go", checkpoints=store, checkpoint_key=KEY)
    assert result.status == "done"
    assert seen == [1] * 4
    assert [record.levelname for record in caplog.records] == ["ERROR"], "said once"


def test_labels_are_bounded_whatever_tools_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_prometheus, "MOST_TOOLS", 3)
    meter = Meter()
    for at in range(10):
        call = {"call": "0", "tool": f"t{at}", "key": f"r{at}:0", "attempt": 1, "step": 1}
        meter.sink(Event("call.started", f"run {at}", call, "acme", 1))
        meter.sink(Event("call.done", f"run {at}", {**call, "duration": 0.1, "result": at}, "acme", 1))
        unknown = {"call": "0", "tool": f"u{at}", "attempt": 0, "error": "UnknownTool: no such tool"}
        meter.sink(Event("call.done", f"run {at}", unknown, "acme", 1))
    told = meter.read()
    assert [name for name in told if name.startswith("attempts")] == [
        *(f"attempts_total{{t{at}}}" for at in range(3)), f"attempts_total{{{OTHER}}}",
    ]  # fmt: skip
    assert told[f"calls_total{{done,{OTHER}}}"] == 7
    assert told[f"calls_total{{refused,{UNKNOWN}}}"] == 10
    assert "run " not in generate_latest(meter.registry).decode().split("# HELP", 1)[0]


def test_all_that_can_become_of_a_run_is_there_from_the_start() -> None:
    text = generate_latest(Meter().registry).decode()
    events = re.findall(r'agent_runtime_runs_total\{event="(\w+)"\} 0.0', text)
    assert sorted(events) == [
        "blocked", "cancelled", "done", "failed", "fenced", "paused", "quarantined", "recovered", "started",
    ]  # fmt: skip


def test_a_namespace_of_ones_own() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry, namespace="shop")
    assert "shop_runs_total" in generate_latest(registry).decode()


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for make in (PrometheusSink, SupervisorMetrics, lambda: serve_metrics(1)):
        with pytest.raises(InvalidSetting, match=r"durable-agent-runtime\[prometheus\]"):
            make()


# The programs.


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def get_once(port: int, name: str) -> dict[str, float]:
    """What is told once that series is: a line may be printed a moment before it is counted."""
    until(lambda: name in get(port), f"{name} is told")
    return get(port)


def get(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LONG_SECONDS) as answer:
        return read(answer.read().decode())


def start(folder: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "agent_runtime", *arguments], cwd=folder, env={**os.environ, **environ},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_worker_and_a_supervisor_serve_their_metrics(tmp_path: Path) -> None:
    port = free_port()
    worker = start(
        tmp_path, "provision", "--metrics-port", str(port), RUN_ID="r1", STALL_AT="before_decide", STALL_MS="60000",
        CRASH_SEQ="1",
    )  # fmt: skip
    assert worker.stdout is not None
    try:
        for line in worker.stdout:
            if "confirmed" in line:
                break
        told = get_once(port, "calls_total{done,create_server}")
    finally:
        worker.kill()
        worker.communicate()
    assert told["runs_open"] == told["calls_total{done,create_server}"] == 1
    assert told["commit_seconds_count"] >= 5

    port = free_port()
    supervisor = start(tmp_path, "supervisor", METRICS_PORT=str(port), POLL="0.05")
    assert supervisor.stdout is not None
    try:
        for line in supervisor.stdout:
            if "worker-exited" in line:
                break
        told = get_once(port, "worker_exits_total{0}")
    finally:
        supervisor.send_signal(signal.SIGTERM)
        supervisor.communicate()
    assert told["worker_exits_total{0}"] == told["supervisor_events_total{resuming}"] == 1
    assert supervisor.returncode == 0


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidSetting, match="METRICS_PORT"):
            serve_metrics(taken.getsockname()[1])


@pytest.mark.parametrize("port", ["http", "0", "70000", "-1", "1.5", "\u0661"])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(InvalidSetting, match="METRICS_PORT"):
        read_settings({"METRICS_PORT": port})


async def test_a_store_that_nobody_holds_is_not_kept_by_its_watchers() -> None:
    import gc
    import weakref

    store = MemoryCheckpointStore()
    Meter().sink.observe(store)
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
