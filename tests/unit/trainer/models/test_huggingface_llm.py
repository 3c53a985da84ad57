"""Decoders of `transformers` on packed samples, beside the same models run on one sample after the other."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from headrace.errors import UserError
from headrace.sample import LABEL_IGNORED
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.attention import Segments
from tests.unit.trainer.models.huggingface_world import assert_close, assert_gradients_match, skeleton, whole
from tests.verify.batches import VOCAB, make_row, packed

SIZES = {
    "vocab_size": VOCAB + 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama 3 with one matrix for both ends": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen 2.5": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen 3 with wide heads": ("Qwen3Config", {"head_dim": 16}),
    "mistral with a window that is wide enough": ("MistralConfig", {"sliding_window": 500}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_microbatch_is_what_transformers_makes_of_each_sample(name: str, tmp_path: Path) -> None:
    original = save(name, tmp_path)
    model = whole(HuggingFaceUnits(llm=tmp_path))
    batch = packed([make_row(number, audio=True) for number in range(6)])
    embeddings = model.embed(batch).detach()
    ours, theirs = embeddings.clone().requires_grad_(), embeddings.clone().requires_grad_()

    hidden = model.decoder(ours, batch.position_ids, Segments.of(batch.cu_seqlens))
    logits = hidden @ model.decoder.output_weight.T
    loss(logits, batch.labels).backward()
    bounds = batch.cu_seqlens.tolist()
    alone = [original(inputs_embeds=theirs[None, start:end]).logits[0] for start, end in pairwise(bounds)]
    loss(torch.cat(alone), batch.labels).backward()

    assert_close(logits, torch.cat(alone))
    assert_close(ours.grad, theirs.grad)
    assert_gradients_match(model.decoder, original)


def test_a_window_that_is_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    save("mistral with a window that is wide enough", tmp_path, sliding_window=8)
    model = whole(HuggingFaceUnits(llm=tmp_path))
    batch = packed([make_row(2, audio=True)])
    with pytest.raises(UserError, match=r"reaches back 8 .* set the job's text.max_tokens to 8 or less"):
        model(batch)


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        ("GPT2Config", {}, r"is a 'gpt2'; an llm is one of llama, qwen2, qwen3, mistral"),
        ("LlamaConfig", {"attention_dropout": 0.1}, r"attention_dropout is 0.1, but .* set it to 0"),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, r"'dynamic', which"),
        ("LlamaConfig", {"vocab_size": 5}, r"tokenizer has 64 tokens, but .* embeds 5"),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, options: dict[str, Any], match: str, tmp_path: Path) -> None:
    getattr(transformers, kind)(**{**SIZES, **options}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=match):
        skeleton(HuggingFaceUnits(llm=tmp_path))


def test_a_path_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        skeleton(HuggingFaceUnits(llm=tmp_path))


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    transformers.LlamaConfig(**{**SIZES, "intermediate_size": 40}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model.layers.0.mlp.gate_proj.weight .* has the shape \(48, 32\), .* \(40, 32\)"):
        whole(HuggingFaceUnits(llm=tmp_path))


def test_a_checkpoint_in_several_files_is_read(tmp_path: Path) -> None:
    original = save("qwen 3 with wide heads", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = whole(HuggingFaceUnits(llm=tmp_path))
    weights = dict(original.named_parameters())
    for name, parameter in model.decoder.named_parameters():
        torch.testing.assert_close(parameter, weights[model.decoder.stored_names[name]], rtol=0, atol=0)


def test_without_a_checkpoint_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    transformers.Qwen2Config(**SIZES).save_pretrained(tmp_path)
    one, same, other = (whole(HuggingFaceUnits(llm=tmp_path), seed=seed).state_dict() for seed in (0, 0, 1))
    key = "decoder.layers.1.layer.mlp.up_proj.weight"
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one[key], other[key])
    assert not torch.equal(one[key], one[key.replace(".1.", ".2.")])
    assert one[key].std().item() == pytest.approx(SIZES["initializer_range"], rel=0.1)


def save(name: str, folder: Path, *, max_shard_size: str = "1GB", **options: Any) -> Any:
    """The model of `transformers` whose checkpoint the folder then has."""
    kind, own = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SIZES, **own, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels, ignore_index=LABEL_IGNORED, reduction="sum")
