"""Strategy `disttrain`: DistTrain's disaggregated data reordering (section 6), both halves of it.

1. Intra-microbatch reordering (Alg. 2) balances the replicas: LPT on the total cost of a sample. The listing sorts
   ascending; the 4/3 bound that the text cites holds for descending order, which is what we use.
2. Microbatches have a fixed number of samples, as in the paper; which ones, it leaves open. Consecutive samples of Alg. 2's
   sorted result would be alike and the microbatches as different as can be, so a replica's samples are dealt out to its
   K microbatches in that order, round and round: each gets one of the K largest, one of the next K, and so on.
3. Inter-microbatch reordering (Alg. 3, see `microbatch_order`) orders the microbatches by encoder and generator time.
"""

from __future__ import annotations

import numpy as np

from headrace.plan import LLM
from reorder_service.planning.batch import Batch, Slots
from reorder_service.planning.microbatch_order import fill_intervals_of_all
from reorder_service.planning.partition import descending, lpt, rank_in_bin
from reorder_service.planning.simulator import BACKWARD_FACTOR, Work


def reorder(batch: Batch) -> Slots:
    """Slots of the samples, equal in all units. Microbatches without a sample are the last of their replica."""
    replicas, microbatches = batch.topology.replicas, batch.topology.microbatches
    total = batch.costs.sum(axis=0)
    heaviest_first = descending(total)
    replica = lpt(total, heaviest_first, replicas)
    microbatch = rank_in_bin(heaviest_first, replica) % microbatches

    unordered = np.broadcast_to(replica * microbatches + microbatch, batch.costs.shape)
    loads, occupied = batch.loads(unordered), batch.occupied(unordered)
    work = Work.of_units(loads, occupied, batch.topology.stages)
    sizes = loads[:, :, [unit != LLM for unit in batch.units]].sum(axis=2)
    position = fill_intervals_of_all(work.forward_s, sizes, occupied, BACKWARD_FACTOR)
    return np.broadcast_to(replica * microbatches + position[replica, microbatch], batch.costs.shape)
