"""`python -m benchmarks.peers.first_batch URLS`: how long webdataset takes for its first batch of remote tars.

It reads as its documentation recommends for remote shards: the order of shards is shuffled, and samples in a buffer; two workers.
"""

from __future__ import annotations

import sys
import time

import webdataset  # type: ignore[import-not-found]
from torch.utils.data import DataLoader

from benchmarks.preprocess.workload import GLOBAL_BATCH, SampleDecoder, collate, touch
from headrace.preprocessor.decoding import Row

SHUFFLED_SHARDS, SHUFFLED_SAMPLES = 100, 1000


def main() -> None:
    """Say that it is ready, wait for a line, and print the seconds that the first batch takes."""
    decode = SampleDecoder()

    def to_row(sample: dict[str, bytes]) -> Row:
        return decode(sample["jpg"], sample["txt"].decode())

    samples = webdataset.WebDataset(sys.argv[1], shardshuffle=SHUFFLED_SHARDS).shuffle(SHUFFLED_SAMPLES).map(to_row)
    loader = DataLoader(samples.batched(GLOBAL_BATCH, collation_fn=collate), batch_size=None, num_workers=2)
    print("ready", flush=True)
    sys.stdin.readline()
    begun_s = time.perf_counter()
    touch(next(iter(loader))["patches"])
    print(time.perf_counter() - begun_s, flush=True)


if __name__ == "__main__":
    main()
