"""`python -m benchmarks.peers.rank_tokens`: the tokens that other libraries give to each rank in a step, by their own code.

Reads a JSON object from standard input: `lengths`, the tokens of every sample; `ranks`; `samples` of a rank and step; `pack`, the
tokens of a packed row, of which a rank has `rows` in a step. Prints a JSON object: for each way a list of steps, each a list of
[tokens of samples, tokens computed] of every rank.

grouped     transformers' `LengthGroupedSampler` (`train_sampling_strategy="group_by_length"`), its batches dealt to the ranks by
            Accelerate's `BatchSamplerShard`, each padded to its longest sample, as its Trainer does
shuffled    the same with torch's `RandomSampler`, its default
packed      grain's `FirstFitPackIterDataset` with eight open rows, which torchtitan calls on the samples of each rank: every row
            is padded to its full length
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice

import grain.python as grain  # type: ignore[import-not-found]
import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler

Tokens = tuple[int, int]
OPEN_ROWS = 8


def main() -> None:
    """Deal the samples, and print what each rank gets."""
    given = json.load(sys.stdin)
    lengths, ranks, samples, pack = given["lengths"], given["ranks"], given["samples"], given["pack"]
    generator = torch.Generator().manual_seed(0)
    grouped = LengthGroupedSampler(samples * ranks, lengths=lengths, generator=generator)
    shuffled = RandomSampler(lengths, generator=generator)
    found = {
        "grouped": list(_padded(grouped, lengths, ranks, samples)),
        "shuffled": list(_padded(shuffled, lengths, ranks, samples)),
        "packed": list(_packed(lengths, ranks, pack, given["rows"])),
    }
    print(json.dumps(found))


def _padded(sampler: Sampler[int], lengths: Sequence[int], ranks: int, samples: int) -> Iterator[list[Tokens]]:
    order = list(sampler)
    batches = [list(BatchSamplerShard(BatchSampler(order, samples, drop_last=True), ranks, rank)) for rank in range(ranks)]
    for of_ranks in zip(*batches, strict=True):
        sizes = [[lengths[index] for index in batch] for batch in of_ranks]
        yield [(sum(batch), len(batch) * max(batch)) for batch in sizes]


def _packed(lengths: Sequence[int], ranks: int, pack: int, rows_a_step: int) -> Iterator[list[Tokens]]:
    order = np.random.default_rng(0).permutation(len(lengths))
    rows = [list(_rows([lengths[index] for index in order[rank::ranks]], pack)) for rank in range(ranks)]
    for first in range(0, min(map(len, rows)) - rows_a_step + 1, rows_a_step):
        yield [(sum(of_rank[first : first + rows_a_step]), rows_a_step * pack) for of_rank in rows]


def _rows(lengths: Sequence[int], pack: int) -> Iterator[int]:
    """Yield the tokens of samples in one packed row after the other, without the last ones, which nothing fills."""
    documents = grain.MapDataset.source(lengths).map(lambda length: {"tokens": np.ones(length, np.int32)}).to_iter_dataset()
    packed = grain.experimental.FirstFitPackIterDataset(
        documents, length_struct={"tokens": pack}, num_packing_bins=OPEN_ROWS, seed=0, shuffle_bins=True
    )
    full = [int((row["tokens_segment_ids"] > 0).sum()) for row in packed]
    yield from islice(full, max(0, len(full) - OPEN_ROWS))


if __name__ == "__main__":
    main()
