"""The leases of parts that a preprocessor has not answered yet."""

from __future__ import annotations


class OpenLeases:
    """Counts the parts of each lease. It is answered once: when all are decoded, or as soon as one cannot be."""

    def __init__(self) -> None:
        self._undecoded: dict[str, int] = {}

    def begin(self, lease: str, num_parts: int) -> None:
        """Note a lease of so many parts, at least one."""
        self._undecoded[lease] = num_parts

    def decoded(self, lease: str) -> bool:
        """Note that one part of a lease is decoded, and return whether it was the last one. False where one has failed."""
        left = self._undecoded.get(lease, 0) - 1
        if left > 0:
            self._undecoded[lease] = left
        else:
            self._undecoded.pop(lease, None)
        return left == 0

    def failed(self, lease: str) -> bool:
        """Note that a part of a lease cannot be decoded, and return whether the lease was not answered yet."""
        return self._undecoded.pop(lease, None) is not None

    def clear(self) -> None:
        """Forget all leases, since the stream that they came by has ended."""
        self._undecoded.clear()
