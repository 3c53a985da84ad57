"""How many ranks share the sequence of each sample in the LLM, where ranks have all units: context parallelism on FSDP ranks.

All sequences of a microbatch run together, and each of its ranks has an equal part of a sequence's work.
"""

from __future__ import annotations

import numpy as np

from headrace.block_distribution import BLOCK
from headrace.plan import LLM, StepPlan
from headrace.reorder_service.planning.batch import Batch, Floats, Ints
from headrace.reorder_service.planning.form_loads import weights_alone


def most_degrees(batch: Batch) -> Ints:
    """Return the (n,) most ranks that may share each sample's sequence: `cp`, or all, but each has a block of it at least.

    Raises ValueError where there is a `cp`, and the tokens of the samples are unknown.
    """
    cp, count = batch.execution.cp, batch.sample_ids.size
    if cp == 1:
        return np.ones(count, np.int64)
    if batch.tokens is None:
        raise ValueError(f"cp {cp} of the LLM needs to know how many tokens each sample has")
    blocks = np.maximum(1, -(-batch.tokens // BLOCK))
    return np.minimum(blocks, batch.topology.replicas if cp == "auto" else cp)


def sequence_seconds(batch: Batch) -> Floats:
    """Return the (n,) forward seconds of each sample in the LLM, under the LLM's form, which adds up."""
    options = batch.execution.post_balancing
    return weights_alone(options.forms.get(LLM, "no_padding"), batch.costs[batch.units.index(LLM)], options.quadratic)


def degrees_of(plan: StepPlan, sample_ids: Ints) -> Ints | None:
    """Return the (n,) degrees that a finished plan has of these samples, in the form of `Batch.degrees`."""
    if not plan.degrees:
        return None
    return np.array([plan.degrees.get(sample, 1) for sample in sample_ids.tolist()], np.int64)


def in_parts(seconds: Floats, slots: Ints, degrees: Ints | None, microbatches: int) -> tuple[Floats, Ints]:
    """Return (n,) seconds and slots of samples as those of their equal parts, one on each of the ranks that share one.

    slots: of the first of its ranks; the others follow it.
    """
    if degrees is None:
        return seconds, slots
    ends = np.cumsum(degrees)
    further = np.arange(ends[-1]) - np.repeat(ends - degrees, degrees)
    return np.repeat(seconds / degrees, degrees), np.repeat(slots, degrees) + further * microbatches
