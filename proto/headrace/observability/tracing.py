"""Traces: what every process did for a step of a job, as OpenTelemetry spans. docs/tracing.md lists them.

There is one trace per step. Its id and that of its root span are derived from the step's name, JOB/UID/GENERATION/STEP, with
which the tickets of all its parts begin. So every process that works for a step knows its trace, messages carry no trace context,
and a reorder service that takes over continues the same traces.

Unless an endpoint is configured, nothing of OpenTelemetry is imported, and a span costs about a microsecond.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.observability.otlp import SpanExporter

ROOT = "step"

_exporter: SpanExporter | None = None


@contextlib.contextmanager
def exported(service: str) -> Iterator[None]:
    """Send this process's spans to OTEL_EXPORTER_OTLP_ENDPOINT during the block, in the background. `service`: its name.

    If neither that nor OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, no spans are recorded. Raises UserError if the endpoint or
    protocol is not supported, or OpenTelemetry is not installed.
    """
    global _exporter
    endpoint = _endpoint()
    if not endpoint:
        yield
        return
    try:
        from headrace.observability.otlp import SpanExporter
    except ModuleNotFoundError as err:
        raise UserError(f"tracing to {endpoint} needs {err.name}: install it with `pip install 'headrace[trace]'`") from err
    exporter = _exporter = SpanExporter(endpoint, service)
    try:
        yield
    finally:
        _exporter = None
        exporter.close()


@contextlib.contextmanager
def span(name: str, of: str, **attributes: str | int) -> Iterator[None]:
    """Record the block as a span in the trace of a step; an error that ends the block becomes the span's error.

    `of`: a part's ticket or the name of a step; empty: no span is recorded.
    """
    since_s = time.perf_counter()
    try:
        yield
    except BaseException as err:
        _send(name, of, since_s, attributes, error=f"{type(err).__name__}: {err}")
        raise
    _send(name, of, since_s, attributes)


def ended(name: str, of: str, since_s: float, **attributes: str | int) -> None:
    """Record a span that began at `since_s` of time.perf_counter and ends now. A span with the name ROOT is its trace's root.

    `of`: a part's ticket or the name of a step; empty: no span is recorded.
    """
    _send(name, of, since_s, attributes)


def _send(name: str, of: str, since_s: float, attributes: dict[str, str | int], error: str = "") -> None:
    if _exporter is None or not of:
        return
    end_ns = time.time_ns()
    job, uid, generation, step, *part = of.split("/")
    about: dict[str, str | int] = {"job": job, "generation": int(generation), "step": int(step)}
    if part:
        about["part"] = "/".join(part).partition(".")[0]  # without the signature, which is a secret
    trace_id, root_id = _ids(f"{job}/{uid}/{generation}/{step}")
    _exporter.export(
        name,
        trace_id=trace_id,
        root_id=root_id,
        is_root=name == ROOT,
        start_ns=end_ns - int(1e9 * (time.perf_counter() - since_s)),
        end_ns=end_ns,
        attributes=about | attributes,
        error=error,
    )


def _ids(step: str) -> tuple[int, int]:
    """Return the id of a step's trace (128 bits) and that of its root span (64 bits), both derived from the step's name."""
    digest = hashlib.blake2b(step.encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:])


def _endpoint() -> str:
    """Return the URL for spans that the environment names; empty: none. Raises UserError if it is no HTTP URL, or for another
    protocol than http/protobuf."""
    base, endpoint = (os.environ.get(name, "") for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
    endpoint = endpoint or (f"{base.rstrip('/')}/v1/traces" if base else "")
    protocols = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, protocols)), "http/protobuf")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise UserError(f"OTEL_EXPORTER_OTLP_ENDPOINT={base or endpoint} must be a URL such as http://127.0.0.1:4318")
    if endpoint and protocol != "http/protobuf":
        raise UserError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} is not spoken here, only http/protobuf: unset it, and name the collector's "
            "port for that, mostly 4318"
        )
    return endpoint
