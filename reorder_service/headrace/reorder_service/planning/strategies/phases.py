"""Plans for ranks that have all units and meet after every phase: OrchMLLM on FSDP ranks (sections 5 and 6).

A microbatch has a phase for each unit. Its collectives end a phase for all ranks together, so that a step takes the sum over the
phases of the slowest rank's time (`phase_step`). So each phase is balanced by itself, over all ranks, under the form of its unit.
No plan takes less than the sum of the phases' even shares, or of their largest samples where these take longer.

A sample's microbatch is that of the LLM, whose microbatches are balanced first (`colocated`); then the phases of one microbatch
after the other. Units whose loads add up are balanced near the ranks of the LLM (`near_home`), so that little of what they make
of samples travels to other nodes. A padded unit puts samples of like length together (`post_balancing`), wherever they come from.
Of several such units, the one with the most to send is balanced before the LLM, which then is balanced near it; the batches of
the others are permuted over the nodes (`node_assignment`). Where nodes are unknown, every rank is one. Sequences that several
ranks share (`Execution.cp`) have their places before all others (`shared_sequences`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.plan import LLM, Topology
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.form_loads import form_seconds, lengths_of, weights_alone
from headrace.reorder_service.planning.post_balancing_options import Form
from headrace.reorder_service.planning.search.limited_partition import NOWHERE
from headrace.reorder_service.planning.search.near_home import balance_near
from headrace.reorder_service.planning.search.node_assignment import assign_senders
from headrace.reorder_service.planning.search.node_permutation import Traffic
from headrace.reorder_service.planning.search.post_balancing import post_balance
from headrace.reorder_service.planning.strategies import colocated
from headrace.reorder_service.planning.strategies.shared_sequences import shared_slots

_NEAR_ENOUGH = 0.01  # by how much a phase may exceed the least possible time before it is balanced without regard to nodes
_WORTH_LEAVING = 1e-3  # and by how much that has to shorten it


def plan_slots(batch: Batch) -> Slots:
    """Plan a batch for ranks that meet after every phase: (U, n) slots. A sample has the same microbatch in all units.

    Raises ValueError as `colocated` does if the microbatches of the LLM cannot keep the limit of tokens.
    """
    if batch.execution.cp != 1:
        return _by_phase(batch, shared_slots(batch), None)
    anchor = _anchor(batch)
    if batch.topology.microbatches == 1:
        samples = np.arange(batch.sample_ids.size)
        return _ranks(batch, samples, samples if anchor is not None else _llm_slots(batch), anchor)
    together = _llm_slots(batch)
    slots = _by_phase(batch, together, anchor)
    if anchor is not None:
        occupied = batch.occupied(slots)
        if (occupied[:, 1:] > occupied[:, :-1]).any():  # an empty microbatch in front of an occupied one
            return _by_phase(batch, together, None)
    return slots


def _form(batch: Batch, u: int) -> Form:
    return batch.execution.post_balancing.forms.get(batch.units[u], "no_padding")


def _adds_up(batch: Batch, u: int) -> bool:
    """Return whether the load of a unit's batch is the sum over its samples of what each takes alone."""
    return _form(batch, u) == "no_padding" or (_form(batch, u) == "third" and batch.execution.post_balancing.quadratic > 0)


def _volumes(batch: Batch, u: int) -> Floats:
    """Return the (n,) volumes that a unit sends on: bytes, or costs where these are unknown."""
    known: Floats = batch.transfer_bytes[u]
    return known if known.any() else batch.costs[u]


def _anchor(batch: Batch) -> int | None:
    """Return the unit that is balanced before the LLM; None if the LLM is the first."""
    padded = [u for u, unit in enumerate(batch.units) if unit != LLM and not _adds_up(batch, u) and batch.costs[u].any()]
    if not padded or batch.execution.max_tokens is not None or not _adds_up(batch, batch.units.index(LLM)):
        return None
    return max(padded, key=lambda u: float(_volumes(batch, u).sum()))


def _llm_slots(batch: Batch) -> Ints:
    """Balance the LLM by itself over all microbatches, those of equal load with equal numbers: (n,) slots."""
    llm, options = batch.units.index(LLM), batch.execution.post_balancing
    if _adds_up(batch, llm):
        weights = weights_alone(_form(batch, llm), batch.costs[llm], options.quadratic)
        return _levelled(batch, weights, np.arange(weights.size), batch.topology.microbatches, batch.execution.max_tokens)
    lengths, quadratic = lengths_of(batch.costs[llm], options.quadratic)
    bins = post_balance(_form(batch, llm), lengths, batch.num_slots, options.tolerance, quadratic)
    loads = form_seconds(options, LLM, batch.costs[llm], bins, batch.num_slots)
    place = np.empty(batch.num_slots, np.int64)
    place[np.lexsort((-loads, np.bincount(bins, minlength=batch.num_slots) == 0))] = np.arange(batch.num_slots)
    ranks = batch.topology.replicas
    slots: Ints = (place % ranks * batch.topology.microbatches + place // ranks)[bins]
    return slots


def _levelled(batch: Batch, weights: Floats, samples: Ints, microbatches: int, max_tokens: int | None = None) -> Ints:
    """Balance (m,) weights of these samples without regard to anything else: (m,) slots."""
    alone = replace(
        batch,
        sample_ids=batch.sample_ids[samples],
        costs=weights[None],
        memory=weights[None],
        transfer_bytes=weights[None],
        tokens=None if batch.tokens is None else batch.tokens[samples],
        topology=Topology(replicas=batch.topology.replicas, microbatches=microbatches, stages={LLM: 1}),
        execution=Execution(colocated="microbatch", max_tokens=max_tokens),
    )
    slots: Ints = colocated.plan_slots(alone)[0]
    return slots


def _by_phase(batch: Batch, together: Ints, anchor: int | None) -> Slots:
    """Balance the phases of one microbatch after the other: (U, n) slots.

    together: (n,) slots of the LLM balanced by itself.
    """
    count = batch.topology.microbatches
    index = together % count
    slots = np.empty(batch.costs.shape, np.int64)
    for k in range(count):
        samples = np.flatnonzero(index == k)
        if samples.size:
            slots[:, samples] = _ranks(batch, samples, together[samples] // count, anchor) * count + k
    return slots


def _ranks(batch: Batch, samples: Ints, together: Ints, anchor: int | None) -> Ints:
    """Balance the phases of one microbatch: (U, m) ranks of its m samples.

    together: (m,) ranks of the LLM balanced by itself, which it keeps unless there is an anchor.
    """
    llm, per_node = batch.units.index(LLM), max(1, batch.execution.post_balancing.ranks_per_node)
    ranks = np.empty((len(batch.units), samples.size), np.int64)
    if anchor is None:
        ranks[llm] = together
    else:
        packed, has = _packed(batch, anchor, samples)
        homes = np.full(samples.size, NOWHERE)
        homes[has] = packed // per_node
        ranks[llm] = _near(batch, llm, samples, homes, per_node)
    for u in range(len(ranks)):
        if u == llm:
            continue
        ranks[u] = ranks[llm]  # a sample of which the unit has nothing to do stays where it is
        if u == anchor:
            ranks[u, has] = packed
        elif not _adds_up(batch, u):
            ranks[u] = _permuted(batch, u, samples, ranks[llm], per_node)
        elif (some := np.flatnonzero(batch.costs[u, samples])).size:
            ranks[u, some] = _near(batch, u, samples[some], ranks[llm, some] // per_node, per_node)
    return ranks


def _near(batch: Batch, u: int, samples: Ints, homes: Ints, per_node: int) -> Ints:
    """Balance a unit whose loads add up near the home nodes, unless that takes longer than need be: (m,) ranks."""
    weights = weights_alone(_form(batch, u), batch.costs[u], batch.execution.post_balancing.quadratic)[samples]
    num_ranks = batch.topology.replicas
    ranks = balance_near(weights, homes, num_ranks, per_node)
    heaviest = float(np.bincount(ranks, weights=weights).max())
    if heaviest <= max(float(weights.sum()) / num_ranks, float(weights.max())) * (1.0 + _NEAR_ENOUGH):
        return ranks
    anywhere = _levelled(batch, weights, samples, 1)
    return anywhere if np.bincount(anywhere, weights=weights).max() < heaviest * (1.0 - _WORTH_LEAVING) else ranks


def _packed(batch: Batch, u: int, samples: Ints) -> tuple[Ints, Ints]:
    """Balance the samples of a padded unit by its form: the ranks of those that it has, and which of the m these are."""
    options = batch.execution.post_balancing
    has = np.flatnonzero(batch.costs[u, samples])
    lengths, quadratic = lengths_of(batch.costs[u, samples[has]], options.quadratic)
    return post_balance(_form(batch, u), lengths, batch.topology.replicas, options.tolerance, quadratic), has


def _permuted(batch: Batch, u: int, samples: Ints, of_llm: Ints, per_node: int) -> Ints:
    """Balance a padded unit by its form, and place its batches on the nodes to which they send most: (m,) ranks."""
    packed, has = _packed(batch, u, samples)
    ranks = of_llm.copy()
    if has.size:
        traffic = Traffic.of_samples(packed, of_llm[has], _volumes(batch, u)[samples[has]], batch.topology.replicas)
        ranks[has] = assign_senders(traffic, per_node).rank_of_batch[packed]
    return ranks
