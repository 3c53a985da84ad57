"""The cost tables and topologies that the planner is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.cli.costs.cost_table import CostTable, read_cost_table
from headrace.plan import StepPlan, Topology
from headrace.reorder_service.planning import plan
from headrace.reorder_service.planning.execution import BACKWARD_FACTOR

COSTS = Path(__file__).parents[2] / "tests" / "data" / "costs"
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A cost table by name, and 8 pipeline stages split in proportion to the units' total costs."""

    name: str
    file: str
    stages: dict[str, int]

    def table(self) -> CostTable:
        return read_cost_table(str(COSTS / self.file))

    def topology(self, replicas: int, microbatches: int) -> Topology:
        return Topology(replicas=replicas, microbatches=microbatches, stages=self.stages)


SYNTHCHART = Family(name="synthchart", file="synthchart_512.parquet", stages={"encoder": 3, "llm": 5})
CHARTQA = Family(name="chartqa", file="chartqa_512.parquet", stages={"encoder": 4, "llm": 4})
COCOQA = Family(name="cocoqa", file="cocoqa_512.parquet", stages={"encoder": 5, "llm": 3})
LLAVA = Family(name="llava", file="llava_512.parquet", stages={"encoder": 4, "llm": 4})
OMNI = Family(name="omni", file="omni_2048.parquet", stages={"vision": 4, "audio": 1, "llm": 3})
GENERATOR = Family(name="generator", file="generator_512.parquet", stages={"encoder": 2, "llm": 3, "generator": 3})

FAMILIES = (SYNTHCHART, CHARTQA, COCOQA, LLAVA)
"""The four of the Entrain evaluation: an encoder and an LLM."""


def resampled(table: CostTable, num_samples: int, seed: int) -> CostTable:
    """`num_samples` rows drawn from a table with replacement, each cost blurred by up to 10 % so that few are equal."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(table.sample_ids.size, size=num_samples)
    costs = {unit: column[rows] * rng.uniform(0.9, 1.1, num_samples) for unit, column in table.costs.items()}
    return CostTable(sample_ids=np.arange(num_samples), costs=costs)


def plan_table(strategy: str, table: CostTable, topology: Topology) -> StepPlan:
    """The planner's front door, called as the service calls it."""
    return plan(strategy, table.sample_ids, table.costs, topology, SEED)


def fill_free_bound_s(table: CostTable, topology: Topology) -> float:
    """Seconds of the busiest stage if the work is spread evenly over replicas and no pipeline has to be filled."""
    per_stage = max(float(table.costs[unit].sum()) / count for unit, count in topology.stages.items())
    return (1 + BACKWARD_FACTOR) * per_stage / topology.replicas


def spread_of(loads: NDArray[np.float64], occupied: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(U,) standard deviation of the microbatches that hold a sample, in the unit of the loads; loads: (D, K, U).

    occupied: (D, K). Not over their mean: a strategy that fills fewer microbatches has heavier ones, for whose differences
    stages wait in seconds.
    """
    spread: NDArray[np.float64] = loads[occupied].std(axis=0)
    return spread
