"""Stages are cut as the trainer cuts them, and the fullest one is found by looking at all."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.orchestration.stage_cuts import (
    layer_share,
    layers_of_parts,
    stage_times,
    time_share,
    weight_share,
)
from headrace.trainer.pipeline.layer_partition import partition
from tests.unit.reorder_service.planning.orchestration.orchestration_world import unit_of


def test_stages_have_whole_layers() -> None:
    unit, seven = unit_of("llm", 1.0, layers=28), unit_of("llm", 1.0, layers=7)
    assert time_share(unit, 8) == layer_share(unit, 7) == weight_share(unit, 8) == pytest.approx(4 / 28)
    assert time_share(seven, np.array([1, 2, 3, 7])) == pytest.approx(np.array([1.0, 4 / 7, 3 / 7, 1 / 7]))


def test_a_head_takes_layers_from_the_last_stage() -> None:
    assert layers_of_parts(8, 2) == (4, 4)
    assert layers_of_parts(8, 2, 2.0) == (5, 3), "5 layers, and 3 with a head as long as 2"
    assert layers_of_parts(8, 4, 6.0) == (3, 2, 2, 1)
    unit = replace(unit_of("llm", 1.0, layers=8, parameters=100.0), end_layers=2.0, front_parameters=10.0, back_parameters=10.0)
    assert float(time_share(unit, 2)) == 0.5
    assert float(layer_share(unit, 2)) == 5 / 8
    assert float(weight_share(unit, 2)) == pytest.approx(0.6), "five layers of 10 and the embedding"
    assert stage_times(unit, 2) == [1.0, 1.0]
    assert stage_times(unit, 1) == [1.0]


@given(layers=st.integers(1, 24), parts=st.integers(1, 24), end=st.sampled_from([0.0, 0.3, 1.0, 2.5, 9.0]))
def test_no_cut_has_a_shorter_longest_stage(layers: int, parts: int, end: float) -> None:
    if parts > layers:
        with pytest.raises(ValueError, match="can be cut into 1 to"):
            layers_of_parts(layers, parts, end)
        return
    costs = np.ones(layers)
    costs[-1] += end
    cuts = partition(costs.tolist(), parts)
    trained = max(float(costs[a:b].sum()) for a, b in itertools.pairwise(cuts))
    found = layers_of_parts(layers, parts, end)
    assert sum(found) == layers
    assert min(found) >= 1
    assert max(max(found), found[-1] + end) == pytest.approx(trained)
    unit = replace(unit_of("llm", 1.0, layers=layers), end_layers=end)
    assert float(time_share(unit, parts)) == pytest.approx(trained / (layers + end))
    assert max(stage_times(unit, parts)) == pytest.approx(parts * trained / (layers + end))
