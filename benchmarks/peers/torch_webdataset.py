"""torch.utils.data.DataLoader with a webdataset pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import webdataset  # type: ignore[import-not-found]
from torch.utils.data import DataLoader

from benchmarks.preprocess.workload import BATCH_SAMPLES, Batch, SampleDecoder, collate
from headrace.preprocessor.decoding import Row


def batches(folder: Path) -> Iterable[Batch]:
    """Shards are divided among the workers, which decode and collate; batches come through shared memory."""
    decode = SampleDecoder()

    def to_row(sample: dict[str, bytes]) -> Row:
        return decode(sample["jpg"], sample["txt"].decode())

    shards = sorted(map(str, folder.glob("*.tar")))
    samples = webdataset.WebDataset(shards, shardshuffle=False).repeat().map(to_row)
    return DataLoader(samples.batched(BATCH_SAMPLES, collation_fn=collate), batch_size=None, num_workers=2)
