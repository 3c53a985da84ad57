"""A sample as the services exchange it: its location, its probed size, and its Arrow schema (design section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from headrace.source_spec import SourceSpec
from headrace.spec import ImageSpec

LABEL_IGNORED = -100  # label of a token that carries no loss; torch's cross_entropy ignores it by default

# One row is one sample of a payload batch. P: patches of all its images; F: mel frames of all its recordings.
SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),  # placeholders expanded to their true count
        pa.field("labels", pa.list_(pa.int32()), nullable=False),  # LABEL_IGNORED where there is no loss
        # (P, 3 * patch * patch) uint8, channel-first inside a patch, merge groups contiguous. A model with a temporal
        # patch of 2 repeats the frame on its own device: half the bytes on the wire.
        pa.field("patches", pa.large_list(pa.uint8()), nullable=False),
        pa.field("image_grids", pa.list_(pa.list_(pa.int32(), 3)), nullable=False),  # (t, h, w) in patches, per image or tile
        pa.field("mel", pa.large_list(pa.float16()), nullable=False),  # (F, mel_bins)
        pa.field("mel_frames", pa.list_(pa.int32()), nullable=False),  # per recording, sums to F
        pa.field("flags", pa.int32(), nullable=False),
        # (height, width) in pixels of the image that begins with an entry of image_grids, (0, 0) for its other tiles; with
        # `image.fit: anyres` only, see `payload_schema`
        pa.field("image_sizes", pa.list_(pa.list_(pa.int32(), 2)), nullable=False),
        # by how much the loss of each token counts, 0 where there is none; empty where every one counts 1. With `weights` in the
        # mapping of a source only, see `payload_schema`
        pa.field("target_weights", pa.list_(pa.float32()), nullable=False),
    ]
)

UNIT_COLUMNS = {
    "encoder": ("sample_id", "patches", "image_grids", "mel", "mel_frames", "flags", "image_sizes"),
    "vision": ("sample_id", "patches", "image_grids", "flags", "image_sizes"),
    "audio": ("sample_id", "mel", "mel_frames", "flags"),
    # sizes of media locate their tokens
    "llm": ("sample_id", "input_ids", "labels", "image_grids", "mel_frames", "flags", "target_weights"),
    "generator": ("sample_id", "patches", "image_grids", "flags"),
}
"""Columns of SCHEMA, in its order, that a rank of each parallelism unit receives: an LLM rank gets no pixels, an encoder or
generator rank no labels."""


def payload_schema(image: ImageSpec, sources: Sequence[SourceSpec] = ()) -> pa.Schema:
    """Return the columns of SCHEMA that the payload of a job with these images and sources has.

    Where its tokens do not depend on the sizes of images, there is no `image_sizes`, and where each target weighs 1, there are no
    `target_weights`: trainers of releases that do not know these columns go on with such jobs.
    """
    has = {"image_sizes": image.fit == "anyres", "target_weights": any(source.mapping.weights for source in sources)}
    return pa.schema([field for field in SCHEMA if has.get(field.name, True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRef:
    """The location of a sample (`row` of shard number `shard` in the job's manifest) and its position in the global order."""

    sample_id: int
    shard: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Name and sizes of a sample, as read from its record without decoding its media."""

    name: str
    """The sample's name, SOURCE/SHARD/KEY, unique in the data set."""
    num_tokens: int
    """Length of the LLM sequence in tokens, with image and audio placeholders expanded."""
    num_targets: int
    """Number of tokens that carry loss."""
    image_patches: tuple[int, ...] = ()
    """Number of patches before merging, one entry per image."""
    mel_frames: tuple[int, ...] = ()
    """Number of mel frames (10 ms each by default), one entry per recording, or per piece of one that is split."""
    is_truncated: bool = False
    """Whether the sample was too long and has been cut."""
    target_weight: float | None = None
    """Sum of the weights of the tokens that carry loss; None: each weighs 1, so that it is their number."""


def decoded_bytes(probe: Probe, *, patch: int, mel_bins: int) -> int:
    """Return the bytes that a decoded sample takes in a payload store, without Arrow's overhead. `patch`: its side in pixels.

    A token takes 4 bytes for its id, 4 for its label and, in samples with weights, 4 for its weight, a patch 3 bytes a pixel, a
    mel frame 2 bytes a bin.
    """
    of_token = 8 if probe.target_weight is None else 12
    return of_token * probe.num_tokens + 3 * patch**2 * sum(probe.image_patches) + 2 * mel_bins * sum(probe.mel_frames)
