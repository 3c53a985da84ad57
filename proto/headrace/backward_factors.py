"""Time of a backward over its forward where units are frozen or re-run their forward.

Cornstarch (dissertation, section 3.3.1). The backward of a layer has two parts, gradients of weights and gradients of
inputs (eq. 3.1). A trainable layer computes both. A frozen layer computes those of its inputs where anything in front of it
is trainable, else nothing (eq. 3.2), and "in front" reaches across units: from the encoders to the LLM (eq. 3.3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headrace.plan import GENERATOR, LLM

WEIGHT_GRADIENTS = 1.0  # each is one matrix product for each one of the forward
INPUT_GRADIENTS = 1.0
RERUN = 1.0  # activation checkpointing: the forward once more, before the backward needs what it computed


def backward_factor(*, frozen: bool, behind_trainable: bool, checkpointing: bool = False) -> float:
    """Backward over forward of one layer. behind_trainable: whether anything in front of it is trainable."""
    if frozen and not behind_trainable:
        return 0.0
    return INPUT_GRADIENTS + weight_factor(frozen=frozen) + (RERUN if checkpointing else 0.0)


def weight_factor(*, frozen: bool) -> float:
    """The part of a layer's backward that computes gradients of weights, over its forward. What is run again is in the other."""
    return 0.0 if frozen else WEIGHT_GRADIENTS


def backward_factors(
    units: Iterable[str],
    *,
    frozen: Collection[str] = (),
    frozen_projectors: Collection[str] = (),
    checkpointing: Collection[str] = (),
) -> dict[str, float]:
    """Backward over forward of the layers of each of `units`, which stand in pipeline order.

    2 for a trainable unit, 1 for a frozen one behind something trainable, 0 for one with nothing to do; with checkpointing 1
    more unless it is 0. Encoders are not in front of each other. A projector leads out of every encoder and out of the LLM
    to a generator, and is trainable unless `frozen_projectors` names the unit; its own backward is not counted.

    Raises ValueError where an option names a unit that there is not.
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
    """The units whose outputs reach this one."""
    if unit == GENERATOR:
        return [other for other in units if other != GENERATOR]
    return [other for other in units if other not in (LLM, GENERATOR)] if unit == LLM else []
