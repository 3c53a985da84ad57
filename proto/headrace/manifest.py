"""What a job's preprocessors find out once: its shards, and what a trainer must know of its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

PAGE_SHARDS = 250  # in one report, or one entry of the store: about 30 kB, so that a batch of them (headrace.outbox) is no feat
MOST_ROWS = (1 << 31) - 1  # of a shard: the store keeps 32 bits of each, with a sign
UNCOUNTED = -1  # rows of a shard that is not indexed


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class ShardInfo:
    """One file of a source. Its place in the manifest is its identity."""

    source: int
    """Index into the job's sources."""
    url: str
    """Absolute local path or fsspec URL."""
    name: str
    """SOURCE/PATH, the path being relative to the source's folder. Prefix of its samples' names."""


Shards = Mapping[int, ShardInfo] | Sequence[ShardInfo]
"""Some, or all, by number."""


class ShardTable(Sequence[ShardInfo]):
    """The shards of a manifest by number, in columns: 100,000 take a third of what they would as objects."""

    def __init__(self, sources: Sequence[int] = (), urls: Sequence[str] = (), names: Sequence[str] = ()) -> None:
        """(n,) each, as ShardInfo has them."""
        self.sources: NDArray[np.int32] = np.array(sources, np.int32)
        self._urls, self._names = pa.array(urls, pa.large_string()), pa.array(names, pa.large_string())

    @classmethod
    def of(cls, shards: Iterable[ShardInfo]) -> ShardTable:
        columns = zip(*((shard.source, shard.url, shard.name) for shard in shards), strict=True)
        return cls(*columns)

    def columns(self, start: int, stop: int) -> tuple[list[int], list[str], list[str]]:
        """Sources, URLs and names of some."""
        length = stop - start
        urls, names = self._urls.slice(start, length), self._names.slice(start, length)
        return self.sources[start:stop].tolist(), urls.to_pylist(), names.to_pylist()

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
    """Size of the tokenizer, and the tokens that stand in `input_ids` where projected image and audio tokens go."""

    size: int
    image_token: int
    audio_token: int
    """-1 where the prompt template has no place for recordings."""


def split_name(name: str, shards: Mapping[str, int]) -> tuple[int, str] | None:
    """(shard, key) of a sample's name SOURCE/SHARD/KEY; None where no shard has that name. The key of a shard's own name is "".

    `shards`: their numbers by name. A key may hold slashes as well; no shard's name begins with another's and a slash.
    """
    end = name.find("/")
    while end >= 0:
        end = name.find("/", end + 1)
        prefix = name if end < 0 else name[:end]
        if prefix in shards:
            return shards[prefix], name[len(prefix) + 1 :]
    return None
