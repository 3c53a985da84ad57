"""Measured layer costs: a layer takes a x^2 + b x + c seconds on x positions (Entrain: dissertation, section 4.4.1).

Counting operations misses memory bandwidth and kernel launches; a curve through a few measured times does not. Entrain
measures every layer separately, because attention grows with the square of the length and the MLP does not, at
x = 64, 256, 1024, 4096 and 16384.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.batch import Floats

VISION = "vision"
AUDIO = "audio"
PARTS = (VISION, AUDIO, LLM, GENERATOR)
"""Parts of a model for which costs are given, each on positions of its own.

The vision encoder is measured on patches before merging, the audio encoder on its own frames (half of the mel frames), the LLM
on tokens, and the generator on image tokens. An encoder's projector counts as one of its layers, the projector to the generator
and the layers at both ends of the generator as layers of the generator, and the output layer as a layer of the LLM.
"""

_POWERS = ("quadratic", "linear", "constant")
_FIELDS = tuple(f"{power}_s" for power in _POWERS)
_MEASURED = ("positions", "seconds")
_MOST_LAYERS = 10_000
_LARGEST = 1e9  # sums of costs stay far from the largest float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The forward seconds of a layer on x positions, as the polynomial `quadratic` * x^2 + `linear` * x + `constant`.

    x counts the positions that attend to each other, so the square is taken image by image and recording by recording. The
    constant is added once per sample that has any position.
    """

    quadratic: float = 0.0
    linear: float = 0.0
    constant: float = 0.0


Coefficients = Mapping[str, Sequence[LayerCost]]
"""The costs of the layers, in order, by part of the model (see PARTS)."""


def total(layers: Iterable[LayerCost]) -> LayerCost:
    """Add up the polynomials of several layers, as if they were one layer."""
    layers = tuple(layers)
    return LayerCost(**{power: math.fsum(getattr(layer, power) for layer in layers) for power in _POWERS})


def fit(positions: ArrayLike, seconds: ArrayLike) -> LayerCost:
    """Fit a layer to (m,) positions and (m,) measured seconds, by least squares of relative errors with no coefficient below 0.

    Errors are relative because otherwise the time at 16384 positions would outweigh that at 64. The best non-negative
    coefficients are the unconstrained optimum of the columns that they use, so all 7 choices of columns are tried.

    Raises ValueError for positions or times that are not positive, and for fewer than 3 different positions.
    """
    x, y = np.asarray(positions, np.float64), np.asarray(seconds, np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"positions and seconds must be lists of one length, got shapes {x.shape} and {y.shape}")
    wrong = np.flatnonzero(~(np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)))
    if wrong.size:
        row = wrong[0]
        raise ValueError(f"positions and seconds must be finite and positive, but measurement {row} is {x[row]} and {y[row]}")
    if len(set(x.tolist())) < len(_POWERS):
        raise ValueError(
            f"a curve of {len(_POWERS)} coefficients needs as many different positions, got {sorted(set(x.tolist()))}"
        )
    columns = np.stack((x**2, x, np.ones_like(x)), axis=1) / y[:, None]
    scale = np.linalg.norm(columns, axis=0)
    return LayerCost(**dict(zip(_POWERS, (_non_negative(columns / scale) / scale).tolist(), strict=True)))


def _non_negative(columns: Floats) -> Floats:
    """Return the (3,) weights >= 0 for which the weighted sum of the (m, 3) columns is nearest to all ones."""
    best, best_error = np.zeros(columns.shape[1]), math.inf
    for count in range(columns.shape[1], 0, -1):
        for used in itertools.combinations(range(columns.shape[1]), count):
            part = columns[:, used]
            weights = np.linalg.lstsq(part, np.ones(len(part)), rcond=None)[0]
            error = float(np.square(part @ weights - 1).sum())
            if weights.min() >= 0 and error < best_error:
                best, best_error = np.zeros(columns.shape[1]), error
                best[list(used)] = weights
    return best


def parse_coefficients(document: Any) -> dict[str, tuple[LayerCost, ...]]:
    """Read the layers of each part of a model from the content of a coefficients file.

        {"units": {"vision": {"layers": 32, "quadratic_s": 1e-12, "linear_s": 2e-8, "constant_s": 1e-6},
                   "llm": {"layers": [{"linear_s": 4e-8}, {"positions": [64, 256, 1024], "seconds": [...]}]}}}

    A part is a number of equal layers or a list of single ones. A layer is given by its coefficients, 0 if left out, or by
    measurements to which they are fitted. Raises ValueError with one sentence that names the part and the field.
    """
    units = document.get("units") if isinstance(document, Mapping) else None
    if not isinstance(units, Mapping) or not units or set(document) != {"units"}:
        raise ValueError("a coefficients file has one field, 'units', with an entry for each unit")
    unknown = [unit for unit in units if unit not in PARTS]
    if unknown:
        raise ValueError(f"units: there is no unit {unknown[0]!r} to give coefficients for; there are {', '.join(PARTS)}")
    return {unit: _layers(f"units.{unit}", entry) for unit, entry in units.items()}


def _layers(where: str, entry: Any) -> tuple[LayerCost, ...]:
    if not isinstance(entry, Mapping) or "layers" not in entry:
        raise ValueError(f"{where}.layers is required: a number of equal layers or a list of single ones")
    layers, common = entry["layers"], {field: value for field, value in entry.items() if field != "layers"}
    if isinstance(layers, list) and layers:
        if common:
            raise ValueError(f"{where}.{next(iter(common))} stands beside a list of layers; give it in each of them")
        return tuple(_layer(f"{where}.layers[{i}]", layer) for i, layer in enumerate(layers))
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= _MOST_LAYERS:
        raise ValueError(f"{where}.layers must be a number from 1 to {_MOST_LAYERS} or a list of layers, got {layers!r}")
    return (_layer(where, common),) * layers


def _layer(where: str, fields: Any) -> LayerCost:
    if not isinstance(fields, Mapping) or not fields:
        raise ValueError(f"{where} must have some of {', '.join(_FIELDS)}, or positions and seconds, got {fields!r}")
    if set(fields) == set(_MEASURED):
        positions, seconds = (_numbers(f"{where}.{field}", fields[field]) for field in _MEASURED)
        try:
            return fit(positions, seconds)
        except ValueError as err:
            raise ValueError(f"{where}: {err}") from err
    unknown = [field for field in fields if field not in _FIELDS]
    if unknown:
        raise ValueError(
            f"{where}.{unknown[0]}: there is no such field; a layer has {', '.join(_FIELDS)}, or positions and seconds"
        )
    values = {field: _number(f"{where}.{field}", value) for field, value in fields.items()}
    return LayerCost(**{field.removesuffix("_s"): value for field, value in values.items()})


def _numbers(where: str, values: Any) -> list[float]:
    if not isinstance(values, list):
        raise ValueError(f"{where} must be a list of numbers, got {values!r}")
    return [_number(f"{where}[{i}]", value) for i, value in enumerate(values)]


def _number(where: str, value: Any) -> float:
    """Return the value of a field as a number from 0 to _LARGEST; raises ValueError if it is none.

    Text that is a number is accepted, because YAML 1.1 reads 1e-12, which has no point, as text.
    """
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= _LARGEST:
        raise ValueError(f"{where} must be a number from 0 to {_LARGEST:g}, got {value!r}")
    return number
