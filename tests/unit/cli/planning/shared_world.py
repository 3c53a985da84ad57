"""Planned steps on ranks that units share, in all shapes that there are, and what trainers make of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headrace.cli.planning.emulated_ranks import pipeline_of
from headrace.cli.planning.outcome import Outcome, plan_timed
from headrace.execution_spec import COLOCATED, NESTED, SharingOrder
from headrace.plan import Topology
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.sharing import Sharing
from headrace.trainer.pipeline.message_order import Program
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.shared_order import shared_order

MICROBATCHES, SAMPLES = 5, 40
WITH_GENERATOR = "a generator, too"
SHAPES: dict[str, dict[str, tuple[int, int, int]]] = {
    "replicas on stages": {"vision": (4, 1, 1), "llm": (2, 1, 2)},
    "replicas on slices": {"vision": (4, 1, 1), "llm": (1, 2, 2)},
    "slices on stages": {"vision": (2, 2, 1), "llm": (1, 1, 4)},
    "slices on slices": {"vision": (2, 2, 1), "llm": (1, 2, 2)},
    "stages on replicas": {"vision": (1, 1, 2), "llm": (2, 1, 1)},
    "beside ranks of their own": {"vision": (4, 1, 1), "audio": (3, 1, 1), "llm": (2, 1, 2), "generator": (1, 1, 1)},
    "in pieces": {"vision": (4, 1, 1), "llm": (2, 1, 2)},
    WITH_GENERATOR: {"vision": (2, 1, 1), "llm": (1, 1, 2), "generator": (2, 1, 1)},
}
"""By name, dp, tp and pp of all units, of which `guests_of` are on the ranks of the LLM."""
PIECES = {"in pieces": {"vision": 3}}
SHARED_STEPS = [
    (shape, order) for shape in SHAPES for order in (NESTED, COLOCATED) if (shape, order) != (WITH_GENERATOR, COLOCATED)
]
"""All shapes in all orders in which their guests can take turns with the LLM."""


def guests_of(shape: str) -> tuple[str, ...]:
    """Return the units of a shape that are on the ranks of the LLM."""
    return ("vision", "generator") if shape == WITH_GENERATOR else ("vision",)


def shared_outcome(shape: str, order: SharingOrder, schedule: str = "1f1b", strategy: str = "entrain") -> Outcome:
    """Plan and simulate one global batch on a shape."""
    units, rng = SHAPES[shape], np.random.default_rng(3)
    costs = {unit: rng.lognormal(0, 0.7, SAMPLES) for unit in units}
    replicas = {unit: dp for unit, (dp, _, _) in units.items()}
    slices = {unit: tp for unit, (_, tp, _) in units.items() if unit in (*guests_of(shape), "llm")}
    execution = Execution(
        schedule=schedule,
        may_cross_replicas=True,
        unit_replicas={unit: dp for unit, dp in replicas.items() if unit != "llm"},
        sharing=Sharing(order=order, slices=slices, pieces=PIECES.get(shape, {})),
    )
    stages = {unit: pp for unit, (_, _, pp) in units.items()}
    topology = Topology(replicas=replicas["llm"], microbatches=MICROBATCHES, stages=stages)
    batch = make_batch(np.arange(SAMPLES), costs, topology, 0, execution=execution)
    return Outcome.of(plan_timed(batch, strategy)[0], batch)


def turns_of_trainers(outcome: Outcome) -> Mapping[int, list[tuple[str, str, int, int]]]:
    """Return by rank the unit, kind, microbatch and piece of what the trainers take, in turn."""
    batch = outcome.batch
    topology = pipeline_of(batch)
    ids = batch.sample_ids.tolist()
    forward_s = {
        unit: dict(zip(ids, of_unit, strict=True)) for unit, of_unit in zip(batch.units, batch.costs.tolist(), strict=True)
    }
    routes = Routes(replace(outcome.plan, forward_s=forward_s), topology.replicas)
    programs = [
        Program(topology, routes, (unit, replica, stage))
        for unit, size in topology.units.items()
        for replica in range(size.dp)
        for stage in range(size.pp)
    ]
    taken = {}
    for rank, posts in shared_order(topology, programs).items():
        left = {program.post: deque(program.actions) for program in programs}
        actions = [(post[0], left[post].popleft()) for post in posts]
        taken[rank] = [(unit, a.kind.name.lower(), a.microbatch, a.chunk) for unit, a in actions]
    return taken
