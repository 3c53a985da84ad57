"""Entrain's search for a configuration (dissertation 4.4.3, Alg. 3), from the proportions of a stable batch (Alg. 2).

Each replica's GPUs are divided among the units in proportion to their work; a unit's GPUs are then cut into slices and stages,
TP PP = M. The best cut of a unit's layers (eq. 4.1) needs no search where layers are alike. Of all combinations, the one with the
least step (eq. 4.2) has the most throughput, DP K / T, because DP K is the same for all.

Read into the text: work is forward and backward together, as frozen status changes their ratio. GPUs go to units by largest
remainders, in multiples of a unit's slices, and no unit gets none. Context parallelism is 1. The paper gives no formula for what
resharding costs between units of different TP; ours is the time in which a microbatch's tokens and their gradients pass to all
slices, at every microbatch. Published choices of which the text gives the proportions reproduce; CocoQA with Llama 3B does not:
table C.8 allocates 8:8 to it, and table C.1 lists 3 and 5 of 8 stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.planning.cost_model.stable_batch import smallest_stable_batch
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import fits, hop_s, microbatch_samples, step_s
from headrace.reorder_service.planning.orchestration.searches.grid_choices import allows, replica_counts, widths
from headrace.reorder_service.planning.orchestration.searches.refusal import no_fit, smallest_layouts

NAME = "entrain"
_MOST = 10  # candidates that a search returns


def sample_seconds(demand: Demand) -> Floats:
    """Return the (U, n) forward and backward seconds of each sample in each unit, unsliced: what Alg. 2 draws batches of."""
    return np.stack([unit.forward_s[min(unit.forward_s)] * (1.0 + unit.backward_factor) for unit in demand.units])


def proportions(seconds: Floats, *, mean_of_ratios: bool = False) -> Floats:
    """Return each unit's share of the work of n samples. seconds: (U, n).

    The share of sums, as in section 4.4.2, or the mean of the samples' own shares, as in appendix C.1: another number.
    """
    total = seconds.sum(axis=0)
    shares: Floats = (
        (seconds[:, total > 0] / total[total > 0]).mean(axis=1) if mean_of_ratios else seconds.sum(axis=1) / total.sum()
    )
    return shares


def proportional_allocation(shares: Floats, gpus: int, multiples: Sequence[int]) -> tuple[int, ...] | None:
    """Return a replica's GPUs for each unit, in proportion to its share, as multiples of its slices; None if they are too few.

    Every unit gets a multiple at least. What rounding down leaves goes to the units with the largest remainders that have room
    for another multiple; a rest too small for any stays idle.
    """
    quotas = gpus * shares
    given = [max(multiple, int(quota // multiple) * multiple) for quota, multiple in zip(quotas.tolist(), multiples, strict=True)]
    while sum(given) > gpus:
        over = [(given[u] - quotas[u]) / multiples[u] if given[u] > multiples[u] else -np.inf for u in range(len(given))]
        most = int(np.argmax(over))
        if over[most] == -np.inf:
            return None
        given[most] -= multiples[most]
    while True:
        short = [
            (quotas[u] - given[u]) / multiples[u] if sum(given) + multiples[u] <= gpus else -np.inf for u in range(len(given))
        ]
        most = int(np.argmax(short))
        if short[most] == -np.inf:
            return tuple(given)
        given[most] += multiples[most]


def stable_batch(demand: Demand, dp: int, *, growth: int = 2, mean_of_ratios: bool = False) -> int | None:
    """Return b_min for so many replicas, or None if no batch is stable (`smallest_stable_batch`)."""
    return smallest_stable_batch(
        sample_seconds(demand), demand.cluster.num_gpus // dp, growth=growth, mean_of_ratios=mean_of_ratios
    )


def reshard_s(demand: Demand, candidate: Candidate) -> float:
    """Return the seconds in which all microbatches of a replica change their slices between units of different TP."""
    seconds = 0.0
    for sender, receiver in itertools.pairwise(demand.units):
        behind = receiver.name if sender.name == LLM else LLM  # encoders feed the LLM, not each other
        if candidate.grids[sender.name].tp != candidate.grids[behind].tp:
            samples = microbatch_samples(demand, candidate, sender.name)
            seconds += candidate.microbatches * float(hop_s(sender, demand.cluster, samples))
    return seconds


def search(demand: Demand, microbatch: int = 1, *, mean_of_ratios: bool = False) -> list[Candidate]:
    """Return the configurations with the most throughput for the allocation that the data's proportions give, best first.

    microbatch: samples of a microbatch of a replica, the paper's mu. mean_of_ratios: as for `proportions`. Raises ValueError, in
    a sentence for the user, if nothing fits.
    """
    shares = proportions(sample_seconds(demand), mean_of_ratios=mean_of_ratios)
    candidates = list(_configurations(demand, shares, microbatch))
    fitting = [candidate for candidate in candidates if allows(demand, candidate) and fits(demand, candidate)]
    if not fitting:
        raise no_fit(demand, NAME, candidates or smallest_layouts(demand, NAME, microbatch))

    def seconds(candidate: Candidate) -> float:
        return step_s(demand, candidate) + reshard_s(demand, candidate)

    return sorted(fitting, key=lambda candidate: (seconds(candidate), candidate.gpus))[:_MOST]


def _configurations(demand: Demand, shares: Floats, microbatch: int) -> Iterator[Candidate]:
    node = demand.cluster.gpus_per_node
    for dp in replica_counts(demand, microbatch):
        for slices in itertools.product(*(widths(unit, node) for unit in demand.units)):
            given = proportional_allocation(shares, demand.cluster.num_gpus // dp, slices)
            if given is None:
                continue
            yield Candidate(
                search=NAME,
                grids={
                    unit.name: UnitGrid(dp=dp, tp=tp, pp=unit.most_stages(gpus // tp))
                    for unit, tp, gpus in zip(demand.units, slices, given, strict=True)
                },
                microbatches=demand.global_batch // (dp * microbatch),
            )
