"""LitData on chunks of its own that hold the same JPEG bytes and captions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import litdata  # type: ignore[import-not-found]

from benchmarks.peers.members import read_samples
from benchmarks.preprocess.workload import BATCH_SAMPLES, Batch, SampleDecoder, collate
from headrace.preprocessor.decoding import Row

_CHUNK_BYTES = "16MB"


def convert(photos: Path, folder: Path) -> None:
    """Write the chunks."""
    shards = sorted(map(str, photos.glob("*.tar")))
    litdata.optimize(read_samples, shards, str(folder), chunk_bytes=_CHUNK_BYTES, num_workers=1, verbose=False)


class _Photos(litdata.StreamingDataset):  # type: ignore[misc]
    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), shuffle=False)
        self._decode = SampleDecoder()

    def __getitem__(self, index: object) -> Row:
        sample = super().__getitem__(index)
        return self._decode(sample["jpg"], sample["txt"])


def batches(folder: Path) -> Iterable[Batch]:
    """Decoded and collated in the workers."""
    loader: Iterable[Batch] = litdata.StreamingDataLoader(
        _Photos(folder), batch_size=BATCH_SAMPLES, num_workers=2, collate_fn=collate, persistent_workers=True
    )
    return loader
