"""DistTrain's orchestration (section 5) at its integer optimum: tensor-, data- and pipeline-parallel sizes of every unit.

The paper solves the problem for real numbers of GPUs and rounds. Here whole layers, whole GPUs, memory and exchange are in the
problem, and it is solved exactly. The paper's number of microbatches is the global batch over the LLM's replicas, as a microbatch
is one sample there; other units may have any number of replicas up to a microbatch's samples.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import step_s
from headrace.reorder_service.planning.orchestration.searches.option_table import OptionTable
from headrace.reorder_service.planning.orchestration.searches.placement_kernels import DP, GPUS, STAGE, WORK, exact
from headrace.reorder_service.planning.orchestration.searches.refusal import no_fit, smallest_layouts

NAME = "disttrain-exact"
WORTH = 1.5
"""Numbers of LLM replicas whose best step takes so many times that of the best number are left out."""


def search(demand: Demand, microbatch: int = 1, worth: float = WORTH) -> list[Candidate]:
    """Return the fastest candidate of each number of LLM replicas, best first.

    microbatch: samples of a microbatch of an LLM replica. worth: 1 for the fastest candidate alone. Raises ValueError, in a
    sentence for the user, if nothing fits.
    """
    table = OptionTable.of(demand, microbatch)
    fastest, found = math.inf, []
    for replicas in _by_promise(table):
        chosen = np.full(len(demand.units), -1, np.int64)
        seconds = exact(table.rates, table.sizes, table.first, table.shape, table.usable_bytes, replicas, worth * fastest, chosen)
        if chosen[0] >= 0:
            fastest = min(fastest, seconds)
            found.append(table.candidate(demand, NAME, chosen))
    if not found:
        raise no_fit(demand, NAME, smallest_layouts(demand, NAME, microbatch))
    ordered = sorted(found, key=lambda candidate: (step_s(demand, candidate), candidate.gpus))
    return [candidate for candidate in ordered if step_s(demand, candidate) <= worth * fastest * (1 + 1e-9)]


def _by_promise(table: OptionTable) -> list[int]:
    """Return the numbers of LLM replicas, those first whose step would be the fastest if all GPUs had equal work."""
    num_gpus, llm, _, batch, microbatch, _, _ = table.shape.tolist()
    gpu_seconds = table.rates[WORK] * table.sizes[GPUS]
    others = sum(float(gpu_seconds[a:b].min()) for u, (a, b) in enumerate(itertools.pairwise(table.first)) if u != llm)
    of_llm = slice(table.first[llm], table.first[llm + 1])
    samples = table.sizes[DP, of_llm] * microbatch
    slowest = samples * np.maximum(table.rates[STAGE, of_llm], (gpu_seconds[of_llm] + others) / num_gpus)
    seconds = samples * table.rates[WORK, of_llm] + (batch // samples - 1) * slowest
    promise = {replicas: float(seconds[samples == replicas * microbatch].min(initial=math.inf)) for replicas in table.replicas}
    return sorted((replicas for replicas in promise if promise[replicas] < math.inf), key=lambda replicas: promise[replicas])
