"""MosaicML Streaming on MDS shards that hold the same JPEG bytes and captions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from streaming import MDSWriter, StreamingDataset  # type: ignore[import-not-found]
from torch.utils.data import DataLoader

from benchmarks.peers.members import read_samples
from benchmarks.preprocess.workload import BATCH_SAMPLES, Batch, SampleDecoder, collate
from headrace.preprocessor.decoding import Row

_SHARD_BYTES = 1 << 24


def convert(photos: Path, folder: Path) -> None:
    """Write the shards."""
    with MDSWriter(out=str(folder), columns={"jpg": "bytes", "txt": "str"}, size_limit=_SHARD_BYTES) as writer:
        for shard in sorted(photos.glob("*.tar")):
            for sample in read_samples(shard):
                writer.write(sample)


class _Photos(StreamingDataset):  # type: ignore[misc]
    def __init__(self, folder: Path) -> None:
        super().__init__(local=str(folder), batch_size=BATCH_SAMPLES, shuffle=False)
        self._decode = SampleDecoder()

    def __getitem__(self, at: int) -> Row:
        sample = super().__getitem__(at)
        return self._decode(sample["jpg"], sample["txt"])


def batches(folder: Path) -> Iterable[Batch]:
    """Decoded and collated in the workers."""
    return DataLoader(_Photos(folder), batch_size=BATCH_SAMPLES, num_workers=2, collate_fn=collate, persistent_workers=True)
