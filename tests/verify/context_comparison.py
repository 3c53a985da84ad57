"""What ranks compute of sequences that they share, beside one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from headrace.mask_layouts import Sight
from headrace.trainer.models.masked_attention import dense_attention
from tests.verify import context_attention, context_models
from tests.verify.context_models import ModelCase
from tests.verify.context_processes import ContextCase
from tests.verify.processes import Processes

TOLERANCE = 1e-5
HALF = 2e-2
"""Of attention in bfloat16, as a share of the norm."""
_LEAST = 1e-6


def every_context_case() -> list[ContextCase]:
    """Attention under each mask, and whole models under each sight, in every combination of choices; and some others."""
    trained = (("", 0), ("vision. decoder.", 80), ("vision_projector", 0), ("decoder.", 0))
    models = [
        ModelCase(cp, (8, 9, 10, 11, 12), sight, names, pack_tokens=tokens, sliced=sliced, kv_heads=heads)
        for cp, sight, (names, tokens), sliced, heads in product((1, 2, 3, 4), Sight, trained, (False, True), (4, 2, 1))
    ]
    half = [replace(case, dtype="bfloat16") for case in context_attention.ALL if case.is_level and case.heads_at_once == 1]
    return [*context_attention.ALL, *half, *models, *context_models.CASES.values()]


def context_differences(processes: Processes, case: ContextCase) -> list[str]:
    """What is not the same, in words; nothing where all is well."""
    answers = processes.run(case)
    return _of_models(answers, case) if isinstance(case, ModelCase) else _of_attention(answers, case)


def _of_attention(answers: list[Any], case: context_attention.Case) -> list[str]:
    (q, k, v), weights = case.inputs()
    whole = [x.float().requires_grad_() for x in (q, k, v)]
    output = dense_attention(whole[0], whole[1], whole[2], context_attention.mask_of(case))
    expected = [output.detach(), *torch.autograd.grad((output * weights.float()).sum(), whole)]
    joined = context_attention.joined(case, [[torch.from_numpy(x) for x in answer] for answer in answers])
    found = []
    for name, ours, theirs in zip(("output", "gradient of q", "of k", "of v"), joined, expected, strict=True):
        if case.dtype == "float32":
            off, most = float((ours - theirs).abs().max()), TOLERANCE * max(1.0, float(theirs.abs().max()))
        else:
            off, most = float((ours - theirs).norm()), HALF * float(theirs.norm())
        if not off <= most:
            found.append(f"{name} is off by {off:.3g}, and at most {most:.3g} are rounding")
    return found


def _of_models(answers: list[Any], case: ModelCase) -> list[str]:
    loss_sum, weight, gradients = context_models.alone(case)
    found = []
    for rank, (ours, of_targets, of_rank) in enumerate(answers):
        if not np.isclose(ours, loss_sum, rtol=TOLERANCE, atol=0):
            found.append(f"rank {rank}: loss {ours}, not {loss_sum}")
        if not np.isclose(of_targets, weight, rtol=1e-6, atol=0):
            found.append(f"rank {rank}: targets weigh {of_targets}, not {weight}")
        found += [f"rank {rank}: no gradient of {name}" for name in gradients.keys() - of_rank.keys()]
        for name, gradient in of_rank.items():
            other = gradients[name].numpy() if name in gradients else np.zeros_like(gradient)
            error, size = np.abs(gradient - other).max(), np.abs(other).max()
            if not error <= max(_LEAST, TOLERANCE * size):
                found.append(f"rank {rank}: gradient of {name} is off by {error:.3g} of {size:.3g}")
    return found
