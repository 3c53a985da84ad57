"""Estimated cost of a sample: arithmetic that can be redone by hand, and what must grow with what."""

import numpy as np
import pytest

from headrace.model_shape import MODEL_SHAPES, ModelShape, TransformerShape
from headrace.sample import Probe
from headrace.spec import AudioSpec, ImageSpec
from reorder_service.planning import sample_costs
from reorder_service.planning.cost import DEVICE_FLOPS_PER_S, LayerCost


def probe(num_tokens: int, images: tuple[int, ...] = (), recordings: tuple[int, ...] = ()) -> Probe:
    return Probe(name="s", num_tokens=num_tokens, num_targets=1, image_patches=images, mel_frames=recordings)


def costs_of(*probes: Probe, vocab: int = 0, shape: ModelShape = MODEL_SHAPES["tiny"]) -> dict[str, np.ndarray]:
    return sample_costs(probes, shape, image=ImageSpec(), audio=AudioSpec(), vocab=vocab)


def test_a_layer_by_hand() -> None:
    shape = TransformerShape(layers=1, width=8, heads=4, kv_heads=2, mlp=20, gated=True)
    # q and o 8 x 8 each, k and v 8 x 4 each, three MLP matrices 8 x 20; two operations per multiply-add
    linear = 2 * (2 * 64 + 2 * 32 + 3 * 160)
    assert LayerCost.of(shape, causal=False) == LayerCost(quadratic=2 * 2 * 8, linear=linear)
    assert LayerCost.of(shape, causal=True) == LayerCost(quadratic=2 * 8, linear=linear)


def test_an_ungated_layer_has_two_mlp_matrices() -> None:
    shape = TransformerShape(layers=1, width=8, heads=2, kv_heads=2, mlp=20, gated=False)
    assert LayerCost.of(shape, causal=False).linear == 2 * (4 * 64 + 2 * 160)


def test_a_whole_sample_by_hand() -> None:
    shape = MODEL_SHAPES["tiny"]
    vision, audio, llm = shape.vision, shape.audio, shape.llm
    encoder_linear = 2 * (4 * 64 * 64 + 2 * 64 * 256)
    expected = vision.layers * (4 * 64 * (16**2 + 32**2) + encoder_linear * 48) + 48 * 2 * 64 * (4 * 64 + 128)
    expected += audio.layers * (4 * 64 * 51**2 + encoder_linear * 51) + 51 * 2 * 64 * (4 * 64 + 128)  # 101 frames, halved
    got = costs_of(probe(30, images=(16, 32), recordings=(101,)), vocab=1000)
    assert got["encoder"][0] == pytest.approx(expected / DEVICE_FLOPS_PER_S)
    layer = LayerCost.of(llm, causal=True)
    expected = llm.layers * (layer.quadratic * 900 + layer.linear * 30) + 30 * 2 * 128 * 1000
    assert got["llm"][0] == pytest.approx(expected / DEVICE_FLOPS_PER_S)


def test_columns_are_float64_with_one_value_per_sample() -> None:
    got = costs_of(probe(5), probe(6, images=(4,)), probe(7, recordings=(100, 200)))
    assert set(got) == {"encoder", "llm"}
    for column in got.values():
        assert column.dtype == np.float64
        assert column.shape == (3,)
    assert costs_of()["llm"].shape == (0,)


def test_text_alone_costs_the_encoder_nothing() -> None:
    assert costs_of(probe(100))["encoder"][0] == 0


def test_one_large_image_costs_more_than_the_same_patches_in_two() -> None:
    one, two = costs_of(probe(9, images=(2048,)), probe(9, images=(1024, 1024)))["encoder"]
    assert one > two


def test_the_7b_shape_costs_about_two_operations_per_parameter_and_token() -> None:
    # Qwen2.5-7B has 6.5e9 parameters outside the embeddings; short sequences make attention's square negligible.
    seconds = costs_of(probe(64), shape=MODEL_SHAPES["7b"])["llm"][0]
    assert seconds * DEVICE_FLOPS_PER_S / 64 == pytest.approx(2 * 6.5e9, rel=0.02)
