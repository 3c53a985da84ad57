"""How long it takes to place the samples of one global batch, where many sources are mixed by weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress, time_calls
from headrace.reorder_service.order.global_order import GlobalOrder, SourceShards

BATCH, SHARDS, ROWS, WARM_BATCHES = 2_048, 20, 500, 20
"""SHARDS of ROWS samples each are a source."""
SOURCES = (10, 1_000)
GOAL_S = 0.05
_BUDGET_S = 2.0


def sections() -> Iterator[Section]:
    """The time of each number of sources, one batch after the other, once the first batches have shuffled every source."""
    yield Section(
        title=f"placing a batch of {BATCH:,} samples of sources with weights 1, 1/2, 1/3, ..., {SHARDS} shards of {ROWS} each",
        rows=[_row(sources) for sources in SOURCES],
    )


def _row(sources: int) -> Row:
    progress(f"placing: {sources:,} sources")
    order = _order(sources)
    for batch in range(WARM_BATCHES):
        order.refs(batch * BATCH, (batch + 1) * BATCH)
    later = itertools.count(WARM_BATCHES)
    timing = time_calls(functools.partial(_place_next, order, later), budget_s=_BUDGET_S)
    return Row(
        name=f"{sources:,} sources, a batch",
        value=timing.median_s,
        unit="s",
        goal=at_most(GOAL_S) if sources == max(SOURCES) else None,
        detail=timing.detail,
    )


def _order(sources: int) -> GlobalOrder:
    shards = np.arange(sources * SHARDS).reshape(sources, SHARDS)
    given = [SourceShards(name=str(n), shards=shards[n], weight=1 / (n + 1)) for n in range(sources)]
    return GlobalOrder(given, np.full(shards.size, ROWS, np.int64), seed=0, shuffle_shards=16)


def _place_next(order: GlobalOrder, batches: Iterator[int]) -> None:
    batch = next(batches)
    order.refs(batch * BATCH, (batch + 1) * BATCH)
