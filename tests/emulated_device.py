"""EMULATED: a device whose memory is not the host's, for code that must not mix the two up. Nothing here has run on a GPU.

Its tensors say that they are on `DEVICE` and hold their values out of the host's sight: no library gets at their memory. They
take part in every operation, and only a copy to the host brings values there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")  # a type that torch has everywhere, and that is not the host's


class DeviceTensor(Tensor):
    """A tensor of the emulated device."""

    values: Tensor
    """What it holds, on the host."""

    @staticmethod
    def __new__(cls, values: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=values.dtype, device=DEVICE, strides=values.stride(), storage_offset=values.storage_offset()
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def emulated_device() -> Iterator[None]:
    """A block in which this thread can make tensors on `DEVICE`."""
    with _FromData(), _Operations():
        yield


class _FromData(TorchFunctionMode):
    """`torch.tensor` fills what it makes below the operations that `_Operations` sees."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            return torch.tensor(*args, **{**kwargs, "device": torch.device("cpu")}).to(DEVICE)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on what tensors hold. Its results are on the device that it names, or else where its arguments are."""
    are_there: list[bool] = []

    def held(value: Any) -> Any:
        are_there.append(isinstance(value, DeviceTensor))
        return value.values if isinstance(value, DeviceTensor) else value

    named = kwargs.get("device")
    kwargs = {**kwargs, "device": torch.device("cpu")} if named is not None else kwargs
    results = func(*tree_map(held, args), **tree_map(held, dict(kwargs)))
    if func._schema.name.endswith("_"):  # in place
        return args[0]
    is_there = torch.device(named) == DEVICE if named is not None else any(are_there)
    return tree_map(lambda value: DeviceTensor(value) if is_there and isinstance(value, Tensor) else value, results)
