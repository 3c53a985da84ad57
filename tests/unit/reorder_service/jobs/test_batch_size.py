"""A job is told, once its first window is planned, if its global batch is too small for its pipelines."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.plan import Topology
from headrace.reorder_service.jobs.batch_size import BatchSize
from headrace.spec import JobSpec, parse_spec

STAGES = {"vision": 3, "llm": 9}
TOPOLOGY = Topology(replicas=1, microbatches=4, stages=STAGES)


def job(global_batch: int, **fields: Any) -> JobSpec:
    topology = {"replicas": 1, "microbatches": 4, "stages": STAGES}
    document = {"name": "j", "sources": [{"path": "/data"}], "topology": topology, "global_batch": global_batch, "window": 2}
    return parse_spec({**document, **fields})


def judged(spec: JobSpec) -> str:
    """The warning after two steps of samples, a tenth of which have an image that takes ten times as long as their text."""
    rng = np.random.default_rng(0)
    size = BatchSize(spec.window)
    for is_last in (False, True):
        vision = np.where(rng.random(200) < 0.1, 10.0, 0.0)
        assert size.add({"vision": vision, "llm": np.ones(200)}) is is_last
    size.judge(spec)
    assert not size.add({"vision": np.ones(1), "llm": np.ones(1)}), "it is judged once"
    return size.warning


def test_a_global_batch_whose_images_come_and_go_is_below_the_least_and_told_the_number() -> None:
    warning = judged(job(4))
    assert warning.startswith("global_batch is 4, below ")
    least = int(warning.split("below ")[1].split(",")[0])
    assert least > 4
    assert f"set global_batch to {least} or more" in warning


def test_ranks_that_have_all_units_have_no_stages_to_divide() -> None:
    assert judged(job(4, execution={"trainer": "colocated"})) == ""


def test_a_job_that_is_planned_for_other_trainers_meanwhile_is_judged_by_these() -> None:
    submitted = job(4, execution={"units": {"vision": {"dp": 3}}})
    assert judged(submitted.planned_for(submitted.topology, job(4).execution)) == judged(job(4))


def test_costs_of_a_former_topology_are_left_out() -> None:
    spec, former = job(4), {"encoder": np.ones(9), "llm": np.ones(9)}
    size = BatchSize(spec.window)
    assert [size.add(former), size.add(former)] == [False, True]
    size.judge(spec)
    assert size.warning == ""


def test_steps_without_a_good_sample_say_nothing() -> None:
    spec = job(4)
    size = BatchSize(spec.window)
    assert [size.add({}), size.add({})] == [False, True]
    size.judge(spec)
    assert size.warning == ""
