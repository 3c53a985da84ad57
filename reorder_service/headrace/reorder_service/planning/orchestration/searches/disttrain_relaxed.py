"""DistTrain's orchestration as published (section 5, Alg. 1): a convex problem for each choice of TP and DP sizes.

For given TP and DP of all units the seconds that a microbatch fills the pipeline with are constant, and the slowest stage is the
largest of terms a / x, with x the GPUs of a unit. That convex problem needs no solver: its optimum levels the terms
(`level_with_gpus`). Of all choices whose numbers of stages fit once rounded down, the one with the least seconds is taken.

Corrected here: the second row of eq. 2 divides the encoder's time by z; it is x. The paper's memory for activations, L / TP of a
slice, is a constraint of the convex problem; what is left after rounding must fit with the stages behind each unit counted
(`estimate`). The exchange of gradients, which the paper calls constant for given DP, is left out of the problem.
"""

from __future__ import annotations

import math

import numpy as np

from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.estimate import kept_bytes_of_sample, state_bytes, usable_bytes
from headrace.reorder_service.planning.orchestration.searches.convex_kernels import relaxed
from headrace.reorder_service.planning.orchestration.searches.grid_choices import allows, replica_counts, widths
from headrace.reorder_service.planning.orchestration.searches.option_table import problem_shape
from headrace.reorder_service.planning.orchestration.searches.refusal import no_fit, smallest_layouts

NAME = "disttrain"
WORTH = 1.5
"""Numbers of LLM replicas whose best step takes so many times that of the best number are left out."""


def search(demand: Demand, microbatch: int = 1, worth: float = WORTH) -> list[Candidate]:
    """Return the solution of each number of LLM replicas, rounded, in the order of their seconds before rounding.

    microbatch: samples of a microbatch of an LLM replica. worth: 1 for the best solution alone. Raises ValueError, in a sentence
    for the user, if nothing fits.
    """
    replicas = replica_counts(demand, microbatch)
    parts = [_pairs_of(demand, unit, replicas, microbatch) for unit in demand.units]
    pairs = np.concatenate([numbers for numbers, _ in parts], axis=1)
    rates = np.concatenate([values for _, values in parts], axis=1)
    first = np.cumsum([0, *(numbers.shape[1] for numbers, _ in parts)])
    shape = problem_shape(demand, microbatch)
    fastest, found = math.inf, []
    for number in reversed(replicas):
        chosen, stages = np.full(len(parts), -1, np.int64), np.zeros(len(parts), np.int64)
        ceiling = worth * fastest
        seconds = relaxed(pairs, rates, first, shape, usable_bytes(demand.cluster), number, ceiling, chosen, stages)
        if chosen[0] >= 0:
            sizes = zip(demand.unit_names, pairs[:, chosen].T.tolist(), stages.tolist(), strict=True)
            grids = {name: UnitGrid(dp=dp, tp=tp, pp=pp) for name, (dp, tp), pp in sizes}
            microbatches = demand.global_batch // (number * microbatch)
            candidate = Candidate(search=NAME, grids=grids, microbatches=microbatches)
            if allows(demand, candidate):  # numbers of stages are known once they are rounded
                fastest = min(fastest, seconds)
                found.append((seconds, candidate))
    if not found:
        raise no_fit(demand, NAME, smallest_layouts(demand, NAME, microbatch))
    ordered = sorted(found, key=lambda pair: (pair[0], pair[1].gpus))
    return [candidate for seconds, candidate in ordered if seconds <= worth * fastest]


def _pairs_of(demand: Demand, unit: UnitDemand, replicas: list[int], microbatch: int) -> tuple[Ints, Floats]:
    """Return (2, P) dp and tp of a unit, dp being a factor of the global batch, and (5, P) what `relaxed` needs of each."""
    numbers = replicas if unit.name == LLM else replica_counts(demand, 1, unit.name)
    usable = usable_bytes(demand.cluster)
    pairs, rates = [], []
    for dp in numbers:
        for tp in widths(unit, demand.cluster.gpus_per_node):
            kept = kept_bytes_of_sample(unit, tp) / dp
            state = float(state_bytes(unit, dp, tp, 1))
            # A replica keeps a microbatch of all layers at least. How many samples that is, is known of the LLM alone.
            room = usable - (kept * dp * microbatch if unit.name == LLM else 0.0)
            least = max(1.0, state / room) if room > 0 else math.inf
            pairs.append((dp, tp))
            rates.append((demand.step_s(unit, tp) / dp, state, kept, least, float(unit.layers)))
    return np.array(pairs, np.int64).T.copy(), np.array(rates).T.copy()
