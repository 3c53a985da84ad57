"""How the layers of a unit are dealt to its stages, and what share of the unit's time, layers and weights its fullest stage has.

Stages have whole layers. Behind the last layer stands what the last stage has besides: the LLM's head, an encoder's projector.
We cut so that the longest stage is as short as possible: a large head takes layers from the last stage. So does the trainer where
no cuts are given, but as if the head computed every token. Of the LLM they are given (`first_layers`), as only tokens that carry
loss pass its head.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.orchestration.demand import UnitDemand


@lru_cache(maxsize=4096)
def layers_of_parts(layers: int, parts: int, end_layers: float = 0.0) -> tuple[int, ...]:
    """Return the layers of each of `parts` stages, at least one, so that the longest is as short as can be, and the rest is even.

    end_layers: what stands behind the last layer, in times of a layer. Earlier stages have a layer more than later ones where the
    others' layers cannot be dealt evenly. Raises ValueError unless there are from 1 to `layers` parts.
    """
    if not 1 <= parts <= layers:
        raise ValueError(f"{layers} layers can be cut into 1 to {layers} parts, got {parts}")
    if parts == 1:
        return (layers,)
    best: tuple[tuple[float, float], tuple[int, ...]] | None = None
    for last in range(1, layers - parts + 2):
        even, more = divmod(layers - last, parts - 1)
        cut = (*(even + (part < more) for part in range(parts - 1)), last)
        squares = more * (even + 1) ** 2 + (parts - 1 - more) * even**2 + (last + end_layers) ** 2
        key = max(float(cut[0]), last + end_layers), squares
        if best is None or key < best[0]:
            best = key, cut
    assert best is not None
    return best[1]


def first_layers(unit: UnitDemand, parts: int) -> tuple[int, ...]:
    """Return the first layer of every part of a unit but the first, as `UnitExecution.cuts` has them."""
    return tuple(accumulate(layers_of_parts(unit.layers, parts, unit.end_layers)))[:-1]


def time_share(unit: UnitDemand, pp: Ints | int) -> Floats:
    """Return the share of a unit's time that its longest stage takes."""
    share: Floats = _shares(unit)[0, np.asarray(pp) - 1]
    return share


def layer_share(unit: UnitDemand, pp: Ints | int) -> Floats:
    """Return the share of a unit's layers that are on the stage with most of them."""
    share: Floats = _shares(unit)[1, np.asarray(pp) - 1]
    return share


def weight_share(unit: UnitDemand, pp: Ints | int) -> Floats:
    """Return the share of a unit's weights that are on the stage with most of them: often one of the two at the ends."""
    share: Floats = _shares(unit)[2, np.asarray(pp) - 1]
    return share


def stage_times(unit: UnitDemand, stages: int, chunks: int = 1) -> list[float]:
    """Return the time of each stage over an even share of the unit's; stages take its parts in turn, `chunks` of them each."""
    of_part = [float(number) for number in layers_of_parts(unit.layers, stages * chunks, unit.end_layers)]
    of_part[-1] += unit.end_layers
    return [sum(of_part[stage::stages]) * stages / (unit.layers + unit.end_layers) for stage in range(stages)]


def _shares(unit: UnitDemand) -> Floats:
    front, back = unit.front_parameters / unit.parameters, unit.back_parameters / unit.parameters
    return _table(unit.layers, unit.end_layers, front, back)


@lru_cache(maxsize=256)
def _table(layers: int, end_layers: float, front: float, back: float) -> Floats:
    """Return (3, layers) the shares of the fullest of 1 .. layers stages. front, back: shares of the weights at both ends."""
    table = np.empty((3, layers))
    of_layer = (1.0 - front - back) / layers
    for stages in range(1, layers + 1):
        cut = layers_of_parts(layers, stages, end_layers)
        weights = [number * of_layer for number in cut]
        weights[0] += front
        weights[-1] += back
        table[:, stages - 1] = (
            max(cut[0], cut[-1] + end_layers) / (layers + end_layers), max(cut) / layers, max(weights)
        )  # fmt: skip
    table[0, 0] = table[1, 0] = table[2, 0] = 1.0  # not less by rounding
    table.flags.writeable = False
    return table
