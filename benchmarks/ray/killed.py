"""How long a trainer waits for its next steps when the Ray node of one of two preprocessors is killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.preprocess.ray_actors import COUNT, OnRay, services_on_ray
from benchmarks.preprocess.workload import job_spec
from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress
from headrace import trainer
from headrace.jobs_client import JobsClient
from headrace.trainer import StepLoader
from headrace.trainer.loading.steps import Step
from tests.frameworks.ray_nodes import PREPROCESSOR, until

GOAL_S = 2.0
COMPUTING_S = 0.4
"""That the EMULATED model takes for a step, which two preprocessors decode in less."""
FIRST, BEFORE, AFTER = 6, 12, 20
"""Steps that are not counted, and those before and after the kill that are."""
GLOBAL_BATCH = 16


def section(python: Path, photos: Path, *, rounds: int) -> Section:
    """All rounds with one cluster, to which a node is added for each that is killed."""
    before_s: list[float] = []
    longest_s: list[float] = []
    with services_on_ray(python, photos, spare_nodes=1) as on_ray:
        job = on_ray.services.submit(job_spec(photos, global_batch=GLOBAL_BATCH, topology={"replicas": 1, "microbatches": 1}))
        with trainer.connect(on_ray.services.endpoint, job=job) as loader:
            steps = iter(loader)
            _waits_s(steps, loader, FIRST)
            for number in range(rounds):
                progress(f"a killed node, round {number + 1} of {rounds}")
                before_s += _waits_s(steps, loader, BEFORE)
                on_ray.nodes.kill(on_ray.nodes.hosts(PREPROCESSOR)[0])
                longest_s.append(max(_waits_s(steps, loader, AFTER)))
                _restore(on_ray, job, number)
    rounds_s = f"rounds: {', '.join(f'{wait_s:.2f}' for wait_s in longest_s)}"
    rows = [
        Row(
            name="longest wait for a step after the kill, median",
            value=median(longest_s),
            unit="s",
            goal=at_most(GOAL_S),
            detail=rounds_s,
        ),
        Row(name="the same, longest of the rounds", value=max(longest_s), unit="s", goal=at_most(GOAL_S)),
        Row(name="wait for a step before, median", value=median(before_s), unit="s", detail=f"longest {max(before_s):.3f} s"),
    ]
    how = f"the model is EMULATED: {COMPUTING_S:g} s a step of {GLOBAL_BATCH} samples"
    return Section(title=f"The Ray node of one of two preprocessors is killed (SIGKILL to all its processes); {how}", rows=rows)


def _waits_s(steps: Iterator[Step], loader: StepLoader, count: int) -> list[float]:
    """Train so many steps, and return how long each was waited for."""
    waits_s = []
    for _ in range(count):
        begun_s = time.perf_counter()
        step = next(steps)
        for _ in step:
            pass
        waits_s.append(time.perf_counter() - begun_s)
        time.sleep(COMPUTING_S)
        loader.commit(step)
    return waits_s


def _restore(on_ray: OnRay, job: str, number: int) -> None:
    """Add a node, and wait until all preprocessors are connected again."""
    on_ray.nodes.add()
    on_ray.driver.until(" lost preprocessor=", count=number + 1)
    with JobsClient(on_ray.services.endpoint) as client:
        until(lambda: len(client.show(job).preprocessors) == COUNT, on_ray.driver.log.read_text)
