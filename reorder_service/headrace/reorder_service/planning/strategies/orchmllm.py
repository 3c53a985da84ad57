"""Strategy `orchmllm`: OrchMLLM's batch post-balancing (sections 5 and 6), which balances every unit separately.

In OrchMLLM a step is one batch per rank (K = 1), and the samples of a unit are balanced over all D ranks by the form that
suits the unit (see `post_balancing`). There a form balances sequence lengths; here it balances the costs of a unit, which are
proportional to the lengths or describe better how long a sample takes.

The paper does not treat pipelines (K > 1). A sample may be processed on different replicas by different units, but its
microbatch index must not decrease on the way. So this index is fixed once, by the LLM, which is balanced over the replicas and
then, in each replica, over its microbatches. Every other unit balances the samples of one index after the other, starting with
the index of the costliest sample, and gives the heaviest batch of an index to the replica with the least work so far. Replicas
that already have their share of the unit's work get no more. Neither do those whose LLM has no sample in that microbatch, so
that no unit has an empty microbatch in front of an occupied one. That costs balance only if there are few samples, or if one
sample outweighs a replica.

A job's strategy `orchmllm` is `plan_slots` with its defaults: the other three forms, the permutation over nodes and `compose` are
only for direct callers of this module.

`compose` gives the all-to-all of encoder outputs (section 6). Raw inputs need none: ranks fetch the samples that they encode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.search.node_permutation import Traffic, permute_heuristically
from headrace.reorder_service.planning.search.post_balancing import FORMS, TOLERANCE, Form, post_balance

Arrival = Literal["round_robin", "contiguous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostBalancing:
    """Options of OrchMLLM's post-balancing. The defaults balance costs and do not permute the replicas over the nodes."""

    forms: Mapping[str, Form] = field(default_factory=dict)
    """Post-balancing form of each unit; a unit that is not named has "no_padding", as microbatches are packed.

    A convolutional audio encoder pads its attention and so needs "fourth".
    """
    tolerance: float = TOLERANCE
    """Tolerance with which the "third" form compares sums, as a share of a bin's mean load."""
    ranks_per_node: int = 0
    """Ranks of a node, for a permutation of each unit's replicas after which little data crosses nodes.

    A replica counts as one rank. With 0, nothing is permuted.
    """
    arrival: Arrival = "round_robin"
    """Which rank sampled sample i and has its data: rank i mod D, or with "contiguous" each rank n / D samples in a row."""

    def __post_init__(self) -> None:
        unknown = {unit: form for unit, form in self.forms.items() if form not in FORMS}
        if unknown:
            raise ValueError(f"forms are {', '.join(FORMS)}, got {unknown}")
        if not self.tolerance > 0 or self.ranks_per_node < 0:
            raise ValueError(
                f"tolerance must be positive and ranks_per_node not negative, got {self.tolerance} and {self.ranks_per_node}"
            )
        if self.arrival not in ("round_robin", "contiguous"):
            raise ValueError(f"samples arrive round_robin or contiguous, got {self.arrival!r}")


DEFAULT = PostBalancing()


def plan_slots(batch: Batch, options: PostBalancing = DEFAULT) -> Slots:
    """Plan a batch with OrchMLLM's post-balancing: (U, n) slots.

    Units may differ in the replica of a sample, never in the index of its microbatch. Raises ValueError if a form is chosen for
    a unit that the topology lacks.
    """
    if not options.forms.keys() <= set(batch.units):
        raise ValueError(f"units are {', '.join(batch.units)}, got forms for {', '.join(options.forms)}")
    num_microbatches = batch.topology.microbatches
    slots = np.empty(batch.costs.shape, np.int64)
    llm = batch.units.index(LLM)
    slots[llm] = _permuted(_by_replica(batch, llm, options), llm, None, batch, options)
    index = slots[llm] % num_microbatches
    occupied = batch.occupied(slots[llm])
    for u in range(len(batch.units)):
        if u != llm:
            slots[u] = _permuted(_by_index(batch, u, index, occupied, options), u, occupied, batch, options)
    return slots


def arrival_ranks(num_samples: int, num_ranks: int, arrival: Arrival) -> Ints:
    """Return the (n,) rank that sampled each sample."""
    samples = np.arange(num_samples)
    return samples % num_ranks if arrival == "round_robin" else samples * num_ranks // num_samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Composition:
    """The single all-to-all that moves encoder outputs from the encoder's replicas to the LLM's."""

    traffic: Traffic
    moved: float
    """Volume of the data that changes its replica."""
    extra_if_reset: float
    """Additional volume that would move with two all-to-alls, the first one back to the ranks that sampled the data."""


def compose(batch: Batch, slots: Slots, unit: str, arrival: Arrival = "round_robin") -> Composition:
    """Undo the rearrangement of encoder `unit` and apply that of the LLM in a single all-to-all.

    Volumes are in `transfer_bytes`, or in costs if those are unknown.
    """
    replicas = slots // batch.topology.microbatches
    encoder, llm = replicas[batch.units.index(unit)], replicas[batch.units.index(LLM)]
    origin = arrival_ranks(llm.size, batch.topology.replicas, arrival)
    volume = _volume(batch, batch.units.index(unit))
    traffic = Traffic.of_samples(encoder, llm, volume, batch.topology.replicas)
    moved = traffic.moved()
    reset = float(volume[encoder != origin].sum() + volume[origin != llm].sum())
    return Composition(traffic=traffic, moved=moved, extra_if_reset=reset - moved)


def _volume(batch: Batch, unit: int) -> Floats:
    """Return the (n,) amount of data to move for each sample: the unit's transfer bytes or, if unknown, its costs.

    A cost stands in for the data as both are in proportion to the sample's length.
    """
    known: Floats = batch.transfer_bytes[unit]
    costs: Floats = batch.costs[unit]
    return known if known.any() else costs


def _by_replica(batch: Batch, unit: int, options: PostBalancing) -> Ints:
    """Balance samples over the replicas, then each replica's samples over its microbatches: (n,) slots."""
    costs, form = batch.costs[unit], options.forms.get(batch.units[unit], "no_padding")
    num_replicas, num_microbatches = batch.topology.replicas, batch.topology.microbatches
    replica = post_balance(form, costs, num_replicas, options.tolerance)
    slots = replica * num_microbatches
    if num_microbatches > 1:
        for _, samples in _groups(replica, num_replicas):
            slots[samples] += post_balance(form, costs[samples], num_microbatches, options.tolerance)
    return slots


def _by_index(batch: Batch, unit: int, index: Ints, occupied: NDArray[np.bool_], options: PostBalancing) -> Ints:
    """Balance the samples of each microbatch index over the replicas that have this microbatch: (n,) slots.

    index: (n,) microbatch index of each sample. occupied: (D, K) microbatches that have a sample in the LLM.
    """
    costs, form = batch.costs[unit], options.forms.get(batch.units[unit], "no_padding")
    slots = np.empty_like(index)
    work, share = np.zeros(batch.topology.replicas), costs.sum() / batch.topology.replicas
    groups = sorted(_groups(index, batch.topology.microbatches), key=lambda group: -costs[group[1]].max())
    for k, samples in groups:
        replicas = np.flatnonzero(occupied[:, k] & (work < share))
        if replicas.size == 0:
            replicas = np.flatnonzero(occupied[:, k])
        bins = post_balance(form, costs[samples], replicas.size, options.tolerance)
        loads = np.bincount(bins, weights=costs[samples], minlength=replicas.size)
        replica_of_bin = np.empty_like(replicas)
        replica_of_bin[np.argsort(-loads, kind="stable")] = replicas[np.argsort(work[replicas], kind="stable")]
        work[replica_of_bin] += loads
        slots[samples] = replica_of_bin[bins] * batch.topology.microbatches + k
    return slots


def _groups(label: Ints, count: int) -> Iterator[tuple[int, Ints]]:
    """Yield each label 0 .. count - 1 that occurs, in rising order, with the positions that have it."""
    if count == 1:
        yield 0, np.arange(label.size)
        return
    by_label = np.argsort(label, kind="stable")
    ends = np.cumsum(np.bincount(label, minlength=count)).tolist()
    for i, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if start < end:
            yield i, by_label[start:end]


def _permuted(slots: Ints, unit: int, occupied: NDArray[np.bool_] | None, batch: Batch, options: PostBalancing) -> Ints:
    """Permute the unit's replicas over the nodes so that little data crosses nodes: (n,) slots.

    The slots stay as they are if nodes are not given, or if an empty microbatch would come before an occupied one. occupied:
    (D, K) microbatches that have a sample in the LLM, None for the LLM itself.
    """
    if options.ranks_per_node == 0:
        return slots
    num_replicas, num_microbatches = batch.topology.replicas, batch.topology.microbatches
    replica, index = slots // num_microbatches, slots % num_microbatches
    origin = arrival_ranks(slots.size, num_replicas, options.arrival)
    traffic = Traffic.of_samples(origin, replica, _volume(batch, unit), num_replicas)
    permuted = (
        permute_heuristically(traffic, options.ranks_per_node, batch.seed).rank_of_batch[replica] * num_microbatches + index
    )
    filled = batch.occupied(permuted) | (False if occupied is None else occupied)
    return slots if (filled[:, 1:] > filled[:, :-1]).any() else permuted
