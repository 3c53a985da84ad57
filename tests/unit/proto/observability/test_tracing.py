"""Spans of one process: what they carry, and that a collector that is gone or hangs holds nobody up."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from headrace.errors import UserError
from headrace.observability import tracing
from headrace.observability.otlp import LAST_SPANS
from headrace.ticket import make_ticket, step_of
from tests.collector import collecting

STEP = "demo.v2/1f3a/7/12"
TICKET = make_ticket("demo.v2", "1f3a/7/12/0/1/2", bytes(32))


def test_a_span_says_which_part_of_which_step_and_what_went_wrong(monkeypatch) -> None:
    assert step_of(TICKET) == STEP
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/elsewhere")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        with tracing.exported("trainer"):
            with tracing.span("decode", TICKET, samples=3, preprocessor="p"):
                pass
            with pytest.raises(OSError, match="gone"), tracing.span("read", TICKET):
                raise OSError("the disk is gone")
            with tracing.span("wait", ""):
                pass
            tracing.ended("step", STEP, 0.0, samples=3)
        with tracing.span("decode", TICKET):
            pass  # not exported any more
    decode, read, step = sorted(collector.spans, key=lambda span: span.name)
    assert collector.paths == {"/elsewhere"}
    of_step = {"job": "demo.v2", "generation": 7, "step": 12, "samples": 3}
    assert decode.attributes == of_step | {"part": "0/1/2", "preprocessor": "p"}
    assert (decode.error, read.error) == ("", "OSError: the disk is gone")
    assert step.attributes == of_step
    assert (decode.trace, decode.parent, read.parent, step.parent) == (step.trace, step.id, step.id, "")


def test_another_life_of_a_job_has_other_traces(monkeypatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with tracing.exported("reorder"):
            for step in (STEP, "demo.v2/1f3a/8/12", "demo.v2/ffff/7/12", "demo.v2/1f3a/7/13", STEP):
                tracing.ended("plan", step, 0.0)
    assert len(collector.spans) == 5
    assert len({span.trace for span in collector.spans}) == 4


def test_the_same_traces_are_sampled_in_every_process(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    steps = []
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        for service in ("reorder", "trainer"):
            with tracing.exported(service):
                for step in range(40):
                    tracing.ended("commit", f"job/1f3a/1/{step}", 0.0)
            steps.append(sorted(span.attributes["step"] for span in collector.spans if span.service == f"headrace-{service}"))
    assert steps[0] == steps[1]
    assert 0 < len(steps[0]) < 40


def test_a_collector_that_hangs_holds_nobody_up(monkeypatch) -> None:
    """It answers only after the process has gone on; more spans than are kept do not wait for it either."""
    with collecting() as collector:
        collector.gate.clear()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with tracing.exported("trainer"):
            for _ in range(5000):
                tracing.ended("wait", STEP, 0.0)
            assert collector.asked.wait(timeout=30)
        assert collector.spans == []
        collector.gate.set()
        for thread in threading.enumerate():
            if thread.name == LAST_SPANS:
                thread.join(timeout=30)  # it draws random pauses, which hypothesis minds in the tests that follow


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "127.0.0.1:4318", "127.0.0.1:4318 must be a URL such as http://"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "grpc is not spoken here, only http/protobuf"),
    ],
)
def test_what_cannot_be_sent_is_told_at_once(monkeypatch, variable, value, sentence) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=sentence), tracing.exported("trainer"):
        pass


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")  # as docker compose hands on what is not set
    code = (
        "import sys\n"
        "from headrace.observability import tracing\n"
        "with tracing.exported('trainer'), tracing.span('wait', 'job/1f3a/1/0'): pass\n"
        "sys.exit('opentelemetry' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
