"""Profiles of models that are known by name: seconds and bytes of their layers, computed from the shape and not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.model_shape import ModelShape, projector_weights
from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.cost_model.coefficients import TARGETS, VISION, total
from headrace.reorder_service.planning.cost_model.cost import nominal_coefficients
from headrace.reorder_service.recovery.pipeline_templates import ModelProfile

if TYPE_CHECKING:  # importing it takes a fifth of a second
    from headrace.spec import AudioSpec, ImageSpec

BYTES_PER_WEIGHT = 16
"""Bytes of training state per weight: weight and gradient in bf16; weight, momentum and variance in fp32."""
BOTH_WAYS = 3
"""Time of forward plus backward, in forwards: the backward takes twice as long as the forward."""
SHARING = 1 / 40
"""What each further GPU that shares a layer adds for the collectives, as a share of the layer's time on one GPU."""


def profile_of(
    shape: ModelShape,
    *,
    tokens: int,
    patches: int,
    image: ImageSpec,
    audio: AudioSpec,
    microbatch: int,
    gpus: int,
    memory_bytes: int,
) -> ModelProfile:
    """Return the profile of a model with the units vision, llm and, if the shape has one, generator.

    A sample has one image of `patches` patches in `tokens` tokens, which all carry loss. Times are `nominal_coefficients`. Left
    out are the audio encoder, which such samples do not use, and the bytes of what stands before the vision encoder and around
    the generator.
    memory_bytes: memory of a GPU for weights, gradients and optimizer.
    """
    ends = {
        VISION: projector_weights(shape.vision.width, image.merge**2, shape.llm.width),
        LLM: shape.llm.vocab * shape.llm.width,
    }
    stacks = {VISION: shape.vision, LLM: shape.llm}
    positions = {VISION: patches, LLM: tokens}
    if shape.generator is not None:
        ends[GENERATOR] = projector_weights(shape.llm.width, 1, shape.generator.width)
        stacks[GENERATOR] = shape.generator
        positions[GENERATOR] = max(1, patches // image.merge**2)
    costs = dict(nominal_coefficients(shape, image=image, audio=audio))
    costs[LLM] = (*costs[LLM], *costs.pop(TARGETS, ()))
    seconds, weights = [], []
    for unit, stack in stacks.items():
        last = stack.layers - 1
        for cost in (*costs[unit][:last], total(costs[unit][last:])):
            forward = cost.quadratic * positions[unit] ** 2 + cost.linear * positions[unit] + cost.constant
            seconds.append(BOTH_WAYS * forward * microbatch)
        of_layers = np.full(stack.layers, stack.layer_weights)
        of_layers[last] += ends[unit]
        if unit == LLM:
            of_layers[0] += ends[unit]  # token embeddings
        weights.append(of_layers)
    shared = np.arange(1, gpus + 1)
    return ModelProfile(
        units={unit: stack.layers for unit, stack in stacks.items()},
        seconds=np.array(seconds)[:, None] * (1 / shared + (shared - 1) * SHARING),
        gpu_bytes=BYTES_PER_WEIGHT * np.concatenate(weights)[:, None] // shared,
        memory_bytes=memory_bytes,
    )
