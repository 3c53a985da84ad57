"""The Llama that `torchtitan_loop.py` and `plain_torchtitan_loop.py` train: torchtitan's smallest, with two layers."""

from __future__ import annotations

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec

VOCAB_SIZE, SEQ_LEN = 4096, 512
"""Those of the job: of its tokenizer, and its `text.max_tokens`."""
SEED, MAX_NORM = 0, 1.0


def llama() -> ModelSpec:
    """Return what torchtitan builds the model from."""
    spec = model_registry("debugmodel")
    model = spec.model
    model.layers = model.layers[:2]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCAB_SIZE
    if not torch.cuda.is_available():  # torchtitan's other attention has no backward on a processor
        for layer in model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def optimizer() -> OptimizersContainer.Config:
    """Return torchtitan's AdamW."""
    return default_adamw(lr=1e-3)


def lr_scheduler() -> LRSchedulersContainer.Config:
    """Return two steps of warm-up and a linear decay to the last step."""
    return LRSchedulersContainer.Config(warmup_steps=2)
