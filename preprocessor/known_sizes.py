"""What probing found out of samples, kept until they are decoded: nothing is tokenised twice where that happens in one place."""

from __future__ import annotations

import threading
from collections import OrderedDict

from headrace.sample import SampleRef
from preprocessor.pipeline import Sizes

BUDGET_BYTES = 4 << 20  # about 500 samples of 1,000 tokens: some global batches
_ENTRY_BYTES = 1024  # of an entry beside its sequence, about


class KnownSizes:
    """The sizes of a job's samples that were put and not yet taken, the latest of them. Thread-safe."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._held_bytes = 0
        self._sizes: OrderedDict[tuple[int, int], Sizes] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, ref: SampleRef, sizes: Sizes) -> None:
        """Keep a sample's sizes; the oldest of others make room."""
        with self._lock:
            self._take(ref.shard, ref.row)
            self._sizes[ref.shard, ref.row] = sizes
            self._held_bytes += sizes.nbytes + _ENTRY_BYTES
            while self._held_bytes > self._budget_bytes:
                self._take(*next(iter(self._sizes)))

    def take(self, ref: SampleRef) -> Sizes | None:
        """A sample's sizes, which are not kept any longer; None where they are not known."""
        with self._lock:
            return self._take(ref.shard, ref.row)

    def _take(self, shard: int, row: int) -> Sizes | None:
        sizes = self._sizes.pop((shard, row), None)
        if sizes is not None:
            self._held_bytes -= sizes.nbytes + _ENTRY_BYTES
        return sizes
