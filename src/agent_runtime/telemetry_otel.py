"""The OpenTelemetry sink: a span for each owner's work on a run, and in it one for each decision and each call.

Rules of this file:

* What is replayed makes no span: it was told when it happened. A span of a call or of a decision ends once its outcome is
  durable, with the time at which the act was over; so what a later owner makes again is told once.
* The span of an owner's work begins before its claim is written, and the claim's record holds its place in the trace
  (W3C's `traceparent`): the next owner links to it, whatever became of this process, and under whatever trace.
* A span that was opened ends when the run is let go, however that came; one whose claim never landed is dropped.
* The span of an act is current in the task that makes it, so that whatever it calls makes children. It is put back by
  looking, never by a token: a token of another context is an error in the log.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from agent_runtime.clock import wall_ns
from agent_runtime.errors import InvalidSetting
from agent_runtime.events import Event
from agent_runtime.redaction import Redact, by_name
from agent_runtime.telemetry import type_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, Tracer

Attributes: TypeAlias = "dict[str, str | int | float | bool]"

TRACER = "agent_runtime"
OPERATIONS = {"flow": "invoke_workflow"}
"""What working a run is called, by its kind; an agent is invoked, else."""
USAGE = {
    "input": "gen_ai.usage.input_tokens",
    "input_tokens": "gen_ai.usage.input_tokens",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output": "gen_ai.usage.output_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}
"""The attribute of each unit that a reply's usage may name."""


class _Act:
    """A span that is open: a call, or a decision."""

    __slots__ = ("before", "context", "doubt", "ended_ns", "span")

    def __init__(self, span: Span, before: Context, context: Context) -> None:
        self.span = span
        self.before, self.context = before, context
        self.doubt = False
        self.ended_ns: int | None = None


class _Work:
    """One owner's work on a run."""

    __slots__ = ("acts", "before", "common", "context", "error", "is_claimed", "span")

    def __init__(self, span: Span, before: Context, context: Context, common: Attributes) -> None:
        self.span = span
        self.before, self.context = before, context
        self.common = common
        self.acts: dict[str, _Act] = {}
        self.error = ""
        self.is_claimed = False


class OpenTelemetrySink:
    """Spans with the `gen_ai.*` names. Without the `otel` extra there is none: `InvalidSetting` says what to install."""

    def __init__(
        self,
        tracer: Tracer | None = None,
        *,
        provider: str = "",
        payloads: bool = False,
        redact: Redact | None = None,
    ) -> None:
        """`tracer`: that of the program's own provider, by default. `provider`: who serves the model, `gen_ai.provider.name`.

        With `payloads` the arguments and results of calls are attributes, each as `redact(name, value)` gives it.
        """
        self._trace, self._contexts = _load()
        self._tracer: Tracer = self._trace.get_tracer(TRACER) if tracer is None else tracer
        self._provider: Attributes = {"gen_ai.provider.name": provider} if provider else {}
        self._payloads = payloads
        self._redact = redact
        self._works: dict[tuple[str, str, int], _Work] = {}

    def __call__(self, event: Event) -> None:
        place = (event.tenant, event.run_id, event.epoch)
        if event.name in ("run.started", "run.claimed"):
            self._begin(place, event.data)
            return
        work = self._works.get(place)
        if work is None:
            return
        if event.name == "run.left":
            del self._works[place]
            self._leave(work, event.data)
            return
        work.is_claimed = work.is_claimed or event.name != "run.fenced"
        if (tell := _TELL.get(event.name)) is not None:
            tell(self, work, event.data)
        elif event.name in _NOTED:
            noted: Attributes = {name: str(event.data[field]) for field, name in _FIELDS.items() if field in event.data}
            work.span.add_event(event.name, noted)

    def trace(self, run_id: str, *, tenant: str, epoch: int, kind: str, name: str) -> str:
        """Open the span of an owner's work; gives its place in the trace, to be written down with the claim."""
        work = self._open((tenant, run_id, epoch), kind, name)
        own = work.span.get_span_context()
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-{int(own.trace_flags):02x}" if own.is_valid else ""

    # An owner's work.

    def _open(self, place: tuple[str, str, int], kind: str, name: str) -> _Work:
        tenant, run_id, epoch = place
        common: Attributes = {**self._provider, "agent_runtime.run.id": run_id, "agent_runtime.run.epoch": epoch}
        if tenant:
            common["agent_runtime.tenant"] = tenant
        operation = OPERATIONS.get(kind, "invoke_agent")
        named: Attributes = {"gen_ai.agent.name": name} if name else {}
        attributes = {"gen_ai.operation.name": operation, "agent_runtime.run.kind": kind, **named, **common}
        before = self._contexts.get_current()
        span = self._tracer.start_span(f"{operation} {name}".rstrip(), context=before, attributes=attributes)
        context = self._trace.set_span_in_context(span, before)
        work = self._works[place] = _Work(span, before, context, common)
        return work

    def _begin(self, place: tuple[str, str, int], data: Mapping[str, Any]) -> None:
        """The claim has landed."""
        work = self._works.get(place) or self._open(place, data.get("kind", ""), data.get("name", ""))
        work.is_claimed = True
        if "thread" in data:
            work.common["gen_ai.conversation.id"] = data["thread"]
            work.span.set_attribute("gen_ai.conversation.id", data["thread"])
        if "why" in data:
            work.span.set_attribute("agent_runtime.claim.why", data["why"])
        if (earlier := self._read_place(data.get("trace", ""))) is not None:
            work.span.add_link(earlier, {"agent_runtime.link": "previous owner"})
        self._contexts.attach(work.context)

    def _read_place(self, traceparent: str) -> SpanContext | None:
        """The place in a trace that an earlier owner wrote down."""
        parts = traceparent.split("-")
        try:
            trace_id, span_id, flags = (int(part, 16) for part in parts[1:4])
        except ValueError:
            return None
        earlier: SpanContext = self._trace.SpanContext(
            trace_id, span_id, is_remote=True, trace_flags=self._trace.TraceFlags(flags)
        )
        return earlier if earlier.is_valid else None

    def _leave(self, work: _Work, data: Mapping[str, Any]) -> None:
        """The run was let go: whatever is open ends."""
        if not work.is_claimed:
            return
        error = data.get("error", "")
        for act in work.acts.values():
            self._put_back(act.before, act.context)
            self._fail(act.span, "in doubt" if act.doubt else error or "interrupted")
            act.span.end(act.ended_ns)
        status = data["status"]
        work.span.set_attributes({"agent_runtime.run.status": status, "agent_runtime.run.step": data["step"]})
        if (error := work.error or error) and (status != "running" or error not in _STOPPED):
            self._fail(work.span, error)
        self._put_back(work.before, work.context)
        work.span.end()

    def _fail(self, span: Span, error: str) -> None:
        span.set_attribute("error.type", error)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error))

    def _put_back(self, before: Context, context: Context) -> None:
        if self._contexts.get_current() is context:
            self._contexts.attach(before)

    def _recovered(self, work: _Work, data: Mapping[str, Any]) -> None:
        work.span.set_attributes(
            {"agent_runtime.replayed": data["replayed"], "agent_runtime.rerun": data["rerun"]},
        )

    def _failed(self, work: _Work, data: Mapping[str, Any]) -> None:
        work.error = type_of(data.get("error", ""))

    # Decisions.

    def _asked(self, work: _Work, data: Mapping[str, Any]) -> None:
        model = data.get("model", "")
        named: Attributes = {"gen_ai.request.model": model} if model else {}
        seq: int = data["seq"]
        self._act(
            work, f"{seq}/model", f"chat {model}".rstrip(), self._trace.SpanKind.CLIENT, data["attempt"],
            {"gen_ai.operation.name": "chat", **named, "agent_runtime.seq": seq, "agent_runtime.step": data["step"]},
        )  # fmt: skip

    def _answered(self, work: _Work, data: Mapping[str, Any]) -> None:
        act = self._back(work, f"{data['seq']}/model")
        if act is not None and "error" in data:
            act.span.add_event("attempt failed", {"error.type": data["error"], "agent_runtime.attempt": data["attempt"]})

    def _decided(self, work: _Work, data: Mapping[str, Any]) -> None:
        act = work.acts.pop(f"{data['seq']}/model", None)
        if act is None:
            return
        used = {USAGE[unit]: amount for unit, amount in data.get("usage", {}).items() if unit in USAGE}
        act.span.set_attributes({**used, "agent_runtime.calls": len(data["calls"])})
        if self._payloads and data["calls"]:
            shown = [{**call, "args": by_name(self._redact, "args", call["args"])} for call in data["calls"]]
            act.span.set_attribute("agent_runtime.decision.calls", _as_text(shown))
        act.span.end(act.ended_ns)

    # Calls.

    def _started(self, work: _Work, data: Mapping[str, Any]) -> None:
        tool, key = data["tool"], data["key"]
        attributes: Attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": tool,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": key,
            "agent_runtime.call": data["call"],
            "agent_runtime.key": key,
            "agent_runtime.step": data["step"],
        }
        if self._payloads and "args" in data:
            attributes["gen_ai.tool.call.arguments"] = _as_text(by_name(self._redact, "args", data["args"]))
        kind = self._trace.SpanKind.INTERNAL
        self._act(work, data["call"], f"execute_tool {tool}", kind, data["attempt"], attributes)

    def _returned(self, work: _Work, data: Mapping[str, Any]) -> None:
        self._back(work, data["call"])

    def _done(self, work: _Work, data: Mapping[str, Any]) -> None:
        act = work.acts.pop(data["call"], None)
        if act is None:
            told = {"gen_ai.tool.name": data["tool"], "agent_runtime.call": data["call"]}
            work.span.add_event("call.done", {**told, "error.type": type_of(data.get("error", ""))})
            return
        if "error" in data:
            self._fail(act.span, type_of(data["error"]))
        if self._payloads:
            name = "error" if "error" in data else "result"
            act.span.set_attribute(
                "agent_runtime.error" if name == "error" else "gen_ai.tool.call.result",
                _as_text(by_name(self._redact, name, data[name])),
            )
        act.span.end(act.ended_ns)

    def _in_doubt(self, work: _Work, data: Mapping[str, Any]) -> None:
        act = work.acts.get(data["call"])
        told = {"agent_runtime.call": data["call"], "agent_runtime.attempt": data["attempt"]}
        if act is None:
            work.span.add_event("call.in_doubt", {**told, "gen_ai.tool.name": data["tool"]})
        else:
            act.doubt = True
            act.span.add_event("call.in_doubt", told)

    # What is open.

    def _act(self, work: _Work, call: str, name: str, kind: Any, attempt: int, attributes: Attributes) -> None:
        """An act begins, or is tried again, in this very task: its span is current until the act is over."""
        act = work.acts.get(call)
        current = self._contexts.get_current()
        if act is None:
            parent = work.context if current is work.before else current
            span = self._tracer.start_span(name, context=parent, kind=kind, attributes={**attributes, **work.common})
            act = work.acts[call] = _Act(span, current, self._trace.set_span_in_context(span, parent))
        else:
            act.before, act.doubt, act.ended_ns = current, False, None
            act.span.add_event("attempt", {"agent_runtime.attempt": attempt})
        act.span.set_attribute("agent_runtime.attempt", attempt)
        self._contexts.attach(act.context)

    def _back(self, work: _Work, call: str) -> _Act | None:
        """The act is over, in the task that made it."""
        act = work.acts.get(call)
        if act is not None:
            act.ended_ns = wall_ns()
            self._put_back(act.before, act.context)
        return act


_STOPPED = ("CancelledError", "GeneratorExit")
"""What stops a worker from outside: the run goes on with another."""

_NOTED = frozenset({"approval.requested", "approval.decided", "approval.refused", "call.settled"})
"""Events that are events of the span of an owner's work, too."""
_FIELDS = {
    "call": "agent_runtime.call",
    "tool": "gen_ai.tool.name",
    "decision": "agent_runtime.verdict",
    "how": "agent_runtime.settled",
}

_TELL: Mapping[str, Callable[[OpenTelemetrySink, _Work, Mapping[str, Any]], None]] = {
    "run.recovered": OpenTelemetrySink._recovered,
    "run.failed": OpenTelemetrySink._failed,
    "decision.asked": OpenTelemetrySink._asked,
    "decision.returned": OpenTelemetrySink._answered,
    "decision.made": OpenTelemetrySink._decided,
    "call.started": OpenTelemetrySink._started,
    "call.returned": OpenTelemetrySink._returned,
    "call.done": OpenTelemetrySink._done,
    "call.in_doubt": OpenTelemetrySink._in_doubt,
}


def _as_text(value: object) -> str:
    return json.dumps(value, default=repr)


def _load() -> tuple[ModuleType, ModuleType]:
    try:
        from opentelemetry import context, trace
    except ImportError as error:
        raise InvalidSetting(
            "OpenTelemetrySink needs opentelemetry-api, which is not installed; pip install 'durable-agent-runtime[otel]'"
        ) from error
    return trace, context
