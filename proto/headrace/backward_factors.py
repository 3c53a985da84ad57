"""The ratio of backward to forward time, for units that are trainable, frozen or use activation checkpointing.

After Cornstarch (dissertation, section 3.3.1). The backward of a layer has two parts, gradients of weights and gradients of
inputs (eq. 3.1). A trainable layer computes both. A frozen layer computes the gradients of its inputs if anything in front of it
is trainable, and otherwise nothing (eq. 3.2); "in front" reaches across units, from the encoders to the LLM (eq. 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from headrace.plan import GENERATOR, LLM

WEIGHT_GRADIENTS = 1.0
"""Time of weight gradients over that of the forward: they are one matrix product for each of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardTimes:
    """Times of the parts of a layer's backward, each over that of its forward; the defaults count matrix products.

    Raises ValueError for a time that is negative or not finite.
    """

    weight_gradients: float = WEIGHT_GRADIENTS
    input_gradients: float = 1.0
    rerun: float = 1.0
    """Time of the forward that activation checkpointing runs again before the backward."""

    def __post_init__(self) -> None:
        for name in ("weight_gradients", "input_gradients", "rerun"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")


_COUNTED = BackwardTimes()


def backward_factor(
    *, frozen: bool, behind_trainable: bool, checkpointing: bool = False, times: BackwardTimes = _COUNTED
) -> float:
    """Return the backward time of one layer over its forward time.

    behind_trainable: whether anything in front of the layer is trainable, so that it must compute gradients of its inputs.
    """
    if frozen and not behind_trainable:
        return 0.0
    return times.input_gradients + weight_factor(frozen=frozen, times=times) + (times.rerun if checkpointing else 0.0)


def weight_factor(*, frozen: bool, frozen_share: float = 0.0, times: BackwardTimes = _COUNTED) -> float:
    """Return the time of the weight gradients of a layer or unit over its forward time.

    frozen_share: share of a unit's layers that are frozen, if not all are. The re-run forward of activation checkpointing counts
    towards the input gradients instead.
    """
    return 0.0 if frozen else (1 - frozen_share) * times.weight_gradients


def backward_factors(
    units: Iterable[str],
    *,
    frozen: Collection[str] = (),
    frozen_projectors: Collection[str] = (),
    frozen_shares: Mapping[str, float] | None = None,
    checkpointing: Collection[str] = (),
    measured: Mapping[str, BackwardTimes] | None = None,
) -> dict[str, float]:
    """Return the backward time of the layers of each unit over their forward time, by unit. `units` are in pipeline order.

    The factor is 2 for a trainable unit, 1 for a frozen one behind something trainable and 0 for one with nothing to do;
    activation checkpointing adds 1 unless it is 0. Encoders are not in front of each other. Every encoder ends in a projector to
    the LLM, and the LLM in one to the generator, if there is one. A projector is trainable unless `frozen_projectors` names its
    unit, and its own backward is not counted.

    frozen_shares: share, from 0 to less than 1, of the layers of units that begin with frozen layers; the factor is then the mean
    over all layers. measured: times to use in place of the counted ones, by unit.

    Raises ValueError if an option names a unit that is not in `units`, or for a share that is out of range.
    """
    units, frozen_shares, measured = tuple(units), frozen_shares or {}, measured or {}
    options: tuple[tuple[str, Collection[str]], ...] = (
        ("frozen", frozen), ("frozen_projectors", frozen_projectors), ("frozen_shares", frozen_shares),
        ("checkpointing", checkpointing), ("measured", measured),
    )  # fmt: skip
    for option, names in options:
        unknown = sorted(set(names) - set(units))
        if unknown:
            raise ValueError(f"{option} names unit {unknown[0]!r}, but the units are {', '.join(units)}")
    for unit, share in frozen_shares.items():
        if not 0 <= share < 1:
            raise ValueError(f"the frozen share of unit {unit!r} must be from 0 to less than 1, got {share}")
    factors = {}
    for unit in units:
        behind_trainable = any(other not in frozen or other not in frozen_projectors for other in in_front(unit, units))
        idle, learning = (
            backward_factor(
                frozen=is_frozen,
                behind_trainable=behind_trainable,
                checkpointing=unit in checkpointing,
                times=measured.get(unit, _COUNTED),
            )
            for is_frozen in (True, False)
        )
        share = 1.0 if unit in frozen else frozen_shares.get(unit, 0.0)
        factors[unit] = share * idle + (1 - share) * learning
    return factors


def in_front(unit: str, units: Collection[str]) -> list[str]:
    """Return those of `units` whose outputs reach `unit`, directly or through other units."""
    if unit == GENERATOR:
        return [other for other in units if other != GENERATOR]
    return [other for other in units if other not in (LLM, GENERATOR)] if unit == LLM else []
