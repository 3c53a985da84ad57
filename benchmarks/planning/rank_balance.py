"""Each microbatch balanced over the replicas, as Megatron-Bridge's reorder buffer does, beside plans of a whole global batch.

Their rule, as read in NVIDIA-NeMo/Megatron-Bridge (src/megatron/bridge/data/megatron_mimo/reorder_buffer.py, commit 4058f1b): a
microbatch of all replicas keeps its samples, and each replica has as many of them. The costliest sample first, each goes to the
replica with the least cost that has room. The cost of a sample is one number: its vision patches, or these and its tokens, each
times a weight. Here the seconds of the encoder stand for the patches, and those of all units for the best choice of weights.

Only the rule is compared: all plans are simulated on the same pipelines, and neither side's exchange of samples takes time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from benchmarks.planning.inputs import FAMILIES, SEED, Family, fill_free_bound_s
from benchmarks.planning.quality import MICROBATCHES, REPLICAS
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import progress
from headrace.plan import LLM, Topology
from headrace.reorder_service.planning.batch import Batch, Floats, Slots, make_batch
from headrace.reorder_service.planning.simulation.prediction import predict_step
from headrace.reorder_service.planning.strategies import arrival, run_strategy

THEIR_SHAPE: Mapping[str, int] = {"encoder": 1, LLM: 2}
"""Stages as they support them: one of the encoder, several of the LLM."""
OURS = ("disttrain", "joint", "auto")


def sections() -> Iterator[Section]:
    """Return the steps of both sides on pipelines as they support them, and on the eight stages of the other tables."""
    for shape in (THEIR_SHAPE, None):
        rows = [row for family in FAMILIES for row in _rows(family, shape or family.stages)]
        what = "encoder 1 stage, llm 2, as Megatron-Bridge supports it" if shape else "8 stages, several of them the encoder's"
        yield Section(
            title=f"SIMULATED 1F1B step over the fill-free bound: n=512, D={REPLICAS}, K={MICROBATCHES}, {what}", rows=rows
        )


def balance_each_microbatch(batch: Batch, costs: Floats) -> Slots:
    """Deal samples as they arrive, and then move those of each microbatch between the replicas by the rule: (U, n) slots.

    costs: (n,) one number for each sample. Where the replicas cannot have as many samples, the first ones have one more.
    """
    replicas, microbatches = batch.topology.replicas, batch.topology.microbatches
    index = arrival.plan_slots(batch)[0] % microbatches
    slots = np.empty(index.size, np.int64)
    for k in range(microbatches):
        samples = np.flatnonzero(index == k)
        room = np.array([len(part) for part in np.array_split(samples, replicas)])
        load = np.zeros(replicas)
        for sample in samples[np.argsort(-costs[samples], kind="stable")]:
            replica = int(np.argmin(np.where(room > 0, load, np.inf)))
            slots[sample] = replica * microbatches + k
            load[replica] += costs[sample]
            room[replica] -= 1
    return np.broadcast_to(slots, batch.costs.shape)


def _rows(family: Family, stages: Mapping[str, int]) -> Iterator[Row]:
    progress(f"rank balance: {family.name}, {sum(stages.values())} stages")
    table = family.table()
    topology = Topology(replicas=REPLICAS, microbatches=MICROBATCHES, stages=dict(stages))
    batch = make_batch(table.sample_ids, table.costs, topology, SEED)
    bound = fill_free_bound_s(table, topology)
    theirs = {
        "by vision alone, its default": balance_each_microbatch(batch, table.costs["encoder"]),
        "by the seconds of all units": balance_each_microbatch(batch, batch.costs.sum(axis=0)),
    }
    steps = {name: predict_step(batch, slots).iteration_s / bound for name, slots in theirs.items()}
    yield Row(name=f"{family.name}, arrival order", value=predict_step(batch, arrival.plan_slots(batch)).iteration_s / bound)
    for name, step in steps.items():
        yield Row(name=f"{family.name}, Megatron-Bridge's rule {name}", value=step)
    best = Rival(value=min(steps.values()), source="the better of theirs")
    for strategy in OURS:
        chosen, slots = run_strategy(strategy, batch)
        yield Row(
            name=f"{family.name}, {strategy}",
            value=predict_step(batch, slots).iteration_s / bound,
            rival=best,
            goal=at_most(best.value) if strategy == "auto" else None,
            detail="" if chosen == strategy else chosen,
        )
