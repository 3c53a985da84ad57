"""Strategy `entrain`: Entrain's hierarchical microbatch assignment (dissertation, sections 4.3 and 4.5, Alg. 4).

1. Replicas (4.3): samples are taken by falling encoder cost, each to the replica with the least LLM load so far.
2. Microbatches (4.5.1): a replica uses K_eff of its K microbatches, so few that the largest sample does not make a longest
   microbatch by itself. Samples with much LLM work are spread first, then the others, both by falling encoder cost and each to
   the microbatch with the least encoder load. This is list scheduling: the longest microbatch is within 2 - 1/K_eff of the
   optimum. The paper's K_eff is each replica's own; by default all replicas use the largest of theirs (`Stratification`). Their
   own were 15, 20, 23 and 26 for 512 samples of synthchart, D = 4 and K = 32, so that microbatches of one replica held 1.7 times
   the LLM work of another's. The smallest mostly levels encoders further, but makes steps up to 1.5 times as long.
3. Deferral (4.5.2, see `deferral`): microbatches are paired, and the first of a pair passes LLM work on to the second.

Several encoders count as one: their costs are added, and a sample is in the same microbatch in all of them. A generator keeps
the LLM's microbatch; its cost is ignored, as the paper has no generator. Samples with the same encoder cost are taken by
falling LLM cost, so without any encoder cost each step is LPT on LLM costs. If few samples carry most of the encoder's work,
K_eff is small: that is the paper's rule, and it makes mixtures with many text-only samples slow.
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.search.deferral import defer_all
from headrace.reorder_service.planning.search.number_partition import descending, lpt
from headrace.reorder_service.planning.slot_order import samples_by_slot


def plan_slots(batch: Batch) -> Slots:
    """Plan a batch with Entrain's hierarchical assignment, as its execution's `stratification` says: (U, n) slots.

    A sample has one slot in all encoders, and one in the LLM and the generator: the same, or if it is deferred, the next of the
    same replica.
    """
    return plan_first(batch, batch.topology.replicas)


def plan_first(batch: Batch, num_replicas: int) -> Slots:
    """Plan replicas 0 .. num_replicas - 1 only: the (U, n) slots of `plan_slots` there, and -1 for samples of other replicas."""
    replicas, microbatches = batch.topology.replicas, batch.topology.microbatches
    llm_row = batch.units.index(LLM)
    encoder, llm = batch.costs[:llm_row].sum(axis=0), batch.costs[llm_row]
    by_llm = descending(llm)
    heaviest_first = by_llm[descending(encoder[by_llm])]
    replica = lpt(llm, heaviest_first, replicas)

    members = heaviest_first[samples_by_slot(replica[heaviest_first], replicas)]
    counts = np.bincount(replica, minlength=replicas)
    starts = np.concatenate([[0], np.cumsum(counts)])
    encoder, llm = encoder[members], llm[members]
    options = batch.execution.stratification
    used = effective_counts(encoder, starts, microbatches)
    if options.common_count:
        used = np.minimum(used.max(), counts)
    used, starts, counts = used[:num_replicas], starts[: num_replicas + 1], counts[:num_replicas]
    members, encoder, llm = members[: starts[-1]], encoder[: starts[-1]], llm[: starts[-1]]
    microbatch = stratify(encoder, llm, starts, used, options.coarse_quantile)
    places = defer_all(llm, starts, microbatch, used)

    slots = np.full(batch.costs.shape, -1)
    encoder_slot, llm_slot = places + np.repeat(np.arange(num_replicas) * microbatches, counts)
    slots[:llm_row, members] = encoder_slot
    slots[llm_row:, members] = llm_slot
    return slots


@kernel
def stratify(encoder: Floats, llm: Floats, starts: Ints, used: Ints, coarse_quantile: float) -> Ints:
    """Assign every replica's samples to its microbatches, those with much LLM work first (section 4.5.1).

    encoder, llm: (n,) costs, with samples sorted by replica and, within a replica, in the order of assignment. starts: (D + 1,),
    replica r has the samples starts[r] .. starts[r + 1] - 1. used: (D,) number of microbatches that each replica uses, at most
    that of its samples. coarse_quantile: samples above this quantile of their replica's LLM costs come first. Among equal loads,
    the microbatch with fewer samples is taken, then the lower number. A replica without any encoder cost is balanced by LLM cost.
    Returns the (n,) microbatch of each sample within its replica.
    """
    microbatch = np.empty(encoder.size, np.int64)
    for r in range(used.size):
        first, last = starts[r], starts[r + 1]
        if first == last:
            continue
        weights = encoder[first:last] if encoder[first:last].max() > 0 else llm[first:last]
        threshold = np.sort(llm[first:last])[int(coarse_quantile * (last - first - 1))]
        loads, counts = np.zeros(used[r]), np.zeros(used[r], np.int64)
        for coarse in (True, False):
            for t in range(last - first):
                if (llm[first + t] > threshold) == coarse:
                    lightest = _lightest(loads, counts)
                    microbatch[first + t] = lightest
                    loads[lightest] += weights[t]
                    counts[lightest] += 1
    return microbatch


@kernel
def effective_counts(encoder: Floats, starts: Ints, num_microbatches: int) -> Ints:
    """Return the (D,) K_eff of each replica, 0 for one without samples; encoder, starts as in `stratify`."""
    counts = np.zeros(starts.size - 1, np.int64)
    for r in range(counts.size):
        if starts[r] < starts[r + 1]:
            counts[r] = effective_microbatches(encoder[starts[r] : starts[r + 1]], num_microbatches)
    return counts


@kernel
def effective_microbatches(encoder: Floats, num_microbatches: int) -> int:
    """Return K_eff: the number of microbatches that encoder costs (n,) fill to the height of the largest cost.

    It is at most K and n and at least 1; without any encoder cost, it is K, or n if that is less. The quotient may be a rounding
    error below a whole number, so 1e-9 is added before it is rounded down.
    """
    largest = encoder.max()
    fills = int(min(encoder.sum() / largest + 1e-9, encoder.size)) if largest > 0 else encoder.size
    return max(1, min(num_microbatches, fills))


@kernel
def _lightest(loads: Floats, counts: Ints) -> int:
    best = 0
    for k in range(1, loads.size):
        if loads[k] < loads[best] or (loads[k] == loads[best] and counts[k] < counts[best]):
            best = k
    return best
