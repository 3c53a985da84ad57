"""How fast the planner is once it is warm, on one core, and how fast it is there after a process starts."""

from __future__ import annotations

import functools
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np

from benchmarks.planning.inputs import SEED, SYNTHCHART, plan_table, resampled
from benchmarks.planning.permutation import LARGE_RANKS, PER_RANK, RANKS_PER_NODE, large_row, ranks_batch
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import Timing, progress, time_calls
from headrace.cli.costs.cost_table import CostTable
from headrace.plan import Topology
from headrace.reorder_service.planning import STRATEGIES
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.search.number_partition import descending, lpt
from headrace.reorder_service.planning.strategies import joint, orchmllm

BUDGET_S = 0.6
DISTTRAIN_GOAL_MS, ANY_GOAL_MS = 2.0, 20.0
ORCHMLLM = Rival(value=53.88, source="OrchMLLM")  # table 2, at 2,560 GPUs: the whole dispatch, transfers included
FIRST_PLAN_GOAL_S = 1.0

_FIRST_PLAN = """
import sys
from time import perf_counter
spawned, started = float(sys.argv[1]), perf_counter()
from headrace.reorder_service.planning import plan, warm_up
from headrace.cli.costs.cost_table import CostTable
from headrace.plan import Topology
import numpy as np
imported = perf_counter()
warm_up()
warm = perf_counter()
ids = np.arange(512)
cost = np.linspace(1.0, 2.0, ids.size)
topology = Topology(replicas=4, microbatches=32, stages={"encoder": 3, "llm": 5})
plan(sys.argv[2], ids, {"encoder": cost, "llm": cost[::-1]}, topology, seed=0)
done = perf_counter()
print([started - spawned, imported - started, warm - imported, done - warm])
"""


def sections(*, quick: bool) -> Iterator[Section]:
    """Training scale, OrchMLLM's scale, a cold process, number partitioning against a package."""
    yield _training_section()
    yield _ranks_section()
    yield _first_plan_section(repetitions=2 if quick else 5)
    if importlib.util.find_spec("prtpy"):
        yield _partition_section()
    else:
        progress("speed: prtpy is not installed, so there is no peer for number partitioning")


def _training_section() -> Section:
    """DistTrain's largest global batch: the whole call of `plan`."""
    table = resampled(SYNTHCHART.table(), 1_920, SEED)
    topology = SYNTHCHART.topology(160, 12)
    rows = []
    for strategy in STRATEGIES:
        progress(f"speed: 1,920 samples, {strategy}")
        timing = time_calls(functools.partial(plan_table, strategy, table, topology), budget_s=BUDGET_S)
        goal = DISTTRAIN_GOAL_MS if strategy == "disttrain" else ANY_GOAL_MS
        rows.append(_ms_row(f"plan, {strategy}", timing, goal=goal))
    return Section(title="one global batch: n=1,920, D=160, K=12, encoder 3 + llm 5 stages; warm, one core", rows=rows)


def _ranks_section() -> Section:
    """OrchMLLM's largest job: 60 samples on each of 2,560 ranks that hold the whole model."""
    batch = ranks_batch(LARGE_RANKS, PER_RANK)
    table = CostTable(sample_ids=batch.sample_ids, costs=dict(zip(batch.units, batch.costs, strict=True)))
    progress("speed: 153,600 samples, balancing of all units")
    balancing = time_calls(lambda: orchmllm.plan_slots(batch), budget_s=2 * BUDGET_S)
    rows = [_ms_row("balancing, orchmllm", balancing, rival=ORCHMLLM, goal=100.0), large_row(batch)]
    for strategy in STRATEGIES:
        progress(f"speed: 153,600 samples, {strategy}")
        timing = time_calls(functools.partial(plan_table, strategy, table, batch.topology), budget_s=2 * BUDGET_S)
        rows.append(_ms_row(f"plan, {strategy}", timing))
    title = f"many ranks, three units (vision, audio, llm): n=153,600, D=2,560, K=1, nodes of {RANKS_PER_NODE}; warm, one core"
    return Section(title=title, rows=rows)


def _ms_row(name: str, timing: Timing, *, rival: Rival | None = None, goal: float | None = None) -> Row:
    return Row(
        name=name,
        value=timing.best_s * 1e3,
        unit="ms",
        rival=rival,
        goal=None if goal is None else at_most(goal),
        detail=timing.detail,
    )


def _first_plan_section(repetitions: int) -> Section:
    """Fresh processes with the kernels' machine code on disk; the clock starts before the process does."""
    runs: list[list[float]] = []
    for i in range(repetitions):
        progress(f"speed: first plan of a process, {i + 1} of {repetitions}")
        command = [sys.executable, "-c", _FIRST_PLAN, str(perf_counter()), "auto"]
        runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout))
    totals = [sum(run) for run in runs]
    best = runs[int(np.argmin(totals))]
    parts = dict(zip(("start of Python", "import", "warm_up of all strategies", "first plan, auto, n=512"), best, strict=True))
    total = Row(
        name="start to first plan",
        value=min(totals),
        unit="s",
        goal=at_most(FIRST_PLAN_GOAL_S),
        detail=f"median {statistics.median(totals):.3g} s of {repetitions}",
    )
    rows = [total, *(Row(name=f"of it {name}", value=seconds, unit="s") for name, seconds in parts.items())]
    return Section(title="a new process, compiled kernels on disk", rows=rows)


def _partition_section() -> Section:
    """Plain number partitioning, where a package exists: 1,920 costs into 160 bins."""
    import prtpy

    costs = resampled(SYNTHCHART.table(), 1_920, SEED).costs["llm"]
    bins = 160
    mean = costs.sum() / bins
    items = costs.tolist()

    def theirs(algorithm: Callable[..., object]) -> float:
        sums = prtpy.partition(algorithm=algorithm, numbins=bins, items=items, outputtype=prtpy.out.Sums)
        return float(max(sums) / mean)

    progress("speed: prtpy")
    package = time_calls(lambda: theirs(prtpy.partitioning.greedy), budget_s=BUDGET_S)
    ours = time_calls(lambda: lpt(costs, descending(costs), bins), budget_s=BUDGET_S)
    heaviest = float(np.bincount(lpt(costs, descending(costs), bins), weights=costs).max() / mean)
    single = Topology(replicas=bins, microbatches=1, stages={"llm": 1})
    batch = make_batch(np.arange(costs.size), {"llm": costs}, single, SEED)
    levelled = float(batch.loads(joint.plan_slots(batch)).max() / mean)
    rows = [
        _ms_row("greedy partition (LPT)", ours, rival=Rival(value=package.best_s * 1e3, source="prtpy greedy")),
        Row(
            name="heaviest over mean bin, LPT",
            value=heaviest,
            rival=Rival(value=theirs(prtpy.partitioning.greedy), source="prtpy greedy"),
        ),
        Row(
            name="heaviest over mean bin, joint",
            value=levelled,
            rival=Rival(value=theirs(prtpy.partitioning.kk), source="prtpy Karmarkar-Karp"),
        ),
    ]
    return Section(title="number partitioning: 1,920 costs of one unit into 160 bins", rows=rows)
