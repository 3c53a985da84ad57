"""Random masks have the sizes that they are asked for, and the counted cost of a model is near the rule of thumb."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.context.degrees import CASES, cost_of
from benchmarks.context.random_masks import MASKS
from headrace.mask_layouts import TEXT


@pytest.mark.parametrize("kind", MASKS)
def test_masks_are_whole(kind):
    for seed in range(5):
        mask = MASKS[kind](np.random.default_rng(seed), 16_384)
        assert mask.num_tokens == 16_384
        assert (mask.segments > 0).all()
        assert len(set(mask.own.tolist())) > 1
        assert (len(set(mask.segments.tolist())) > 1) == (kind == "MP")
    if kind != "MP":
        assert (mask.own[0] == TEXT) == (kind == "EE")


@pytest.mark.parametrize("preset", sorted({case.preset for case in CASES}))
def test_a_token_costs_six_operations_a_weight(preset):
    cost = cost_of(preset)
    rate = {"a40": 149.7e12, "h100": 989e12}[preset] * 0.5
    assert cost.token_s == pytest.approx(6 * 8.0e9 / rate, rel=0.1)
    assert cost.gather_s < cost.far_gather_s
