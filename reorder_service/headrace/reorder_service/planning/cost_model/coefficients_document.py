"""The content of a coefficients file, which `headrace profile` writes, from and to measured costs.

    {"model": "7b", "measured_on": {"device": "cpu", "dtype": "fp32"},
     "units": {"vision": {"layers": 32, "quadratic_s": 1e-12, "linear_s": 2e-8, "constant_s": 1e-6,
                          "ends": {"projector": {"linear_s": 3e-8}},
                          "backward": {"input_gradients": 1.1, "weight_gradients": 0.9, "rerun": 1.0},
                          "microbatch": {"forward_s": 1e-4, "backward_s": 2e-4},
                          "step": {"gradients_s": 1e-3, "update_s": 5e-3},
                          "slices": {"2": {"layers": 32, "linear_s": 1e-8}}},
               "llm": {"layers": [{"linear_s": 4e-8}, {"positions": [64, 256, 1024], "seconds": [0.1, 0.3, 0.9]}],
                       "ends": {"targets": {"linear_s": 5e-7}}}}}

A unit here is a part of the model (`coefficients.PARTS`). Its layers are a number of equal ones or a list of single ones. A layer
is given by its coefficients, 0 if left out, or by measurements to which they are fitted. The end `targets` of the LLM is on the
tokens that carry loss, all others on all positions. `microbatch` is what every microbatch takes besides its samples, `step` what
every step takes besides its microbatches (`measured_costs.PartCosts`). Everything but the layers may be left out. `slices` has an
entry of the same form for each further tensor-parallel width; ends are whole on every slice, and so is what a microbatch and a
step take besides. `huggingface` names the Hugging Face model of each unit that is not the named model's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.backward_factors import BackwardTimes
from headrace.reorder_service.planning.cost_model.coefficients import PARTS, POWERS, LayerCost, fit
from headrace.reorder_service.planning.cost_model.measured_costs import BACKWARD_FIELDS, MeasuredCosts, PartCosts

_FIELDS = tuple(f"{power}_s" for power in POWERS)
_MEASURED = ("positions", "seconds")
_HEAD = ("model", "huggingface", "measured_on")
_FIXED = {"microbatch": ("forward_s", "backward_s"), "step": ("gradients_s", "update_s")}
"""Fields that are two numbers each, as PartCosts has them in `microbatch_s` and `step_s`."""
_BESIDE_LAYERS = ("ends", "backward", "tp", "slices", *_FIXED)
_MOST_LAYERS = 10_000
_LARGEST = 1e9  # sums of costs stay far from the largest float
_LARGEST_RATIO = 100.0  # of a part of the backward over the forward; about 1 where matrix products take the time


def parse_coefficients(document: Any, tp: Mapping[str, int] | None = None) -> MeasuredCosts:
    """Read measured costs from the content of a coefficients file.

    tp: by unit, the tensor-parallel widths for which `slices` are taken; where it names none, the entry of the unit itself is.
    Raises ValueError with one sentence that names the unit and the field.
    """
    units = document.get("units") if isinstance(document, Mapping) else None
    if not isinstance(units, Mapping) or not units or set(document) - {"units", *_HEAD}:
        raise ValueError(
            f"a coefficients file has one field, 'units', with an entry for each unit, and perhaps {', '.join(_HEAD)}"
        )
    unknown = [unit for unit in units if unit not in PARTS]
    if unknown:
        raise ValueError(f"units: there is no unit {unknown[0]!r} to give coefficients for; there are {', '.join(PARTS)}")
    model = document.get("model", "")
    if not isinstance(model, str):
        raise ValueError(f"model must be a name, got {model!r}")
    huggingface, measured_on = (_texts(name, document.get(name, {})) for name in ("huggingface", "measured_on"))
    parts = {unit: _part(f"units.{unit}", entry, (tp or {}).get(unit)) for unit, entry in units.items()}
    return MeasuredCosts(parts=parts, model=model, huggingface=huggingface, measured_on=measured_on)


def document_of(costs: MeasuredCosts) -> dict[str, Any]:
    """Return the plain data from which `parse_coefficients` makes the same costs again."""
    units = {part: entry_of(of_part) | ({"tp": of_part.tp} if of_part.tp > 1 else {}) for part, of_part in costs.parts.items()}
    head = {name: getattr(costs, name) for name in _HEAD if getattr(costs, name)}
    return {**head, "units": units}


def entry_of(costs: PartCosts) -> dict[str, Any]:
    """Return the plain data of a unit or of one of its `slices`, without the width."""
    equal = len(set(costs.layers)) == 1
    layers = {"layers": len(costs.layers), **_fields(costs.layers[0])} if equal else {"layers": [*map(_fields, costs.layers)]}
    ends = {"ends": {name: _fields(layer) for name, layer in costs.ends.items()}} if costs.ends else {}
    pairs = {"microbatch": costs.microbatch_s, "step": costs.step_s}
    fixed = {name: dict(zip(_FIXED[name], seconds, strict=True)) for name, seconds in pairs.items() if sum(seconds)}
    return {**layers, **ends, "backward": {name: getattr(costs.backward, name) for name in BACKWARD_FIELDS}, **fixed}


def _fields(layer: LayerCost) -> dict[str, float]:
    return {f"{power}_s": getattr(layer, power) for power in POWERS}


def _part(where: str, entry: Any, tp: int | None) -> PartCosts:
    """Read the costs of a unit at tensor-parallel width `tp`; None takes the width of the entry itself."""
    own = _mapping(where, entry).get("tp", 1)
    if isinstance(own, bool) or not isinstance(own, int) or own < 1:
        raise ValueError(f"{where}.tp must be a number of slices from 1, got {own!r}")
    if tp not in (None, own):
        slices = _mapping(f"{where}.slices", entry.get("slices", {}))
        if str(tp) not in slices:
            raise ValueError(
                f"{where} was measured at tensor-parallel width {', '.join([str(own), *slices])}, but the unit's tp is {tp}"
            )
        where, whole = f"{where}.slices.{tp}", {name: entry[name] for name in ("ends", *_FIXED) if name in entry}
        entry = {**whole, **_mapping(where, slices[str(tp)])}
    if "layers" not in entry:
        raise ValueError(f"{where}.layers is required: a number of equal layers or a list of single ones")
    ends = _mapping(f"{where}.ends", entry.get("ends", {}))
    return PartCosts(
        layers=_layers(where, {field: value for field, value in entry.items() if field not in _BESIDE_LAYERS}),
        ends={name: _layer(f"{where}.ends.{name}", end) for name, end in ends.items()},
        backward=_backward(where, entry),
        tp=own if tp is None else tp,
        microbatch_s=_pair(where, entry, "microbatch"),
        step_s=_pair(where, entry, "step"),
    )


def _pair(where: str, entry: Mapping[str, Any], name: str) -> tuple[float, float]:
    fields = _FIXED[name]
    values = _mapping(f"{where}.{name}", entry.get(name, dict.fromkeys(fields, 0.0)))
    if set(values) != set(fields):
        raise ValueError(f"{where}.{name} must have {' and '.join(fields)}, got {values!r}")
    first, second = (_number(f"{where}.{name}.{field}", values[field]) for field in fields)
    return first, second


def _texts(where: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{where} must be texts by name, got {value!r}")
    return dict(value)


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping of fields, got {value!r}")
    return value


def _backward(where: str, entry: Mapping[str, Any]) -> BackwardTimes:
    if "backward" not in entry:
        return BackwardTimes()
    where, times = f"{where}.backward", entry["backward"]
    if not isinstance(times, Mapping) or set(times) != set(BACKWARD_FIELDS):
        raise ValueError(f"{where} must have {', '.join(BACKWARD_FIELDS)}, each over the forward, got {times!r}")
    return BackwardTimes(**{name: _number(f"{where}.{name}", times[name], _LARGEST_RATIO) for name in BACKWARD_FIELDS})


def _layers(where: str, entry: Mapping[str, Any]) -> tuple[LayerCost, ...]:
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


def _number(where: str, value: Any, largest: float = _LARGEST) -> float:
    """Return the value of a field as a number from 0 to `largest`; raises ValueError if it is none.

    Text that is a number is accepted, because YAML 1.1 reads 1e-12, which has no point, as text.
    """
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= largest:
        raise ValueError(f"{where} must be a number from 0 to {largest:g}, got {value!r}")
    return number
