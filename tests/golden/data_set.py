"""The data set of a script: the shards of each source, and which of their rows are damaged or deadly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from string import ascii_lowercase

from headrace.v1.common_pb2 import Shard


@dataclass(kw_only=True)
class Data:
    """Every source of every job has the same shards, a, b, ..., with `rows` samples each, which are named SOURCE/SHARD/ROW."""

    shards: int = 1
    rows: int = 24
    bad: frozenset[int] = frozenset()
    """Rows of each shard that are refused when they are probed."""
    deadly: frozenset[int] = field(default_factory=frozenset)
    """Rows of each shard that end the preprocessor that probes or decodes them."""

    def listed(self, sources: Iterable[str]) -> list[Shard]:
        """Return the shards of all sources, as a preprocessor lists them."""
        letters = ascii_lowercase[: self.shards]
        return [
            Shard(source=number, number=number * self.shards + place, url=f"/{source}/{letter}.tar", name=f"{source}/{letter}")
            for number, source in enumerate(sources)
            for place, letter in enumerate(letters)
        ]


def rows_of(words: str) -> frozenset[int]:
    """Return the rows that a script names, as in 3,5."""
    return frozenset(map(int, filter(None, words.split(","))))
