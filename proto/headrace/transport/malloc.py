"""Tuning of malloc, so that the C library reuses memory instead of giving it back after every received part or large plan.

Flight receives into `malloc` blocks of one MiB or more. By default glibc maps such blocks one by one, or returns the end of its
heap as soon as parts are freed, and the first touch of a fresh page costs more than the copy into it: that halves the rate of a
transfer.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os

from headrace.observability.logs import pairs

log = logging.getLogger(__name__)

KEEP = "HEADRACE_KEEP_MALLOC"
"""Name of the environment variable that, set to 1, makes Headrace leave malloc alone."""

_HEAP_BYTES = 32 << 20  # largest block that lies in the heap, the largest threshold that glibc itself chooses
_TRIM_BYTES = 2**31 - 1  # most freed memory to keep at the end of the heap, the largest number that mallopt takes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


@functools.cache
def keep_freed_pages() -> bool:
    """Make this process's malloc keep freed pages, permanently, and return whether it was done: only with glibc, and not if
    HEADRACE_KEEP_MALLOC is 1.

    The process then keeps its peak memory in blocks of up to 32 MiB. Further calls change nothing.
    """
    if os.environ.get(KEEP) == "1":
        log.info("malloc is left as it is %s", pairs(**{KEEP: 1}))
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = bool(mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
    log.info(
        "malloc keeps freed pages for later use; %s=1 leaves it alone %s",
        KEEP,
        pairs(mmap_threshold_bytes=_HEAP_BYTES, trim_threshold_bytes=_TRIM_BYTES),
    )
    return done
