"""The trace of a step: what a viewer of the Trace Event Format finds in it."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli.planning.outcome import Outcome, plan_timed
from headrace.cli.planning.trace_events import MAX_REPLICAS, write_trace
from headrace.plan import Topology
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.execution import Execution


def trace(
    out: Path, strategy: str, topology: Topology, num_samples: int, execution: Execution | None = None
) -> tuple[Outcome, Any]:
    rng = np.random.default_rng(1)
    costs = {unit: rng.lognormal(0, 1, num_samples) for unit in topology.stages}
    batch = make_batch(np.arange(num_samples) + 100, costs, topology, 0, execution=execution)
    outcome = Outcome.of(plan_timed(batch, strategy)[0], batch)
    assert write_trace(out, outcome) == out
    return outcome, json.loads(out.read_text())


TOPOLOGY = Topology(replicas=3, microbatches=5, stages={"encoder": 2, "llm": 2})


def test_replicas_are_processes_and_stages_are_threads(tmp_path: Path) -> None:
    _, document = trace(tmp_path / "t.json", "random", TOPOLOGY, 60)
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in document["traceEvents"] if e["ph"] == "M"}
    assert [names[r, 0, "process_name"]["name"] for r in range(3)] == ["replica 0", "replica 1", "replica 2"]
    assert [names[1, s, "thread_name"]["name"] for s in range(4)] == [
        "stage 0 (encoder 0)",
        "stage 1 (encoder 1)",
        "stage 2 (llm 0)",
        "stage 3 (llm 1)",
    ]


@pytest.mark.parametrize("execution", [Execution(), Execution(schedule="interleaved", chunks=2), Execution(schedule="gpipe")])
def test_slices_are_the_actions_and_a_stage_does_one_at_a_time(tmp_path: Path, execution: Execution) -> None:
    outcome, document = trace(tmp_path / "t.json", "random", TOPOLOGY, 60, execution)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 3 * 4 * 5 * 2 * execution.chunks
    by_thread = defaultdict(list)
    for event in slices:
        by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(spans))
    last = max(end for spans in by_thread.values() for _, end in spans)
    assert last == pytest.approx(outcome.predicted.iteration_s * 1e6)
    assert document["otherData"]["iteration_s"] == outcome.predicted.iteration_s


def test_a_slice_tells_its_microbatch_its_samples_and_whether_it_matters(tmp_path: Path) -> None:
    outcome, document = trace(tmp_path / "t.json", "random", TOPOLOGY, 60)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    first = next(event for event in slices if (event["pid"], event["tid"], event["ts"]) == (0, 0, 0.0))
    assert (first["name"], first["cat"]) == ("F 0 (encoder)", "forward")
    assert {event["cat"] for event in slices} == {"forward", "backward"}
    assert first["args"]["samples"] == len(outcome.plan.replicas[0][0].units["encoder"]) == 4
    forwards = [event for event in slices if event["name"].startswith("F ")]
    assert sum(event["args"]["samples"] for event in forwards if event["tid"] == 3) == 60
    critical = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["args"]["critical"])
    assert critical[0][0] == 0.0
    assert critical[-1][1] == pytest.approx(outcome.predicted.iteration_s * 1e6)


def test_weights_that_are_put_off_are_slices_too(tmp_path: Path) -> None:
    execution = Execution(schedule="zero-bubble", backward_factors={"encoder": 1.0}, weight_gradient_factors={"encoder": 0.0})
    _, document = trace(tmp_path / "t.json", "random", TOPOLOGY, 60, execution)
    weights = [event["name"] for event in document["traceEvents"] if event.get("cat") == "weight"]
    assert sorted(weights) == sorted(f"W {microbatch} (llm)" for microbatch in range(5) for _ in range(3 * 2)), "none if frozen"


def test_what_takes_no_time_is_no_slice(tmp_path: Path) -> None:
    _, document = trace(tmp_path / "t.json", "random", TOPOLOGY, 60, Execution(backward_factors={"encoder": 0.0}))
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 3 * 5 * (2 * 1 + 2 * 2), "frozen encoder stages have a forward only"
    assert min(event["dur"] for event in slices) > 0


def test_deferred_samples_are_counted_where_they_wait(tmp_path: Path) -> None:
    topology = Topology(replicas=1, microbatches=6, stages={"encoder": 1, "llm": 2})
    outcome, document = trace(tmp_path / "t.json", "entrain", topology, 40)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X" and event["name"].startswith("F ")]
    assert outcome.num_deferred() > 0
    assert sum(event["args"]["deferred"] for event in slices if event["tid"] == 0) == outcome.num_deferred()
    assert not any(event["args"]["deferred"] for event in slices if event["tid"] > 0)


def test_of_many_replicas_the_slowest_are_traced(tmp_path: Path) -> None:
    topology = Topology(replicas=MAX_REPLICAS + 5, microbatches=1, stages={"llm": 1})
    outcome, document = trace(tmp_path / "t.json", "random", topology, 100)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len({event["pid"] for event in slices}) == MAX_REPLICAS
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(outcome.predicted.iteration_s * 1e6)
