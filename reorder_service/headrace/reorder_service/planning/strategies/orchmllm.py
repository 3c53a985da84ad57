"""Strategy `orchmllm`: OrchMLLM's batch post-balancing (sections 5 and 6), every unit balanced for itself.

In OrchMLLM a step is one batch per rank (K = 1), and the samples of a unit are balanced over all D ranks by the form that
suits the unit (see `post_balancing`). What a form balances are sequence lengths there; here it is the costs of a unit, which
are in proportion to them or say better how long a sample takes.

Pipelines (K > 1) the paper leaves out. A sample may pass its units on different replicas, but its microbatch must not fall
on the way. So the index of a sample's microbatch is fixed once, by the LLM, which is balanced over the replicas and then, in
each replica, over its microbatches. Every other unit balances the samples of one index after the other, the index with the
costliest sample first, and gives the heaviest batch of an index to the replica with the least work so far. Replicas that
have their share of the unit's work get no more. So do those whose LLM has no sample in that microbatch: then no unit has an
empty microbatch in front of one that is not. That costs balance only with few samples, or one that outweighs a replica.

Strategy `orchmllm` of a job is `balance` with its defaults: the other three forms and the permutation over nodes are there for
callers of this module only, as is `compose`.

`compose` gives the all-to-all of what encoders computed (section 6). Raw inputs need none: ranks fetch what they encode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.search.node_permutation import Traffic, improve
from headrace.reorder_service.planning.search.post_balancing import FORMS, TOLERANCE, Form, post_balance

Arrival = Literal["round_robin", "contiguous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostBalancing:
    """What can be chosen. The defaults balance costs and leave the batches where they are."""

    forms: Mapping[str, Form] = field(default_factory=dict)
    """Of each unit; "no_padding" where a unit is not named, as microbatches are packed. A convolutional audio encoder pads
    its attention: "fourth"."""
    tolerance: float = TOLERANCE
    """Of the third form, as a share of a bin's mean load."""
    ranks_per_node: int = 0
    """Permute the replicas of each unit so that little data crosses nodes; a replica counts as one rank. 0: do not."""
    arrival: Arrival = "round_robin"
    """Which rank sampled sample i and has its data: rank i mod D, or each rank n / D samples in a row."""

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


def balance(batch: Batch, options: PostBalancing = DEFAULT) -> Slots:
    """Slots of the samples; units differ in the replica of a sample, never in the index of its microbatch.

    Raises ValueError if a form is chosen for a unit that the topology lacks.
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
    """(n,) rank that sampled each sample."""
    samples = np.arange(num_samples)
    return samples % num_ranks if arrival == "round_robin" else samples * num_ranks // num_samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Composition:
    """The all-to-all from the replicas of an encoder to those of the LLM."""

    traffic: Traffic
    moved: float
    """Volume that changes its replica."""
    saved: float
    """What more would move if the data went back to the ranks that sampled it first (two all-to-alls)."""


def compose(batch: Batch, slots: Slots, unit: str, arrival: Arrival = "round_robin") -> Composition:
    """The rearrangement of `unit` undone and that of the LLM done at once, in `transfer_bytes` (in costs if unknown)."""
    replicas = slots // batch.topology.microbatches
    encoder, llm = replicas[batch.units.index(unit)], replicas[batch.units.index(LLM)]
    origin = arrival_ranks(llm.size, batch.topology.replicas, arrival)
    volume = _volume(batch, batch.units.index(unit))
    traffic = Traffic.of_samples(encoder, llm, volume, batch.topology.replicas)
    moved = traffic.moved()
    reset = float(volume[encoder != origin].sum() + volume[origin != llm].sum())
    return Composition(traffic=traffic, moved=moved, saved=reset - moved)


def _volume(batch: Batch, unit: int) -> Floats:
    """(n,) how much data of a sample moves: what the unit passes on, or its cost, in proportion to its length."""
    known: Floats = batch.transfer_bytes[unit]
    costs: Floats = batch.costs[unit]
    return known if known.any() else costs


def _by_replica(batch: Batch, unit: int, options: PostBalancing) -> Ints:
    """(n,) slots: balanced over the replicas, then each replica's samples over its microbatches."""
    costs, form = batch.costs[unit], options.forms.get(batch.units[unit], "no_padding")
    num_replicas, num_microbatches = batch.topology.replicas, batch.topology.microbatches
    replica = post_balance(form, costs, num_replicas, options.tolerance)
    slots = replica * num_microbatches
    if num_microbatches > 1:
        for _, samples in _groups(replica, num_replicas):
            slots[samples] += post_balance(form, costs[samples], num_microbatches, options.tolerance)
    return slots


def _by_index(batch: Batch, unit: int, index: Ints, occupied: NDArray[np.bool_], options: PostBalancing) -> Ints:
    """(n,) slots: the samples of each microbatch index balanced over the replicas that have this microbatch."""
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
    """The positions of each label 0 .. count - 1 that occurs, in rising order."""
    if count == 1:
        yield 0, np.arange(label.size)
        return
    by_label = np.argsort(label, kind="stable")
    ends = np.cumsum(np.bincount(label, minlength=count)).tolist()
    for i, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if start < end:
            yield i, by_label[start:end]


def _permuted(slots: Ints, unit: int, occupied: NDArray[np.bool_] | None, batch: Batch, options: PostBalancing) -> Ints:
    """(n,) the slots with the unit's replicas permuted over the nodes.

    As they were if that would leave an empty microbatch in front of one that is not; `occupied` (D, K): those of the LLM.
    """
    if options.ranks_per_node == 0:
        return slots
    num_replicas, num_microbatches = batch.topology.replicas, batch.topology.microbatches
    replica, index = slots // num_microbatches, slots % num_microbatches
    origin = arrival_ranks(slots.size, num_replicas, options.arrival)
    traffic = Traffic.of_samples(origin, replica, _volume(batch, unit), num_replicas)
    permuted = improve(traffic, options.ranks_per_node, batch.seed).rank_of_batch[replica] * num_microbatches + index
    filled = batch.occupied(permuted) | (False if occupied is None else occupied)
    return slots if (filled[:, 1:] > filled[:, :-1]).any() else permuted
