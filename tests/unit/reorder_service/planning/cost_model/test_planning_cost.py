"""Estimated cost of a sample: arithmetic that can be redone by hand, and what must grow with what."""

import time
from dataclasses import replace

import numpy as np
import pytest

from headrace.model_shape import (
    AUDIO_SHAPES,
    GENERATOR_SHAPES,
    LLM_SHAPES,
    MODEL_SHAPES,
    VISION_SHAPES,
    ModelShape,
    TransformerShape,
)
from headrace.reorder_service.planning import sample_costs
from headrace.reorder_service.planning.cost_model.coefficients import TARGETS, LayerCost
from headrace.reorder_service.planning.cost_model.cost import (
    DEVICE_FLOPS_PER_S,
    SampleCosts,
    estimate,
    layer_costs,
    nominal_coefficients,
)
from headrace.reorder_service.planning.cost_model.kept_bytes import Keeping, kept_bytes
from headrace.sample import Probe
from headrace.spec import AudioSpec, ImageSpec

BUILT = ("tiny", "small", "1b", "3b", "7b", "8b", "70b", "tiny-generator", "9b")
MIB = 2**20


def probe(num_tokens: int, images: tuple[int, ...] = (), recordings: tuple[int, ...] = ()) -> Probe:
    return Probe(name="s", num_tokens=num_tokens, num_targets=1, image_patches=images, mel_frames=recordings)


def costs_of(*probes: Probe, vocab: int = 0, shape: ModelShape = MODEL_SHAPES["tiny"]) -> dict[str, np.ndarray]:
    return sample_costs(probes, shape, image=ImageSpec(), audio=AudioSpec(), vocab=vocab)


def estimate_of(*probes: Probe, shape: ModelShape = MODEL_SHAPES["tiny"], **options) -> SampleCosts:
    return estimate(probes, shape, image=ImageSpec(), audio=AudioSpec(), **options)


def in_operations(cost: LayerCost) -> tuple[float, float, float]:
    return cost.quadratic * DEVICE_FLOPS_PER_S, cost.linear * DEVICE_FLOPS_PER_S, cost.constant


# -- published shapes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tables", "published_size"),
    [  # tables of width * vocab: one where the output layer is the embedding, else two
        ("llama3-1b", 1, 1.236e9),
        ("llama3-3b", 1, 3.213e9),
        ("llama3-8b", 2, 8.030e9),
        ("llama3-70b", 2, 70.55e9),
        ("mistral-7b", 2, 7.248e9),
        ("qwen2-1.5b", 1, 1.544e9),
        ("qwen2-7b", 2, 7.616e9),
        ("qwen2-72b", 2, 72.71e9),
    ],
)
def test_a_decoder_has_the_parameters_of_the_published_model(name: str, tables: int, published_size: float) -> None:
    shape = LLM_SHAPES[name]
    assert shape.layers * shape.layer_weights + tables * shape.width * shape.vocab == pytest.approx(published_size, rel=0.001)


@pytest.mark.parametrize(
    ("name", "rest", "published_size"),
    [
        ("clip-l", 3 * 14**2 * 1024 + 257 * 1024, 304e6),  # patches and positions
        ("siglip-so400m", 3 * 14**2 * 1152 + 729 * 1152 + 4 * 1152**2 + 2 * 1152 * 4304, 428e6),  # and the pooling layer
        ("vit-h", 3 * 14**2 * 1280 + 257 * 1280, 632e6),
        ("qwen2-vl-vision", 2 * 3 * 14**2 * 1280 + 5120 * (5120 + 3584), 675e6),  # two frames a patch; the merger
        ("qwen2.5-vl-vision", 2 * 3 * 14**2 * 1280 + 5120 * (5120 + 3584), 8.292e9 - 7.616e9),  # the 7B, without its LLM
    ],
)
def test_a_vision_encoder_has_the_parameters_of_the_published_model(name: str, rest: int, published_size: float) -> None:
    shape = VISION_SHAPES[name]
    assert shape.layers * shape.layer_weights + rest == pytest.approx(published_size, rel=0.005)


@pytest.mark.parametrize(
    ("name", "mel_bins", "published_size"), [("small", 80, 244e6), ("medium", 80, 769e6), ("large", 128, 1.55e9)]
)
def test_whisper_has_its_parameters_with_a_decoder_of_the_same_size(name: str, mel_bins: int, published_size: float) -> None:
    shape = AUDIO_SHAPES[f"whisper-{name}"]
    encoder = shape.layers * shape.layer_weights + 3 * shape.width * (mel_bins + shape.width) + 1500 * shape.width
    cross_attention = 4 * shape.width**2
    decoder = shape.layers * (shape.layer_weights + cross_attention) + (51_866 + 448) * shape.width
    assert encoder + decoder == pytest.approx(published_size, rel=0.015)


def test_what_the_trainer_builds_has_no_window_attention() -> None:
    assert tuple(MODEL_SHAPES) == BUILT
    for shape in MODEL_SHAPES.values():
        assert shape.vision.window == shape.audio.window == shape.llm.window == 0
        assert shape.generator is None or shape.generator.window == 0


def test_a_generator_has_the_parameters_of_the_published_model() -> None:
    """Each of DiT-XL's layers has six vectors to modulate it besides, which are made by a matrix of its own."""
    shape = GENERATOR_SHAPES["dit-xl"]
    modulation = 6 * shape.width**2
    assert shape.layers * (shape.layer_weights + modulation) == pytest.approx(675e6, rel=0.01)


@pytest.mark.parametrize("wrong", [{"window": 64}, {"full_every": 8}, {"window": -1}, {"full_every": 0}])
def test_half_of_a_window_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs both a window of at least 1 and full_every of at least 2"):
        TransformerShape(layers=8, width=8, heads=2, kv_heads=2, mlp=8, gated=False, **wrong)


# -- layers ------------------------------------------------------------------------------------------------------------


def test_a_layer_by_hand() -> None:
    shape = TransformerShape(layers=1, width=8, heads=4, kv_heads=2, mlp=20, gated=True)
    # q and o 8 x 8 each, k and v 8 x 4 each, three MLP matrices 8 x 20; two operations per multiply-add
    linear = 2 * (2 * 64 + 2 * 32 + 3 * 160)
    (layer,) = layer_costs(shape)
    assert in_operations(layer) == pytest.approx((2 * 2 * 8, linear, 0))
    (layer,) = layer_costs(shape, causal=True)
    assert in_operations(layer) == pytest.approx((2 * 8, linear, 0))


def test_an_ungated_layer_has_two_mlp_matrices() -> None:
    shape = TransformerShape(layers=1, width=8, heads=2, kv_heads=2, mlp=20, gated=False)
    assert shape.layer_weights == 4 * 64 + 2 * 160


def test_window_attention_costs_a_position_the_same_in_an_image_of_any_size() -> None:
    layers = layer_costs(VISION_SHAPES["qwen2.5-vl-vision"])
    full = [i for i, layer in enumerate(layers) if layer.quadratic]
    assert (len(layers), full) == (32, [7, 15, 23, 31])
    # inside one window of 64 patches nothing is saved: 64 positions cost what they cost a full layer
    windowed, whole = layers[0], layers[7]
    assert windowed.linear * 64 == pytest.approx(whole.quadratic * 64**2 + whole.linear * 64)


def test_windows_make_a_large_image_cheaper() -> None:
    by_name = {
        name: ModelShape(vision=VISION_SHAPES[name], audio=AUDIO_SHAPES["whisper-small"], llm=LLM_SHAPES["qwen2-7b"])
        for name in ("qwen2-vl-vision", "qwen2.5-vl-vision")
    }
    small, large = ([costs_of(probe(9, (x,)), shape=s)["encoder"][0] for s in by_name.values()] for x in (64, 16_384))
    assert small[1] == pytest.approx(small[0], rel=0.01)
    assert large[1] < 0.6 * large[0]


def test_published_layers_are_followed_by_projectors_and_the_head_is_by_itself() -> None:
    shape = MODEL_SHAPES["tiny"]
    parts = nominal_coefficients(shape, image=ImageSpec(), audio=AudioSpec(), vocab=1000)
    assert {part: len(layers) for part, layers in parts.items()} == {"vision": 2 + 1, "audio": 2 + 1, "llm": 4, TARGETS: 1}
    assert in_operations(parts[TARGETS][0]) == pytest.approx((0, 2 * 128 * 1000, 0))
    assert TARGETS not in nominal_coefficients(shape, image=ImageSpec(), audio=AudioSpec()), "the vocabulary is not known"


def test_slices_divide_the_layers_and_the_head_and_leave_projectors_whole() -> None:
    whole, halves = (
        nominal_coefficients(MODEL_SHAPES["7b"], image=ImageSpec(), audio=AudioSpec(), tp=tp) for tp in (None, {"llm": 2})
    )
    assert halves["vision"] == whole["vision"]
    for part in ("llm", TARGETS):
        assert list(halves[part]) == [LayerCost(quadratic=one.quadratic / 2, linear=one.linear / 2) for one in whole[part]]


def test_the_head_counts_on_tokens_that_carry_loss_only() -> None:
    few, more = (replace(probe(50), num_targets=number) for number in (10, 30))
    without, one, other = (costs_of(of, vocab=vocab)["llm"][0] for of, vocab in ((few, 0), (few, 1000), (more, 1000)))
    head_s = 2 * 128 * 1000 / DEVICE_FLOPS_PER_S
    assert (one - without, other - without) == pytest.approx((10 * head_s, 30 * head_s))


def test_the_head_does_not_run_again_where_layers_do() -> None:
    """With checkpointing a backward takes three forwards: of the head it takes two, after a forward."""
    again = {"checkpointing": ["llm"], "backward_factors": {"llm": 3.0}}
    without, whole = (estimate_of(probe(50), vocab=vocab, **again).seconds["llm"][0] for vocab in (0, 1000))
    assert (1 + 3) * (whole - without) == pytest.approx(3 * 2 * 128 * 1000 / DEVICE_FLOPS_PER_S)


def test_the_published_vocabulary_counts_where_the_job_gives_none() -> None:
    shape = MODEL_SHAPES["7b"]
    assert costs_of(probe(7), shape=shape)["llm"] == costs_of(probe(7), shape=shape, vocab=152_064)["llm"]
    assert costs_of(probe(7), shape=shape)["llm"] > costs_of(probe(7), shape=shape, vocab=1000)["llm"]


# -- seconds -----------------------------------------------------------------------------------------------------------


def test_a_whole_sample_by_hand() -> None:
    encoder_linear = 2 * (4 * 64 * 64 + 2 * 64 * 256)
    expected = 2 * (4 * 64 * (16**2 + 32**2) + encoder_linear * 48) + 48 * 2 * 64 * (4 * 64 + 128)
    expected += 2 * (4 * 64 * 51**2 + encoder_linear * 51) + 51 * 2 * 64 * (4 * 64 + 128)  # 101 frames, halved
    got = costs_of(probe(30, images=(16, 32), recordings=(101,)), vocab=1000)
    assert got["encoder"][0] == pytest.approx(expected / DEVICE_FLOPS_PER_S)
    decoder_linear = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352)
    expected = 4 * (2 * 128 * 900 + decoder_linear * 30) + 1 * 2 * 128 * 1000
    assert got["llm"][0] == pytest.approx(expected / DEVICE_FLOPS_PER_S)


def test_columns_are_float64_with_one_value_per_sample() -> None:
    got = costs_of(probe(5), probe(6, images=(4,)), probe(7, recordings=(100, 200)))
    assert list(got) == ["encoder", "llm"]
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
    # 6.5e9 parameters outside the embeddings, 0.5e9 in the output layer; short sequences make attention's square negligible
    seconds = costs_of(replace(probe(64), num_targets=64), shape=MODEL_SHAPES["7b"])["llm"][0]
    assert seconds * DEVICE_FLOPS_PER_S / 64 == pytest.approx(2 * 7.07e9, rel=0.01)


# -- units -------------------------------------------------------------------------------------------------------------


def test_the_encoder_is_vision_and_audio_together() -> None:
    probes = (probe(30, images=(16, 32), recordings=(101,)), probe(9), probe(9, recordings=(40,)), probe(9, images=(64,)))
    apart, together = estimate_of(*probes, units=("vision", "audio", "llm")), estimate_of(*probes)
    for columns, whole in (
        (apart.seconds, together.seconds),
        (apart.memory_bytes, together.memory_bytes),
        (apart.transfer_bytes, together.transfer_bytes),
    ):
        assert list(columns) == ["vision", "audio", "llm"]
        np.testing.assert_allclose(columns["vision"] + columns["audio"], whole["encoder"], rtol=1e-15)
        np.testing.assert_array_equal(columns["llm"], whole["llm"])
        assert columns["vision"][1:3].tolist() == [0, 0] == columns["audio"][[1, 3]].tolist()


def test_the_generator_has_a_position_for_every_image_token_by_hand() -> None:
    shape = MODEL_SHAPES["tiny-generator"]
    assert shape.generator is not None
    width, values = shape.generator.width, 3 * (2 * 14) ** 2
    got = estimate_of(
        probe(30, images=(16, 64)), probe(9), probe(9, images=(7,)), shape=shape, units=("encoder", "llm", "generator")
    )
    matrices = shape.generator.layers * shape.generator.layer_weights
    ends = 2 * values * width + width**2 + shape.llm.width * (shape.llm.width + width)  # tokens, time; the projector
    attention = shape.generator.layers * 4 * width * (4**2 + 16**2)
    assert got.seconds["generator"] * DEVICE_FLOPS_PER_S == pytest.approx(
        [2 * (4 + 16) * (matrices + ends) + attention, 0, got.seconds["generator"][2] * DEVICE_FLOPS_PER_S]
    )
    assert got.transfer_bytes["generator"].tolist() == [2 * 20 * width, 0, 2 * 2 * width]
    assert got.memory_bytes["generator"].tolist() == [
        20 * kept_bytes(shape.generator, Keeping()),
        0,
        2 * kept_bytes(shape.generator, Keeping()),
    ]
    without = estimate_of(probe(30, images=(16, 64)), shape=shape)
    assert without.seconds["llm"][0] == got.seconds["llm"][0]
    assert "generator" not in without.seconds


def test_columns_come_in_the_order_of_the_units() -> None:
    assert list(estimate_of(probe(1), units=("audio", "vision", "llm")).seconds) == ["audio", "vision", "llm"]
    assert list(estimate_of(probe(1), units=("llm",)).seconds) == ["llm"]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (("encoder", "llm", "generator"), "gives no cost for unit 'generator', only for encoder, vision, audio, llm"),
        (("encoder",), r"units must have 'llm', each unit once, .* got \['encoder'\]"),
        (("encoder", "vision", "llm"), "'encoder' without its parts"),
        (("vision", "vision", "llm"), "each unit once"),
        (("vision", "llm"), r"row 1 \(s\) has recordings, but no unit of \['vision', 'llm'\] stands for them: add 'audio'"),
        (("audio", "llm"), r"row 0 \(s\) has images, but no unit of \['audio', 'llm'\] stands for them: add 'vision'"),
    ],
)
def test_units_that_leave_something_out_are_refused(units: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_of(probe(9, images=(4,)), probe(9, recordings=(8,)), units=units)


# -- measured coefficients ---------------------------------------------------------------------------------------------


def test_measured_layers_replace_operations() -> None:
    measured = {
        "vision": (LayerCost(quadratic=2.0, linear=3.0), LayerCost(constant=5.0)),
        "llm": (LayerCost(linear=7.0),) * 3,
    }
    got = estimate_of(probe(10, images=(4, 6)), probe(20), measured=measured)
    # squares image by image, the constant once per sample and not for the one without images
    assert got.seconds["encoder"].tolist() == [2 * (16 + 36) + 3 * 10 + 5, 0]
    assert got.seconds["llm"].tolist() == [210, 420]
    assert got.memory_bytes["llm"].tolist() == estimate_of(probe(10), probe(20)).memory_bytes["llm"].tolist()


def test_a_measurement_that_lacks_what_samples_have_is_refused() -> None:
    measured = {"llm": (LayerCost(linear=1.0),)}
    assert estimate_of(probe(3), measured=measured).seconds["encoder"].tolist() == [0]
    with pytest.raises(ValueError, match=r"row 1 \(s\) has images, but no measured coefficient stands for them: add 'vision'"):
        estimate_of(probe(3), probe(3, images=(4,)), measured=measured)


# -- memory and transfers ----------------------------------------------------------------------------------------------


def test_an_ungated_layer_keeps_32_bytes_a_channel_and_4_more_with_a_residual_stream_in_float32() -> None:
    """34 s h of Korthikanti et al. less the two masks of dropout, one byte each; and the numbers of norms and of a softmax."""
    shape = AUDIO_SHAPES["whisper-small"]
    beside = 2 * 2 * 4 + 4 * shape.heads
    assert kept_bytes(shape, Keeping(fp32_residual=False)) == shape.layers * (32 * shape.width + beside)
    assert kept_bytes(shape, Keeping()) == shape.layers * (36 * shape.width + beside)


def test_grouped_queries_and_a_gate_by_hand() -> None:
    shape = TransformerShape(layers=2, width=8, heads=4, kv_heads=2, mlp=20, gated=True)
    norms, attention = 2 * 4 * 8 + 2 * 4, 2 * (8 + 4 + 4 + 8) + 4 * 4
    assert kept_bytes(shape, Keeping()) == 2 * (norms + 2 * 2 * 8 + attention + 2 * 4 * 20)
    assert kept_bytes(shape, Keeping(frozen=True)) == 2 * (norms + attention + 2 * 3 * 20)
    assert kept_bytes(shape, Keeping(checkpointing=True)) == 2 * 4 * 8
    assert kept_bytes(shape, Keeping(tp=2)) == 2 * (norms / 2 + 2 * 2 * 8 + attention / 2 + 2 * 4 * 20 / 2)


def test_memory_grows_with_the_positions_of_each_part() -> None:
    got, shape = estimate_of(probe(4096, images=(1000, 24)), shape=MODEL_SHAPES["7b"]), MODEL_SHAPES["7b"]
    assert got.memory_bytes["encoder"][0] == 1024 * kept_bytes(shape.vision, Keeping())
    assert got.memory_bytes["llm"][0] == 4096 * kept_bytes(shape.llm, Keeping())


def test_how_a_unit_keeps_its_activations_counts_for_that_unit() -> None:
    of_llm = {"frozen": ("llm",), "bf16_residual": ("llm",), "tp": {"llm": 2}}
    got, plain = estimate_of(probe(100, images=(64,)), **of_llm).memory_bytes, estimate_of(probe(100, images=(64,))).memory_bytes
    assert got["encoder"].tolist() == plain["encoder"].tolist()
    keeping = Keeping(frozen=True, fp32_residual=False, tp=2)
    assert got["llm"].tolist() == [100 * kept_bytes(MODEL_SHAPES["tiny"].llm, keeping)]


def test_checkpointing_keeps_the_input_of_each_layer() -> None:
    probes = (probe(100, images=(64,), recordings=(10,)),)
    got = estimate_of(*probes, checkpointing=("encoder",)).memory_bytes
    assert got["encoder"].tolist() == [(64 + 5) * 2 * 4 * 64]
    assert got["llm"].tolist() == estimate_of(*probes).memory_bytes["llm"].tolist()


def test_a_unit_without_backward_keeps_nothing() -> None:
    got = estimate_of(probe(100, images=(64,)), backward_factors={"encoder": 0.0, "llm": 1.0}).memory_bytes
    assert got["encoder"].tolist() == [0]
    assert got["llm"][0] > 0


def test_stages_hand_on_hidden_states_in_two_bytes_a_channel() -> None:
    got = estimate_of(probe(100, images=(64,), recordings=(10,)), shape=MODEL_SHAPES["1b"]).transfer_bytes
    assert got == {"encoder": [(64 + 5) * 768 * 2], "llm": [100 * 2048 * 2]}


# -- speed -------------------------------------------------------------------------------------------------------------


def test_a_global_batch_is_estimated_in_a_few_milliseconds() -> None:
    probes = [probe(100 + i, images=(i % 3000,) * (i % 5), recordings=(i,) * (i % 2)) for i in range(2048)]

    def once() -> float:
        start = time.process_time()
        costs_of(*probes)
        return time.process_time() - start

    assert min(once() for _ in range(5)) < 0.010
