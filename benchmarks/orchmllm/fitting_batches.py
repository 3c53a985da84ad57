"""Bytes of the exchange, by all-gather and by all-to-all (equations 3 and 4), and the largest batches of which ranks have room.

How much memory the paper's ranks have for activations is not published. So the batch that it publishes for balanced ranks gives
the limit here, and how many samples of a rank fit without balancing follows. Layers keep their inputs (activation checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.orchmllm.mixtures import BYTES, batch_of
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import progress
from headrace.cli.experiment.orchmllm_experiments import LARGE_RANKS, MICRO_RANKS, TAILORED
from headrace.cli.experiment.orchmllm_samples import SETTINGS, Mixture, draw
from headrace.published_models import PUBLISHED_MODELS
from headrace.reorder_service.planning.batch import Batch, Floats, Slots
from headrace.reorder_service.planning.form_loads import bin_loads
from headrace.reorder_service.planning.strategies import arrival, llm_only, phases
from headrace.reorder_service.planning.strategies.orchmllm import sent_to_llm

LLM_ONLY_MODEL, LLM_ONLY_FITS = "mllm-84b", 18
_MIB = 2.0**20


def sections(*, quick: bool) -> Iterator[Section]:
    """The bytes, then the batches."""
    rows = []
    for model, setting in SETTINGS.items():
        progress(f"bytes: {model}")
        batch = batch_of(model, MICRO_RANKS, setting.micro_batch)
        slots = phases.plan_slots(batch)
        for u, unit in enumerate(batch.units[:-1]):
            gathered, exchanged = all_gather_bytes(batch, slots, u), all_to_all_bytes(batch, slots, u)
            rows.append(
                Row(
                    name=f"{model}, {unit}",
                    value=exchanged / _MIB,
                    unit="MiB",
                    rival=Rival(value=gathered / _MIB, source="all-gather, eq. 3"),
                    goal=at_most(gathered / _MIB),
                )
            )
    yield Section(
        title=f"most that a rank sends or receives of what an encoder makes, all-to-all: {MICRO_RANKS} ranks", rows=rows
    )
    yield _fitting(LARGE_RANKS // 8 if quick else LARGE_RANKS)


def all_gather_bytes(batch: Batch, slots: Slots, u: int) -> float:
    """Return what a rank receives if all gather the batches of all, each as long as the longest (equation 3)."""
    ranks = batch.topology.replicas
    return (ranks - 1) * float(np.bincount(slots[u], weights=batch.transfer_bytes[u], minlength=ranks).max())


def all_to_all_bytes(batch: Batch, slots: Slots, u: int) -> float:
    """Return the most that any rank sends to others or receives from others (equation 4 has the longest batch as its bound)."""
    traffic = sent_to_llm(batch, slots, [u])
    travels = traffic.sender != traffic.receiver
    ends = (traffic.sender, traffic.receiver)
    return max(float(np.bincount(end[travels], weights=traffic.volume[travels], minlength=1).max()) for end in ends)


def _fitting(ranks: int) -> Section:
    rows = []
    for model, setting in SETTINGS.items():
        progress(f"fitting batches: {model}")
        limit = _fullest(model, ranks, setting.mini_batch, phases.plan_slots)
        fits = largest(lambda per_rank, m=model, most=limit: _fullest(m, ranks, per_rank, arrival.plan_slots) <= most)  # type: ignore[misc]
        rows.append(
            Row(
                name=f"{model}, not balanced, {ranks:,} ranks",
                value=fits,
                rival=Rival(value=setting.unbalanced, source="OrchMLLM, 8.1"),
                detail=f"where {setting.mini_batch} fit if balanced",
            )
        )
    setting = SETTINGS[LLM_ONLY_MODEL]
    limit = _fullest(LLM_ONLY_MODEL, MICRO_RANKS, setting.micro_batch, phases.plan_slots)
    fits = largest(lambda per_rank: _fullest(LLM_ONLY_MODEL, MICRO_RANKS, per_rank, llm_only.plan_slots) <= limit)
    rows.append(
        Row(
            name=f"{LLM_ONLY_MODEL}, llm alone balanced, {MICRO_RANKS} ranks",
            value=fits,
            rival=Rival(value=LLM_ONLY_FITS, source="OrchMLLM, 8.3"),
            detail=f"where {setting.micro_batch} fit if balanced",
        )
    )
    return Section(title="SIMULATED samples of a rank for which memory is enough", rows=rows)


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number for which `fits`, up to 127, if a larger one fits no more easily."""
    found = 0
    for step in (64, 32, 16, 8, 4, 2, 1):
        found += step if fits(found + step) else 0
    return found


def _fullest(model: str, ranks: int, per_rank: int, way: Callable[[Batch], Slots]) -> float:
    """Return the bytes of activations on the rank that keeps most."""
    batch = batch_of(model, ranks, per_rank)
    return float(kept_bytes(model, draw(model, ranks * per_rank, 0), way(batch), ranks).max())


def kept_bytes(model: str, mixture: Mixture, slots: Slots, ranks: int) -> Floats:
    """Return the (ranks,) bytes that the layers of all units keep: the inputs of each, padded where the unit pads."""
    kept = np.zeros(ranks)
    for u, (unit, form) in enumerate(TAILORED.items()):
        lengths, shape = getattr(mixture, unit), PUBLISHED_MODELS[model].units[unit]
        has = np.flatnonzero(lengths)
        kept += bin_loads(form, lengths[has], slots[u, has], ranks) * shape.layers * shape.width * BYTES
    return kept
