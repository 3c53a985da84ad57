"""Costs of layers by Cornstarch's rules, and the contiguous parts that they make."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model_shape import MODEL_SHAPES
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.pipeline.layer_partition import UnitCosts, bounds, layer_costs, partition
from headrace.trainer.pipeline.topology import PipelineTopology
from tests.examples import with_examples

TINY = MODEL_SHAPES["tiny"]
VOCAB_SIZE = 1000
JOB = {"vocab_size": VOCAB_SIZE, "image": ImageSpec(), "audio": AudioSpec()}  # both projectors join 4 neighbours

LAYER = 4 * 64 * 64 + 2 * 64 * 256  # of an encoder
PROJECTOR = (4 * 64) * (4 * 64) // 4 + (4 * 64) * 128 // 4  # per position before the join
LLM_LAYER = 2 * 128 * (128 + 64) + 3 * 128 * 352
HEAD = VOCAB_SIZE * 128


def topology_of(units: dict[str, Any], **fields: Any) -> PipelineTopology:
    return PipelineTopology.model_validate({"units": units, **fields})


def costs_of(units: dict[str, Any]) -> dict[str, UnitCosts]:
    return layer_costs(topology_of(units), TINY, **JOB)


def test_the_last_layer_carries_what_stands_behind_it() -> None:
    costs = costs_of({"vision": {}, "audio": {}, "llm": {}})
    assert costs["vision"].forward == costs["audio"].forward == (LAYER, LAYER + PROJECTOR)
    assert costs["llm"].forward == (LLM_LAYER, LLM_LAYER, LLM_LAYER, LLM_LAYER + HEAD)
    for forward, backward in costs.values():
        assert backward == tuple(2 * cost for cost in forward)


FROZEN, WHOLLY_FROZEN = {"frozen": True}, {"frozen": True, "frozen_projector": True}


@pytest.mark.parametrize(
    ("units", "vision", "llm"),
    [
        # (layer, what stands behind the last one): backward over forward.
        ({"vision": FROZEN, "llm": {}}, (0, 2), (2, 2)),
        ({"vision": FROZEN, "llm": FROZEN}, (0, 2), (1, 1)),  # the projector's gradient comes through the LLM
        ({"vision": WHOLLY_FROZEN, "llm": FROZEN}, (0, 0), (0, 0)),
        ({"vision": WHOLLY_FROZEN, "llm": {}}, (0, 0), (2, 2)),
        ({"vision": {"frozen_projector": True}, "llm": FROZEN}, (2, 1), (1, 1)),
        ({"vision": WHOLLY_FROZEN, "audio": FROZEN, "llm": FROZEN}, (0, 0), (1, 1)),
        ({"vision": {"checkpointing": True}, "llm": {"frozen": True, "checkpointing": True}}, (3, 2), (2, 1)),
        ({"vision": {"frozen": True, "checkpointing": True}, "llm": {"checkpointing": True}}, (0, 2), (3, 2)),
    ],
)
def test_backward_follows_what_is_trained(units: dict[str, Any], vision: tuple[int, int], llm: tuple[int, int]) -> None:
    costs = costs_of(units)
    for unit, layer, end, (layer_factor, end_factor) in (("vision", LAYER, PROJECTOR, vision), ("llm", LLM_LAYER, HEAD, llm)):
        *first, last = costs[unit].backward
        assert set(first) == {layer_factor * layer}
        assert last == layer_factor * layer + end_factor * end


def test_a_generator_carries_its_head_and_not_the_projector_to_it() -> None:
    costs = layer_costs(topology_of({"vision": {}, "llm": {}, "generator": FROZEN}), MODEL_SHAPES["tiny-generator"], **JOB)
    assert costs["llm"] == costs_of({"vision": {}, "llm": {}})["llm"]
    assert costs["generator"].forward == (LAYER, LAYER + 64 * 3 * 28**2)
    assert costs["generator"].backward == costs["generator"].forward  # gradients pass through it


def test_a_wide_head_takes_layers_from_the_last_part() -> None:
    topology = topology_of({"vision": {}, "llm": {"pp": 2}})
    assert bounds(topology, TINY, **{**JOB, "vocab_size": 10}) == {"vision": (0, 2), "llm": (0, 2, 4)}
    assert bounds(topology, TINY, **{**JOB, "vocab_size": 10_000}) == {"vision": (0, 2), "llm": (0, 3, 4)}


def test_a_frozen_encoder_whose_projector_is_trained_is_cut_later() -> None:
    """The projector is half a layer: 3, 3, 3 and 4.5 where all is trained, 1, 1, 1 and 2.5 where the projector is."""
    small = MODEL_SHAPES["small"]
    trained, frozen = (
        bounds(topology_of({"vision": {"pp": 2, "frozen": frozen}, "llm": {}}), small, **JOB)["vision"]
        for frozen in (False, True)
    )
    assert trained == (0, 2, 4)
    assert frozen == (0, 3, 4)


def test_chunks_are_parts_of_their_own_and_cuts_come_first() -> None:
    interleaved = topology_of({"llm": {"pp": 2}}, schedule="interleaved", chunks=2)
    assert bounds(interleaved, TINY, **JOB) == {"llm": (0, 1, 2, 3, 4)}
    cut = topology_of({"vision": {"pp": 2}, "llm": {"pp": 2, "cuts": [1]}})
    assert bounds(cut, TINY, **JOB) == {"vision": (0, 1, 2), "llm": (0, 1, 4)}


def loads(costs: list[int], found: tuple[int, ...]) -> list[int]:
    return [sum(costs[start:end]) for start, end in itertools.pairwise(found)]


@with_examples(200)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(1, 4))
def test_partition_equals_trying_everything(costs: list[int], num_parts: int) -> None:
    num_parts = min(num_parts, len(costs))

    def rank(found: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        return max(loads(costs, found)), sum(load**2 for load in loads(costs, found)), found

    every = [(0, *cuts, len(costs)) for cuts in itertools.combinations(range(1, len(costs)), num_parts - 1)]
    assert partition(costs, num_parts) == min(every, key=rank)


def test_the_parts_beside_the_largest_are_even_too() -> None:
    assert partition([4, 1, 1, 1, 1], 3) == (0, 1, 3, 5)


def test_equal_layers_make_equal_parts() -> None:
    assert partition([1.5] * 80, 16) == tuple(range(0, 81, 5))


@pytest.mark.parametrize("num_parts", [0, 3])
def test_a_part_without_a_layer_is_refused(num_parts: int) -> None:
    with pytest.raises(ValueError, match=f"2 layers can be cut into 1 to 2 parts, got {num_parts}"):
        partition([1, 1], num_parts)
