"""`python -m benchmarks.peers.run NAME FOLDER`: one peer in its own environment, measured, or converting to its own format."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.preprocess.meter import Meter
from benchmarks.preprocess.workload import Batch, touch


def main() -> None:
    """Convert, or consume until the time is over and print the reading."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("folder", type=Path, help="of the shards in the format that it reads; of WebDataset with --convert")
    parser.add_argument("--convert", type=Path, metavar="TO", help="write the samples into this folder, and measure nothing")
    parser.add_argument("--skip", type=int, default=0, help="samples before the measurement")
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    peer = importlib.import_module(f"benchmarks.peers.{options.name}")
    if options.convert:
        peer.convert(options.folder, options.convert)
        return
    meter = Meter(skip_samples=options.skip, seconds=options.seconds)
    for batch in _epochs(peer.batches(options.folder)):
        touch(batch["patches"])
        if not meter.add(len(batch["lengths"])):
            break
    meter.reading().print()


def _epochs(batches: Iterable[Batch]) -> Iterator[Batch]:
    """One after the other, until one is empty."""
    ended = False
    while not ended:
        ended = True
        for batch in batches:
            ended = False
            yield batch


if __name__ == "__main__":
    main()
