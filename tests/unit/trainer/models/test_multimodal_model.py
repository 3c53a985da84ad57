"""The packed model against one sample at a time, its independence of order, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from headrace.errors import HeadraceError, UserError
from headrace.model_shape import MODEL_SHAPES
from headrace.source_spec import SourceSpec
from headrace.spec import AudioSpec, ImageSpec, JobSpec, parse_spec
from headrace.trainer.loading.collate import collate
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.multimodal import MultimodalModel, build_model

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
SPEC = JobSpec(name="job", sources=(SourceSpec(path="data"),))


def loss_and_gradients(model, microbatches):
    """Summed over microbatches; the denominator is left out on purpose: it is the step's affair."""
    model.zero_grad(set_to_none=True)
    losses = [model(microbatch) for microbatch in microbatches]
    total = sum(loss.loss_sum for loss in losses)
    total.backward()
    target_weight = sum(loss.target_weight for loss in losses)
    gradients = {
        name: parameter.grad / target_weight for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return total.detach() / target_weight, target_weight, gradients


def assert_same(one, other):
    assert one[1] == other[1]
    torch.testing.assert_close(one[0], other[0], **CLOSE)
    assert one[2].keys() == other[2].keys()
    for name, gradient in one[2].items():
        torch.testing.assert_close(gradient, other[2][name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def test_packed_equals_one_sample_at_a_time(mixed_rows, make_batch, make_model):
    model = make_model()
    packed = loss_and_gradients(model, [collate([make_batch(mixed_rows)])])
    single = loss_and_gradients(model, [collate([make_batch([row])]) for row in mixed_rows])
    assert_same(packed, single)
    assert packed[2].keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("division", [[[5, 4, 3, 2, 1, 0]], [[3, 0], [1, 5, 4], [2]], [[2, 4], [], [0, 1, 3, 5]]])
def test_a_permutation_over_microbatches_changes_nothing(division, mixed_rows, make_batch, make_model):
    model = make_model()
    arrived = loss_and_gradients(model, [collate([make_batch(mixed_rows)])])
    planned = loss_and_gradients(model, [collate([make_batch([mixed_rows[i] for i in part])]) for part in division])
    assert_same(arrived, planned)


@pytest.mark.parametrize("column", ["input_ids", "patches", "mel"])
def test_a_changed_sample_changes_no_other(column, mixed_rows, make_batch, make_model):
    model = make_model()
    before = hidden_states(model, collate([make_batch(mixed_rows)]))
    changed = dict(mixed_rows[3])
    changed[column] = changed[column].copy()
    changed[column][0] = changed[column][0] + 1 if column != "patches" else 255 - changed[column][0]
    after = hidden_states(model, collate([make_batch([*mixed_rows[:3], changed, *mixed_rows[4:]])]))
    start = sum(len(row["input_ids"]) for row in mixed_rows[:3])
    end = start + len(changed["input_ids"])
    difference = (before - after).abs().amax(dim=1)
    assert difference[start:end].max() > 1e-6
    assert (difference[:start] == 0).all()
    assert (difference[end:] == 0).all()


def hidden_states(model, packed):
    with torch.no_grad():
        return model.decoder(model.embed(packed), packed.position_ids, Segments.of(packed.cu_seqlens))


def test_a_token_sees_nothing_that_follows_it(make_row, make_batch, make_model):
    model, row = make_model(), make_row(1, text=6)
    before = hidden_states(model, collate([make_batch([row])]))
    row["input_ids"][5] = 3 if row["input_ids"][5] != 3 else 4
    difference = (before - hidden_states(model, collate([make_batch([row])]))).abs().amax(dim=1)
    assert (difference[:5] == 0).all()
    assert (difference[5:] > 0).all()


def test_positions_count_by_their_distance_only(make_row, make_batch, make_model):
    model, packed = make_model(), collate([make_batch([make_row(1, text=8)])])
    with torch.no_grad():
        embeddings = model.embed(packed)
        near, far, stretched = (
            model.decoder(embeddings, positions, Segments.of(packed.cu_seqlens))
            for positions in (packed.position_ids, packed.position_ids + 50, packed.position_ids * 3)
        )
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)
    assert (near - stretched).abs().max() > 1e-2


def test_the_loss_is_the_cross_entropy_of_the_next_token(make_row, make_batch, make_model):
    model, row = make_model(), make_row(1, text=2, answer=3)
    packed = collate([make_batch([row])])
    logits = hidden_states(model, packed) @ model.decoder.output_weight.T
    ids = torch.tensor(row["input_ids"]).long()
    expected = functional.cross_entropy(logits[2:5], ids[3:6], reduction="sum")
    torch.testing.assert_close(model(packed).loss_sum, expected, **CLOSE)


def test_text_alone_leaves_the_encoders_without_gradient(make_row, make_batch, make_model):
    model = make_model()
    model(collate([make_batch([make_row(1)])])).loss_sum.backward()
    for unit in (model.vision, model.vision_projector, model.audio, model.audio_projector):
        assert all(parameter.grad is None for parameter in unit.parameters())
    assert all(parameter.grad is not None for parameter in model.decoder.parameters())


def test_without_targets_the_loss_is_zero(make_row, make_batch, make_model):
    model = make_model()
    for packed in (collate([]), collate([make_batch([make_row(1, answer=0, grids=[(1, 2, 2)])])])):
        loss = model(packed)
        assert (float(loss.loss_sum), loss.target_weight) == (0.0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_grids": [[1, 2, 4]], "patches": [0] * 96}, "1 image placeholders for 2 image tokens"),
        ({"image_grids": [], "patches": []}, "1 image placeholders for 0 image tokens"),
        ({"mel_frames": [9], "mel": [0.0] * 36}, "0 audio placeholders for 2 audio tokens"),
    ],
)
def test_placeholders_that_do_not_fit_their_media_are_refused(change, message, make_row, make_batch, make_model):
    row = make_row(1, grids=[(1, 2, 2)]) | change
    with pytest.raises(HeadraceError, match=message):
        make_model()(collate([make_batch([row])]))


def test_images_of_any_resolution_are_refused_by_a_model_with_a_token_for_each_patch():
    image = {"fit": "anyres", "side": 384, "patch": 14, "merge": 1}
    with pytest.raises(UserError, match=r"image\.fit is anyres, but this model makes a token of each patch"):
        build_model("tiny", parse_spec({"name": "a", "sources": [{"path": "/a"}], "image": image}), 128, 1, 2, 0)


def test_equal_seeds_build_equal_models_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    one, same, other = (build_model("tiny", SPEC, 128, 1, 2, seed) for seed in (7, 7, 8))
    assert torch.equal(state, torch.get_rng_state())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name)), name
    assert not torch.equal(one.decoder.embed.weight, other.decoder.embed.weight)


@pytest.mark.parametrize(
    ("name", "decoder", "whole"), [("1b", (1.2e9, 1.3e9), (1.2e9, 1.5e9)), ("7b", (7.5e9, 7.7e9), (8.8e9, 9.1e9))]
)
def test_named_shapes_have_the_size_of_their_models(name, decoder, whole):
    """Llama-3.2-1B has 1.24 billion parameters, Qwen2.5-7B 7.62; the encoders come on top."""
    model = build_model(name, SPEC, 152_064, 1, 2, 0, device="meta")
    assert decoder[0] < sum(parameter.numel() for parameter in model.decoder.parameters()) < decoder[1]
    assert whole[0] < sum(parameter.numel() for parameter in model.parameters()) < whole[1]


def test_an_unknown_shape_is_refused():
    with pytest.raises(UserError, match="no model 'huge'; there are tiny"):
        build_model("huge", SPEC, 128, 1, 2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_token_id": 9}, "must lie in the vocabulary of 8"),
        ({"audio": AudioSpec(frames_per_token=5)}, "make it even"),
        ({"audio": AudioSpec(last_token="drop")}, "this model pads the last token of a recording: set it to pad"),
    ],
)
def test_settings_that_no_model_can_have_are_refused(change, message):
    settings = {"vocab_size": 8, "image": ImageSpec(), "audio": AudioSpec(), "image_token_id": 1, "audio_token_id": 2} | change
    with pytest.raises(UserError, match=message):
        MultimodalModel(MODEL_SHAPES["tiny"], **settings)
