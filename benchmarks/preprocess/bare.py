"""`python -m benchmarks.preprocess.bare FOLDER NUMBER COUNT`: one process of the bare loop, the most that decoding can give.

It reads, decodes, resizes, patchifies and tokenises its share of the shards, one sample after the other into the same array,
and does nothing with the result. It says when it is ready, and begins when it is told to.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from benchmarks.preprocess.meter import Meter
from benchmarks.preprocess.workload import job_spec
from headrace.preprocessor.decoding import SampleProcessor, SizedSample
from headrace.preprocessor.sources import list_shards, open_shard


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--skip", type=int, required=True, help="samples before the measurement")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    meter = Meter(skip_samples=options.skip, seconds=options.seconds)
    samples = _decoded(options.folder, options.number, options.count)
    next(samples)
    print("ready", flush=True)
    sys.stdin.readline()
    while meter.add(1):
        next(samples)
    meter.reading().print()


def _decoded(folder: Path, number: int, count: int) -> Iterator[int]:
    """The number of patches of each sample, for ever."""
    spec = job_spec(folder)
    processor, source = SampleProcessor(spec), spec.sources[0]
    patches = np.empty((0, 3 * spec.image.patch**2), np.uint8)
    mel = np.empty((0, spec.audio.mel_bins), np.float16)
    shards = [open_shard(info.url, source) for info in list_shards(spec)[number::count]]
    for shard in cycle(shards):
        for row in range(shard.num_rows):
            loaded = processor.load(shard.read(row), source)
            sizes = processor.size(loaded)
            if sizes.num_patches > len(patches):
                patches = np.empty((sizes.num_patches, patches.shape[1]), np.uint8)
            yield len(processor.decode_into(SizedSample(loaded=loaded, sizes=sizes), patches[: sizes.num_patches], mel).patches)


if __name__ == "__main__":
    main()
