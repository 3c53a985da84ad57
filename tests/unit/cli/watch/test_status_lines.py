"""One line for each job, rank, node and preprocessor: a state in a word, numbers that grep finds, no control characters."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.watch.status_lines import (
    job_line,
    node_line,
    pipelines_line,
    preprocessor_line,
    rank_line,
    status_lines,
)
from headrace.rates import Look
from headrace.snapshot import NOBODY
from headrace.v1 import jobs_pb2
from headrace.v1.common_pb2 import Occupancy
from headrace.v1.jobs_pb2 import JobStatus, NodeStatus, PreprocessorStatus, RankStatus
from headrace.v1.membership_pb2 import Node, Pipeline, PipelineStage, Snapshot


def member(name: str = "p1", **fields: Any) -> PreprocessorStatus:
    counted = {"slots": 4, "leases": 3, "kept": 12, "store_bytes": 5, "store_budget_bytes": 100, "occupancy": Occupancy()}
    return PreprocessorStatus(preprocessor=name, **counted | fields)


def status(job: str = "charts", **fields: Any) -> JobStatus:
    running = {"state": jobs_pb2.JOB_STATE_RUNNING, "committed_steps": 41, "num_steps": 120, "generation": 3, "num_shards": 12}
    return JobStatus(job=job, leader="10.0.0.1:7070", term=2, **running | fields)


SNAPSHOT = Snapshot(
    generation=6,
    change="d was lost",
    nodes=[Node(name=name) for name in "abc"],
    pipelines=[
        Pipeline(
            stages=[PipelineStage(rank=r, unit="llm", first_layer=a, end_layer=b) for r, a, b in cut], num_microbatches=number
        )
        for cut, number in (([(0, 0, 2), (1, 2, 4)], 8), ([(2, 0, 2), (NOBODY, 2, 4)], 0))
    ],
)


def test_a_preprocessor_is_full_when_its_leases_late_ones_with_them_are_as_many_as_its_slots() -> None:
    assert preprocessor_line(member()) == "preprocessor p1 ready slots=4 busy=3 late=0 kept=12 store=5% rate=0.0/s"
    assert " busy=4[full] late=0 " in preprocessor_line(member(leases=4))
    assert " busy=3[full] late=1 " in preprocessor_line(member(late=1))
    assert preprocessor_line(member(silent=True, store_budget_bytes=0)).startswith("preprocessor p1 silent slots=4")
    assert " store=0% " in preprocessor_line(member(store_budget_bytes=0))


def test_a_job_has_its_state_and_how_far_it_has_come_and_a_failed_one_the_reason() -> None:
    line = "generation=3 steps=41/120 planned=0 samples=0 quarantined=0 shards=0/12 rate=32.0/s"
    assert job_line(status(), 32.0) == f"job charts running {line}"
    assert job_line(status(paused=True), 32.0) == f"job charts paused {line}"
    failed = status(state=jobs_pb2.JOB_STATE_FAILED, num_steps=0, message="no data set at /d")
    assert job_line(failed).startswith("job charts failed generation=3 steps=41/? ")
    assert job_line(failed).endswith(" rate=0.0/s: no data set at /d")


def test_a_rank_is_connected_while_it_reads_plans() -> None:
    rank = RankStatus(rank=7, committed_steps=41, step_s=0.4, data_wait_s=0.1)
    assert rank_line("charts", rank) == "rank charts/7 away next=41 step=0.400s wait=0.100s"
    rank.connected = True
    assert rank_line("charts", rank).startswith("rank charts/7 connected next=41 ")


@pytest.mark.parametrize(
    ("node", "line"),
    [
        (NodeStatus(node="b", connected=True), "node charts/b trains pipeline=0 layers=llm[2:4]"),
        (NodeStatus(node="c", connected=True, leaving=True), "node charts/c leaves pipeline=1 layers=llm[0:2]"),
        (NodeStatus(node="a"), "node charts/a away pipeline=0 layers=llm[0:2]"),
        (NodeStatus(node="e", connected=True), "node charts/e waits"),
    ],
)
def test_a_node_has_its_part_of_its_pipeline(node: NodeStatus, line: str) -> None:
    assert node_line("charts", node, SNAPSHOT) == line


def test_nodes_that_cannot_go_on_save_and_the_pipelines_say_why_there_are_none() -> None:
    ended = Snapshot(generation=7, nodes=[Node(name="a")], error="1 nodes are left")
    assert node_line("charts", NodeStatus(node="a", connected=True), ended) == "node charts/a saves"
    line = "pipelines charts none generation=7 nodes=0 microbatches=0: 1 nodes are left"
    assert pipelines_line("charts", ended) == line


def test_a_pipeline_that_lacks_a_node_stands_in_brackets() -> None:
    line = "pipelines charts formed generation=6 nodes=2+(1) microbatches=8+0: d was lost"
    assert pipelines_line("charts", SNAPSHOT) == line


def test_the_service_comes_first_and_its_preprocessors_last_once_for_all_jobs() -> None:
    members = [member("p2"), member("p1")]
    jobs = [status("a", preprocessors=members, ranks=[RankStatus(rank=0)]), status("b", preprocessors=members)]
    nodes = [NodeStatus(node=name, connected=True) for name in ("e", "b", "a")]
    jobs.append(status("c", preprocessors=members, snapshot=SNAPSHOT, nodes=nodes))
    lines = list(status_lines([[Look(at_s=0.0, status=job)] for job in jobs]))
    assert lines[0] == "service 10.0.0.1:7070 leads term=2 preprocessors=2"
    assert [" ".join(line.split()[:2]) for line in lines[1:]] == [
        *("job a", "rank a/0", "job b", "job c", "pipelines c", "node c/a", "node c/b", "node c/e"),
        *("preprocessor p1", "preprocessor p2"),
    ]
    assert list(status_lines([])) == ["service without jobs"]


def test_rates_are_those_between_the_looks() -> None:
    before = status(preprocessors=[member(samples_decoded=100)], committed_samples=16)
    after = status(preprocessors=[member(samples_decoded=340)], committed_samples=80)
    _, job, preprocessor = status_lines([[Look(at_s=1.0, status=before), Look(at_s=3.0, status=after)]])
    assert job.endswith(" rate=32.0/s")
    assert preprocessor.endswith(" rate=120.0/s")


def test_names_and_sentences_bring_no_control_characters() -> None:
    bad = "x\x1b[2J\ny"
    job = status(message=bad, preprocessors=[member(bad)], nodes=[NodeStatus(node=bad)], snapshot=Snapshot(change=bad))
    assert all(line.isprintable() for line in status_lines([[Look(at_s=0.0, status=job)]]))
