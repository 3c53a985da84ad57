"""Checks between the layers of a stage, by which a node whose work has become useless ends it in the middle of a computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def checked(layers: Iterable[nn.Module], check: Callable[[], None]) -> Iterator[None]:
    """Return a context in which `check` is called before each of these layers computes, forward and backward.

    What it raises ends the computation: `backward` raises it too, and leaves gradients of some layers behind.
    """

    def before_forward(*_: Any) -> None:
        check()

    def before_backward(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: check())  # type: ignore[no-untyped-call]  # before the layer's own backward

    handles = []
    for layer in layers:
        handles += [layer.register_forward_pre_hook(before_forward), layer.register_forward_hook(before_backward)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
