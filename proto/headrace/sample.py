"""A sample as the services hand it to each other: where it lies, what it costs, and its Arrow form (design section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

LABEL_IGNORED = -100  # label of a token that carries no loss; torch's cross_entropy ignores it by default

# One row of a payload batch. P: patches of all images; F: mel frames of all recordings of the sample.
SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),  # placeholders expanded to their true count
        pa.field("labels", pa.list_(pa.int32()), nullable=False),  # LABEL_IGNORED where there is no loss
        # (P, 3 * patch * patch) uint8, channel-first inside a patch, merge groups contiguous. A model with a temporal
        # patch of 2 repeats the frame on its own device: half the bytes on the wire.
        pa.field("patches", pa.large_list(pa.uint8()), nullable=False),
        pa.field("image_grids", pa.list_(pa.list_(pa.int32(), 3)), nullable=False),  # (t, h, w) in patches, per image
        pa.field("mel", pa.large_list(pa.float16()), nullable=False),  # (F, mel_bins)
        pa.field("mel_frames", pa.list_(pa.int32()), nullable=False),  # per recording, sums to F
        pa.field("flags", pa.int32(), nullable=False),
    ]
)

UNIT_COLUMNS = {
    "encoder": ("sample_id", "patches", "image_grids", "mel", "mel_frames", "flags"),
    "vision": ("sample_id", "patches", "image_grids", "flags"),
    "audio": ("sample_id", "mel", "mel_frames", "flags"),
    "llm": ("sample_id", "input_ids", "labels", "image_grids", "mel_frames", "flags"),  # sizes of media, for their places
    "generator": ("sample_id", "patches", "image_grids", "flags"),
}
"""What a rank of each parallelism unit receives of SCHEMA, in its order: an LLM rank no pixels, an encoder or
generator rank no labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRef:
    """Where a sample lies: `row` of `shard` of the job's manifest. `sample_id` is its place in the global order."""

    sample_id: int
    shard: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What is known of a sample before it is decoded."""

    name: str
    """SOURCE/SHARD/KEY, unique in the data set."""
    num_tokens: int
    """Length of the LLM sequence, placeholders expanded."""
    num_targets: int
    """Tokens that carry loss."""
    image_patches: tuple[int, ...] = ()
    """Patches before merging, one entry per image."""
    mel_frames: tuple[int, ...] = ()
    """10 ms frames, one entry per recording."""


def decoded_bytes(probe: Probe, *, patch: int, mel_bins: int) -> int:
    """What a sample takes in a store, less what Arrow adds. `patch`: side of a patch in pixels.

    A token has an id and a label of 4 bytes each; a patch 3 bytes a pixel; a mel frame 2 bytes a bin.
    """
    return 8 * probe.num_tokens + 3 * patch**2 * sum(probe.image_patches) + 2 * mel_bins * sum(probe.mel_frames)
