"""The models that experiments and the benchmark of bubbles take add up to what the paper says of them."""

from __future__ import annotations

import pytest

from headrace.cli.experiment.optimus_models import GPT_175B, TABLE_1, TABLE_1_STEP_S, VIT_22B, encoder, llm, llm_layer
from headrace.reorder_service.planning.bubbles.idle_time import Bubble, idle_seconds
from headrace.reorder_service.planning.bubbles.llm_timeline import time_llm


def test_a_layer_of_the_encoder_takes_1_4_ms_forward_and_2_0_ms_backward() -> None:
    layer = encoder(VIT_22B).layer[8]
    assert layer.forward.total_s == pytest.approx(1.4e-3)
    assert layer.backward.total_s == pytest.approx(2.0e-3)


def test_kernels_of_both_models_fill_what_the_step_of_table_1_has_left() -> None:
    """16 microbatches of 12 layers of the LLM and 6 of the encoder; each pass has four kernels that communicate."""
    vision, language = encoder(VIT_22B).layer[8], llm_layer(GPT_175B)
    compute_s = 16 * sum(
        layers * (of_layer.forward.compute_s + of_layer.backward.compute_s) for layers, of_layer in ((6, vision), (12, language))
    )
    assert compute_s == pytest.approx(TABLE_1_STEP_S - sum(TABLE_1.values()))
    total_s = 16 * sum(
        layers * (of_layer.forward.total_s + of_layer.backward.total_s) for layers, of_layer in ((6, vision), (12, language))
    )
    assert total_s - compute_s == pytest.approx(TABLE_1["tensor"])
    assert language.forward.communicates.sum() == language.backward.communicates.sum() == 4
    assert language.forward.seconds[language.forward.communicates] == pytest.approx(300e-6, rel=0.03)


def test_bubbles_of_tensor_parallelism_are_the_llms_share_of_table_1() -> None:
    plan = llm(GPT_175B, replicas=48, stages=8, chunks=12, microbatches=16)
    assert idle_seconds(time_llm(plan))[Bubble.TENSOR] == pytest.approx(TABLE_1["tensor"] * 12 / 15, rel=0.01)


def test_on_fewer_ranks_kernels_compute_longer_and_communicate_less() -> None:
    by_tensor = encoder(VIT_22B).layer
    for few, many in ((1, 2), (2, 4), (4, 8)):
        assert by_tensor[few].forward.compute_s == pytest.approx(2 * by_tensor[many].forward.compute_s)
        assert by_tensor[few].forward.total_s - by_tensor[few].forward.compute_s < (
            by_tensor[many].forward.total_s - by_tensor[many].forward.compute_s
        )
    assert not by_tensor[1].forward.communicates.any()
