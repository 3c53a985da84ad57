"""Positions, convolutions and projectors on packed media; nothing passes between images or recordings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.model_shape import TransformerShape
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.collate import cumulative
from headrace.trainer.models.audio_encoder import AudioEncoder, PackedConv, encoder_frames
from headrace.trainer.models.projector import Projector
from headrace.trainer.models.rotary import rotation
from headrace.trainer.models.vision_encoder import VisionEncoder, patch_positions

SHAPE = TransformerShape(layers=2, width=16, heads=2, kv_heads=2, mlp=32, gated=False)


def positions_by_loop(grids, merge):
    positions = []
    for frames, height, width in grids:
        for _ in range(frames):
            for top in range(0, height, merge):
                for left in range(0, width, merge):
                    positions += [[top + row, left + column] for row in range(merge) for column in range(merge)]
    return positions


@given(
    merge=st.integers(1, 3),
    sizes=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4)), max_size=4),
)
def test_patch_positions_equal_the_explicit_loop(merge, sizes):
    grids = [(frames, merge * rows, merge * columns) for frames, rows, columns in sizes]
    tensor = torch.tensor(grids, dtype=torch.int32).view(-1, 3)
    assert patch_positions(tensor, merge).tolist() == positions_by_loop(grids, merge)


def test_rotary_scores_depend_on_the_distance_only():
    q, k = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(4, 1, 8), torch.ones(4, 1, 8)
    near = rotation(torch.tensor([[0, 0], [3, 1], [5, 9], [40, 7]]), 8, theta=100.0)
    far = rotation(torch.tensor([[2, 4], [5, 5], [7, 13], [42, 11]]), 8, theta=100.0)
    scores = (near.apply(q) * far.apply(k)).sum(-1)
    torch.testing.assert_close(scores, scores[:1].expand_as(scores), atol=1e-5, rtol=1e-5)
    assert not torch.allclose((near.apply(q) * near.apply(k)).sum(-1), scores)


def test_rotary_refuses_a_head_that_its_axes_cannot_share():
    with pytest.raises(ValueError, match="head of 6 channels"):
        rotation(torch.zeros(1, 2), 6, theta=100.0)


@pytest.fixture
def vision():
    torch.manual_seed(0)
    return VisionEncoder(SHAPE, ImageSpec(patch=2, merge=2, min_pixels=16, max_pixels=4096))


def encode_images(vision, patches, grids):
    tensor = torch.tensor(grids, dtype=torch.int32)
    return vision(patches, vision.layout(tensor, cumulative(tensor.prod(dim=1))))


def test_an_image_is_encoded_as_if_it_were_alone(vision):
    grids = [(1, 2, 4), (1, 2, 4), (1, 4, 2), (1, 6, 6)]
    patches = torch.randint(0, 256, (60, 12), dtype=torch.uint8)
    together = encode_images(vision, patches, grids)
    alone = [encode_images(vision, part, [grid]) for part, grid in zip(patches.split([8, 8, 8, 36]), grids, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_a_changed_patch_changes_its_own_image_only(vision):
    grids = [(1, 2, 4), (1, 2, 4), (1, 4, 2)]
    patches = torch.randint(0, 256, (24, 12), dtype=torch.uint8)
    changed = patches.clone()
    changed[8] = 255 - changed[8]
    difference = (encode_images(vision, patches, grids) - encode_images(vision, changed, grids)).abs().amax(dim=1)
    assert (difference[8:16] > 0).all()
    assert (difference[:8] == 0).all()
    assert (difference[16:] == 0).all()


def test_the_arrangement_of_patches_matters(vision):
    """The same pixels as a tall and as a wide image have different features: positions are really two-dimensional."""
    patches = torch.randint(0, 256, (8, 12), dtype=torch.uint8)
    assert not torch.allclose(encode_images(vision, patches, [(1, 2, 4)]), encode_images(vision, patches, [(1, 4, 2)]), atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2])
@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5))
def test_packed_convolution_equals_conv1d_per_segment(stride, lengths):
    torch.manual_seed(0)
    packed = PackedConv(3, 5, stride=stride)
    plain = torch.nn.Conv1d(3, 5, 3, stride=stride, padding=1)
    with torch.no_grad():
        plain.weight.copy_(packed.linear.weight.unflatten(1, (3, 3)).transpose(1, 2))
        plain.bias.copy_(packed.linear.bias)
    x = torch.randn(sum(lengths), 3)
    expected = [plain(part.T[None])[0].T for part in x.split(lengths) if len(part)]
    actual = packed(x, packed.windows(torch.tensor(lengths)))
    torch.testing.assert_close(actual, torch.cat(expected) if expected else torch.empty(0, 5), atol=1e-5, rtol=1e-5)


@pytest.fixture
def audio():
    torch.manual_seed(0)
    return AudioEncoder(SHAPE, AudioSpec(mel_bins=4))


def encode_recordings(audio, mel, frames):
    return audio(mel, audio.convolutions(frames), audio.layout(frames))


def test_a_recording_is_encoded_as_if_it_were_alone(audio):
    frames = torch.tensor([5, 8, 8, 1, 16], dtype=torch.int32)
    mel = torch.randn(38, 4).half()
    alone = [encode_recordings(audio, part, torch.tensor([len(part)])) for part in mel.split(frames.tolist())]
    assert [len(part) for part in alone] == [3, 4, 4, 1, 8]
    torch.testing.assert_close(encode_recordings(audio, mel, frames), torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_a_changed_frame_changes_its_own_recording_only(audio):
    frames = torch.tensor([5, 8, 8], dtype=torch.int32)
    mel = torch.randn(21, 4).half()
    changed = mel.clone()
    changed[5] += 1  # the first frame of the second recording, beside the last of the first
    difference = (encode_recordings(audio, mel, frames) - encode_recordings(audio, changed, frames)).abs().amax(dim=1)
    assert (difference[3:7] > 0).all()
    assert (difference[:3] == 0).all()
    assert (difference[7:] == 0).all()


@given(frames=st.lists(st.integers(1, 40), max_size=5), group=st.integers(1, 4))
def test_tokens_per_recording_are_the_frames_over_frames_per_token_rounded_up(frames, group):
    lengths = encoder_frames(torch.tensor(frames, dtype=torch.int32))
    projector = Projector(width_in=4, group=group, width_out=6)
    tokens = projector(torch.randn(int(lengths.sum()), 4), projector.groups(lengths))
    assert tokens.shape == (sum(-(-count // (2 * group)) for count in frames), 6)


def test_the_last_group_is_filled_inside_its_own_segment():
    torch.manual_seed(0)
    projector = Projector(width_in=4, group=4, width_out=6)
    lengths = torch.tensor([5, 4, 2])
    features = torch.randn(11, 4)
    alone = [projector(part, projector.groups(torch.tensor([len(part)]))) for part in features.split(lengths.tolist())]
    torch.testing.assert_close(projector(features, projector.groups(lengths)), torch.cat(alone), atol=1e-6, rtol=1e-6)
