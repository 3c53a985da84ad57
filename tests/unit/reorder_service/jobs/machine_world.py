"""Trainers whose actions take what a `Correction` says of them, and that report it as real ones do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.measured import ALL_UNITS, MeasuredWork
from headrace.reorder_service.jobs.formation import Formation
from headrace.reorder_service.jobs.job_execution import execution_of
from headrace.reorder_service.jobs.planned_step import PlannedStep, RankCommit
from headrace.reorder_service.planning.batch import make_batch, slots_of
from headrace.reorder_service.planning.cost_model.correction import UNCORRECTED, Correction
from headrace.reorder_service.planning.simulation.colocated_step import predict
from headrace.reorder_service.planning.simulation.simulator import simulate
from headrace.reorder_service.planning.simulation.work import Work
from headrace.reorder_service.planning.unequal_pipelines import PipelineShape, for_pipelines, simulated_work
from headrace.sample import Probe, SampleRef
from headrace.schedule import Kind
from headrace.spec import JobSpec, parse_spec

STAGES = {"vision": 1, "llm": 2}
REPLICAS, MICROBATCHES, SAMPLES = 2, 4, 32


def job(strategy: str = "auto", **execution: Any) -> JobSpec:
    topology = {"replicas": REPLICAS, "microbatches": MICROBATCHES, "stages": STAGES}
    document = {"name": "j", "sources": [{"path": "/data"}], "topology": topology, "model": "7b", "strategy": strategy}
    return parse_spec({**document, "execution": execution})


def planned(spec: JobSpec, index: int = 0, correction: Correction = UNCORRECTED) -> PlannedStep:
    """A planned step, of whose samples every second one has an image. Each step has samples of its own."""
    rng = np.random.default_rng(index)
    step = PlannedStep(index=index, refs=[SampleRef(sample_id=i, shard=0, row=i) for i in range(SAMPLES)])
    for i in range(SAMPLES):
        patches = (4 * int(rng.integers(64, 512)),) if i % 2 else ()
        step.probes[i] = Probe(
            name=f"{index}/{i}", num_tokens=int(rng.integers(100, 2000)), num_targets=10, image_patches=patches, mel_frames=()
        )
    step.sample_ids = np.arange(SAMPLES)
    step.correction = correction
    plan = step.make_plan(spec, spec.topology, vocab=0, generation=1)
    step.cut(plan, part_samples=16, ticket=str)
    return step


def form(spec: JobSpec, step: PlannedStep, pipelines: Sequence[PipelineShape]) -> None:
    """Plan a step again for pipelines of nodes."""
    formation = Formation(generation=1, first_step=0, pipelines=tuple(pipelines))
    step.adopt(step.make_plan(spec, spec.topology, formation, vocab=0, generation=1), formation)


def train(spec: JobSpec, step: PlannedStep, truth: Correction) -> None:
    """Commit a step as trainers would whose actions take what `truth` makes of the estimates."""
    assert step.plan is not None
    topology, formation = step.plan.topology, step.formation
    execution = truth.execution(execution_of(spec, topology))
    execution = replace(execution, in_flight=step.plan.in_flight)
    costs = truth.seconds(step.estimated)
    batch = make_batch(
        step.sample_ids, costs, topology, 0, execution=execution if formation is None else for_pipelines(execution)
    )
    slots = slots_of(step.plan, step.sample_ids)
    if formation is not None:
        iteration_s, work = 0.0, []
        for p, shape in enumerate(formation.pipelines):
            rows = np.flatnonzero(slots[0] // topology.microbatches == p)
            simulated = simulated_work(batch.of_rows(rows, shape.topology), slots[:, rows] % topology.microbatches, shape)
            iteration_s = max(iteration_s, simulate(simulated).iteration_s)
            work += [replace(one, replica=p) for one in _of_stages(simulated)]
    elif execution.colocated:
        iteration_s, work = predict(batch, slots).iteration_s, list(_of_ranks(batch.loads(slots), execution))
    else:
        simulated = Work.of(batch, slots)
        iteration_s, work = simulate(simulated).iteration_s, list(_of_stages(simulated))
    step.commits[0] = RankCommit(
        rejected=(),
        loss=1.0,
        step_s=iteration_s + truth.unexplained_s + 0.5,
        data_wait_s=0.5,
        measured=tuple(work),
    )


def _of_stages(work: Work) -> Iterator[MeasuredWork]:
    chunks, seen = work.execution.chunks, Counter[str]()
    for s, unit in enumerate(np.repeat(list(work.topology.stages), list(work.topology.stages.values())).tolist()):
        for replica, of_replica in enumerate(work.seconds[:, :, s]):
            for kind in Kind:
                taken = np.flatnonzero(of_replica[:, kind])
                if taken.size:
                    yield MeasuredWork(
                        unit=unit,
                        replica=replica,
                        stage=seen[unit],
                        kind=kind,
                        microbatches=tuple(taken.tolist()),
                        seconds=tuple((chunks * of_replica[taken, kind]).tolist()),
                    )
        seen[unit] += 1


def _of_ranks(loads: Any, execution: Any) -> Iterator[MeasuredWork]:
    factors = np.array([1.0 + execution.backward_factor(unit) for unit in STAGES])
    seconds = (loads * factors).sum(axis=2)
    if execution.colocated == "microbatch":  # ranks wait for the slowest
        seconds = np.tile(seconds.max(axis=0), (len(seconds), 1))
    for rank, of_rank in enumerate(seconds.tolist()):
        yield MeasuredWork(
            unit=ALL_UNITS,
            replica=rank,
            stage=0,
            kind=Kind.FORWARD,
            microbatches=tuple(range(len(of_rank))),
            seconds=tuple(of_rank),
        )
