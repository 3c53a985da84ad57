"""Encoders of `transformers` on packed images and recordings, beside the same models run as `transformers` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headrace.errors import HeadraceError, UserError
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.collate import cumulative
from headrace.trainer.models.huggingface import clip, qwen_vision, whisper
from tests.unit.trainer.models.huggingface_world import assert_close, assert_gradients_match

PATCH, MERGE = 4, 2
IMAGE = ImageSpec(patch=PATCH, merge=MERGE, min_pixels=64, max_pixels=65536)
GRIDS = torch.tensor([[1, 6, 10], [1, 2, 2], [1, 8, 8], [1, 4, 6]], dtype=torch.int32)
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": PATCH}
QWEN = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "window_size": 4 * PATCH,
    "fullatt_block_indexes": [1, 3],
    "out_hidden_size": 24,
    "initializer_range": 0.1,
}


def test_qwens_tower_and_merger_are_those_of_transformers(tmp_path: Path) -> None:
    """Of a checkpoint of the whole model, whose tower is a part."""
    torch.manual_seed(0)
    llm = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen2_5_VLConfig(
        vision_config=QWEN,
        text_config={**llm, "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}},
    )
    original = transformers.Qwen2_5_VLForConditionalGeneration(config)
    original.save_pretrained(tmp_path)
    tower, merger = qwen_vision.qwen_vision(tmp_path, IMAGE, token_width=24)
    for number, unit in enumerate((tower, merger)):
        unit.to_empty(device="cpu").initialise(str(number), 0)
    patches, counts = random_patches(GRIDS), GRIDS.prod(dim=1)

    ours = merger(tower(patches, tower.layout(GRIDS, cumulative(counts))), merger.groups(counts))
    frame = standardised(patches, "OPENAI_CLIP")
    pixel_values = torch.stack((frame, frame), dim=2).flatten(1)  # channel, frame, row, column
    theirs = original.model.visual(pixel_values, GRIDS.long()).pooler_output
    weight = torch.randn_like(theirs)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()

    assert_close(ours, theirs)
    assert_gradients_match(tower, original.model.visual)
    assert_gradients_match(merger, original.model.visual)


@pytest.mark.parametrize("kind", ["Siglip", "CLIP"])
def test_towers_with_learned_positions_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Images of 4 sizes, one of which has the grid of the learned positions."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}VisionConfig")(**VIT, image_size=8 * PATCH)
    original = getattr(transformers, f"{kind}VisionModel")(config)
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    original.save_pretrained(tmp_path)
    tower = clip.ClipVision(tmp_path, IMAGE)
    tower.to_empty(device="cpu").initialise("vision", 0)
    patches, counts = random_patches(GRIDS), GRIDS.prod(dim=1)

    ours = tower(patches, tower.layout(GRIDS, cumulative(counts)))
    frames = standardised(patches, "OPENAI_CLIP" if kind == "CLIP" else "IMAGENET_STANDARD").split(counts.tolist())
    theirs = torch.cat([alone(original, frame, grid) for frame, grid in zip(frames, GRIDS.tolist(), strict=True)])
    weight = torch.randn_like(theirs)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()

    assert_close(ours, theirs)
    assert_gradients_match(tower, original)


def test_whispers_encoder_is_that_of_transformers(tmp_path: Path) -> None:
    """Each recording beside a Whisper made for just its length; one of odd length beside the same with the last frame silent."""
    torch.manual_seed(0)
    frames = torch.tensor([20, 2, 14, 30], dtype=torch.int32)
    config = transformers.WhisperConfig(
        num_mel_bins=6,
        d_model=32,
        encoder_layers=3,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=8,
        vocab_size=64,
        pad_token_id=0,
        max_source_positions=15,
        init_std=0.2,
    )
    original = transformers.WhisperModel(config)
    original.save_pretrained(tmp_path)
    encoder = whisper.WhisperAudio(tmp_path, AudioSpec(mel_bins=6, max_seconds=0.3))
    encoder.to_empty(device="cpu").initialise("audio", 0)
    mel = torch.randn(int(frames.sum()), 6)

    ours = encoder(mel, encoder.convolutions(frames), encoder.layout(frames))
    table = original.encoder.embed_positions.weight
    recordings = []
    for recording in mel.split(frames.tolist()):
        original.config.max_source_positions = len(recording) // 2
        original.encoder.embed_positions = torch.nn.Embedding.from_pretrained(table[: len(recording) // 2])
        recordings.append(original.encoder(recording.T[None]).last_hidden_state[0])
    theirs = torch.cat(recordings)
    weight = torch.randn_like(theirs)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()

    assert_close(ours, theirs)
    assert_gradients_match(encoder, original.encoder)


def test_a_convolution_of_packed_segments_is_that_of_each_alone() -> None:
    lengths = torch.tensor([1, 4, 0, 7, 2, 3])
    x = torch.randn(int(lengths.sum()), 5)
    for stride in (1, 2):
        conv = torch.nn.Conv1d(5, 3, 3, stride, padding=1)
        expected = [conv(segment.T[None])[0].T for segment in x.split(lengths.tolist()) if len(segment)]
        assert_close(whisper.packed_conv(conv, x, whisper.spread_of(conv, lengths)), torch.cat(expected))


def test_a_job_that_allows_more_than_whispers_positions_is_refused(tmp_path: Path) -> None:
    sizes = {"d_model": 8, "encoder_attention_heads": 2, "encoder_layers": 1, "num_mel_bins": 6}
    transformers.WhisperConfig(**sizes).save_pretrained(tmp_path)
    assert whisper.WhisperAudio(tmp_path, AudioSpec(mel_bins=6, max_seconds=30)).width == 8
    for job in (AudioSpec(mel_bins=6, max_seconds=30.02), AudioSpec(mel_bins=6)):
        with pytest.raises(UserError, match=r"audio.max_seconds \(.*\) allows more than the 1500 positions of .*: set it to 30,"):
            whisper.WhisperAudio(tmp_path, job)
    with pytest.raises(UserError, match="set it to 60,"):
        whisper.WhisperAudio(tmp_path, AudioSpec(mel_bins=6, hop_s=0.02, max_seconds=61))
    with pytest.raises(UserError, match=r"takes 6 mel bins, .* is 80: set it to 6"):
        whisper.WhisperAudio(tmp_path, AudioSpec(mel_bins=80))


def test_patches_of_another_size_are_refused(tmp_path: Path) -> None:
    transformers.SiglipVisionConfig(**VIT).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"patches of 4 pixels, but the job's image.patch is 14: set it to 4"):
        clip.ClipVision(tmp_path, ImageSpec())


def test_qwens_merge_and_stills_are_asked_for(tmp_path: Path) -> None:
    transformers.Qwen2_5_VLConfig(vision_config=QWEN).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"joins 2 x 2 patches, but .* is 1: set it to 2"):
        qwen_vision.qwen_vision(tmp_path, IMAGE.model_copy(update={"merge": 1}), token_width=24)
    tower, merger = qwen_vision.qwen_vision(tmp_path, IMAGE, token_width=25)
    assert merger is None
    with pytest.raises(HeadraceError, match="several frames"):
        tower.layout(torch.tensor([[2, 2, 2]]), torch.tensor([0, 8]))


def random_patches(grids: Tensor) -> Tensor:
    return torch.randint(0, 256, (int(grids.prod(dim=1).sum()), 3 * PATCH**2), dtype=torch.uint8)


def standardised(patches: Tensor, constants: str) -> Tensor:
    """(P, 3, patch * patch)."""
    mean, std = (torch.tensor(getattr(transformers.image_utils, f"{constants}_{kind}"))[:, None] for kind in ("MEAN", "STD"))
    return (patches.view(len(patches), 3, -1) / 255 - mean) / std


def alone(original: Any, patches: Tensor, grid: list[int]) -> Tensor:
    """(P, width) of one image that is put together from its patches, in their order."""
    _, height, width = grid
    blocks = patches.view(height // MERGE, width // MERGE, MERGE, MERGE, 3, PATCH, PATCH)
    image = blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, height * PATCH, width * PATCH)
    features = original(image, interpolate_pos_encoding=True).last_hidden_state[0, -height * width :]
    return features.view(height // MERGE, MERGE, width // MERGE, MERGE, -1).transpose(1, 2).reshape(height * width, -1)
