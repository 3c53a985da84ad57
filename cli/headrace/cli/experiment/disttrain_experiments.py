"""DistTrain's experiments (Zhang et al. 2024, section 8): placements and orders of samples, beside Megatron-LM and in proportion.

Steps are the formula's by which placements are searched for (`orchestration.estimate`), except figure 18's, which are simulated.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from headrace.cli.experiment.disttrain_models import MEGATRON_STAGES, demand_of
from headrace.cli.experiment.findings import Figure, Findings, Row
from headrace.plan import LLM, Topology
from headrace.reorder_service.planning.batch import Ints, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import step_s
from headrace.reorder_service.planning.orchestration.searches import disttrain_exact, megatron, ratio
from headrace.reorder_service.planning.simulation.simulator import simulate
from headrace.reorder_service.planning.simulation.work import Work
from headrace.reorder_service.planning.strategies import run_strategy

Search = Callable[[Demand], list[Candidate]]

TABLE_2 = ((1296, 1920, 922.0), (648, 960, 641.0), (324, 480, 441.0), (112, 240, 133.0))
"""MLLM-72B by GPUs and global batch: milliseconds of the search."""
LARGE_GPUS, LARGE_BATCH = 1296, 1920
"""Section 8.1."""
MICRO_GPUS = 96
"""Of the "up to 98" of section 8.2: whole nodes."""
MICRO_BATCHES: Mapping[str, int] = {"MLLM-9B": 128, "MLLM-15B": 64, "MLLM-72B": 40}
"""Section 8.2: global batches of the models."""
FROZEN: Mapping[str, tuple[str, ...]] = {
    "all frozen": ("encoder", "llm", "generator"),
    "encoder learns": ("llm", "generator"),
    "llm learns": ("encoder", "generator"),
    "generator learns": ("encoder", "llm"),
}
"""Section 8.3.1: which units are frozen; projectors learn."""
FIGURE_15: Mapping[str, Figure] = {"MLLM-9B": (1.7, 2.8), "MLLM-15B": (1.7, 2.8), "MLLM-72B": 1.2}
FIGURE_16: Mapping[str, Figure] = {"MLLM-9B": (1.7, 2.2), "MLLM-15B": (1.7, 2.2), "MLLM-72B": 1.3}
FIGURE_17, FIGURE_18, FIGURE_19 = (1.3, 2.7), (1.03, 1.11), (1.4, 2.9)

_LIKE_PUBLISHED = ("MLLM-9B", "MLLM-15B")
_BATCHES = 8
PLACED = "Placements are dp x tp x pp of each unit."
_COUNTED = (
    "Times are counted operations at half of an A800's peak; the images of LAION-400M's samples are drawn, 3 in the mean.",
    "A transformer with the operations of Stable Diffusion 2.1 stands for its U-Net.",
    PLACED,
)
_ROUNDED = '"Up to 98" GPUs are 96, whole nodes; the paper\'s figures mark how many each system used, and its text does not say.'
_WITHOUT_REORDERING = "The formula has equal samples, so what DistTrain's reordering of data gains is not in ours."


def figure_15() -> Findings:
    """Utilisation on up to 1,296 GPUs over Megatron-LM's."""
    return _large("utilisation of the used GPUs over Megatron-LM's", FIGURE_15, utilisation_gain, within=0.1)


def figure_16() -> Findings:
    """Throughput on up to 1,296 GPUs over Megatron-LM's."""
    return _large("throughput over Megatron-LM's", FIGURE_16, throughput_gain, within=0.3)


def figure_17() -> Findings:
    """Utilisation on up to 98 GPUs over Megatron-LM's and that of the ratio-based strategy."""
    rows = []
    for model, batch in MICRO_BATCHES.items():
        demand = demand_of(model, MICRO_GPUS, batch)
        best = fastest(demand)
        rivals: dict[str, Search] = {"Megatron-LM": published_megatron(model), "ratio-based": ratio.search}
        for name, rival in rivals.items():
            within = 0.0 if name == "Megatron-LM" and model in _LIKE_PUBLISHED else None
            rows.append(_gain_row(f"{model}, over {name}", demand, rival(demand)[0], best, FIGURE_17, within))
    notes = (
        *_COUNTED,
        _ROUNDED,
        _WITHOUT_REORDERING,
        "MLLM-72B's LLM takes 80 of the 96 GPUs: ours finds nothing better there than Megatron-LM's placement, while the "
        "paper's least gain is 1.3.",
        "Given its own choice of stages and replicas, Megatron-LM comes near to the best placement for MLLM-15B (1.00 x).",
    )
    return Findings(what="utilisation of the used GPUs over the baseline's", rows=tuple(rows), notes=notes)


def figure_18() -> Findings:
    """Step of random order over that of DistTrain's reordering, on its own placement."""
    rows = []
    for model, batch in MICRO_BATCHES.items():
        demand = demand_of(model, MICRO_GPUS, batch)
        best = fastest(demand)
        gain = _reordering_gain(demand, best)
        rows.append(Row(name=model, ours=gain, published=FIGURE_18, unit="x", detail=layout_in_words(best)))
    notes = (
        *_COUNTED,
        f"Steps are simulated, {_BATCHES} global batches each: samples in random order, and reordered by strategy `disttrain`.",
        "How much samples differ is in the numbers of images alone, which are drawn, so the size of the gain is not claimed.",
    )
    return Findings(what="simulated step in random order over the reordered one", rows=tuple(rows), notes=notes)


def figure_19() -> Findings:
    """Utilisation with frozen units, on up to 98 GPUs, over Megatron-LM's."""
    rows = []
    for (model, batch), (name, frozen) in itertools.product(MICRO_BATCHES.items(), FROZEN.items()):
        demand = demand_of(model, MICRO_GPUS, batch, frozen)
        megatrons = published_megatron(model)(demand)[0]
        within = 0.0 if model in _LIKE_PUBLISHED else None
        rows.append(_gain_row(f"{model}, {name}", demand, megatrons, fastest(demand), FIGURE_19, within))
    return Findings(
        what="utilisation of the used GPUs over Megatron-LM's, with units frozen",
        rows=tuple(rows),
        notes=(*_COUNTED, _ROUNDED, _WITHOUT_REORDERING),
    )


def table_2() -> Findings:
    """Time of the search for MLLM-72B's placement."""
    rows = []
    for gpus, batch, published in TABLE_2:
        demand = demand_of("MLLM-72B", gpus, batch)
        fastest(demand)
        before = time.perf_counter()
        best = fastest(demand)
        seconds = time.perf_counter() - before
        rows.append(
            Row(
                name=f"{gpus} GPUs, global batch {batch}",
                ours=1e3 * seconds,
                published=published,
                unit="ms",
                detail=layout_in_words(best),
            )
        )
    notes = ("Ours is the integer optimum of `disttrain-exact`, measured once on one core of this machine, warm.",)
    return Findings(what="time of the search", rows=tuple(rows), notes=notes, kind="MEASURED")


def fastest(demand: Demand) -> Candidate:
    """Return the placement that DistTrain's orchestration has at its integer optimum."""
    return disttrain_exact.search(demand, worth=1.0)[0]


def published_megatron(model: str) -> Search:
    """Return the search for Megatron-LM's placement with the stages that DistTrain gave it."""
    return functools.partial(megatron.search, llm_stages=MEGATRON_STAGES[model])


def throughput_gain(demand: Demand, other: Candidate, best: Candidate) -> float:
    """Return how many times as fast a step is as another placement's."""
    return step_s(demand, other) / step_s(demand, best)


def utilisation_gain(demand: Demand, other: Candidate, best: Candidate) -> float:
    """Return how many times as well as in another placement the GPUs are used that a placement uses."""
    return throughput_gain(demand, other, best) * other.gpus / best.gpus


def layout_in_words(candidate: Candidate) -> str:
    """Return the grids of a placement, dp x tp x pp, like `encoder 1x8x1, llm 1x8x10 on 88 GPUs`."""
    units = ", ".join(f"{name} {grid.dp}x{grid.tp}x{grid.pp}" for name, grid in candidate.grids.items())
    return f"{units} on {candidate.gpus} GPUs"


def _large(
    what: str, published: Mapping[str, Figure], gain: Callable[[Demand, Candidate, Candidate], float], *, within: float
) -> Findings:
    rows = []
    for model, figure in published.items():
        demand = demand_of(model, LARGE_GPUS, LARGE_BATCH)
        best, other = fastest(demand), published_megatron(model)(demand)[0]
        rows.append(
            Row(
                name=model,
                ours=gain(demand, other, best),
                published=figure,
                unit="x",
                within=within,
                detail=f"{layout_in_words(best)} beside {layout_in_words(other)}",
            )
        )
    return Findings(what=what, rows=tuple(rows), notes=(*_COUNTED, _WITHOUT_REORDERING))


def _gain_row(name: str, demand: Demand, other: Candidate, best: Candidate, published: Figure, within: float | None) -> Row:
    faster = throughput_gain(demand, other, best)
    return Row(
        name=name,
        ours=utilisation_gain(demand, other, best),
        published=published,
        unit="x",
        within=within,
        detail=f"throughput {faster:.3g} x; {layout_in_words(best)} beside {layout_in_words(other)}",
    )


def _reordering_gain(demand: Demand, best: Candidate) -> float:
    """Return the simulated step in random order over the reordered one, of global batches drawn from the demand's samples."""
    grids, count = best.grids, best.microbatches
    topology = Topology(replicas=grids[LLM].dp, microbatches=count, stages={name: grid.pp for name, grid in grids.items()})
    execution = Execution(
        unit_replicas={name: grid.dp for name, grid in grids.items() if name != LLM},
        backward_factors={unit.name: unit.backward_factor for unit in demand.units},
    )
    seconds = np.zeros(2)
    for rows in _global_batches(demand):
        costs = {unit.name: unit.forward_s[grids[unit.name].tp][rows] for unit in demand.units}
        batch = make_batch(np.arange(rows.size), costs, topology, 0, execution=execution)
        seconds += [simulate(Work.of(batch, run_strategy(name, batch)[1])).iteration_s for name in ("random", "disttrain")]
    return float(seconds[0] / seconds[1])


def _global_batches(demand: Demand) -> Iterator[Ints]:
    rng = np.random.default_rng(7)
    for _ in range(_BATCHES):
        yield rng.integers(demand.num_samples, size=demand.global_batch)
