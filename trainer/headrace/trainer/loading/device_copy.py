"""Copies to the device that overlap with computation: on a GPU from pinned memory, and by a side stream where asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


def to_device(value: _T, device: torch.device) -> _T:
    """Return `value` with every tensor in it on `device`: in dataclasses, tuples, lists and dicts, at any depth.

    The host does not wait for a copy to a GPU. Memory that is not pinned is copied into pinned memory first.
    """

    def move(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    moved: _T = _mapped(value, move)
    return moved


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Yield every tensor in a value, as `to_device` finds them."""
    found: list[Tensor] = []
    _mapped(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    yield from found


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of `value` with `change` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _mapped(getattr(value, field.name), change) for field in fields(value)})
    return value


@dataclass(frozen=True, slots=True)
class PendingCopy(Generic[_T]):
    """A value whose tensors are on their device, where copies may still be in progress."""

    value: _T
    end: torch.cuda.Event | None
    """Recorded behind the copies; None: they are complete."""

    def wait(self) -> _T:
        """Return the value after making the caller's current stream wait for the copies; the host does not wait."""
        if self.end is not None:
            for tensor in _tensors_in(self.value):
                stream = torch.cuda.current_stream(tensor.device)
                stream.wait_event(self.end)
                tensor.record_stream(stream)  # its memory is not reused before this stream has read it
        return self.value


class DeviceCopy:
    """Copies values to a device, one after the other, on a CUDA stream of its own where the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self, value: _T) -> PendingCopy[_T]:
        """Start the copy of all tensors in a value (`to_device`). From any thread, one at a time."""
        if self._stream is None:
            return PendingCopy(to_device(value, self._device), end=None)
        with torch.cuda.stream(self._stream):
            return PendingCopy(to_device(value, self._device), self._stream.record_event())
