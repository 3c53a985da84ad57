"""Partition of a unit's layers into contiguous parts whose forward and backward together take equally long.

Cornstarch (dissertation, sections 3.3.1 and 3.4.1): the slowest stage sets the pace of 1F1B, so its forward and backward
count, and a frozen layer's backward is shorter or absent. Costs are relative: the number of matrix elements that each row is
multiplied with. They are compared only within a unit, so attention, which every layer has alike, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from headrace.backward_factors import backward_factor
from headrace.model_shape import ModelShape, projector_weights
from headrace.plan import GENERATOR, LLM
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.models.audio_encoder import STRIDE
from headrace.trainer.pipeline.gradient_flow import has_trainable_upstream
from headrace.trainer.pipeline.topology import ENCODER, PipelineTopology


class UnitCosts(NamedTuple):
    """Relative costs of a unit's layers, in order. The last layer's include the projector or head that follows it."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


def layer_costs(
    topology: PipelineTopology, shape: ModelShape, *, vocab_size: int, image: ImageSpec, audio: AudioSpec
) -> dict[str, UnitCosts]:
    """Return the relative layer costs of each unit of a checked topology.

    Activation checkpointing runs the layers again, but not the head or projector. The projector to a generator, which few of
    the LLM's positions pass, is left out. A head that is tied to an embedding frozen by `frozen_layers` counts as trained.
    """
    joined = {ENCODER: image.merge**2, "vision": image.merge**2, "audio": audio.frames_per_token // STRIDE}
    costs = {}
    for unit, size in topology.units.items():
        stack = shape.units[unit]
        if unit == LLM:
            end, end_frozen = vocab_size * stack.width, size.frozen
        elif unit == GENERATOR:
            end, end_frozen = 3 * (image.merge * image.patch) ** 2 * stack.width, size.frozen
        else:
            end, end_frozen = projector_weights(stack.width, joined[unit], shape.llm.width), size.frozen_projector
        upstream, num_frozen = has_trainable_upstream(topology, unit), stack.layers if size.frozen else size.frozen_layers
        end_factor = backward_factor(frozen=end_frozen, behind_trainable=upstream or not size.frozen)
        forward = [float(stack.layer_weights)] * stack.layers
        backward = [
            cost * backward_factor(frozen=layer < num_frozen, behind_trainable=upstream, checkpointing=size.checkpointing is True)
            for layer, cost in enumerate(forward)
        ]
        forward[-1] += end
        backward[-1] += end_factor * end
        costs[unit] = UnitCosts(tuple(forward), tuple(backward))
    return costs


def bounds(
    topology: PipelineTopology, shape: ModelShape, *, vocab_size: int, image: ImageSpec, audio: AudioSpec
) -> dict[str, tuple[int, ...]]:
    """Return (0, b1, ..., layers) for each unit of a checked topology: part i has the layers from bound i up to bound i + 1.

    The bounds are the unit's own cuts if the topology gives them, else those that `partition` finds.
    """
    costs = layer_costs(topology, shape, vocab_size=vocab_size, image=image, audio=audio)
    found = {}
    for unit, (forward, backward) in costs.items():
        cuts = topology.units[unit].cuts
        if cuts is None:
            both = [f + b for f, b in zip(forward, backward, strict=True)]
            found[unit] = partition(both, topology.num_parts(unit))
        else:
            found[unit] = (0, *cuts, len(forward))
    return found


def with_cuts(
    topology: PipelineTopology, shape: ModelShape, *, vocab_size: int, image: ImageSpec, audio: AudioSpec
) -> PipelineTopology:
    """Return a checked topology with the cuts of every unit, from which `gradient_flow` knows where frozen layers end."""
    found = bounds(topology, shape, vocab_size=vocab_size, image=image, audio=audio)
    units = {unit: size.model_copy(update={"cuts": found[unit][1:-1]}) for unit, size in topology.units.items()}
    return topology.model_copy(update={"units": units})


def partition(costs: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Return the bounds (0, b1, ..., L) of `num_parts` contiguous parts of L layers that minimise the cost of the costliest part.

    Each part has at least one layer. Ties go to the least sum of squares, so that the other parts are even too, then to the
    earliest cuts. [4, 1, 1, 1, 1] in 3 parts is (0, 1, 3, 5): no part is above 4, and the rest is halved. O(L^2 parts).

    Raises ValueError unless there are from 1 to L parts.
    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"{len(costs)} layers can be cut into 1 to {len(costs)} parts, got {num_parts}")
    ends = list(accumulate(costs, initial=0.0))
    largest, _ = _best(ends, num_parts, max)
    _, found = _best(ends, num_parts, lambda squares, cost: squares + cost**2 if cost <= largest else math.inf)
    return found


def _best(ends: Sequence[float], num_parts: int, join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
    """Solve equation 3.5 (Cornstarch) by dynamic programming: return the least joined value of all parts, and its bounds.

    ends: (L + 1,) cost of the first i layers. join: maps the value of the parts so far and the cost of the next part to the
    value of them all.
    """
    num_layers = len(ends) - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for part in range(1, num_parts + 1):
        best = {
            end: min(
                (join(value, ends[end] - ends[found[-1]]), (*found, end)) for value, found in best.values() if found[-1] < end
            )
            for end in range(part, num_layers - (num_parts - part) + 1)
        }
    return best[num_layers]
