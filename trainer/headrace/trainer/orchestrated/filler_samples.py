"""The sample of a rank that has none: it makes the rank's modules run, and with them their collectives, and changes nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.manifest import Vocabulary
from headrace.sample import LABEL_IGNORED, SCHEMA, UNIT_COLUMNS
from headrace.spec import ImageSpec, JobSpec
from headrace.trainer.loading.buffers import BufferPool
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.packs import collate_packs, padding_token

FILLER_ID = -1
"""The sample id of a filler; no sample of a job has it."""


def filler(unit: str, spec: JobSpec, vocabulary: Vocabulary) -> PackedMicrobatch:
    """Return a microbatch of one sample as a rank of the unit gets it, on the host.

    An encoder's has one black image, or one silent recording, as small as the job has them. The LLM's has one token, and no
    target.
    """
    columns = list(UNIT_COLUMNS[unit])
    row = {"sample_id": FILLER_ID, "flags": 0, **_NOTHING, **_MAKE[unit](spec, vocabulary)}
    batch = pa.RecordBatch.from_pylist([row], schema=SCHEMA).select(columns)
    return collate_packs([batch], [], spec, vocabulary, BufferPool(max_idle_bytes=0))


_NOTHING: dict[str, list[Any]] = {
    name: [] for name in ("input_ids", "labels", "patches", "image_grids", "mel", "mel_frames", "image_sizes", "target_weights")
}


def _image(spec: JobSpec, _: Vocabulary) -> dict[str, Any]:
    image = spec.image
    side = _patches_of_side(image)
    sizes = [[image.side, image.side]] if image.fit == "anyres" else []
    patches = np.zeros(side * side * 3 * image.patch**2, np.uint8)
    return {"patches": patches, "image_grids": [[1, side, side]], "image_sizes": sizes}


def _patches_of_side(image: ImageSpec) -> int:
    if image.fit not in ("area", "longest_side"):
        return image.side // image.patch
    if image.fit == "longest_side":
        return image.merge
    cells = math.ceil(math.sqrt(image.min_pixels) / (image.patch * image.merge))
    while cells > 1 and (cells * image.patch * image.merge) ** 2 > image.max_pixels:
        cells -= 1
    return cells * image.merge


def _recording(spec: JobSpec, _: Vocabulary) -> dict[str, Any]:
    frames = spec.audio.frames_per_token
    return {"mel": np.zeros(frames * spec.audio.mel_bins, np.float16), "mel_frames": [frames]}


def _token(_: JobSpec, vocabulary: Vocabulary) -> dict[str, Any]:
    return {"input_ids": [padding_token(vocabulary)], "labels": [LABEL_IGNORED]}


_MAKE = {"vision": _image, "audio": _recording, "llm": _token}
