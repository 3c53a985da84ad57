"""Changes of what a unit's layers take, whatever model it is of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from headrace.trainer.models.attention import Segments
from headrace.trainer.pipeline.chunk import Inputs


def attending(inputs: Inputs, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Inputs:
    """Return a unit's inputs with `attend` in place of the layers' attention (`Segments.attend`)."""
    return replace(inputs, layers=mapped(inputs.layers, Segments, lambda segments: replace(segments, attend=attend)))


def mapped(value: Any, kind: type, change: Any) -> Any:
    """Return a copy of a unit's layer inputs with `change` applied to each value of a kind, tensors of Segments apart."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        return tuple(mapped(item, kind, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type | Segments):
        return replace(value, **{field.name: mapped(getattr(value, field.name), kind, change) for field in fields(value)})
    return value
