"""The planner's front door: strategies by name, and the plan of a global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from headrace.plan import LLM, StepPlan, Topology
from reorder_service.planning import arrival, disttrain
from reorder_service.planning.batch import Batch, Floats, Ints, Slots, make_batch
from reorder_service.planning.simulator import Work, simulate

STRATEGIES: dict[str, Callable[[Batch], Slots]] = {"random": arrival.deal, "disttrain": disttrain.reorder}
"""A strategy says where each sample of a batch goes; it sees nothing but the batch."""


def plan(
    strategy: str,
    sample_ids: Ints,
    costs: Mapping[str, Floats],
    topology: Topology,
    seed: int,
    generation: int = 1,
) -> StepPlan:
    """The plan of one global batch, with the simulator's prediction.

    sample_ids: (n,) int64, all different, in arrival order. costs: per unit of the topology (n,) forward seconds of the
    whole unit (any consistent unit of time). The same arguments give the same plan. Every replica gets exactly K
    microbatches; those without a sample come last (with fewer samples than replicas, some replicas have only such).

    Raises ValueError for an unknown strategy, an empty batch, ids that are not different, a missing or superfluous cost
    column, and a cost that is negative, infinite or not a number; the message names the row and the rule.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"no strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
    batch = make_batch(sample_ids, costs, topology, seed)
    slots = STRATEGIES[strategy](batch)
    work = Work.of_units(batch.loads(slots), batch.occupied(slots), topology.stages)
    return StepPlan(
        strategy=strategy,
        seed=seed,
        generation=generation,
        topology=topology,
        replicas=batch.microbatches(slots),
        predicted=simulate(work),
    )


def warm_up() -> None:
    """Compile every kernel, or load it from numba's cache, so that the first plan is as fast as the later ones."""
    topology = Topology(replicas=2, microbatches=3, stages={"encoder": 1, LLM: 2})
    ids = np.arange(12)
    cost = np.linspace(1.0, 2.0, ids.size)
    for strategy in STRATEGIES:
        plan(strategy, ids, {"encoder": cost, LLM: cost}, topology, seed=0)
