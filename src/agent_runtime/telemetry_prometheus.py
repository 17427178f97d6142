"""The Prometheus sink: counters, histograms and a gauge of what runs on a store do.

Rules of this file:

* What is replayed is not counted again.
* No label holds what a run, a model or a person says: tools are those that were called, never those that a model made up,
  and past a number of them all are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from agent_runtime.errors import InvalidSetting
from agent_runtime.events import Event
from agent_runtime.journal.commits import watch_commits
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.telemetry import type_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter

MOST_TOOLS = 200
"""Past so many tools the label of any other is `OTHER`."""
OTHER = "(other)"
UNKNOWN = "(unknown)"
"""The label of a tool that is not registered, whatever a model called it."""

ENDS = ("run.done", "run.failed", "run.cancelled", "run.paused", "run.blocked", "run.quarantined", "run.fenced")
TOKENS = {
    "input": "input",
    "input_tokens": "input",
    "prompt_tokens": "input",
    "output": "output",
    "output_tokens": "output",
    "completion_tokens": "output",
}
"""The label of each unit that a reply's usage may name."""
CALL_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
COMMIT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
GROUP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class PrometheusSink:
    """Counts into a registry. Without the `prometheus` extra there is none: `InvalidSetting` says what to install."""

    def __init__(self, registry: CollectorRegistry | None = None, *, namespace: str = "agent_runtime") -> None:
        """`registry`: that of the process, by default. One sink for all runs of a process; a second one of the same
        registry and namespace is refused by the registry."""
        prometheus = _load()
        into: dict[str, Any] = {"namespace": namespace, "registry": prometheus.REGISTRY if registry is None else registry}

        def counter(name: str, says: str, *labels: str) -> Counter:
            made: Counter = prometheus.Counter(name, says, labels, **into)
            return made

        self._runs = counter("runs", "What became of runs: started, recovered, done, failed, …", "event")
        self._calls = counter("calls", "Calls that ended, by tool and outcome: done, error, refused", "tool", "outcome")
        self._attempts = counter("attempts", "Calls that went out, by tool, those made again too", "tool")
        self._doubts = counter("doubts", "Calls of which nobody knew whether they happened", "tool")
        self._takeovers = counter("takeovers", "Runs that were claimed after another owner")
        self._settlements = counter("settlements", "Calls in doubt that were settled, by how", "how")
        self._approvals = counter("approvals", "Approvals: requested, approve, deny, edit, refused", "event")
        self._requests = counter("model_requests", "Requests to the model, by outcome: answered, failed", "outcome")
        self._tokens = counter("model_tokens", "Tokens that replies say they used", "type")
        self._call_seconds = prometheus.Histogram(
            "call_seconds", "How long a call's last attempt took", ("tool",), buckets=CALL_SECONDS, **into
        )
        self._model_seconds = prometheus.Histogram(
            "model_seconds", "How long a request to the model took", buckets=CALL_SECONDS, **into
        )
        self._commit_seconds = prometheus.Histogram(
            "commit_seconds", "How long the store took to answer a write", buckets=COMMIT_SECONDS, **into
        )
        self._group_size = prometheus.Histogram(
            "group_size", "Appends of different runs that one write carried", buckets=GROUP_SIZES, **into
        )
        self._open = prometheus.Gauge("runs_open", "Runs that this process works now", **into)
        self._tools: set[str] = set()
        self._working: set[tuple[str, str, int]] = set()
        for name in ("run.started", "run.recovered", *ENDS):
            self._runs.labels(name.removeprefix("run."))

    def observe(self, store: CheckpointStore) -> None:
        """Measure the writes to a store as well: how long they take, and how many runs share one."""
        watch_commits(store, self._see_commit)

    def __call__(self, event: Event) -> None:
        name, data = event.name, event.data
        if name in _COUNT:
            _COUNT[name](self, data)
        if name in ("run.started", "run.claimed"):
            self._working.add((event.tenant, event.run_id, event.epoch))
            self._open.set(len(self._working))
        elif name == "run.left":
            self._working.discard((event.tenant, event.run_id, event.epoch))
            self._open.set(len(self._working))
        if name in _RUN_EVENTS:
            self._runs.labels(name.removeprefix("run.")).inc()

    def _see_commit(self, seconds: float, size: int) -> None:
        self._commit_seconds.observe(seconds)
        self._group_size.observe(size)

    def _claimed(self, data: Mapping[str, Any]) -> None:
        self._takeovers.inc()

    def _returned(self, data: Mapping[str, Any]) -> None:
        self._requests.labels("failed" if "error" in data else "answered").inc()
        self._model_seconds.observe(data["duration"])

    def _decided(self, data: Mapping[str, Any]) -> None:
        for unit, amount in data.get("usage", {}).items():
            if unit in TOKENS and amount > 0:
                self._tokens.labels(TOKENS[unit]).inc(amount)

    def _started(self, data: Mapping[str, Any]) -> None:
        self._attempts.labels(self._label(data["tool"])).inc()

    def _done(self, data: Mapping[str, Any]) -> None:
        is_unknown = not data["tool"] or type_of(data.get("error", "")) == "UnknownTool"
        tool = UNKNOWN if is_unknown else self._label(data["tool"])
        outcome = "refused" if not data["attempt"] else "error" if "error" in data else "done"
        self._calls.labels(tool, outcome).inc()
        if "duration" in data:
            self._call_seconds.labels(tool).observe(data["duration"])

    def _in_doubt(self, data: Mapping[str, Any]) -> None:
        self._doubts.labels(self._label(data["tool"])).inc()

    def _settled(self, data: Mapping[str, Any]) -> None:
        self._settlements.labels(data["how"]).inc()

    def _decided_by_person(self, data: Mapping[str, Any]) -> None:
        self._approvals.labels(data["decision"]).inc()

    def _requested(self, data: Mapping[str, Any]) -> None:
        self._approvals.labels("requested").inc()

    def _refused(self, data: Mapping[str, Any]) -> None:
        self._approvals.labels("refused").inc()

    def _label(self, tool: str) -> str:
        """A tool that was called, unless there are too many by now."""
        if tool not in self._tools:
            if len(self._tools) >= MOST_TOOLS:
                return OTHER
            self._tools.add(tool)
        return tool


_RUN_EVENTS = frozenset({"run.started", "run.recovered", *ENDS})

_COUNT = {
    "run.claimed": PrometheusSink._claimed,
    "decision.returned": PrometheusSink._returned,
    "decision.made": PrometheusSink._decided,
    "call.started": PrometheusSink._started,
    "call.done": PrometheusSink._done,
    "call.in_doubt": PrometheusSink._in_doubt,
    "call.settled": PrometheusSink._settled,
    "approval.requested": PrometheusSink._requested,
    "approval.decided": PrometheusSink._decided_by_person,
    "approval.refused": PrometheusSink._refused,
}


class SupervisorMetrics:
    """Counts what a supervisor says, by its verbs, and how its workers ended."""

    def __init__(self, registry: CollectorRegistry | None = None, *, namespace: str = "agent_runtime") -> None:
        prometheus = _load()
        into: dict[str, Any] = {"namespace": namespace, "registry": prometheus.REGISTRY if registry is None else registry}
        self._events = prometheus.Counter("supervisor_events", "Lines of the supervisor, by verb", ("event",), **into)
        self._exits = prometheus.Counter("worker_exits", "Workers that ended, by exit code", ("code",), **into)
        self._workers = prometheus.Gauge("workers", "Workers that run now", **into)

    def __call__(self, verb: str, fields: Mapping[str, object], workers: int) -> None:
        self._events.labels(verb).inc()
        self._workers.set(workers)
        if verb == "worker-exited":
            self._exits.labels(str(fields["code"])).inc()


def serve_metrics(port: int, *, host: str = "127.0.0.1") -> None:
    """Serve the process's registry over HTTP, on a thread, until the process ends. `InvalidSetting` where that cannot be."""
    prometheus = _load()
    try:
        prometheus.start_http_server(port, host)
    except (OSError, OverflowError) as error:
        raise InvalidSetting(
            f"metrics cannot be served on {host}:{port}: {error}; choose a port that is free (METRICS_PORT)"
        ) from error


def _load() -> ModuleType:
    try:
        import prometheus_client
    except ImportError as error:
        raise InvalidSetting(
            "Prometheus metrics need prometheus-client, which is not installed; pip install "
            "'durable-agent-runtime[prometheus]'"
        ) from error
    return prometheus_client
