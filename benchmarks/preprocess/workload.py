"""What all contenders of the preprocessing benchmark do: the same samples, the same decoding, the same batches.

The function that decodes is Headrace's own, so that what differs is how samples get to it and batches to the trainer.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.preprocess.inputs import EXAMPLE, large_photos, photos
from headrace.preprocessor.decoding import Row, SampleProcessor
from headrace.preprocessor.records.record import Record
from headrace.spec import JobSpec, parse_spec

BATCH_SAMPLES = 16
GLOBAL_BATCH = 64
PAGE_BYTES = 4096
Batch = dict[str, Tensor]


class SampleDecoder:
    """What every peer calls in its workers: an image and its caption become patches and tokens."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # as every loader does in its workers
        spec = job_spec(Path("of-a-peer"))
        self._processor, self._source = SampleProcessor(spec), spec.sources[0]

    def __call__(self, jpeg: bytes, caption: str) -> Row:
        media = {"jpg": jpeg}
        record = Record(key="sample", fields={"txt": caption}, load=media.__getitem__, members=("jpg",))
        return self._processor.decode(record, self._source)


def collate(rows: Sequence[Row]) -> Batch:
    """Samples packed one behind the other; T: tokens, P: patches, n: samples and images.

    input_ids, labels (T,) int32; lengths (n,) int32; patches (P, 588) uint8; grids (n, 3) int32.
    """
    return {
        "input_ids": torch.from_numpy(np.concatenate([row.input_ids for row in rows])),
        "labels": torch.from_numpy(np.concatenate([row.labels for row in rows])),
        "lengths": torch.tensor([len(row.input_ids) for row in rows], dtype=torch.int32),
        "patches": torch.from_numpy(np.concatenate([row.patches for row in rows])),
        "grids": torch.from_numpy(np.concatenate([row.image_grids for row in rows])),
    }


def touch(patches: Tensor) -> int:
    """The trainer's use of a batch: the sum of one byte of every page, so that all of it has come."""
    return int(patches.view(-1)[::PAGE_BYTES].sum(dtype=torch.int64))


def job_spec(folder: Path, **fields: object) -> JobSpec:
    """The job on a folder of shards: microbatches of BATCH_SAMPLES samples each, epochs without end.

    Nothing is balanced, as no other loader does that: `make bench-planning` has what planning costs and gains.
    """
    document = {
        "name": "bench",
        "sources": [{"path": str(folder), "name": "photos"}],
        "global_batch": GLOBAL_BATCH,
        "epochs": 1_000_000,
        "strategy": "random",
        "topology": {"replicas": 1, "microbatches": GLOBAL_BATCH // BATCH_SAMPLES},
        "part_samples": BATCH_SAMPLES,
    }
    return parse_spec(document | fields)


def write_photos(folder: Path, num_samples: int, num_shards: int) -> list[Path]:
    """WebDataset shards of 0.6-megapixel photographs and captions of about 280 characters."""
    pictures, texts = large_photos(), captions()
    samples = ({"jpg": pictures[k % len(pictures)], "txt": texts[k % len(texts)]} for k in range(num_samples))
    return write_shards(folder, samples, num_samples, num_shards)


def write_spread(folder: Path, num_samples: int, num_shards: int, *, smallest: int, spread: int) -> list[Path]:
    """Shards of photographs of `smallest` to `spread` times as many pixels, in a geometric series of 24 sizes, shuffled."""
    sizes = np.geomspace(smallest, smallest * spread, 24).astype(int)
    pictures = [_scaled(data, int(pixels)) for data, pixels in zip(photos()[: len(sizes)], sizes, strict=True)]
    texts, order = captions(), np.random.default_rng(0).integers(len(sizes), size=num_samples)
    samples = ({"jpg": pictures[place], "txt": texts[k % len(texts)]} for k, place in enumerate(order))
    return write_shards(folder, samples, num_samples, num_shards)


def captions() -> list[bytes]:
    """The example's documents, one paragraph each."""
    with tarfile.open(EXAMPLE / "text-00000.tar") as archive:
        members = [archive.extractfile(member).read() for member in archive if member.name.endswith(".json")]  # type: ignore[union-attr]
    return [" ".join(json.loads(data)["texts"]).encode() for data in members]


def _scaled(jpeg: bytes, pixels: int) -> bytes:
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(jpeg)) as photo:
        factor = (pixels / (photo.width * photo.height)) ** 0.5
        size = max(28, round(photo.width * factor)), max(28, round(photo.height * factor))
        photo.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_shards(folder: Path, samples: Iterator[Mapping[str, bytes]], num_samples: int, num_shards: int) -> list[Path]:
    """WebDataset shards in a new folder, of samples as members by extension."""
    folder.mkdir(parents=True)
    paths = [folder / f"photos-{number:05d}.tar" for number in range(num_shards)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            for index in range(number * num_samples // num_shards, (number + 1) * num_samples // num_shards):
                for extension, data in next(samples).items():
                    member = tarfile.TarInfo(f"{index:06d}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return paths
