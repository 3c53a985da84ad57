"""SPDL: a pipeline of stages in threads of the trainer's own process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import spdl.io  # type: ignore[import-not-found]
from spdl.pipeline import PipelineBuilder  # type: ignore[import-not-found]

from benchmarks.preprocess.workload import BATCH_SAMPLES, Batch, SampleDecoder, collate
from headrace.preprocessor.decoding import Row


def batches(folder: Path) -> Iterable[Batch]:
    """Two threads decode and collate; a third one reads."""
    decode = SampleDecoder()

    def to_row(sample: dict[str, bytes]) -> Row:
        return decode(sample["jpg"], sample["txt"].decode())

    pipeline = (
        PipelineBuilder()
        .add_source(_samples(folder))
        .pipe(to_row, concurrency=2)
        .aggregate(BATCH_SAMPLES)
        .pipe(collate)
        .add_sink(4)
        .build(num_threads=2)
    )
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def _samples(folder: Path) -> Iterator[dict[str, bytes]]:
    while True:
        for shard in sorted(folder.glob("*.tar")):
            with shard.open("rb") as file:
                members = iter(spdl.io.iter_tarfile(file))
                for (image, jpeg), (_, text) in zip(members, members, strict=True):
                    if not image.endswith(".jpg"):
                        raise ValueError(f"{shard} is not in the order of this benchmark: {image}")
                    yield {"jpg": jpeg, "txt": text}
