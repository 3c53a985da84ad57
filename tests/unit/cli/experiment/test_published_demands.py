"""The models that published searches were measured on have their published sizes, and fit the published clusters."""

from __future__ import annotations

import pytest

from headrace.cli.experiment.cornstarch_models import PUBLISHED, frozen_demand
from headrace.cli.experiment.disttrain_models import MODELS, demand_of
from headrace.model_shape import TransformerShape
from headrace.published_models import CORNSTARCH_AUDIO, CORNSTARCH_LLMS, CORNSTARCH_VISION
from headrace.reorder_service.planning.orchestration.estimate import fits
from headrace.reorder_service.planning.orchestration.searches import megatron


@pytest.mark.parametrize(
    ("model", "billions"), [("MLLM-9B", (0.63, 7.5, 1.0)), ("MLLM-15B", (0.63, 13.9, 1.0)), ("MLLM-72B", (0.63, 70.6, 1.0))]
)
def test_disttrain_models_have_their_weights(model: str, billions: tuple[float, ...]) -> None:
    units = demand_of(model, 96, 128).units
    assert [unit.parameters / 1e9 for unit in units] == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("model", MODELS)
def test_megatron_places_them_on_the_published_cluster(model: str) -> None:
    demand = demand_of(model, 1296, 1920)
    assert all(fits(demand, candidate) for candidate in megatron.search(demand))


@pytest.mark.parametrize(
    ("shapes", "billions"),
    [
        (CORNSTARCH_VISION, {"S": 0.6, "M": 3.9, "L": 11.6}),
        (CORNSTARCH_AUDIO, {"M": 3.4, "L": 12.4}),
        (CORNSTARCH_LLMS, {"S": 1.2, "M": 8.0, "L": 32.0}),
    ],
)
def test_cornstarch_models_have_their_weights(shapes: dict[str, TransformerShape], billions: dict[str, float]) -> None:
    """But for the small audio encoder, whose published 0.5b are more than 24 layers of its width have."""
    for size, published in billions.items():
        shape = shapes[size]
        assert (shape.layers * shape.layer_weights + shape.vocab * shape.width) / 1e9 == pytest.approx(published, rel=0.25), size


@pytest.mark.parametrize("sizes", PUBLISHED)
def test_only_projectors_of_cornstarch_models_learn(sizes: str) -> None:
    assert [(unit.trained_share, unit.backward_factor) for unit in frozen_demand(sizes).units] == [(0.0, 0.0), (0.0, 2.0)]
