"""What models of other libraries are called with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.manifest import Vocabulary
from headrace.sample import LABEL_IGNORED, Probe
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.integrations.dynamic_batches import veomni_form, verl_form
from headrace.trainer.integrations.model_inputs import packed_inputs, with_tokens
from headrace.trainer.loading.collate import PackedMicrobatch, collate
from headrace.trainer.loading.random_batch import random_batch

VOCABULARY = Vocabulary(size=16, image_token=0, audio_token=1)


@pytest.fixture
def batch() -> PackedMicrobatch:
    """Two samples, of 3 and 5 tokens, of a job without M-RoPE."""
    probes = [Probe(name=str(n), num_tokens=n, num_targets=n - 1, image_patches=(), mel_frames=()) for n in (3, 5)]
    drawn = random_batch(probes, image=ImageSpec(), audio=AudioSpec(), placeholders=(0, 1))
    return replace(drawn, mrope_position_ids=torch.zeros(3, 0, dtype=torch.int64))


def test_models_that_shift_labels_get_them_at_their_own_tokens_and_others_at_the_token_before(batch: PackedMicrobatch) -> None:
    own = packed_inputs(batch, VOCABULARY)
    assert torch.equal(own["labels"][0, [0, 3]], torch.tensor([LABEL_IGNORED] * 2)), "a sample's first token follows nothing"
    assert torch.equal(own["labels"][0, 1:3], batch.input_ids[1:3])
    shifted = packed_inputs(batch, VOCABULARY, labels_are_shifted=True)
    assert torch.equal(shifted["labels"][0], batch.labels)
    assert own["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert own["use_cache"] is False, "with a cache, models of transformers would attend across samples"


def test_a_microbatch_without_tokens_gets_one_without_a_target() -> None:
    for form in (veomni_form, verl_form, packed_inputs):
        inputs = form(collate([]), VOCABULARY)
        assert inputs["input_ids"].numel() == 1
        assert (
            int(inputs["input_ids"].flatten()[0] if not inputs["input_ids"].is_nested else inputs["input_ids"].values()[0]) == 2
        )
    assert with_tokens(collate([]), VOCABULARY).num_targets == 0


def test_veomni_s_micro_batches_have_the_arguments_of_flash_attention(batch: PackedMicrobatch) -> None:
    inputs = veomni_form(batch, VOCABULARY)
    assert torch.equal(inputs["labels"][0], batch.labels)
    assert (inputs["cu_seq_lens_q"].tolist(), inputs["max_length_k"]) == ([0, 3, 8], 5)
    assert inputs["attention_mask"].shape == inputs["input_ids"].shape == (1, 8)


def test_verl_s_micro_batches_are_jagged_and_mask_the_tokens_themselves(batch: PackedMicrobatch) -> None:
    inputs = verl_form(batch, VOCABULARY)
    assert [len(row) for row in inputs["input_ids"].unbind()] == [3, 5]
    assert [row.tolist() for row in inputs["loss_mask"].unbind()] == [[0, 1, 1], [0, 1, 1, 1, 1]]
