"""A collector of OpenTelemetry's spans: a server that decodes what is posted to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.http_site import serving


@dataclass(frozen=True)
class Span:
    """A span as it came, with the resource that it is of."""

    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str
    service: str
    instance: str


@dataclass
class Collector:
    """What came, and where to send it."""

    spans: list[Span] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    """Requests are answered once it is set."""
    asked: threading.Event = field(default_factory=threading.Event)
    """A request has come."""
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, *args: Any, collector: Collector) -> None:
        self._collector = collector
        super().__init__(*args)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._collector.asked.set()
        self._collector.gate.wait()
        self._collector.paths.add(self.path)
        self._collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for group in request.resource_spans:
        resource = _values(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Span(
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    error=span.status.message,
                    service=resource["service.name"],
                    instance=resource["service.instance.id"],
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on this machine that takes what comes."""
    collector = Collector()
    collector.gate.set()
    with serving(partial(_Handler, collector=collector)) as collector.url:
        yield collector
