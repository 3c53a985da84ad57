"""Encoders are divided among all GPUs, within their memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.bubbles.encoder_plans import encoder_plans
from headrace.reorder_service.planning.bubbles.layer_kernels import LayerKernels
from tests.unit.reorder_service.planning.bubbles.bubble_world import ENCODER_LAYER, LLM_LAYER, ROOMY, encoder, llm_plan

GIB = 1 << 30


def test_figure_5_two_encoder_pipelines_share_a_pipeline_of_the_llm() -> None:
    """Eight GPUs: the LLM in four stages of two ranks; an encoder of two stages of two ranks has two replicas."""
    llm = llm_plan(LLM_LAYER, stages=4, tensor=2, layers=4)
    (plan,) = [plan for plan in encoder_plans([encoder()], llm, ROOMY) if (plan.stages, plan.tensor) == (2, 2)]
    assert (plan.pipelines, plan.replicas) == (2, 2)
    assert plan.llm_stages(llm).tolist() == [[0, 1], [2, 3]]
    assert plan.gpus(llm).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_every_gpu_has_one_stage_of_one_pipeline(stages: int, tensor: int, replicas: int) -> None:
    llm = llm_plan(LLM_LAYER, stages=stages, tensor=tensor, layers=stages, replicas=replicas)
    vision = encoder(stages, layer=dict.fromkeys((1, 2, 4), ENCODER_LAYER))
    plans = encoder_plans([vision], llm, ROOMY)
    assert len(plans) == sum(stages % n == 0 for n in range(1, 7)) * sum(tensor % n == 0 for n in range(1, 5))
    for plan in plans:
        assert sorted(plan.gpus(llm).ravel()) == list(range(stages * tensor))
        assert plan.replicas == plan.pipelines * replicas
        assert plan.replicas * plan.stages * plan.tensor == llm.gpus
        assert (plan.gpus(llm) // tensor == plan.llm_stages(llm)[..., None]).all()


def test_memory_is_that_of_section_4_5() -> None:
    """k (DP_enc phi_enc + DP_llm phi_llm) / n with k = 6, and what the LLM's activations take; the overhead is what is more than
    with as many replicas as the LLM has."""
    llm = llm_plan(LLM_LAYER, stages=4, tensor=2, layers=4, replicas=3, weights=1000, activation_bytes=7.0)
    for plan in encoder_plans([encoder(4, weights=100)], llm, ROOMY):
        assert plan.states_bytes == pytest.approx(6 * (plan.replicas * 100 + 3 * 1000) / 24 + 7)
        assert plan.overhead_bytes == pytest.approx(6 * (plan.replicas - 3) * 100 / 24)
    frozen = encoder_plans([encoder(4, weights=100, frozen=True)], llm, ROOMY)
    assert frozen[0].states_bytes == pytest.approx((2 * frozen[0].replicas * 100 + 6 * 3 * 1000) / 24 + 7)


def test_plans_that_do_not_fit_are_left_out_and_none_is_an_error() -> None:
    llm = llm_plan(LLM_LAYER, stages=4, layers=4, weights=GIB)
    vision = encoder(4, weights=GIB)
    sizes = [plan.states_bytes for plan in encoder_plans([vision], llm, ROOMY)]
    assert sizes == sorted(sizes)
    assert [plan.states_bytes for plan in encoder_plans([vision], llm, sizes[1])] == sizes[:2]
    with pytest.raises(ValueError, match=r"need 3\.0 GiB on every GPU, which have 2\.0; give the LLM more stages"):
        encoder_plans([vision], llm, 2 * GIB)


def test_an_encoder_has_the_tensor_parallel_ranks_that_it_has_a_profile_for() -> None:
    llm = llm_plan(LLM_LAYER, tensor=4)
    assert {plan.tensor for plan in encoder_plans([encoder()], llm, ROOMY)} == {1, 2}
    with pytest.raises(ValueError, match="profile the encoders for one"):
        encoder_plans([encoder(layer={3: ENCODER_LAYER})], llm, ROOMY)
    with pytest.raises(ValueError, match="at least one encoder"):
        encoder_plans([], llm, ROOMY)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_layers_are_spread_over_stages_and_the_projector_is_last(stages: int) -> None:
    vision = encoder(7, projector={1: ENCODER_LAYER, 2: ENCODER_LAYER})
    layer, projector = ENCODER_LAYER.forward.seconds.size, ENCODER_LAYER.forward.seconds.size
    sizes = [vision.stage_kernels(stage, stages, 1, backward=False).seconds.size for stage in range(stages)]
    assert sum(sizes) == 7 * layer + projector
    layers = [size // layer for size in sizes[:-1]] + [(sizes[-1] - projector) // layer]
    assert max(layers) - min(layers) <= 1
    frozen = encoder(7, projector={1: ENCODER_LAYER, 2: ENCODER_LAYER}, frozen=True)
    back = [frozen.stage_kernels(stage, stages, 1, backward=True).seconds for stage in range(stages)]
    assert np.concatenate(back).tolist() == ENCODER_LAYER.backward.seconds.tolist()


def test_what_no_encoder_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a layer"):
        encoder(0)
    with pytest.raises(ValueError, match="same numbers of tensor-parallel ranks"):
        encoder(projector={1: ENCODER_LAYER})
    with pytest.raises(ValueError, match="no negative size"):
        encoder(weights=-1)
    with pytest.raises(ValueError, match="above 0 s"):
        LayerKernels.of([("compute", 0.0)])
    with pytest.raises(ValueError, match="'compute' or 'communicate', got think"):
        LayerKernels.of([("think", 1.0)])
