"""Traces of a real job, at a real collector: every step is one, with spans of all three services. And its log, as JSON."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

from headrace.cli.example import example_data
from headrace.observability import tracing
from tests.collector import Span, collecting

pytestmark = pytest.mark.integration

TRAINER, PREPROCESSOR, REORDER = "headrace-trainer", "headrace-preprocessor", "headrace-reorder"
WHO_DOES_WHAT = {
    ("step", REORDER),
    ("plan", REORDER),
    ("commit", REORDER),
    ("probe", PREPROCESSOR),
    ("read", PREPROCESSOR),
    ("decode", PREPROCESSOR),
    ("fetch", TRAINER),
    ("wait", TRAINER),
    ("commit", TRAINER),
}


def named(spans: Iterable[Span], *names: str) -> list[Span]:
    return [span for span in spans if span.name in names]


@pytest.mark.slow
def test_a_step_is_a_trace_with_spans_of_all_services(cluster, spec, monkeypatch) -> None:
    samples = {}
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("HEADRACE_LOG_FORMAT", "json")
        cluster.start_reorder()
        cluster.add_preprocessors(1)
        job = cluster.submit(spec("traced", sources=[{"path": str(example_data() / "charts-00000.tar")}]))
        with tracing.exported("trainer"):
            steps = cluster.consume(job, lambda step: samples.update({step.index: step.num_samples}))
        services = [cluster.reorder, *cluster.preprocessors]
        for process in services:
            process.terminate()
        for process in services:
            process.wait(timeout_s=10.0)

    traces = defaultdict(list)
    for span in collector.spans:
        traces[span.trace].append(span)
    assert collector.paths == {"/v1/traces"}
    assert sorted(spans[0].attributes["step"] for spans in traces.values()) == steps
    for spans in traces.values():
        (root,) = named(spans, "step")
        assert {(span.name, span.service) for span in spans} == WHO_DOES_WHAT
        assert (root.parent, {span.parent for span in spans if span is not root}) == ("", {root.id})
        assert len({span.id for span in spans}) == len(spans)
        assert {(span.attributes["job"], span.attributes["step"]) for span in spans} == {(job, root.attributes["step"])}
        assert all(span.start_ns <= span.end_ns for span in spans)
        assert {span.name for span in spans if span.error} <= {"fetch"}  # it may come before the order to decode
        samples_of = {span.attributes["part"]: span.attributes["samples"] for span in named(spans, "decode")}
        assert {span.attributes["part"] for span in named(spans, "fetch")} == samples_of.keys()
        assert {span.attributes["part"] for span in named(spans, "read")} == samples_of.keys()
        assert sum(samples_of.values()) == samples[root.attributes["step"]]
        assert sum(span.attributes["samples"] for span in named(spans, "probe")) >= samples[root.attributes["step"]]
        assert all(span.attributes["preprocessor"] for span in spans if span.service == PREPROCESSOR)
    instances = {(span.service, span.instance) for span in collector.spans}
    assert Counter(service for service, _ in instances) == {TRAINER: 1, PREPROCESSOR: 1, REORDER: 1}

    lines = cluster.reorder.log.read_text().splitlines()
    events = [json.loads(line) for line in lines if " listening on " not in line]
    assert [(event["job"], event["step"]) for event in events if event["event"] == "committed"] == [(job, step) for step in steps]
