"""Megatron-Energon on the WebDataset shards, with the index that its own command makes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from megatron.energon import (
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    WorkerConfig,
    get_loader,
    get_train_dataset,
    stateless,
)

from benchmarks.preprocess.workload import BATCH_SAMPLES, Batch, SampleDecoder, collate
from headrace.preprocessor.decoding import Row


def convert(photos: Path, folder: Path) -> None:
    """A copy of the shards, indexed."""
    shutil.copytree(photos, folder)
    command = [str(Path(sys.executable).with_name("energon")), "prepare", str(folder), "--non-interactive"]
    options = ["--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "2"]
    subprocess.run([*command, *options], check=True)


class _Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    decoder = None  # members stay bytes

    def __init__(self) -> None:
        super().__init__()
        self._decode = SampleDecoder()
        self.cookers = [Cooker(self._cook)]

    @stateless  # type: ignore[untyped-decorator]
    def _cook(self, sample: CrudeSample) -> Row:
        return self._decode(sample["jpg"], sample["txt"].decode())

    def encode_sample(self, sample: Row) -> Row:
        return sample

    def batch(self, samples: list[Row]) -> Batch:
        return collate(samples)

    def encode_batch(self, batch: Batch) -> Batch:
        return batch


def batches(folder: Path) -> Iterable[Batch]:
    """Cooked and collated in the workers."""
    dataset = get_train_dataset(
        folder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=2),
        batch_size=BATCH_SAMPLES,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=_Encoder(),
    )
    loader: Iterable[Batch] = get_loader(dataset)
    return loader
