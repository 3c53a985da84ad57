"""What a job's preprocessors find out once: its shards, and what a trainer must know of its tokenizer."""

from __future__ import annotations

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
