"""The planner's entry points: the strategies by name, and `plan`, which plans one global batch with one of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from headrace.plan import BASELINE_STRATEGIES, CROSS_REPLICA_STRATEGIES, GENERATOR, LLM, StepPlan, Topology
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.packing import pack
from headrace.reorder_service.planning.post_balancing_options import FORMS, PostBalancing
from headrace.reorder_service.planning.search.lightening import lighten
from headrace.reorder_service.planning.search.unequal_speeds import share_by_speed
from headrace.reorder_service.planning.search.unit_dealing import Strategy, dealt
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.memory_limit import excess_memory
from headrace.reorder_service.planning.simulation.phase_step import AFTER_PHASES
from headrace.reorder_service.planning.simulation.prediction import predict_step
from headrace.reorder_service.planning.strategies import (
    arrival,
    colocated,
    disttrain,
    entrain,
    joint,
    llm_only,
    orchmllm,
    taper,
)
from headrace.reorder_service.planning.strategies.auto import fastest
from headrace.reorder_service.planning.strategies.shared_sequences import with_degrees

_EVEN: dict[str, Strategy] = {
    "random": arrival.plan_slots,
    "disttrain": disttrain.plan_slots,
    "entrain": entrain.plan_slots,
    "orchmllm": orchmllm.plan_slots,
    "joint": joint.plan_slots,
    "taper": taper.plan_slots,
}  # all for units with equal numbers of replicas
_PLANNED = _EVEN | dict.fromkeys(BASELINE_STRATEGIES, llm_only.plan_slots)  # with what `auto` does not consider
_EXCHANGING = ("joint", "taper")  # they level all units: samples may change whole places to keep that on units of own replicas

CANDIDATES = {name: dealt(strategy, exchanging=name in _EXCHANGING) for name, strategy in _EVEN.items()}
"""The strategies by name: functions from a batch to the slots of its samples, which depend on nothing but the batch."""

OF_FIRST = {"entrain": entrain.plan_first}
"""Functions that plan the first replicas only, for strategies whose plan of a replica takes longer than dealing the samples."""

AUTO = "auto"
COLOCATED = "colocated"
"""What `auto` chooses for colocated ranks, to which the other strategies, which are for pipelines, have nothing to add. Where
these meet behind every unit, it chooses `orchmllm`."""
STRATEGIES = (*CANDIDATES, AUTO)


def plan(
    strategy: str,
    sample_ids: Ints,
    costs: Mapping[str, Floats],
    topology: Topology,
    seed: int,
    generation: int = 1,
    *,
    execution: Execution | None = None,
    memory: Mapping[str, Floats] | None = None,
    transfer_bytes: Mapping[str, Floats] | None = None,
    tokens: Ints | None = None,
) -> StepPlan:
    """Plan one global batch with the named strategy, and add the simulator's prediction to the plan.

    sample_ids: (n,) int64, all different, in arrival order. costs: per unit of the topology (n,) forward seconds of the
    whole unit (any consistent unit of time). execution: how the plan will be run, by default as ideal 1F1B. memory,
    transfer_bytes: per unit (n,), see `Batch`. The same arguments give the same plan. Every replica gets exactly K
    microbatches; empty ones come last (with fewer samples than replicas, some replicas have only empty ones).

    Raises ValueError for an unknown strategy, an empty batch, ids that are not different, a missing or superfluous cost
    column, a cost that is negative, infinite or not a number (the message names the row and the rule), and for an
    execution whose schedule cannot run the plan.
    """
    batch = make_batch(
        sample_ids, costs, topology, seed, execution=execution, memory=memory, transfer_bytes=transfer_bytes, tokens=tokens
    )
    return plan_of(strategy, batch, generation)


def plan_of(strategy: str, batch: Batch, generation: int = 1, speeds: Floats | None = None) -> StepPlan:
    """Plan a checked `Batch` with the named strategy, and add the simulator's prediction to the plan.

    speeds: (D,) relative speeds of the replicas. If they differ, `search.unequal_speeds` shares the work in proportion to them
    whatever the strategy, and no time is predicted: the simulator knows only replicas of equal speed.
    """
    if speeds is not None and np.ptp(speeds) > 0:
        slots = leaner(batch, dealt(lambda even: lighten(even, share_by_speed(even, speeds)))(batch))
        return StepPlan(
            strategy=strategy,
            seed=batch.seed,
            generation=generation,
            topology=batch.topology,
            replicas=batch.replicas(slots),
            unit_replicas=batch.own_replicas(slots),
            chosen="unequal",
            in_flight=planned_work(batch, slots).execution.in_flight,
        )
    batch = with_degrees(batch)
    chosen, slots = run_strategy(strategy, batch)
    in_flight = None if batch.execution.colocated else planned_work(batch, slots).execution.in_flight
    return StepPlan(
        strategy=strategy,
        seed=batch.seed,
        generation=generation,
        topology=batch.topology,
        replicas=batch.replicas(slots),
        unit_replicas=batch.own_replicas(slots),
        predicted=predict_step(batch, slots),
        degrees=batch.shared_by(),
        chosen="" if chosen == strategy else chosen,
        in_flight=in_flight,
    )


def run_strategy(strategy: str, batch: Batch) -> tuple[str, Slots]:
    """Return the strategy that was used in the end (the one that `auto` chose, if asked for) and the (U, n) slots.

    Where its plan exceeds the execution's memory limit, samples move until it fits (`lighten`). Where that does not help, `joint`
    plans the batch with as little memory as it can; a plan that exceeds the limit even so is returned: `check_memory` refuses it.

    Raises ValueError for an unknown strategy.
    """
    if strategy == AUTO and batch.execution.colocated == AFTER_PHASES:
        return "orchmllm", orchmllm.plan_slots(batch)
    if strategy == AUTO and batch.execution.colocated:
        return COLOCATED, colocated.plan_slots(batch)
    if strategy != AUTO and strategy not in _PLANNED:
        raise ValueError(f"no strategy {strategy!r}; there are {', '.join((*STRATEGIES, *BASELINE_STRATEGIES))}")
    if strategy == AUTO:
        lightened = {name: partial(_lightened, name) for name in CANDIDATES}
        chosen, slots = fastest(batch, lightened, crossing=CROSS_REPLICA_STRATEGIES, of_first=OF_FIRST)
    else:
        chosen, slots = strategy, _lightened(strategy, batch)
    return ("joint", lean) if (lean := leaner(batch, slots)) is not slots else (chosen, slots)


def _lightened(name: str, batch: Batch) -> Slots:
    """Plan a batch with a strategy so that it keeps the memory limit, and then deal it to the units' own replicas."""
    return dealt(lambda even: lighten(even, _PLANNED[name](even)), exchanging=name in _EXCHANGING)(batch)


def leaner(batch: Batch, slots: Slots) -> Slots:
    """Return a plan that exceeds the execution's memory limit less than `slots` do, or `slots` if they fit or are the leanest."""
    excess = excess_memory(batch, slots)
    if excess == 0:
        return slots
    lean = dealt(lambda even: lighten(even, joint.lean_slots(even)), exchanging=True)(batch)
    return lean if excess_memory(batch, lean) < excess else slots


def warm_up() -> None:
    """Compile the kernels of all strategies and of packing, or load them from numba's cache.

    After this the first plan is as fast as later ones.
    """
    ids = np.arange(12)
    pack(1 + ids, int(ids[-1]) + 1)
    cost = np.linspace(1.0, 2.0, ids.size)
    for stages in ({"encoder": 1, LLM: 2}, {"vision": 1, "audio": 1, LLM: 1, GENERATOR: 1}):
        topology = Topology(replicas=2, microbatches=3, stages=stages)
        own = Execution(unit_replicas={next(iter(stages)): 3})
        for execution in (Execution(), Execution(schedule="interleaved", chunks=2, latency_s=1e-3), own):
            plan(AUTO, ids, dict.fromkeys(stages, cost), topology, seed=0, execution=execution)
        for form in FORMS:
            options = PostBalancing(forms=dict.fromkeys(stages, form), ranks_per_node=1)
            for execution in (Execution(post_balancing=options), Execution(post_balancing=options, colocated=AFTER_PHASES)):
                plan("orchmllm", ids, dict.fromkeys(stages, cost), topology, seed=0, execution=execution)
        plan(AUTO, ids, dict.fromkeys(stages, cost), topology, seed=0, execution=Execution(colocated=AFTER_PHASES))
    tight = Execution(memory_limit=0.51 * cost.sum())  # less than a stage holds in arrival order, so that samples have to move
    plan("random", ids, dict.fromkeys(stages, cost), topology, seed=0, execution=tight)
    colocated.warm_up()
