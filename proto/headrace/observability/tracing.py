"""Traces: what every process did for a step of a job, as OpenTelemetry's spans. docs/tracing.md lists them.

A trace is a step's. Its id and that of its root span are derived from the step's name, JOB/UID/GENERATION/STEP, with which the
tickets of all its parts begin. So every process that works for a step knows its trace, no context travels beside the
messages, and a reorder service that takes over goes on with the same traces.

Where no endpoint is configured nothing of OpenTelemetry is imported, and a span costs about a microsecond.
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
    """Send this process's spans during the block, in the background, to where OTEL_EXPORTER_OTLP_ENDPOINT says.

    Without it, and without OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, there are none. Raises UserError where they cannot be sent.
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
    """What the block does is a span of the step's trace, and an error that ends the block is the span's.

    `of`: a part's ticket or the name of a step; empty: there is no span.
    """
    since_s = time.perf_counter()
    try:
        yield
    except BaseException as err:
        _send(name, of, since_s, attributes, error=f"{type(err).__name__}: {err}")
        raise
    _send(name, of, since_s, attributes)


def ended(name: str, of: str, since_s: float, **attributes: str | int) -> None:
    """A span ends now that began at `since_s` of time.perf_counter. `of`: as for `span`. The one called ROOT has no parent."""
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
    """Of a step's trace and of its root span."""
    digest = hashlib.blake2b(step.encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:])


def _endpoint() -> str:
    """The URL that the environment names; empty: none. Raises UserError for one that is none, or for another protocol."""
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
