"""Traces over OTLP/HTTP, by the OpenTelemetry SDK: the one file that imports it (extra `otel`).

Spans are exported in batches by a thread of the SDK. A backend that is away or slow costs spans, which are dropped when
the queue is full, and no request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence

from gateway.core.log.rollout import RolloutRecord
from gateway.core.log.spans import TraceSpan, spans_of
from gateway.errors import ConfigError

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
except ImportError as error:
    raise ConfigError(f"BATON_OTEL_URL needs {error.name}; `pip install '.[otel]'` adds it") from None

SPANS_MAX = 8_192  # that wait for export
DELAY_MS = 1_000
EXPORT_S = 10.0
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Traces:
    """Exports the spans of finished requests. `headers`: `name=value`, comma-separated. `models`: the kinds of workers
    that are models. Raises ConfigError for headers of another form."""

    def __init__(
        self, url: str, headers: str, service: str, version: str, models: Collection[str], *, content: bool
    ) -> None:
        pairs = [one.partition("=") for one in headers.split(",") if one.strip()]
        if any(not equals for _, equals, _ in pairs):
            raise ConfigError("BATON_OTEL_HEADERS: write name=value, several with commas between them")
        named = {name.strip(): value.strip() for name, _, value in pairs}
        exporter = OTLPSpanExporter(endpoint=url, headers=named, timeout=EXPORT_S)
        self._processor = BatchSpanProcessor(exporter, max_queue_size=SPANS_MAX, schedule_delay_millis=DELAY_MS)
        self._resource = Resource.create({"service.name": service, "service.version": version})
        self._scope = InstrumentationScope("baton", version)
        self._models = frozenset(models)
        self._content = content

    def finished(self, record: RolloutRecord, children: Sequence[RolloutRecord]) -> None:
        """Queue the spans of a request that was settled and logged."""
        for span in spans_of(record, children, self._models, content=self._content):
            self._processor.on_end(self._readable(span))

    async def close(self) -> None:
        """Export what waits, for at most EXPORT_S."""
        thread = threading.Thread(target=self._processor.shutdown, daemon=True)  # it may take 30 s and one export
        thread.start()
        await asyncio.to_thread(thread.join, EXPORT_S)

    def _readable(self, span: TraceSpan) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=_context(span.trace_id, span.span_id, is_remote=False),
            parent=None if span.parent_id is None else _context(span.trace_id, span.parent_id, is_remote=True),
            resource=self._resource,
            attributes=span.attributes,
            kind=SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
            status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.started_us * 1_000,
            end_time=span.finished_us * 1_000,
            instrumentation_scope=self._scope,
        )


def _context(trace_id: str, span_id: str, *, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, SAMPLED)
