"""What a job's preprocessors find out once: its shards, and what a trainer must know of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One file of a source. Its place in the manifest is its identity."""

    source: int
    """Index into the job's sources."""
    url: str
    """Absolute local path or fsspec URL."""
    name: str
    """SOURCE/PATH, the path being relative to the source's folder. Prefix of its samples' names."""


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
