"""Memory that is used again: keeps the C library from giving pages back after every part that came over the network.

Flight receives into blocks of `malloc` of one or two MiB each. As it is, glibc maps such blocks one by one, or returns the end
of its heap as soon as parts are freed, and the first touch of a fresh page costs more than the copy into it: that halves the
rate of a transfer.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os

from headrace.observability.logs import pairs

log = logging.getLogger(__name__)

KEEP = "HEADRACE_KEEP_MALLOC"
"""The environment variable that, set to 1, leaves malloc alone."""

_HEAP_BYTES = 32 << 20  # blocks up to this size lie in the heap: the largest threshold that glibc chooses by itself
_TRIM_BYTES = 2**31 - 1  # freed memory at the end of the heap that is kept: the largest number that mallopt takes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


@functools.cache
def keep_freed_pages() -> bool:
    """Tune this process's malloc, once and for good. Whether that was done: glibc only, and not where the user forbids it.

    The process then keeps as much memory as it ever used at a time, in blocks of up to 32 MiB.
    """
    if os.environ.get(KEEP) == "1":
        log.info("malloc is left as it is %s", pairs(**{KEEP: 1}))
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = bool(mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
    log.info(
        "malloc keeps freed pages for parts to come; %s=1 leaves it alone %s",
        KEEP,
        pairs(mmap_threshold_bytes=_HEAP_BYTES, trim_threshold_bytes=_TRIM_BYTES),
    )
    return done
