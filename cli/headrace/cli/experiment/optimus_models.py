"""Encoders and LLMs of Optimus' evaluation, with times of their kernels that are counted and fitted, not measured.

What the paper gives: table 1, a step of 5.12 s with its bubbles; a ViT-22B layer takes 1.4 ms forward and 2.0 ms backward; a pass
through a layer has two all-gathers and two reduce-scatters, each of which idles for about 300 us; the shapes of tables 8 and 9.
What is assumed beyond that:

* Table 1 is of the largest job of table 5, with 16 microbatches of two samples: 12 layers of GPT-175B and 6 of ViT-22B a GPU.
* Communication is proportional to the width, so ViT-22B's kernels take half as long as GPT-175B's. Then table 1's 0.585 s make
  305 us for each of the LLM's. The 1.4 and 2.0 ms of ViT-22B are with its communication, on 8 tensor-parallel ranks.
* What is left of the step after bubbles and ViT is the LLM's, forward a third of it and backward two.
* In a layer, compute is divided among kernels by counted operations, with attention at half the speed of matrix products, and 2 %
  for each norm. Backward has two kernels for each of forward's, of half its time: for inputs and for weights.
* Other shapes take times in proportion to operations (compute) and widths (communication). On fewer tensor-parallel ranks t, a
  kernel computes 8 / t times as long, and communicates in proportion to (t - 1) / t.
* Exchanges of data parallelism take table 1's 0.167 and 0.458 s for GPT-175B, and in proportion to parameters per GPU else.
* Encoder kernels take as long beside kernels of the LLM as alone, and nothing passes between two kernels.
* A GPU has 80 GB. Activations are 34 bytes per position and width in every layer (Korthikanti et al. 2022), over 8 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.reorder_service.planning.bubbles.layer_kernels import Encoder, LayerKernels, Passes
from headrace.reorder_service.planning.bubbles.llm_timeline import LlmPlan

SEQUENCE, SAMPLES = 2048, 2
MEMORY_BYTES = 80e9
SEND_S = 126e-6
"""From one stage of an encoder to the next: 50 MB for ViT-22B, of which each of 8 ranks sends an eighth at 400 Gb/s."""
TABLE_1 = {"all-gather": 0.167, "reduce-scatter": 0.458, "warm-up": 0.291, "cool-down": 0.471, "other": 0.445, "tensor": 0.585}
TABLE_1_STEP_S = 5.12

_MICROBATCHES, _TENSOR = 16, 8
_LLM_LAYERS, _VIT_LAYERS, _PER_LAYER = 12, 6, 8  # on a GPU; communication kernels of a layer's two passes
_COMMUNICATION_S = TABLE_1["tensor"] / (_MICROBATCHES * _PER_LAYER * (_LLM_LAYERS + _VIT_LAYERS / 2))
_VIT_FORWARD_S, _VIT_BACKWARD_S = 1.4e-3 - 4 * _COMMUNICATION_S / 2, 2.0e-3 - 4 * _COMMUNICATION_S / 2
_COMPUTE_S = TABLE_1_STEP_S - sum(TABLE_1.values())
_LLM_LAYER_S = (_COMPUTE_S / _MICROBATCHES - _VIT_LAYERS * (_VIT_FORWARD_S + _VIT_BACKWARD_S)) / _LLM_LAYERS
_NORM = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A stack of layers with an MLP of four times its width, as in tables 8 and 9."""

    name: str
    layers: int
    width: int
    weights: int

    @property
    def layer_operations(self) -> float:
        """Multiplications and additions of one position's forward through one layer."""
        return 24.0 * self.width**2 + 4.0 * SEQUENCE * self.width


VIT_22B = Shape(name="ViT-22B", layers=48, width=6144, weights=22_000_000_000)
VIT_11B = Shape(name="ViT-11B", layers=48, width=4096, weights=10_000_000_000)  # table 8 names it ViT-10B
VIT_5B = Shape(name="ViT-5B", layers=48, width=3072, weights=5_500_000_000)
GPT_175B = Shape(name="GPT-175B", layers=96, width=12_288, weights=175_000_000_000)
LLAMA_70B = Shape(name="LLAMA-70B", layers=80, width=8192, weights=70_000_000_000)


def encoder(shape: Shape) -> Encoder:
    """An encoder on 1, 2, 4 or 8 tensor-parallel ranks."""
    relative = shape.layer_operations / VIT_22B.layer_operations
    return Encoder(
        name=shape.name,
        layers=shape.layers,
        layer={tensor: _passes(shape, tensor, relative * _VIT_FORWARD_S, relative * _VIT_BACKWARD_S) for tensor in (1, 2, 4, 8)},
        weights=shape.weights,
        activation_bytes=_activation_bytes(shape),
    )


def llm(shape: Shape, *, replicas: int, stages: int, chunks: int, microbatches: int, exchange: float = 1.0) -> LlmPlan:
    """An LLM on 8 tensor-parallel ranks a stage. exchange: share of the data-parallel exchange that nothing hides."""
    per_gpu = shape.weights / stages / (GPT_175B.weights / 8)
    held = 1 + (stages - 1) / (stages * chunks)
    return LlmPlan(
        replicas=replicas,
        stages=stages,
        tensor=_TENSOR,
        microbatches=microbatches,
        layers=shape.layers,
        layer=llm_layer(shape),
        chunks=chunks,
        all_gather_s=exchange * per_gpu * TABLE_1["all-gather"],
        reduce_scatter_s=exchange * per_gpu * TABLE_1["reduce-scatter"],
        weights=shape.weights,
        activation_bytes=_activation_bytes(shape) / _TENSOR * held,
    )


def llm_layer(shape: Shape) -> Passes:
    """One layer of an LLM."""
    layer_s = _LLM_LAYER_S * shape.layer_operations / GPT_175B.layer_operations
    return _passes(shape, _TENSOR, layer_s / 3, 2 * layer_s / 3)


def _activation_bytes(shape: Shape) -> float:
    """What one microbatch leaves in all layers, on one rank that had them all."""
    return 34.0 * SEQUENCE * SAMPLES * shape.width * shape.layers


def _passes(shape: Shape, tensor: int, forward_s: float, backward_s: float) -> Passes:
    """One layer that computes for so long on 8 ranks."""
    more = _TENSOR / tensor
    sends = _COMMUNICATION_S * shape.width / GPT_175B.width * (tensor - 1) / tensor * _TENSOR / (_TENSOR - 1)
    send = [("communicate", sends)] if tensor > 1 else []
    norm, qkv, attention, projection, up, down = _shares(shape)

    def forward(*shares: float) -> list[tuple[str, float]]:
        return [("compute", share * forward_s * more) for share in shares]

    def backward(*shares: float) -> list[tuple[str, float]]:
        return [("compute", share * backward_s * more / 2) for share in shares for _ in range(2)]

    return Passes(
        forward=LayerKernels.of(
            [*forward(norm), *send, *forward(qkv, attention, projection), *send, *forward(norm), *send, *forward(up, down), *send]
        ),
        backward=LayerKernels.of(
            [
                *send,
                *backward(down, up),
                *send,
                *backward(norm),
                *send,
                *backward(projection, attention, qkv),
                *send,
                *backward(norm),
            ]
        ),
    )


def _shares(shape: Shape) -> tuple[float, ...]:
    """Shares of a layer's time: of a norm, the projection to query, key and value, attention, its output, and the MLP's two."""
    operations = [6.0 * shape.width, 2 * 4.0 * SEQUENCE, 2.0 * shape.width, 8.0 * shape.width, 8.0 * shape.width]
    return (_NORM, *((1 - 2 * _NORM) * part / sum(operations) for part in operations))
