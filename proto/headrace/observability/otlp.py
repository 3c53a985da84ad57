"""Export of spans to a collector over OTLP, by OpenTelemetry's SDK. `tracing` imports it only if an endpoint is configured."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from headrace.observability.logs import pairs

log = logging.getLogger(__name__)

LAST_SPANS = "last spans"  # name of the thread that sends the remaining spans at the end
FLUSH_S = 1.0  # how long a process that ends waits for the collector
_SCOPE = InstrumentationScope("headrace")


class SpanExporter:
    """An exporter that sends spans to a collector over HTTP, from a background thread. Thread-safe.

    While the collector does not accept spans, the SDK keeps the latest 2048. Headers, certificates, time limits and the sampler
    come from OpenTelemetry's environment variables. A sampler of a share of the traces (OTEL_TRACES_SAMPLER=traceidratio) takes
    the same traces in every process.
    """

    def __init__(self, endpoint: str, service: str) -> None:
        """`endpoint`: the URL to post spans to. `service`: reorder, preprocessor or trainer."""
        instance = f"{socket.gethostname()}-{os.getpid()}"
        self._resource = Resource.create({"service.name": f"headrace-{service}", "service.instance.id": instance})
        self._sampler = TracerProvider(resource=self._resource, shutdown_on_exit=False).sampler
        self._spans = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # log lost spans, but not every failed attempt
        log.info("tracing %s", pairs(endpoint=endpoint, instance=instance))

    def export(
        self,
        name: str,
        *,
        trace_id: int,
        root_id: int,
        is_root: bool,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, str | int],
        error: str,
    ) -> None:
        """Queue a finished span for sending, unless the sampler drops its trace.

        `root_id`: span id of the trace's root, the parent of every other span. `start_ns`, `end_ns`: nanoseconds since the epoch.
        `error`: message of the error that ended the span; empty: none.
        """
        if self._sampler.should_sample(None, trace_id, name).decision is not Decision.RECORD_AND_SAMPLE:
            return
        sampled = TraceFlags(TraceFlags.SAMPLED)
        root = SpanContext(trace_id, root_id, is_remote=not is_root, trace_flags=sampled)
        span_id = secrets.randbits(64) or 1  # 0 is not a valid id
        self._spans.on_end(
            ReadableSpan(
                name,
                context=root if is_root else SpanContext(trace_id, span_id, is_remote=False, trace_flags=sampled),
                parent=None if is_root else root,
                resource=self._resource,
                attributes=attributes,
                status=Status(StatusCode.ERROR, error) if error else Status(),
                start_time=start_ns,
                end_time=end_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    def close(self) -> None:
        """Send the remaining spans; those that the collector has not accepted within FLUSH_S are lost."""
        ending = threading.Thread(target=self._spans.shutdown, name=LAST_SPANS, daemon=True)
        ending.start()
        ending.join(FLUSH_S)
