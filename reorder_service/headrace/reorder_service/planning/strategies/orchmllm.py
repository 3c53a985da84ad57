"""Strategy `orchmllm`: OrchMLLM's batch post-balancing (sections 5 and 6), which balances every unit separately.

In OrchMLLM a step is one batch per rank (K = 1), and the samples of a unit are balanced over all D ranks by the form that
suits the unit (see `post_balancing`). There a form balances sequence lengths; here it balances the costs of a unit, which are
proportional to the lengths or describe better how long a sample takes.

The paper does not treat pipelines. A sample may be processed on different replicas by different units, but its
microbatch index must not decrease on the way. So this index is fixed once, by the LLM, which is balanced over the replicas and
then, in each replica, over its microbatches. Every other unit balances the samples of one index after the other, starting with
the index of the costliest sample, and gives the heaviest batch of an index to the replica with the least work so far. Replicas
that already have their share of the unit's work get no more. Neither do those whose LLM has no sample in that microbatch, so
that no unit has an empty microbatch in front of an occupied one. That costs balance only if there are few samples, or if one
sample outweighs a replica.

`Execution.post_balancing` has the options: a form for each unit, lambda, tolerance and ranks per node.

Which replica takes which of a unit's batches is then still free, and decides how much crosses nodes (section 5.2.2). The paper
permutes the batches against the ranks that sampled them. Raw inputs need no all-to-all here, as ranks fetch the samples that they
encode: what travels from rank to rank is what an encoder makes of a sample, to the rank that has the sample in the LLM (the
paper's composition of rearrangements, section 6). So the LLM's batches are permuted against the encoders', then each encoder's
against the LLM's, as long as the heaviest volumes fall.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Batch, Ints, Slots
from headrace.reorder_service.planning.form_loads import bin_loads, lengths_of
from headrace.reorder_service.planning.search.node_assignment import assign_senders
from headrace.reorder_service.planning.search.node_permutation import Traffic, permute_heuristically
from headrace.reorder_service.planning.search.number_partition import descending, lpt, lpt_of_groups, lpt_of_rounds
from headrace.reorder_service.planning.search.post_balancing import post_balance
from headrace.reorder_service.planning.simulation.phase_step import AFTER_PHASES
from headrace.reorder_service.planning.strategies import phases

MOST_ROUNDS = 2  # of permuting the LLM's batches and then the others'; more gain at most 2 % on 64 to 2,560 ranks


def plan_slots(batch: Batch) -> Slots:
    """Plan a batch with OrchMLLM's post-balancing: (U, n) slots.

    Units may differ in the replica of a sample, never in the index of its microbatch. Ranks that meet after every phase, as the
    paper's do, get the plan of `phases`.
    """
    if batch.execution.colocated == AFTER_PHASES:
        return phases.plan_slots(batch)
    slots = np.empty(batch.costs.shape, np.int64)
    llm = batch.units.index(LLM)
    slots[llm] = _by_replica(batch, llm)
    index = slots[llm] % batch.topology.microbatches
    occupied = batch.occupied(slots[llm])
    for u in _others(batch):
        slots[u] = _by_index(batch, u, index, occupied)
    ranks_per_node = batch.execution.post_balancing.ranks_per_node
    return _permuted(batch, slots, ranks_per_node) if ranks_per_node > 0 else slots


def sent_to_llm(batch: Batch, slots: Slots, units: Sequence[int]) -> Traffic:
    """Return the all-to-all that moves what the replicas of some units, by their rows, make of the samples to the LLM's replicas.

    Volumes are in `transfer_bytes`, or in costs where a unit's are unknown: both are in proportion to a sample's length.
    """
    replicas = slots // batch.topology.microbatches
    volumes = [known if (known := batch.transfer_bytes[u]).any() else batch.costs[u] for u in units]
    return Traffic.of_samples(
        replicas[list(units)].ravel(),
        np.tile(replicas[batch.units.index(LLM)], len(units)),
        np.concatenate(volumes),
        batch.topology.replicas,
    )


def heaviest_between_nodes(batch: Batch, slots: Slots) -> dict[str, float]:
    """Return the largest volume that any one rank sends to other nodes, for each unit that sends to the LLM.

    Raises ValueError unless the batch's post-balancing knows how many ranks a node has.
    """
    ranks_per_node = batch.execution.post_balancing.ranks_per_node
    if ranks_per_node < 1:
        raise ValueError(f"a node has at least one rank, got {ranks_per_node}")
    nodes = np.arange(batch.topology.replicas) // ranks_per_node
    return {batch.units[u]: float(sent_to_llm(batch, slots, [u]).leaving(nodes, ranks_per_node).max()) for u in _others(batch)}


def _others(batch: Batch) -> list[int]:
    """Return the rows of all units but the LLM."""
    return [u for u, unit in enumerate(batch.units) if unit != LLM]


def _by_replica(batch: Batch, unit: int) -> Ints:
    """Balance samples over the replicas, then each replica's samples over its microbatches: (n,) slots."""
    options = batch.execution.post_balancing
    lengths, quadratic = lengths_of(batch.costs[unit], options.quadratic)
    form = options.forms.get(batch.units[unit], "no_padding")
    num_replicas, num_microbatches = batch.topology.replicas, batch.topology.microbatches
    if form == "no_padding":
        falling = descending(lengths)
        replica = lpt(lengths, falling, num_replicas)
        return replica * num_microbatches + lpt_of_groups(lengths, falling, replica, num_replicas, num_microbatches)
    replica = post_balance(form, lengths, num_replicas, options.tolerance, quadratic)
    slots = replica * num_microbatches
    if num_microbatches > 1:
        for _, samples in _groups(replica, num_replicas):
            slots[samples] += post_balance(form, lengths[samples], num_microbatches, options.tolerance, quadratic)
    return slots


def _by_index(batch: Batch, unit: int, index: Ints, occupied: NDArray[np.bool_]) -> Ints:
    """Balance the samples of each microbatch index over the replicas that have this microbatch: (n,) slots.

    index: (n,) microbatch index of each sample. occupied: (D, K) microbatches that have a sample in the LLM.
    """
    options = batch.execution.post_balancing
    lengths, quadratic = lengths_of(batch.costs[unit], options.quadratic)
    form = options.forms.get(batch.units[unit], "no_padding")
    if form == "no_padding":
        share = float(lengths.sum() / batch.topology.replicas)
        replica = lpt_of_rounds(lengths, descending(lengths), index, np.ascontiguousarray(occupied.T), share)
        return replica * batch.topology.microbatches + index
    slots = np.empty_like(index)
    work, taken = np.zeros(batch.topology.replicas), np.zeros(batch.topology.replicas)
    share = lengths.sum() / batch.topology.replicas
    groups = sorted(_groups(index, batch.topology.microbatches), key=lambda group: -lengths[group[1]].max())
    for k, samples in groups:
        replicas = np.flatnonzero(occupied[:, k] & (taken < share))
        if replicas.size == 0:
            replicas = np.flatnonzero(occupied[:, k])
        bins = post_balance(form, lengths[samples], replicas.size, options.tolerance, quadratic)
        loads = bin_loads(form, lengths[samples], bins, replicas.size, quadratic)
        replica_of_bin = np.empty_like(replicas)
        replica_of_bin[np.argsort(-loads, kind="stable")] = replicas[np.argsort(work[replicas], kind="stable")]
        work[replica_of_bin] += loads
        taken[replica_of_bin] += np.bincount(bins, weights=lengths[samples], minlength=replicas.size)
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


def _permuted(batch: Batch, slots: Slots, ranks_per_node: int) -> Slots:
    """Permute the units' batches over the nodes so that little crosses nodes: (U, n) slots.

    No unit's heaviest rank sends more to other nodes than without permutations, and the sum of the units' heaviest volumes falls
    unless nothing helps. A permutation is not taken if an empty microbatch would then come before an occupied one.
    """
    best, least = slots, heaviest_between_nodes(batch, slots)
    before = least
    for rounds in range(MOST_ROUNDS + 1):
        permuted = best.copy()
        if rounds > 0:  # at first the LLM stays, so that every unit finds its best place there
            llm = batch.units.index(LLM)
            traffic = sent_to_llm(batch, best, _others(batch))
            permuted[llm] = _moved(batch, best[llm], permute_heuristically(traffic, ranks_per_node, batch.seed).rank_of_batch)
        for u in _others(batch):
            traffic = sent_to_llm(batch, permuted, [u])
            permuted[u] = _moved(batch, permuted[u], assign_senders(traffic, ranks_per_node).rank_of_batch)
        heaviest = heaviest_between_nodes(batch, permuted)
        occupied = batch.occupied(permuted)
        if (occupied[:, 1:] > occupied[:, :-1]).any() or any(heaviest[unit] > before[unit] for unit in before):
            break
        if sum(heaviest.values()) >= sum(least.values()):
            break
        best, least = permuted, heaviest
    return best


def _moved(batch: Batch, slots: Ints, rank_of_batch: Ints) -> Ints:
    """Return one unit's (n,) slots after a permutation of its replicas; the indices of microbatches stay."""
    num_microbatches = batch.topology.microbatches
    return rank_of_batch[slots // num_microbatches] * num_microbatches + slots % num_microbatches
