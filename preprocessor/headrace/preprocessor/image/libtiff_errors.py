"""Notes the errors that libtiff, Pillow's decoder for TIFF, would print and pass over.

It fills up damaged lines of fax pages and reports success. Its errors come through a hook, which Pillow leaves at its default:
they are printed, a line for each line of pixels. Here the hook is taken, for the library that Pillow has loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

from PIL import _imaging


class _Noted(threading.local):
    """The number of errors of the calling thread, in which libtiff calls its hook."""

    count = 0


_noted = _Noted()
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)  # module, format, arguments


def _note(*_: object) -> None:
    _noted.count += 1


_hook = _Handler(_note)  # lives as long as the library may call it


def _take_hook() -> bool:
    try:
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
    except (OSError, AttributeError):  # Pillow holds libtiff in itself, or has none
        return False
    set_handler.restype = ctypes.c_void_p
    set_handler(_hook)
    return True


TAKEN = _take_hook()
"""Whether the hook could be taken, as it can with Pillow's own wheels for Linux."""


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Give a function that returns the number of errors of libtiff in this thread since the block began."""
    before = _noted.count
    yield lambda: _noted.count - before
