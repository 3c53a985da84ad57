"""Ray Data: two actors decode, batches come through its object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.preprocess.workload import BATCH_SAMPLES, Batch, SampleDecoder, collate

_STORE_BYTES = 2 << 30
_PASSES = 20  # over the shards: more than any measurement takes


class _Decode:
    def __init__(self) -> None:
        self._decode = SampleDecoder()

    def __call__(self, samples: dict[str, Any]) -> dict[str, Any]:
        """One row that holds the whole batch, so that its arrays are not taken apart again."""
        rows = [self._decode(jpeg, text.decode()) for jpeg, text in zip(samples["jpg"], samples["txt"], strict=True)]
        return {name: np.expand_dims(tensor.numpy(), 0) for name, tensor in collate(rows).items()}


def batches(folder: Path) -> Iterator[Batch]:
    """A third slot is for reading, which takes little."""
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=_STORE_BYTES)
    ray.data.DataContext.get_current().enable_progress_bars = False
    shards = _PASSES * sorted(map(str, folder.glob("*.tar")))
    decoded = ray.data.read_webdataset(shards, decoder=None).map_batches(_Decode, batch_size=BATCH_SAMPLES, concurrency=2)
    for batch in decoded.iter_batches(batch_size=1, prefetch_batches=4, batch_format="numpy"):
        yield {name: torch.from_numpy(values[0]) for name, values in batch.items()}
