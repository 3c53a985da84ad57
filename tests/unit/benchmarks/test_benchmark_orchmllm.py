"""The figures of `make bench-orchmllm` are what they say, on few ranks."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.orchmllm.fitting_batches import all_gather_bytes, all_to_all_bytes, kept_bytes, largest
from benchmarks.orchmllm.level_phases import WAYS, over_mean
from benchmarks.orchmllm.mixtures import batch_of
from benchmarks.orchmllm.real_ranks import SKIP_STEPS, step_seconds
from headrace.cli.experiment.orchmllm_samples import draw
from headrace.published_models import PUBLISHED_MODELS
from headrace.reorder_service.planning.strategies import arrival, phases

RANKS, PER_RANK = 16, 40


def test_balancing_is_in_the_papers_order_and_nothing_beats_the_mean() -> None:
    batch = batch_of("mllm-18b", RANKS, PER_RANK)
    over = [over_mean([batch], WAYS[name]) for name in ("tailored", "all as without padding", "llm alone", "none")]
    assert over == sorted(over)
    assert 1 < over[0] < 1.05


def test_an_exchange_moves_less_than_gathering_everything_everywhere() -> None:
    batch = batch_of("mllm-18b", RANKS, PER_RANK)
    slots = phases.plan_slots(batch)
    for u in range(2):
        assert all_to_all_bytes(batch, slots, u) < all_gather_bytes(batch, slots, u) / (RANKS / 2)
    assert all_to_all_bytes(batch, arrival.plan_slots(batch), 0) == 0, "a sample that has one rank in all units stays there"


def test_layers_keep_their_inputs_with_recordings_padded() -> None:
    mixture, units = draw("mllm-10b", 4, 1), PUBLISHED_MODELS["mllm-10b"].units
    [kept] = kept_bytes("mllm-10b", mixture, np.zeros((3, 4), np.int64), 1)
    rows = {
        "vision": mixture.vision.sum(),
        "audio": np.count_nonzero(mixture.audio) * mixture.audio.max(),
        "llm": mixture.llm.sum(),
    }
    assert kept == pytest.approx(sum(2 * rows[unit] * units[unit].layers * units[unit].width for unit in rows))


def test_the_largest_number_that_fits_is_found() -> None:
    assert [largest(lambda n, most=most: n <= most) for most in (0, 1, 40, 127)] == [0, 1, 40, 127]  # type: ignore[misc]


def test_a_step_takes_what_the_slowest_rank_takes_in_each_phase() -> None:
    first = {"llm forward": 100.0, "llm backward": 100.0}
    ranks = [[{"llm forward": 1.0, "llm backward": 5.0}], [{"llm forward": 3.0, "llm backward": 2.0}]]
    assert step_seconds([{"microbatches": [first] * SKIP_STEPS + steps} for steps in ranks]) == 3 + 5
