"""What crosses nodes: of the traffic from encoders to the LLM that a plan makes, and of the one that OrchMLLM measures.

`planning/permutation.py` has the permutations alone, for pipelines' plans and beside their optimum.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.orchmllm.mixtures import RANKS_PER_NODE, batch_of
from benchmarks.planning.permutation import PAPER
from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress
from headrace.cli.experiment.orchmllm_experiments import MICRO_RANKS, TAILORED
from headrace.cli.experiment.orchmllm_samples import SETTINGS
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.search.near_home import balance_near
from headrace.reorder_service.planning.search.node_assignment import assign_senders
from headrace.reorder_service.planning.search.node_permutation import Traffic, permute_heuristically
from headrace.reorder_service.planning.search.post_balancing import post_balance
from headrace.reorder_service.planning.strategies import phases
from headrace.reorder_service.planning.strategies.orchmllm import heaviest_between_nodes, sent_to_llm

BATCHES = 4
_NODES = np.arange(MICRO_RANKS) // RANKS_PER_NODE


def sections(*, quick: bool) -> Iterator[Section]:
    """Heaviest volume of a rank to other nodes, over that of unpermuted batches that are balanced by the paper's forms."""
    composed, arriving = [], []
    for model, setting in SETTINGS.items():
        progress(f"nodes: {model}")
        batches = [batch_of(model, MICRO_RANKS, setting.micro_batch, seed) for seed in range(1 if quick else BATCHES)]
        for u, unit in enumerate(batches[0].units[:-1]):
            ours, permuted = np.mean([_composed(batch, u) for batch in batches], axis=0)
            composed += [
                Row(name=f"{model}, {unit}, planned near", value=float(ours), rival=PAPER, goal=at_most(PAPER.value)),
                Row(name=f"{model}, {unit}, permuted batches", value=float(permuted), rival=PAPER),
            ]
        for u, unit in enumerate(batches[0].units):
            ours, permuted = np.mean([_arriving(batch, u) for batch in batches], axis=0)
            if TAILORED[unit] == "no_padding":
                arriving.append(
                    Row(name=f"{model}, {unit}, balanced near", value=float(ours), rival=PAPER, goal=at_most(PAPER.value))
                )
            arriving.append(Row(name=f"{model}, {unit}, permuted batches", value=float(permuted), rival=PAPER))
    where = f"{MICRO_RANKS} ranks, nodes of {RANKS_PER_NODE}"
    yield Section(
        title=f"heaviest volume from an encoder's rank to the LLM's on other nodes, over unpermuted: {where}", rows=composed
    )
    yield Section(
        title=f"the same from the ranks where samples arrive to those of each phase, as in the paper: {where}", rows=arriving
    )


def _composed(batch: Batch, u: int) -> tuple[float, float]:
    """Return the heaviest volume of a unit, planned near the LLM and with permuted batches, each over unpermuted ones."""
    slots = np.stack([_by_form(batch, each) for each in range(len(batch.units))])
    before = heaviest_between_nodes(batch, slots)[batch.units[u]]
    near = heaviest_between_nodes(batch, phases.plan_slots(batch))[batch.units[u]]
    permuted = slots.copy()
    permuted[u] = assign_senders(sent_to_llm(batch, slots, [u]), RANKS_PER_NODE).rank_of_batch[slots[u]]
    return near / before, heaviest_between_nodes(batch, permuted)[batch.units[u]] / before


def _arriving(batch: Batch, u: int) -> tuple[float, float]:
    """Return the heaviest volume from where samples arrive, balanced near and with permuted batches, over unpermuted ones."""
    lengths, arrived = batch.costs[u], np.arange(batch.costs.shape[1]) % MICRO_RANKS
    batches = _by_form(batch, u)
    traffic = Traffic.of_samples(arrived, batches, lengths, MICRO_RANKS)
    before = traffic.leaving(_NODES, RANKS_PER_NODE).max()
    permuted = permute_heuristically(traffic, RANKS_PER_NODE).heaviest_outgoing
    has = np.flatnonzero(lengths)
    ranks = balance_near(lengths[has], _NODES[arrived[has]], MICRO_RANKS, RANKS_PER_NODE)
    near = Traffic.of_samples(arrived[has], ranks, lengths[has], MICRO_RANKS).leaving(_NODES, RANKS_PER_NODE).max()
    return float(near / before), float(permuted / before)


def _by_form(batch: Batch, u: int) -> Slots:
    """Balance a unit over all ranks by the paper's form for it; samples that it has nothing to do of stay where they arrive."""
    costs: Floats = batch.costs[u]
    ranks: Ints = np.arange(costs.size) % MICRO_RANKS
    has = np.flatnonzero(costs)
    ranks[has] = post_balance(TAILORED[batch.units[u]], costs[has], MICRO_RANKS)
    return ranks
