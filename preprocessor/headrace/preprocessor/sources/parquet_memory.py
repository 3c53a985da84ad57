"""Row groups that are decoded in memory, in one bounded cache of the process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

import pyarrow as pa

CACHE_BYTES = 256 * 2**20


class RowGroupCache:
    """A cache of decoded row groups within `max_bytes`, except that the newest stays even if it alone exceeds them.

    The least recently used row groups are dropped first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()

    def get(self, key: tuple[int, int], decode: Callable[[], pa.Table]) -> pa.Table:
        """Return the table of `key`, a (shard, row group), calling `decode` if it is not cached.

        No thread waits for another's decoding, so that two may decode the same row group.
        """
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        table = decode()
        with self._lock:
            self._tables[key] = table
            while len(self._tables) > 1 and sum(kept.nbytes for kept in self._tables.values()) > self._max_bytes:
                self._tables.popitem(last=False)
        return table

    def drop(self, shard: int) -> None:
        """Remove the row groups of a shard, for example once it is closed."""
        with self._lock:
            for key in [key for key in self._tables if key[0] == shard]:
                del self._tables[key]


CACHE = RowGroupCache(CACHE_BYTES)
SERIALS = count()
