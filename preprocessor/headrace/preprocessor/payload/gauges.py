"""Metrics of what the stages hold, read at every scrape in the scraping thread."""

from __future__ import annotations

from functools import partial

from headrace.observability import metrics
from headrace.preprocessor.payload.arena import Arena
from headrace.preprocessor.payload.part import PartStage
from headrace.preprocessor.payload.payload_store import PayloadStore
from headrace.preprocessor.payload.staging import ReadAhead


def watch(store: PayloadStore, read_ahead: ReadAhead, arena: Arena | None) -> None:
    """Let the gauges of this process show the parts and bytes in `store`, `read_ahead` and `arena`."""
    metrics.watch(metrics.STAGE_PARTS, {stage: partial(_parts, store, stage) for stage in PartStage})
    in_memory = [stage for stage in PartStage if stage is not PartStage.WAITING]
    metrics.watch(metrics.STAGE_BYTES, {stage: partial(_bytes, store, stage) for stage in in_memory})
    metrics.STORE_BUDGET_BYTES.set(store.budget_bytes)
    metrics.READ_AHEAD_LIMIT_BYTES.set(read_ahead.max_bytes)
    metrics.STORE_LENT_BYTES.set_function(lambda: store.lent_bytes)
    metrics.ARENA_COLD_BYTES.set_function(lambda: arena.statistics().cold_bytes if arena is not None else 0)


def _parts(store: PayloadStore, stage: PartStage) -> float:
    return store.stage_parts[stage]


def _bytes(store: PayloadStore, stage: PartStage) -> float:
    return store.stage_bytes[stage]
