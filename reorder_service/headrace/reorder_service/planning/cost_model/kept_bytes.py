"""Bytes that a transformer stack keeps of a position from its forward to its backward: what the trainer's blocks keep on a GPU.

This is the count of Korthikanti et al. 2022 (Reducing Activation Recomputation, section 4.1: 34 s h bytes a layer plus the
attention matrix), without the matrix, which flash attention does not keep, and without the masks of dropout. It is taken tensor
by tensor, as a residual stream in float32, grouped queries, a gate, frozen weights and slices each change it. An ungated layer
keeps 36 bytes a channel, and 32 with the stream in bfloat16. `tests/unit/trainer/pipeline/test_kept_bytes.py` compares it with
what autograd keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.model_shape import TransformerShape

_HALF, _FULL = 2, 4
"""Bytes of a number in bfloat16 and in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How the layers of a unit keep their activations, in training with bfloat16."""

    checkpointing: bool = False
    """Whether a layer keeps only its input."""
    frozen: bool = False
    """Whether the layers have no gradients of weights, so that matrix products do not keep their inputs."""
    fp32_residual: bool = True
    """Whether the residual stream is float32."""
    tp: int = 1
    """Number of tensor-parallel slices of a layer; what one of them keeps is counted."""


def kept_bytes(shape: TransformerShape, keeping: Keeping) -> float:
    """Return the bytes that all layers of a stack keep of one position on one process.

    With slices, the residual stream and the norms are cut by rows, and what is inside attention and MLP by channels; only the
    inputs of the first matrices are whole on every slice. The layer's input, which checkpointing keeps, is then a share too,
    but for the first layer of a stage.
    """
    stream = (_FULL if keeping.fp32_residual else _HALF) * shape.width / keeping.tp
    if keeping.checkpointing:
        return shape.layers * stream
    norms = 2 * stream + 2 * (2 if not shape.gated else 1) * _FULL / keeping.tp  # with mean and deviation, or only the latter
    queries_and_output, keys_and_values = 2 * _HALF * shape.width, 2 * _HALF * shape.kv_width
    attention = queries_and_output + keys_and_values + _FULL * shape.heads  # with the logarithms of the softmax's sums
    # gated: gate, its SiLU, the other matrix's output; else the input of GELU. The last matrix's input is kept for its weights.
    inner = _HALF * shape.mlp * ((3 if shape.gated else 1) + (not keeping.frozen))
    of_matrices = 0 if keeping.frozen else 2 * _HALF * shape.width
    return shape.layers * (norms + (attention + inner) / keeping.tp + of_matrices)
