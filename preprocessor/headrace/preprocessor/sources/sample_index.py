"""Where the samples of an archive lie, packed into arrays: shards of a million samples stay open by the dozen."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The place of a member's data in its archive, in bytes."""

    offset: int
    size: int


class SampleIndex:
    """The keys of samples and the spans of their members, at 18 bytes a member and 16 more and its key a sample."""

    def __init__(self, samples: Iterable[tuple[str, Mapping[str, Span]]]) -> None:
        """`samples`: key, and spans by extension, of each sample in turn."""
        keys = bytearray()
        self._key_ends, self._ends = array("Q"), array("Q")
        self._offsets, self._sizes, self._numbers = array("Q"), array("Q"), array("H")
        self._extensions: list[str] = []
        numbers: dict[str, int] = {}
        for key, spans in samples:
            keys += key.encode(errors="surrogatepass")
            for extension, span in spans.items():
                self._numbers.append(numbers.setdefault(extension, len(numbers)))
                self._offsets.append(span.offset)
                self._sizes.append(span.size)
            self._key_ends.append(len(keys))
            self._ends.append(len(self._offsets))
        self._keys = bytes(keys)
        self._extensions += numbers

    def __len__(self) -> int:
        return len(self._ends)

    def key(self, row: int) -> str:
        """Return the key of a sample."""
        row = range(len(self))[row]
        start = self._key_ends[row - 1] if row else 0
        return self._keys[start : self._key_ends[row]].decode(errors="surrogatepass")

    def spans(self, row: int) -> dict[str, Span]:
        """Return the spans of a sample's members by extension, in the archive's order."""
        row = range(len(self))[row]
        members = range(self._ends[row - 1] if row else 0, self._ends[row])
        return {
            self._extensions[self._numbers[member]]: Span(offset=self._offsets[member], size=self._sizes[member])
            for member in members
        }
