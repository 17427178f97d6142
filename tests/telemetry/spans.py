"""A tracer whose spans are kept, and counted while they are open."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from agent_runtime.telemetry_otel import OpenTelemetrySink


class Open(SpanProcessor):
    """The spans that were started and have not ended."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        assert span.context is not None
        self.names[span.context.span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        assert span.context is not None
        del self.names[span.context.span_id]


class Spans:
    """A tracer provider of the real SDK, its exporter in memory, and a sink on it."""

    def __init__(self, **options: object) -> None:
        self.exporter = InMemorySpanExporter()
        self.open = Open()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(self.open)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer: Tracer = provider.get_tracer("tests")
        self.sink = OpenTelemetrySink(self.tracer, **options)  # type: ignore[arg-type]  # options of the sink

    @property
    def all(self) -> list[ReadableSpan]:
        """Every span that has ended, in the order in which they did."""
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        found = self.named(name)
        assert len(found) == 1, f"{len(found)} spans {name!r} among {[span.name for span in self.all]}"
        return found[0]


def attributes(span: ReadableSpan) -> Mapping[str, object]:
    return dict(span.attributes or {})


def own(span: ReadableSpan) -> tuple[int, int]:
    """The trace and the id of a span."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent(span: ReadableSpan) -> tuple[int, int] | None:
    """The trace and the id of a span's parent."""
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    """The traces and ids that a span links to."""
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def calls_of(spans: list[ReadableSpan]) -> list[object]:
    """The calls that have a span, in the order in which those ended."""
    return [attributes(span)["agent_runtime.call"] for span in spans if span.name.startswith("execute_tool")]
