"""What the loops of this folder share: their command line, and a Llama that is small enough for a processor."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import trainer


def arguments() -> argparse.Namespace:
    """Return the options of the command line. The number of steps and of microbatches is that of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True, metavar="HOST:PORT", help="of the reorder service")
    parser.add_argument("--job", required=True, help="name of a job that was submitted")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=2, help="microbatches of a step and rank (default %(default)s)")
    parser.add_argument(
        "--checkpoints", type=Path, required=True, help="folder of checkpoints: of the newest one training goes on"
    )
    parser.add_argument("--every", type=int, default=5, help="steps from checkpoint to checkpoint (default %(default)s)")
    return parser.parse_args()


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
