"""The grids that a unit may have: the numbers that searches enumerate."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.plan import LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.estimate import fits, step_s


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def allows(demand: Demand, candidate: Candidate) -> bool:
    """Return whether every unit of a candidate has numbers of replicas and stages that the user allows it."""
    return all(unit.allows(candidate.grids[unit.name].dp, candidate.grids[unit.name].pp) for unit in demand.units)


def replica_counts(demand: Demand, microbatch: int, unit: str = LLM) -> list[int]:
    """Return the numbers of replicas of a unit that share the global batch evenly, in microbatches of so many samples.

    Raises ValueError if no number does, or none of those that the user allows.
    """
    if microbatch < 1 or demand.global_batch % microbatch:
        raise ValueError(
            f"a global batch of {demand.global_batch} samples cannot be cut into microbatches of {microbatch}: take a multiple"
        )
    every = divisors(demand.global_batch // microbatch)
    [own] = [one for one in demand.units if one.name == unit]
    allowed = [count for count in every if own.most_replicas(count) == count]
    if not allowed:
        raise ValueError(
            f"no number of replicas that {unit} is allowed divides the {demand.global_batch // microbatch} microbatches of a "
            f"global batch: allow one of {', '.join(map(str, every))}"
        )
    return allowed


def widths(unit: UnitDemand, gpus_per_node: int) -> list[int]:
    """Return the tensor-parallel widths of a unit that fill a node evenly, ascending; slices never cross nodes.

    Raises ValueError if there is none.
    """
    found = sorted(tp for tp in unit.forward_s if tp <= gpus_per_node and gpus_per_node % tp == 0)
    if not found:
        raise ValueError(
            f"no tensor-parallel width of {unit.name} ({', '.join(map(str, unit.forward_s))}) divides a node of "
            f"{gpus_per_node} GPUs: allow one that does"
        )
    return found


def grids_within(unit: UnitDemand, gpus_per_node: int, most_gpus: int, replicas: Sequence[int]) -> list[UnitGrid]:
    """Return all grids of a unit of at most so many GPUs, with one of the given numbers of replicas, that it is allowed."""
    return [
        UnitGrid(dp=dp, tp=tp, pp=pp)
        for dp in replicas
        for tp in widths(unit, gpus_per_node)
        for pp in range(1, min(unit.layers, most_gpus // (dp * tp)) + 1)
        if unit.allows(dp, pp)
    ]


def best_first(demand: Demand, candidates: Sequence[Candidate], most: int = 10) -> list[Candidate]:
    """Return those that are allowed and fit the GPUs' memory by their step time, and of equally fast ones those with fewer GPUs
    first."""
    fitting = [candidate for candidate in candidates if allows(demand, candidate) and fits(demand, candidate)]
    return sorted(fitting, key=lambda candidate: (step_s(demand, candidate), candidate.gpus))[:most]
