"""Microbatches on which layers are timed: their sizes, and that a model takes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.random_batch import random_batch
from headrace.trainer.profiling.profiled_batch import PACKED_POSITIONS, batch_shape, mixed_probes, profiled_batch

PARTS = ("vision", "audio", "llm", "generator")
IMAGE, AUDIO = ImageSpec(patch=2, merge=2, min_pixels=16, max_pixels=4096), AudioSpec(mel_bins=4)


@given(st.sampled_from(PARTS), st.integers(16, 8192))
def test_a_microbatch_has_samples_of_about_the_positions_asked_for(part: str, positions: int) -> None:
    shape = batch_shape(part, positions, IMAGE)
    assert all(abs(length - positions) <= max(8, 0.4 * positions) for length in shape.lengths)
    assert sum(shape.lengths) >= min(positions, PACKED_POSITIONS / 2)
    assert len(shape.grids) == 1 or len(set(shape.lengths)) == 2, "neighbours differ, as samples do"


@pytest.mark.parametrize("part", PARTS)
def test_the_microbatch_of_a_part_has_its_content_only(part: str) -> None:
    shape = batch_shape(part, 64, IMAGE)
    batch = profiled_batch(shape, image=IMAGE, audio=AUDIO, token_ids=(2, 50))
    total = sum(shape.lengths)
    rows = {"vision": len(batch.patches), "audio": len(batch.mel) // 2, "llm": len(batch.input_ids)}
    rows["generator"] = len(batch.patches) // IMAGE.merge**2
    assert rows[part] == total
    assert all(count == 0 for name, count in rows.items() if name != part and {name, part} != {"vision", "generator"})
    assert torch.equal(batch.image_cu_seqlens.diff(), batch.image_grids.prod(dim=1))
    assert batch.num_targets == len(batch.labels)


def test_mixed_samples_have_the_sizes_that_their_probes_say() -> None:
    probes = mixed_probes(IMAGE, AUDIO)
    batch = random_batch(probes, image=IMAGE, audio=AUDIO, placeholders=(0, 1))
    assert batch.cu_seqlens.diff().tolist() == [probe.num_tokens for probe in probes]
    assert batch.mel_frames.tolist() == [frames for probe in probes for frames in probe.mel_frames]
    assert batch.image_cu_seqlens.diff().tolist() == [patches for probe in probes for patches in probe.image_patches]
    assert int((batch.input_ids == 0).sum()) * IMAGE.merge**2 == len(batch.patches)
