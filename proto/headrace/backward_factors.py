"""The ratio of backward to forward time, for units that are trainable, frozen or use activation checkpointing.

After Cornstarch (dissertation, section 3.3.1). The backward of a layer has two parts, gradients of weights and gradients of
inputs (eq. 3.1). A trainable layer computes both. A frozen layer computes the gradients of its inputs if anything in front of it
is trainable, and otherwise nothing (eq. 3.2); "in front" reaches across units, from the encoders to the LLM (eq. 3.3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headrace.plan import GENERATOR, LLM

# Times of the parts of a backward, each over that of the forward.
WEIGHT_GRADIENTS = 1.0  # one matrix product for each of the forward's; the gradients of inputs take another
INPUT_GRADIENTS = 1.0
RERUN = 1.0  # activation checkpointing runs the forward once more before the backward


def backward_factor(*, frozen: bool, behind_trainable: bool, checkpointing: bool = False) -> float:
    """Return the backward time of one layer over its forward time.

    behind_trainable: whether anything in front of the layer is trainable, so that it must compute gradients of its inputs.
    """
    if frozen and not behind_trainable:
        return 0.0
    return INPUT_GRADIENTS + weight_factor(frozen=frozen) + (RERUN if checkpointing else 0.0)


def weight_factor(*, frozen: bool) -> float:
    """Return the time of a layer's weight gradients over its forward time. The re-run forward of activation checkpointing counts
    towards the input gradients instead."""
    return 0.0 if frozen else WEIGHT_GRADIENTS


def backward_factors(
    units: Iterable[str],
    *,
    frozen: Collection[str] = (),
    frozen_projectors: Collection[str] = (),
    checkpointing: Collection[str] = (),
) -> dict[str, float]:
    """Return the backward time of the layers of each unit over their forward time, by unit. `units` are in pipeline order.

    The factor is 2 for a trainable unit, 1 for a frozen one behind something trainable and 0 for one with nothing to do;
    activation checkpointing adds 1 unless it is 0. Encoders are not in front of each other. Every encoder ends in a projector to
    the LLM, and the LLM in one to the generator, if there is one. A projector is trainable unless `frozen_projectors` names its
    unit, and its own backward is not counted.

    Raises ValueError if an option names a unit that is not in `units`.
    """
    units = tuple(units)
    options = (("frozen", frozen), ("frozen_projectors", frozen_projectors), ("checkpointing", checkpointing))
    for option, names in options:
        unknown = sorted(set(names) - set(units))
        if unknown:
            raise ValueError(f"{option} names unit {unknown[0]!r}, but the units are {', '.join(units)}")
    return {
        unit: backward_factor(
            frozen=unit in frozen,
            behind_trainable=any(other not in frozen or other not in frozen_projectors for other in in_front(unit, units)),
            checkpointing=unit in checkpointing,
        )
        for unit in units
    }


def in_front(unit: str, units: Collection[str]) -> list[str]:
    """Return those of `units` whose outputs reach `unit`, directly or through other units."""
    if unit == GENERATOR:
        return [other for other in units if other != GENERATOR]
    return [other for other in units if other not in (LLM, GENERATOR)] if unit == LLM else []
