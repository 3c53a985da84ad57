"""Counted costs of a model's layers as the trainers run them: the LLM's head on the tokens that carry loss only, and cut by its
vocabulary where layers are cut into slices.

The plain count (`cost.nominal_coefficients`) has the head whole on every slice, and on every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.model_shape import ModelShape
from headrace.plan import LLM
from headrace.reorder_service.planning.cost_model.coefficients import TARGETS, Coefficients, total
from headrace.reorder_service.planning.cost_model.cost import nominal_coefficients

if TYPE_CHECKING:
    from headrace.spec import AudioSpec, ImageSpec


def counted_coefficients(
    shape: ModelShape,
    *,
    image: ImageSpec,
    audio: AudioSpec,
    vocab: int = 0,
    tp: Mapping[str, int] | None = None,
    reruns: float = 0.0,
) -> Coefficients:
    """Return the layer costs of a model's published shape at the nominal device rate, those of the head as its TARGETS.

    vocab: size of the job's vocabulary, 0 for the published one. tp: number of slices by part, 1 where none is given. reruns: the
    LLM's backward over its forward if its layers run their forward again. As the head does not, its costs are such that with this
    ratio they come to what it takes; 0 where nothing runs again.
    """
    layers = nominal_coefficients(shape, image=image, audio=audio, vocab=vocab, tp=tp)
    stack, head = layers[LLM][: shape.llm.layers], layers[LLM][shape.llm.layers :]
    if not head:
        return layers
    on_slice = total(head).sliced((tp or {}).get(LLM, 1))
    return {**layers, LLM: stack, TARGETS: (on_slice.scaled(reruns / (1.0 + reruns)) if reruns else on_slice,)}
