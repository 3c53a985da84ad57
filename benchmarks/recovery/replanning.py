"""The step after a loss: EMULATED beside its forecast, the best plan that a search finds, and microbatches that are dealt out.

The pipelines are those that Oobleck's rules leave of two, with as many microbatches as these are told. Every pipeline runs on its
own, as pipelines meet at the end of a step only: its processes, messages (gloo) and schedule are real, their computing is sleep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from benchmarks.planning.inputs import SEED, SYNTHCHART
from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress
from headrace.cli.planning.emulated_ranks import EmulatedRanks
from headrace.cli.planning.outcome import Outcome
from headrace.plan import Microbatch, Predicted, StepPlan, Topology
from headrace.reorder_service.planning import warm_up
from headrace.reorder_service.planning.batch import Batch, make_batch, slots_of
from headrace.reorder_service.planning.simulation.simulator import simulate
from headrace.reorder_service.planning.strategies import plan_of
from headrace.reorder_service.planning.unequal_pipelines import PipelineShape, plan_for_pipelines, simulated_work
from headrace.reorder_service.recovery.instantiation import distribute, instantiate
from headrace.reorder_service.recovery.pipeline_templates import ModelProfile, Template, plan_templates
from headrace.reorder_service.recovery.reconfiguration import Pipeline, reconfigure
from headrace.trainer.pipeline.emulated_stage import EMULATED
from headrace.trainer.recovery.layout import deal

LAYERS = {"encoder": 2, "llm": 12}
NUM_NODES, MAX_FAILURES, NODE_LAYERS = 10, 1, 6
MICROBATCHES, SAMPLES = 32, 256
TIME_SCALE = 0.3
"""Of the table's seconds: a step takes some 15 s."""
RATIO_GOAL = 1.05
SEARCHED = tuple(product(("taper", "joint", "entrain"), range(3), (-2, -1, 0, 1, 2)))
"""Strategy, seed, and microbatches that the first pipeline takes from the second, of every plan of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A batch, and the pipelines that are left to compute it."""

    batch: Batch
    shapes: tuple[PipelineShape, ...]
    title: str


def sections(*, quick: bool) -> Iterator[Section]:
    """One step by each of two strategies, after a loss that leaves unequal pipelines."""
    warm_up()
    loss = _loss()
    rows: list[Row] = []
    for strategy in ("auto",) if quick else ("auto", "entrain"):
        progress(f"{EMULATED} a step by {strategy} after a loss")
        plan = plan_for_pipelines(strategy, loss.batch, loss.shapes)
        predicted = _predicted(plan)
        dealt_s = _dealt_s(strategy, loss)
        rows += [
            Row(
                name=f"{strategy}, forecast over the fill-free bound",
                value=predicted.iteration_s / predicted.lower_bound_s,
                unit="x",
            ),
            Row(
                name=f"{strategy}, microbatches of a former plan dealt out, over the forecast",
                value=dealt_s / predicted.iteration_s,
                unit="x",
            ),
        ]
        if strategy == "auto":
            tried = SEARCHED[::15] if quick else SEARCHED
            best_s = min(_searched(loss, tried))
            detail = f"of {len(tried)} plans: strategies, seeds, shares of the microbatches"
            rows.append(
                Row(
                    name="auto, forecast over the best plan found",
                    value=predicted.iteration_s / best_s,
                    unit="x",
                    goal=at_most(RATIO_GOAL),
                    detail=detail,
                )
            )
        measured_s = max(_emulated(plan, loss))
        ratio = max(measured_s / predicted.iteration_s, predicted.iteration_s / measured_s)
        detail = f"{measured_s:.2f} s, forecast {predicted.iteration_s:.2f} s"
        rows.append(
            Row(
                name=f"{EMULATED} {strategy}, beside its forecast", value=ratio, unit="x", goal=at_most(RATIO_GOAL), detail=detail
            )
        )
    yield Section(title=loss.title, rows=rows)


def _loss() -> Loss:
    """Templates from what the samples take, two pipelines, and what is left of them without one node."""
    table = SYNTHCHART.table()
    costs = {unit: TIME_SCALE * column[:SAMPLES] for unit, column in table.costs.items()}
    topology = Topology(replicas=2, microbatches=MICROBATCHES // 2, stages=dict.fromkeys(costs, 1))
    batch = make_batch(table.sample_ids[:SAMPLES], costs, topology, SEED)
    seconds = np.concatenate([np.full(count, costs[unit].sum() * 3 / MICROBATCHES / count) for unit, count in LAYERS.items()])
    profile = ModelProfile(
        units=LAYERS, seconds=seconds[:, None], gpu_bytes=np.ones((len(seconds), 1), np.int64), memory_bytes=NODE_LAYERS
    )
    templates = plan_templates(profile, NUM_NODES, MAX_FAILURES)
    names = iter(f"node{number}" for number in range(NUM_NODES))
    start = instantiate(templates, NUM_NODES, MICROBATCHES, 1)
    before = [Pipeline(template=one, nodes=tuple(next(names) for _ in range(one.num_nodes))) for one in start.templates]
    after = [one.template for one in reconfigure(templates, before, lost=[before[0].nodes[-1]]).pipelines]
    counts = distribute(after, MICROBATCHES)
    sizes = ["+".join(str(one.num_nodes) for one in some) for some in (start.templates, after)]
    title = f"synthchart, {SAMPLES} samples, {MICROBATCHES} microbatches; pipelines of {sizes[0]} nodes, then {sizes[1]}"
    shapes = tuple(_shape(template, count) for template, count in zip(after, counts, strict=True))
    return Loss(batch=batch, shapes=shapes, title=f"A step after a loss: {title}")


def _shape(template: Template, microbatches: int) -> PipelineShape:
    of_unit = {unit: [stage.seconds for stage in template.stages if stage.unit == unit] for unit in LAYERS}
    stages = {unit: tuple(seconds / sum(all_) for seconds in all_) for unit, all_ in of_unit.items()}
    return PipelineShape(stages=stages, microbatches=microbatches)


def _searched(loss: Loss, tried: Sequence[tuple[str, int, int]]) -> Iterator[float]:
    first, *rest = loss.shapes
    for strategy, seed, more in tried:
        shapes = [replace(first, microbatches=first.microbatches + more), *rest]
        shapes[1] = replace(shapes[1], microbatches=shapes[1].microbatches - more)
        yield _predicted(plan_for_pipelines(strategy, replace(loss.batch, seed=seed), shapes)).iteration_s


def _dealt_s(strategy: str, loss: Loss) -> float:
    """Seconds of the step if the microbatches of a plan for two equal pipelines are dealt out by their lengths."""
    batch = loss.batch
    whole = [microbatch for replica in plan_of(strategy, batch).replicas for microbatch in replica]
    cost = dict(zip(batch.sample_ids.tolist(), batch.costs.sum(axis=0).tolist(), strict=True))
    seconds = [sum(cost[sample] for sample in microbatch.sample_ids) for microbatch in whole]
    dealt = deal(seconds, [shape.microbatches for shape in loss.shapes], range(len(whole)))
    longest_s = 0.0
    for shape, numbers in zip(loss.shapes, dealt, strict=True):
        together = [Microbatch(units=dict.fromkeys(batch.units, whole[number].sample_ids)) for number in numbers]
        part, plan = _alone(batch, replace(shape, microbatches=len(together)), together)
        longest_s = max(longest_s, simulate(simulated_work(part, slots_of(plan, part.sample_ids), shape)).iteration_s)
    return longest_s


def _emulated(plan: StepPlan, loss: Loss) -> Iterator[float]:
    """Measured seconds of every pipeline."""
    for shape, microbatches in zip(loss.shapes, plan.replicas, strict=True):
        assert all(max(shares) - min(shares) < 1e-3 for shares in shape.stages.values()), "emulated stages of a unit are alike"
        part, alone = _alone(loss.batch, shape, microbatches)
        outcome = Outcome.of(alone, part)
        with EmulatedRanks(shape.topology.num_stages) as ranks:
            ranks.warm_up(outcome)
            yield ranks.run(outcome).iteration_s


def _alone(batch: Batch, shape: PipelineShape, microbatches: Sequence[Microbatch]) -> tuple[Batch, StepPlan]:
    """Return the samples of one pipeline as a batch, and their plan."""
    plan = StepPlan(strategy="", seed=batch.seed, topology=shape.topology, replicas=[microbatches])
    rows = np.flatnonzero(np.isin(batch.sample_ids, plan.sample_ids()))
    costs = dict(zip(batch.units, batch.costs[:, rows], strict=True))
    return make_batch(batch.sample_ids[rows], costs, shape.topology, batch.seed, execution=batch.execution), plan


def _predicted(plan: StepPlan) -> Predicted:
    assert plan.predicted is not None, "plans for pipelines are simulated"
    return plan.predicted
