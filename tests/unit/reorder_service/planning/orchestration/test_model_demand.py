"""What a model asks of a cluster is what the cost model counts, at the cluster's rate, with what slices exchange."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headrace.published_models import PLANNED_MODELS, PUBLISHED_ENCODERS, PUBLISHED_LLMS
from headrace.reorder_service.planning.cost_model.coefficients import LayerCost
from headrace.reorder_service.planning.cost_model.cost import DEVICE_FLOPS_PER_S, estimate
from headrace.reorder_service.planning.cost_model.measured_costs import MeasuredCosts, PartCosts
from headrace.reorder_service.planning.orchestration.cluster import CLUSTERS
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.model_demand import Training, demand_of, exchange_s, units_of, widths_of
from headrace.reorder_service.planning.orchestration.stage_cuts import first_layers
from headrace.sample import Probe
from headrace.spec import AudioSpec, ImageSpec

A40 = CLUSTERS["a40"].of_gpus(8)
PROBES = [
    Probe(name="a", num_tokens=700, num_targets=10, image_patches=(1024,)),
    Probe(name="b", num_tokens=90, num_targets=30),
    Probe(name="c", num_tokens=1400, num_targets=30, image_patches=(2000, 400)),
]


RATE = DEVICE_FLOPS_PER_S / (A40.flops_per_s * 0.5)
HEAD_S = 2 * 2048 * 151_936 / DEVICE_FLOPS_PER_S
"""Of one token, at the nominal rate."""


def demand(
    model: str = "qwen2.5-vl-3b",
    measured: dict[int, MeasuredCosts] | None = None,
    probes: Sequence[Probe] = PROBES,
    **training: object,
) -> Demand:
    how = Training(**{"global_batch": 8, **training})
    return demand_of(probes, PLANNED_MODELS[model], A40, how, image=ImageSpec(), audio=AudioSpec(), measured=measured)


def test_seconds_are_counted_at_the_clusters_rate() -> None:
    shape = PLANNED_MODELS["qwen2.5-vl-3b"]
    counted = estimate(PROBES, shape, image=ImageSpec(), audio=AudioSpec(), units=("vision", "llm")).seconds
    for unit in demand().units:
        np.testing.assert_allclose(unit.forward_s[1], counted[unit.name] * RATE)


def test_the_head_is_charged_for_targets_as_often_as_it_runs_and_in_slices_of_the_vocabulary() -> None:
    """What a token with loss takes more: forward and backward, also where the layers run their forward again."""
    more = [replace(PROBES[0], num_targets=10), replace(PROBES[0], num_targets=110)]
    for checkpointing, tp in itertools.product(((), ("llm",)), (1, 2)):
        llm = demand(probes=more, checkpointing=checkpointing).units[1]
        assert llm.backward_factor == (3.0 if checkpointing else 2.0)
        without, with_more = llm.forward_s[tp] * (1 + llm.backward_factor)
        assert with_more - without == pytest.approx(100 * 3 * HEAD_S * RATE / tp)


def test_stages_are_cut_by_what_the_head_takes_on_these_samples() -> None:
    shape = PLANNED_MODELS["qwen2.5-vl-3b"].llm
    layers_s = estimate(PROBES, PLANNED_MODELS["qwen2.5-vl-3b"], image=ImageSpec(), audio=AudioSpec()).seconds["llm"].sum()
    layers_s -= HEAD_S * sum(probe.num_targets for probe in PROBES)
    llm = demand().units[1]
    assert llm.end_layers == pytest.approx(70 * HEAD_S / (layers_s / shape.layers))
    assert first_layers(llm, 2) == (18,)
    assert first_layers(demand(probes=[replace(probe, num_targets=probe.num_tokens) for probe in PROBES]).units[1], 2) == (20,)
    assert first_layers(llm, 1) == ()


def test_slices_of_a_layer_exchange_its_rows_as_often_as_it_runs() -> None:
    """Two gathers and two scatters of half of every row, forward and backward, and once more where the forward runs again."""
    shape = PLANNED_MODELS["qwen2.5-vl-3b"].llm
    rows = np.array([probe.num_tokens for probe in PROBES]) * 2.0 * shape.width
    once = shape.layers * 4 * (rows / 2 / A40.intra_node_bytes_per_s + A40.latency_s)
    np.testing.assert_allclose(exchange_s(shape, rows, 2, A40), once)
    assert (exchange_s(shape, rows, 1, A40) == 0).all()
    for checkpointing, passes in (((), 2), (("llm",), 3)):
        llm = demand(checkpointing=checkpointing).units[1]
        halves = estimate(
            PROBES, PLANNED_MODELS["qwen2.5-vl-3b"], image=ImageSpec(), audio=AudioSpec(), units=("vision", "llm"), tp={"llm": 2}
        ).seconds["llm"]  # fmt: skip
        halves -= HEAD_S / 2 * np.array([probe.num_targets for probe in PROBES])
        head = 3 * HEAD_S / 2 * np.array([probe.num_targets for probe in PROBES])
        whole = llm.forward_s[2] * (1 + llm.backward_factor)
        np.testing.assert_allclose(whole, (halves * (1 + llm.backward_factor) + head) * RATE + passes * once)


def test_widths_divide_heads_and_channels_and_stay_in_a_node() -> None:
    shape = PLANNED_MODELS["qwen2.5-vl-3b"]
    assert widths_of(shape.llm, 8) == (1, 2), "two heads of keys"
    assert widths_of(shape.vision, 8) == (1, 2, 4), "3,420 inner channels"
    assert widths_of(PLANNED_MODELS["7b"].vision, 8) == (1, 2, 4, 8)
    assert widths_of(PLANNED_MODELS["7b"].vision, 2) == (1, 2)


def test_units_are_those_that_have_something_to_do() -> None:
    assert units_of(PLANNED_MODELS["9b"], PROBES) == ("vision", "llm", "generator")
    assert units_of(PLANNED_MODELS["9b"], PROBES[1:2]) == ("llm",)
    with_sound = [*PROBES, Probe(name="d", num_tokens=9, num_targets=1, mel_frames=(300,))]
    assert units_of(PLANNED_MODELS["9b"], with_sound) == ("vision", "audio", "llm", "generator")


def test_a_frozen_encoder_trains_its_projector_only() -> None:
    learning, frozen = demand().units[0], demand(frozen=("vision",)).units[0]
    assert (learning.trained_share, learning.backward_factor) == (1.0, 2.0)
    assert frozen.backward_factor == 0.0
    assert 0 < frozen.trained_share < 0.1
    assert frozen.parameters == learning.parameters
    assert (frozen.kept_bytes[1] == 0).all()


def test_measured_times_replace_counted_ones_at_the_widths_that_were_measured() -> None:
    parts = {"vision": PartCosts(layers=(LayerCost(linear=1e-6),) * 32), "llm": PartCosts(layers=(LayerCost(linear=1e-5),) * 36)}
    found = demand(measured={1: MeasuredCosts(parts=parts)})
    assert [tuple(unit.forward_s) for unit in found.units] == [(1,), (1,)]
    np.testing.assert_allclose(found.units[1].forward_s[1], [36e-5 * probe.num_tokens for probe in PROBES])
    with pytest.raises(ValueError, match="measure width 1"):
        demand(measured={8: MeasuredCosts(parts=parts)})


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="frozen names unit 'audio', but the units are vision, llm"):
        demand(frozen=("audio",))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("vit-3b", 3), ("vit-5b", 5.5), ("vit-10b", 10), ("vit-22b", 22), ("gpt-11b", 11), ("llama-70b", 70), ("gpt-175b", 175),
        ("bert-large", 0.34), ("gpt-2-medium", 0.345), ("gpt-3-medium", 0.35), ("gpt-3-2.7b", 2.7), ("gpt-3-6.7b", 6.7),
        ("qwen2.5-3b", 3.09), ("qwen2.5-14b", 14.7), ("disttrain-7b", 7), ("disttrain-13b", 13), ("disttrain-70b", 70),
    ],
)  # fmt: skip
def test_published_shapes_have_about_the_weights_that_are_published(name: str, billions: float) -> None:
    shape = (PUBLISHED_ENCODERS | PUBLISHED_LLMS)[name]
    weights = shape.layers * shape.layer_weights + shape.vocab * shape.width
    assert weights / 1e9 == pytest.approx(billions, rel=0.2)
