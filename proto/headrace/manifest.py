"""The manifest of a job: its shards, and what a trainer must know about its tokenizer. Preprocessors find both out once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

PAGE_SHARDS = 250  # shards per report or store entry: about 30 kB, so that a batch of them (headrace.outbox) fits a message
MAX_SHARD_ROWS = (1 << 31) - 1  # of a shard: the store keeps row numbers as signed 32-bit integers
UNCOUNTED = -1  # number of rows of a shard that is not indexed yet


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class ShardInfo:
    """A shard, one file of a source. Its position in the manifest is its identity."""

    source: int
    """Index into the job's sources."""
    url: str
    """Absolute local path or fsspec URL of the file."""
    name: str
    """SOURCE/PATH, with the path relative to the source's folder; the prefix of the shard's samples' names."""


Shards = Mapping[int, ShardInfo] | Sequence[ShardInfo]
"""Shards of a manifest by number: all of them as a sequence, or some as a mapping."""


class ShardTable(Sequence[ShardInfo]):
    """The shards of a manifest by number, stored in columns: 100,000 take a third of the memory that objects would."""

    def __init__(self, sources: Sequence[int] = (), urls: Sequence[str] = (), names: Sequence[str] = ()) -> None:
        """Each argument is a column of length n: the ShardInfo field of the same name, shard by shard."""
        self.sources: NDArray[np.int32] = np.array(sources, np.int32)
        self._urls, self._names = pa.array(urls, pa.large_string()), pa.array(names, pa.large_string())

    @classmethod
    def of(cls, shards: Iterable[ShardInfo]) -> ShardTable:
        """Return the table of the given shards, in their order."""
        columns = zip(*((shard.source, shard.url, shard.name) for shard in shards), strict=True)
        return cls(*columns)

    def columns(self, start: int, stop: int) -> tuple[list[int], list[str], list[str]]:
        """Return the sources, URLs and names of the shards from number `start` up to, not including, `stop`."""
        length = stop - start
        urls, names = self._urls.slice(start, length), self._names.slice(start, length)
        return self.sources[start:stop].tolist(), urls.to_pylist(), names.to_pylist()

    def numbers_of(self, names: Iterable[str]) -> dict[str, int]:
        """Return the numbers of the shards that have any of these names, by name. It takes some ms with 100,000 shards."""
        from pyarrow.compute import index_in  # a tenth of a second, for those who come to it

        asked = list(names)
        found = index_in(pa.array(asked, pa.large_string()), value_set=self._names).to_pylist()
        return {name: number for name, number in zip(asked, found, strict=True) if number is not None}

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, number: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, number: slice) -> list[ShardInfo]: ...
    def __getitem__(self, number: int | slice) -> ShardInfo | list[ShardInfo]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        source = int(self.sources[number])  # IndexError ends an iteration
        return ShardInfo(source=source, url=self._urls[number].as_py(), name=self._names[number].as_py())


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokenizer's size, and the ids of the tokens in `input_ids` that projected image and audio tokens replace."""

    size: int
    image_token: int
    audio_token: int
    """Id of the audio token; -1 if the prompt template has no place for recordings."""


def split_name(name: str, shards: Mapping[str, int]) -> tuple[int, str] | None:
    """Split a sample's name SOURCE/SHARD/KEY into (shard number, key); None if no shard's name is its prefix.

    The key of a shard's own name is "". `shards`: shard numbers by shard name. Keys may hold slashes; no shard's name begins with
    another's and a slash.
    """
    end = name.find("/")
    while end >= 0:
        end = name.find("/", end + 1)
        prefix = name if end < 0 else name[:end]
        if prefix in shards:
            return shards[prefix], name[len(prefix) + 1 :]
    return None
