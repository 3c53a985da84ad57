"""The best plan of a tiny batch on one replica, found by trying every one of them.

Times come from a replay of 1F1B of its own, independent of the planner's simulator, which has to agree with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.planning.inputs import plan_table
from headrace.cli.costs.cost_table import CostTable
from headrace.plan import Topology
from headrace.reorder_service.planning.batch import slots_of
from headrace.reorder_service.planning.execution import BACKWARD_FACTOR

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOPOLOGY = Topology(replicas=1, microbatches=3, stages={"encoder": 1, "llm": 2})
_AGREEMENT = 1e-9


def least_time_s(table: CostTable) -> float:
    """The shortest step of any plan of up to three microbatches: all places of each sample in the encoder and, not
    earlier, in the LLM, hence all orders too."""
    return min(float(step_times_s(table, *places).min()) for places in _all_places(table.sample_ids.size))


def _all_places(num_samples: int) -> Iterator[tuple[Ints, Ints]]:
    """Microbatches of the encoder and of the LLM, (A, n) each; once per number of microbatches, none of which is empty."""
    for count in range(1, TOPOLOGY.microbatches + 1):
        pairs = [(encoder, llm) for llm in range(count) for encoder in range(llm + 1)]
        of_sample = np.array(list(itertools.product(range(len(pairs)), repeat=num_samples)))
        encoder, llm = np.moveaxis(np.array(pairs)[of_sample], -1, 0)
        filled = [((encoder == k) | (llm == k)).any(axis=1) for k in range(count)]
        none_empty = np.logical_and.reduce(filled)
        yield encoder[none_empty], llm[none_empty]


def step_times_s(table: CostTable, encoder: Ints, llm: Ints) -> Floats:
    """(A,) step times of A plans, each (n,) microbatches of the samples in the encoder and in the LLM.

    A sample's backward in the encoder runs in the turn of its microbatch in the LLM (split backward). A turn waits for
    those turns of the other unit that have one of its samples: of the encoder's for the part that goes to the same turn of the
    LLM. These parts follow each other in the order of the LLM's turns.
    """
    turns = range(int(llm.max()) + 1)
    llm_stage = _loads(llm, table.costs["llm"], turns) / TOPOLOGY.stages["llm"]
    forward = np.stack([_loads(encoder, table.costs["encoder"], turns), llm_stage, llm_stage])
    backward = BACKWARD_FACTOR * np.stack([_loads(llm, table.costs["encoder"], turns), llm_stage, llm_stage])
    shared = np.stack([[((llm == k) & (encoder == e)).any(axis=1) for e in turns] for k in turns])
    parts = np.stack([_loads(np.where(encoder == e, llm, -1), table.costs["encoder"], turns) for e in turns])
    later = np.flip(np.flip(parts, axis=1).cumsum(axis=1), axis=1) - parts
    return _replay(forward, backward, shared, later)


def _loads(places: Ints, costs: Floats, turns: range) -> Floats:
    """(K, A) cost of every microbatch in every plan."""
    return np.stack([np.where(places == k, costs, 0.0).sum(axis=1) for k in turns])


def _replay(forward: Floats, backward: Floats, shared: NDArray[np.bool_], later: Floats) -> Floats:
    """(A,) end of the step under 1F1B.

    forward, backward: (S, K, A) times of every stage's turns; stage 0 is the encoder. shared: (K, K, A) whether turn k of
    the LLM has samples that turn e of the encoder had. later: (K, K, A) how long turn e of the encoder goes on after its
    part for turn k of the LLM.
    """
    num_stages, count, num_plans = forward.shape
    turns = [_one_f_one_b(num_stages - 1 - s, count) for s in range(num_stages)]
    ends: dict[tuple[str, int, int], Floats] = {}
    free = [np.zeros(num_plans) for _ in range(num_stages)]
    while any(turns):
        for s in range(num_stages):
            while turns[s] and (needed := _input(*turns[s][0], s, num_stages)) in {None, *ends}:
                kind, k = turns[s].pop(0)
                ready = np.zeros(num_plans) if needed is None else ends[needed]
                if (kind, s) == ("F", 1):
                    there = [np.where(shared[k, e], ends["F", 0, e] - later[e, k], 0.0) for e in range(k + 1)]
                    ready = np.maximum.reduce(there)
                elif (kind, s) == ("B", 0):
                    ready = np.where(shared[k].any(axis=0), ready, 0.0)
                free[s] = np.maximum(free[s], ready) + (forward if kind == "F" else backward)[s, k]
                ends[kind, s, k] = free[s]
    end: Floats = np.maximum.reduce(free)
    return end


def _input(kind: str, k: int, stage: int, num_stages: int) -> tuple[str, int, int] | None:
    """The turn that has to be over before this one can start, besides the one before it on its own stage."""
    if kind == "F":
        return ("F", stage - 1, k) if stage > 0 else None
    return ("B", stage + 1, k) if stage + 1 < num_stages else ("F", stage, k)


def _one_f_one_b(num_behind: int, count: int) -> list[tuple[str, int]]:
    """A stage's turns: as many forwards as stages are behind it, then one forward and one backward by turns."""
    ahead = min(num_behind, count)
    turns = [("F", k) for k in range(ahead)]
    for k in range(count):
        if ahead + k < count:
            turns.append(("F", ahead + k))
        turns.append(("B", k))
    return turns


def strategy_time_s(strategy: str, table: CostTable) -> float:
    """The step time of a strategy's plan. Raises RuntimeError if the planner's simulator predicts another."""
    plan = plan_table(strategy, table, TOPOLOGY)
    assert plan.predicted is not None
    encoder, llm = slots_of(plan, table.sample_ids)
    replayed = float(step_times_s(table, encoder[None], llm[None])[0])
    if abs(replayed - plan.predicted.iteration_s) > _AGREEMENT * replayed:
        raise RuntimeError(f"{strategy}: the simulator predicts {plan.predicted.iteration_s}, the replay takes {replayed}")
    return replayed
