"""What would make the host wait for a GPU, found on the CPU: operations that read values, or copy them between devices.

On a GPU the host gives the device work ahead of time; a read drains that queue, and so does a copy from memory that is not
pinned. On the CPU nothing waits, but the same operations run, and are seen here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount"}
"""Operations that read values: to return them to the host, or to know the shape of their result."""
_MASKED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operations that read values where an index is a mask."""
_REPEATED = "repeat_interleave"
"""An operation that reads values where it is not told how many rows the result has."""
_TO_HOST = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor, Tensor.pin_memory}
"""Functions that make tensors of what Python has, or of other host memory."""
_TO = {Tensor.to, Tensor.cuda}
"""Functions that copy where they are told a device."""
_FACTORIES = {torch.arange, torch.zeros, torch.ones, torch.empty, torch.full, torch.rand, torch.randn, torch.randint}
"""Functions that make tensors on the host where they are told no device."""
_WATCHED = _TO_HOST | _FROM_DATA | _TO | _FACTORIES


def _package(frame: FrameType) -> str:
    """The outermost package whose code runs in a frame: paths do not tell, for a clone may lie anywhere, with an environment
    inside."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def place_of(frame: FrameType | None) -> str:
    """The innermost function of this repository, with its file."""
    while frame is not None:
        if _package(frame) == "headrace":
            return f"{frame.f_code.co_filename.rsplit('/headrace/', 1)[-1].removeprefix('trainer/')}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "elsewhere"


def _is_ours(frame: FrameType | None) -> bool:
    """Whether the innermost frame outside of torch is this repository's."""
    while frame is not None and _package(frame) == "torch":
        frame = frame.f_back
    return frame is not None and _package(frame) == "headrace"


@cache
def _name(func: Any) -> str:
    """The name of an operation that may read values; empty for all others."""
    name: str = func.overloadpacket.__name__
    return name if name in _READS | _MASKED | {_REPEATED} else ""


class _Operations(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False saves a call around each operation, which torch has lest it compiles what this does; nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = _name(func)
        if not name:
            return func(*args, **(kwargs or {}))
        counts = name == _REPEATED and (kwargs or {}).get("output_size") is None
        masked = name in _MASKED and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in _READS or masked or counts:
            self._found[f"{place_of(sys._getframe(1))} {name}"] += 1
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func not in _WATCHED:
            return func(*args, **named)
        moves = func in _TO and any(isinstance(arg, torch.device | str) for arg in (*args[1:], named.get("device")))
        on_host = func in _FACTORIES and named.get("device") is None
        frame = sys._getframe(1)
        if func in _TO_HOST or ((func in _FROM_DATA or moves or on_host) and _is_ours(frame)):
            self._found[f"{place_of(frame)} {func.__name__}"] += 1
        return func(*args, **named)


@contextmanager
def watched(found: Counter[str], allowed: Collection[str] = ()) -> Iterator[None]:
    """Count in `found`, by place and operation, what this thread does here that would make the host wait for a GPU.

    `allowed`: places where it may.
    """
    own: Counter[str] = Counter()
    with ExitStack() as stack:
        stack.enter_context(_Functions(own))
        stack.enter_context(_Operations(own))
        yield
    found.update({waits: count for waits, count in own.items() if waits.split(" ")[0] not in allowed})
