"""The first layers of a unit frozen: what is trained, which backwards there are, and how the layers are cut."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.model_shape import MODEL_SHAPES
from headrace.sample import UNIT_COLUMNS
from headrace.spec import parse
from headrace.trainer.pipeline.gradient_flow import GradientFlow
from headrace.trainer.pipeline.layer_partition import layer_costs, with_cuts
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from tests.verify.batches import AUDIO, GENERATING, IMAGE, SHAPE, VOCAB, make_row, packed, whole_model

WHOLLY = {"frozen": True, "frozen_projector": True}
JOB: dict[str, Any] = {"vocab_size": VOCAB, "image": IMAGE, "audio": AUDIO}


def topology_of(units: dict[str, Any]) -> PipelineTopology:
    return parse(PipelineTopology, {"units": units}, "topology")


def stages_of(unit: str, units: dict[str, Any]) -> list[Stage]:
    """All stages of a unit's only replica."""
    topology = with_cuts(topology_of(units), GENERATING, **JOB)
    cuts = topology.units[unit].cuts
    assert cuts is not None
    every = (0, *cuts, 6 if unit == "llm" else 4)
    make, cpu = partial(whole_model, GENERATING), torch.device("cpu")
    places = [Place(unit, 0, stage, 0) for stage in range(topology.units[unit].pp)]
    return [stage for place in places for stage in build_stages(make, topology, place, every, seed=1, device=cpu, slices=None)]


def trained(stages: list[Stage]) -> set[str]:
    """The modules of the unit that learn, layers by number; of a tied matrix, the name that it has on each stage."""
    names = [name.split(".") for stage in stages for name, p in stage.model.named_parameters() if p.requires_grad]
    return {name[2] if name[1] == "layers" else name[1] if "projector" not in name[0] else name[0] for name in names}


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("vision", {"1", "2", "3", "norm", "vision_projector"}),
        ("audio", {"1", "2", "3", "norm", "audio_projector"}),
        ("llm", {"1", "2", "3", "4", "5", "norm", "generator_projector"}),  # its head is the frozen embedding
        ("generator", {"1", "2", "3", "norm", "head"}),
    ],
)
def test_first_layers_are_frozen_with_what_stands_in_front_of_them(unit: str, expected: set[str]) -> None:
    units: dict[str, Any] = {"vision": {}, "audio": {}, "llm": {}, "generator": {}}
    for pp in (1, 2):
        assert trained(stages_of(unit, {**units, unit: {"pp": pp, "frozen_layers": 1}})) == expected


@pytest.mark.parametrize(
    ("units", "has_backward", "sends_gradient"),
    [
        ({"vision": {}, "llm": {"frozen_layers": 3}}, [True] * 3, [True] * 3),  # gradients pass through to the encoder
        ({"vision": WHOLLY, "llm": {"frozen_layers": 3}}, [False, True, True], [False, False, True]),
        ({"vision": WHOLLY, "llm": {"frozen_layers": 2}}, [False, True, True], [False, False, True]),
        ({"vision": WHOLLY, "llm": {"frozen_layers": 1}}, [True, True, True], [False, True, True]),
        ({"vision": WHOLLY, "llm": {"frozen_layers": 5}}, [False, False, True], [False, False, False]),
        ({"vision": WHOLLY, "llm": {}}, [True, True, True], [False, True, True]),
        ({"llm": {"frozen_layers": 4}}, [False, False, True], [False, False, False]),
    ],
)
def test_nothing_goes_back_below_the_first_layer_that_learns(
    units: dict[str, Any], has_backward: list[bool], sends_gradient: list[bool]
) -> None:
    """Six layers in three parts of two."""
    flow = GradientFlow.of(topology_of({**units, "llm": {"pp": 3, "cuts": [2, 4], **units["llm"]}}), "llm")
    assert [flow.has_backward(position) for position in range(3)] == has_backward
    assert [flow.sends_gradient(position) for position in range(3)] == sends_gradient


@given(st.integers(1, 6), st.integers(0, 5), st.booleans(), st.booleans())
def test_a_part_sends_a_gradient_exactly_where_the_one_before_has_a_backward(
    pp: int, frozen_layers: int, upstream: bool, frozen: bool
) -> None:
    vision = {} if upstream else WHOLLY
    llm = {"pp": pp, "frozen": frozen, "frozen_layers": 0 if frozen else frozen_layers}
    flow = GradientFlow.of(with_cuts(topology_of({"vision": vision, "llm": llm}), SHAPE, **JOB), "llm")
    for before, position in itertools.pairwise(range(pp)):
        assert flow.sends_gradient(position) == flow.has_backward(before)
    assert flow.sends_gradient(0) == upstream


def test_no_graph_is_built_for_stages_below_the_first_layer_that_learns() -> None:
    batch = packed([make_row(number, audio=False) for number in range(4)], UNIT_COLUMNS["vision"])
    first, second = stages_of("vision", {"vision": {"pp": 2, "cuts": [2], "frozen_layers": 2}, "llm": {}, "generator": {}})
    rows = first(first.prepare(batch), None, {}).rows
    assert rows is not None
    assert not rows.requires_grad
    output = second(second.prepare(batch), rows, {}).rows
    assert output is not None
    assert output.requires_grad


def test_backward_costs_follow_the_layers() -> None:
    """LLM and vision encoder of 4 and 2 layers; a frozen layer computes input gradients where something in front learns."""
    tiny, job = MODEL_SHAPES["tiny"], {**JOB, "vocab_size": 0}

    def factors(unit: str, units: dict[str, Any]) -> list[float]:
        forward, backward = layer_costs(topology_of(units), tiny, **job)[unit]
        return [b / f for f, b in zip(forward, backward, strict=True)]

    assert factors("llm", {"vision": {}, "llm": {"frozen_layers": 3}}) == [1, 1, 1, 2]
    assert factors("llm", {"vision": WHOLLY, "llm": {"frozen_layers": 3}}) == [0, 0, 0, 2]
    assert factors("llm", {"vision": WHOLLY, "llm": {"frozen_layers": 1, "checkpointing": True}}) == [0, 3, 3, 3]
    assert factors("vision", {"vision": {"frozen_layers": 1}, "llm": {"frozen": True}}) == [0, 2]


def test_frozen_layers_move_the_cut() -> None:
    """Of six layers, 1 1 1 1 3 3 and not 3 3 3 3 3 3 has to be halved; gradients to an encoder make it 2 2 2 2 3 3."""

    def cuts(**llm: int) -> tuple[int, ...] | None:
        topology = topology_of({"vision": {**WHOLLY}, "llm": {"pp": 2, **llm}})
        return with_cuts(topology, SHAPE, **{**JOB, "vocab_size": 0}).units["llm"].cuts

    assert cuts() == (3,)
    assert cuts(frozen_layers=4) == (4,)
    assert cuts(frozen_layers=5) == (4,)
