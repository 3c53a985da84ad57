"""All grids that each unit of a model may have, as arrays: what the kernels of DistTrain's searches go through.

Times are for one sample of a microbatch of the whole job; a microbatch of m samples takes m times as long on a unit's replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.estimate import (
    exchange_s,
    hop_s,
    kept_bytes_of_sample,
    state_bytes,
    usable_bytes,
)
from headrace.reorder_service.planning.orchestration.searches.grid_choices import replica_counts, widths
from headrace.reorder_service.planning.orchestration.stage_cuts import layer_share, time_share
from headrace.schedule import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionTable:
    """Options of all units, one after the other: those of the LLM by stages, those of each other unit by GPUs."""

    sizes: Ints
    """(5, M) unit, dp, tp, pp and GPUs of each option."""
    rates: Floats
    """(7, M) per sample of the job: seconds of the whole unit, of its slowest stage, and of the whole unit with its hops; then
    seconds that hops take whatever their size, and that the exchange takes; bytes of the fullest GPU's state, and of what it
    keeps of one sample of the job."""
    first: Ints
    """(U + 1,) the options of unit u are first[u] .. first[u + 1] - 1."""
    shape: Ints
    """(7,) GPUs of the cluster, index of the LLM, of the generator or -1, samples of the global batch, of an LLM replica's
    microbatch, index of the schedule in SCHEDULES, and chunks."""
    usable_bytes: float
    """Of a GPU."""
    replicas: tuple[int, ...]
    """Numbers of replicas that the LLM may have, ascending."""

    @classmethod
    def of(cls, demand: Demand, microbatch: int) -> OptionTable:
        """List the options; numbers of stages that leave the largest one as large as a smaller number does are no options.

        Raises ValueError for a unit that has none.
        """
        replicas = replica_counts(demand, microbatch)
        parts = [_options_of(demand, unit, np.array(replicas)) for unit in demand.units]
        if lacking := [unit.name for unit, (sizes, _) in zip(demand.units, parts, strict=True) if sizes.shape[1] == 0]:
            raise ValueError(
                f"{lacking[0]} has no grid of at most {demand.cluster.num_gpus} GPUs with the dp, tp and pp that are allowed: "
                "allow others"
            )
        return cls(
            sizes=np.ascontiguousarray(np.concatenate([sizes for sizes, _ in parts], axis=1)),
            rates=np.ascontiguousarray(np.concatenate([rates for _, rates in parts], axis=1)),
            first=np.cumsum([0, *(sizes.shape[1] for sizes, _ in parts)]),
            shape=problem_shape(demand, microbatch),
            usable_bytes=usable_bytes(demand.cluster),
            replicas=tuple(replicas),
        )

    def candidate(self, demand: Demand, search: str, chosen: Ints) -> Candidate:
        """Return the candidate of the chosen options, one of each unit."""
        grids = {
            unit.name: UnitGrid(dp=int(dp), tp=int(tp), pp=int(pp))
            for unit, (_, dp, tp, pp, _) in zip(demand.units, self.sizes[:, chosen].T, strict=True)
        }
        samples = grids[LLM].dp * int(self.shape[4])
        return Candidate(search=search, grids=grids, microbatches=demand.global_batch // samples)


def problem_shape(demand: Demand, microbatch: int) -> Ints:
    """Return `OptionTable.shape`."""
    names = demand.unit_names
    generator = names.index(GENERATOR) if GENERATOR in names else -1
    schedule = SCHEDULES.index(demand.schedule)
    numbers = [
        demand.cluster.num_gpus, names.index(LLM), generator, demand.global_batch, microbatch, schedule, demand.chunks
    ]  # fmt: skip
    return np.array(numbers, np.int64)


def useful_depths(layers: int) -> list[int]:
    """Return the numbers of stages that each have a smaller largest stage than all before; 32 layers: 1 to 8, 11, 16 and 32."""
    sizes = [-(-layers // pp) for pp in range(1, layers + 1)]
    return [pp for pp in range(1, layers + 1) if pp == 1 or sizes[pp - 1] < sizes[pp - 2]]


def _options_of(demand: Demand, unit: UnitDemand, replicas: Ints) -> tuple[Ints, Floats]:
    cluster = demand.cluster
    slices = np.array(widths(unit, cluster.gpus_per_node))
    most = min(cluster.num_gpus, demand.global_batch)
    numbers = replicas if unit.name == LLM else np.array(unit.only_dp or range(1, most + 1))
    depths = np.array(unit.only_pp or useful_depths(unit.layers))
    grid: NDArray[np.int64] = np.stack(
        [axis.ravel() for axis in np.meshgrid(numbers[numbers <= most], slices, depths[depths <= unit.layers], indexing="ij")]
    ).astype(np.int64)
    gpus = grid.prod(axis=0)
    chosen = np.flatnonzero(gpus <= cluster.num_gpus)
    order = (gpus[chosen], grid[2, chosen]) if unit.name == LLM else (gpus[chosen],)
    chosen = chosen[np.lexsort(order)]
    (dp, tp, pp), gpus = grid[:, chosen], gpus[chosen]
    seconds = np.zeros(int(slices.max()) + 1)
    kept = np.zeros(seconds.size)
    for width in slices.tolist():
        seconds[width], kept[width] = demand.step_s(unit, width), kept_bytes_of_sample(unit, width)
    hops = pp - (unit.name == demand.unit_names[-1])
    fixed, of_sample = hop_s(unit, cluster, 0.0), hop_s(unit, cluster, 1.0) - hop_s(unit, cluster, 0.0)
    work = seconds[tp] / dp
    rates = np.stack(
        [
            work,
            work * time_share(unit, pp),
            work + hops * of_sample / dp,
            hops * fixed,
            2.0 * exchange_s(unit, cluster, dp, tp, pp),
            state_bytes(unit, dp, tp, pp),
            kept[tp] * layer_share(unit, pp) / dp,
        ]
    )
    return np.stack([np.full(dp.size, demand.unit_names.index(unit.name)), dp, tp, pp, gpus]), rates
