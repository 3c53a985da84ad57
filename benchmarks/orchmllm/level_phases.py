"""SIMULATED steps of OrchMLLM's models, with the paper's ways of balancing: what its figures 1, 10 and 11 compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.orchmllm.mixtures import ALL_PACKED, ALL_PADDED, batch_of, planned_for
from benchmarks.report import Row, Section, at_most, more_than
from benchmarks.timing import progress
from headrace.cli.experiment.orchmllm_experiments import LARGE_RANKS, MICRO_RANKS, TAILORED
from headrace.cli.experiment.orchmllm_samples import SETTINGS
from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.simulation.phase_step import predict_phases
from headrace.reorder_service.planning.strategies import arrival, llm_only, phases

TAILORED_GOAL = 1.02
BATCHES = 4

WAYS: dict[str, Callable[[Batch], Slots]] = {
    "tailored": lambda batch: phases.plan_slots(planned_for(batch, TAILORED)),
    "all as padded": lambda batch: phases.plan_slots(planned_for(batch, ALL_PADDED)),
    "all as without padding": lambda batch: phases.plan_slots(planned_for(batch, ALL_PACKED)),
    "llm alone": llm_only.plan_slots,
    "none": arrival.plan_slots,
}
BETTER = {
    "all as padded": "tailored",
    "all as without padding": "tailored",
    "llm alone": "all as without padding",
    "none": "llm alone",
}
"""By way, one that the paper found to be faster."""


def sections(*, quick: bool) -> Iterator[Section]:
    """Sums over phases of the slowest rank's time, over the sum of the means: 1 is a step in which nobody waits or pads."""
    for ranks in (MICRO_RANKS,) if quick else (MICRO_RANKS, LARGE_RANKS):
        rows = []
        for model, setting in SETTINGS.items():
            per_rank = setting.micro_batch if ranks == MICRO_RANKS else setting.mini_batch
            progress(f"phases: {model}, {ranks:,} ranks x {per_rank}")
            batches = [batch_of(model, ranks, per_rank, seed) for seed in range(1 if quick or ranks > MICRO_RANKS else BATCHES)]
            over = {name: over_mean(batches, way) for name, way in WAYS.items()}
            rows += [
                Row(
                    name=f"{model}, {per_rank} samples a rank, {name}",
                    value=value,
                    goal=more_than(over[BETTER[name]]) if name in BETTER else at_most(TAILORED_GOAL),
                    detail=f"{value / over['tailored']:.2f} x tailored",
                )
                for name, value in over.items()
            ]
        title = f"SIMULATED step over the mean of its phases, padding included, {ranks:,} ranks; goals are the paper's order"
        yield Section(title=title, rows=rows)


def over_mean(batches: list[Batch], way: Callable[[Batch], Slots]) -> float:
    """Return the seconds of the batches' steps over those of ranks that share the samples evenly and pad none."""
    took = sum(predict_phases(batch, way(batch)).iteration_s for batch in batches)
    return took / sum(float((batch.costs.sum(axis=1) * batch.step_factors).sum()) / batch.topology.replicas for batch in batches)
