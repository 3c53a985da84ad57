"""Bytes of the tensors that a computation holds, counted as it runs, on any device and without its allocator."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is entered, the bytes of storages that operations give out, until each of them is freed.

    Everything that holds a tensor counts alike: a variable, autograd, or the closure of a checkpoint. What was there before, and
    what kernels allocate inside themselves, does not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are held."""
        self.most = 0
        """Most bytes that were held at a time."""
        self._known: set[int] = set()  # by address of the storage

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count what it gives out."""
        self._ignore((args, kwargs))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return result

    def _ignore(self, inputs: Any) -> None:
        """Take note of storages from before, of which an operation may give out views."""
        for tensor in tree_iter(inputs):
            if isinstance(tensor, Tensor) and (address := tensor.untyped_storage()._cdata) not in self._known:
                self._known.add(address)
                weakref.finalize(tensor.untyped_storage(), self._known.discard, address).atexit = False

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (address := storage._cdata) in self._known:
            return
        self._known.add(address)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, address, storage.nbytes()).atexit = False

    def _free(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.now -= num_bytes
