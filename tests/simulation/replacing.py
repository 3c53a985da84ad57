"""Puts something in the place of an attribute, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LACKING = object()


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class during the block; one that it lacks is removed afterwards."""
    own = vars(target).get(name, _LACKING)  # as a class has it: not bound
    setattr(target, name, value)
    try:
        yield
    finally:
        if own is _LACKING:
            delattr(target, name)
        else:
            setattr(target, name, own)
