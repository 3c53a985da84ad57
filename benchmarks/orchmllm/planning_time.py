"""How long the planner takes for a step of OrchMLLM's largest job, on one core, beside the paper's whole overhead (table 2)."""

from __future__ import annotations

import functools

from benchmarks.orchmllm.mixtures import RANKS_PER_NODE, batch_of
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import progress, time_calls
from headrace.cli.experiment.orchmllm_experiments import TABLE_2
from headrace.reorder_service.planning import plan
from headrace.transport.malloc import keep_freed_pages

MODEL, PER_RANK = "mllm-10b", 60
GOAL_MS = {2_560: 50.0}
BUDGET_S = 2.0


def section(*, quick: bool) -> Section:
    """The whole call of `plan`, as the service makes it: costs checked, phases balanced near nodes, ranks' samples, forecast."""
    keep_freed_pages()  # as in a service that is running: else fresh pages of memory take a third of the time
    rows = []
    for ranks, published in TABLE_2.items():
        progress(f"planning: {ranks:,} ranks")
        batch = batch_of(MODEL, ranks, PER_RANK)
        columns = [dict(zip(batch.units, matrix, strict=True)) for matrix in (batch.costs, batch.transfer_bytes)]
        call = functools.partial(
            plan, "auto", batch.sample_ids, columns[0], batch.topology, 0, execution=batch.execution, transfer_bytes=columns[1]
        )
        timing = time_calls(call, budget_s=BUDGET_S / 4 if quick else BUDGET_S)
        rows.append(
            Row(
                name=f"{ranks:,} ranks",
                value=timing.best_s * 1e3,
                unit="ms",
                rival=Rival(value=published, source="OrchMLLM, table 2"),
                goal=at_most(GOAL_MS.get(ranks, published)),
                detail=timing.detail,
            )
        )
    title = (
        f"planning of a step: three units, {PER_RANK} samples a rank, nodes of {RANKS_PER_NODE}; warm, one core. OrchMLLM's is "
        "its whole overhead, transfers included"
    )
    return Section(title=title, rows=rows)
