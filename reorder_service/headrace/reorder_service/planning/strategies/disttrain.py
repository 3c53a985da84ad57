"""Strategy `disttrain`: both halves of DistTrain's disaggregated data reordering (section 6).

1. Intra-microbatch reordering (Alg. 2) balances the replicas: LPT on a sample's forward and backward seconds in all units.
   The listing sorts ascending; the 4/3 bound that the text cites holds for descending order, which is used here.
2. Microbatches have a fixed number of samples, as in the paper, which does not say how to choose them. Consecutive samples of
   Alg. 2's sorted result would be alike and the microbatches as different as can be, so a replica's samples are dealt in that
   order to its K microbatches in turn: each gets one of the K largest, one of the next K, and so on.
3. Inter-microbatch reordering (Alg. 3, see `microbatch_order`) orders the microbatches. It knows only one chain of stages.
   Several encoders run in parallel in front of the LLM, so only the slowest over the whole batch counts: the others wait for
   it. A microbatch's size is its time in that encoder and in the generator, as in the paper, or its time in the LLM if the
   model has neither.

The intervals that Alg. 3 fills are a notion of 1F1B. Under interleaved 1F1B a microbatch has several, see `microbatch_order`.
Eager-forward 1F1B and GPipe run forwards earlier and have no such intervals, and the zero-bubble schedule also fills them with
weight gradients: these three get the order of 1F1B.
"""

from __future__ import annotations

import numpy as np

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.batch import Batch, Floats, Slots
from headrace.reorder_service.planning.search.microbatch_order import microbatch_positions
from headrace.reorder_service.planning.search.number_partition import descending, lpt, rank_in_bin


def plan_slots(batch: Batch) -> Slots:
    """Plan a batch with DistTrain's two reorderings: (U, n) slots, equal in all units.

    Empty microbatches are the last of their replica.
    """
    replicas, microbatches = batch.topology.replicas, batch.topology.microbatches
    backward = np.array([batch.execution.backward_factor(unit) for unit in batch.units])
    seconds = batch.costs * (1.0 + backward)[:, None]
    total = seconds.sum(axis=0)
    heaviest_first = descending(total)
    replica = lpt(total, heaviest_first, replicas)
    slot = replica * microbatches + rank_in_bin(heaviest_first, replica) % microbatches

    unordered = np.broadcast_to(slot, batch.costs.shape)
    loads, occupied = batch.loads(unordered), batch.occupied(unordered[:1])
    chain = _chain(batch, seconds)
    sized = [u for u in chain if batch.units[u] != LLM] or chain
    counts = np.array([batch.topology.stages[batch.units[u]] for u in chain])
    forward = np.repeat(loads[:, :, chain] / counts, counts, axis=2)
    sizes = loads[:, :, sized].sum(axis=2)
    position = microbatch_positions(forward, sizes, occupied, np.repeat(backward[chain], counts), batch.execution.chunks)
    position += microbatches * np.arange(replicas)[:, None]
    return np.broadcast_to(position.ravel()[slot], batch.costs.shape)


def _chain(batch: Batch, seconds: Floats) -> list[int]:
    """Return the indices of the units that a microbatch passes in sequence: the slowest encoder, the LLM, the generator."""
    encoders = [batch.units.index(unit) for unit in batch.topology.encoders]
    slowest = [max(encoders, key=lambda u: seconds[u].sum())] if encoders else []
    return slowest + [u for u, unit in enumerate(batch.units) if unit in (LLM, GENERATOR)]
