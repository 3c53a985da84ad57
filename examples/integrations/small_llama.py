"""A Llama of transformers that is small enough for a processor."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import trainer


def small_llama(loader: trainer.StepLoader) -> LlamaForCausalLM:
    """Return it with fresh weights, the same in every process."""
    opened = loader.open()
    torch.manual_seed(opened.spec.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=opened.vocabulary.size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=opened.spec.text.max_tokens,
        )
    )
