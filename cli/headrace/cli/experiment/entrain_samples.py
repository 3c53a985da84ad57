"""Samples in the manner of Entrain's data sets (dissertation, chapter 4), which are not published as times.

What a sample takes in the vision encoder and in the LLM is drawn from two independent log-normal distributions with one spread. A
data set with a model has two numbers, both fitted to its table of Bernoulli trials (4.2, C.2 to C.8): the encoder's part of 16
GPUs, and the spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.reorder_service.planning.batch import Floats

GPUS = 16
SIZES = (1, 4, 16, 64, 256)
"""Sizes of profiling batches in the tables."""
_SAMPLES, _SEED = 8192, 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """A table of Bernoulli trials, what is fitted to it, and the stages that the paper chose from it."""

    encoder_gpus: float
    """Fitted: the encoder's part of 16 GPUs in the mean."""
    spread: float
    """Fitted: standard deviation of the logarithm of a sample's seconds in a unit."""
    seen: tuple[str, ...]
    """Divisions of 16 GPUs, encoder to LLM, that the trials of each size showed, those with most for the encoder first."""
    passes: int
    """The first size at which all trials agreed."""
    entrain: tuple[int, int]
    """Stages of two slices, of 8: encoder's and LLM's, that Entrain chose (tables 4.1 and C.1)."""
    disttrain: tuple[int, int]
    """Those of DistTrain."""

    def seconds(self, count: int = _SAMPLES, seed: int = _SEED) -> Floats:
        """Return (2, count) forward and backward seconds of samples in the encoder and in the LLM, together 1 in the mean."""
        drawn = np.random.default_rng(seed).lognormal(-(self.spread**2) / 2, self.spread, (2, count))
        share = self.encoder_gpus / GPUS
        seconds: Floats = drawn * np.array([[share], [1.0 - share]])
        return seconds


TABLES: Mapping[str, Trials] = {
    "SynthChartNet, 1b": Trials(
        encoder_gpus=10.2,
        spread=0.13,
        seen=("11:5, 10:6, 9:7", "11:5, 10:6, 9:7", "11:5, 10:6", "10:6", "10:6"),
        passes=64,
        entrain=(5, 3),
        disttrain=(4, 4),
    ),
    "LLaVA-150k, 1b": Trials(
        encoder_gpus=8.8,
        spread=0.15,
        seen=("10:6, 9:7, 8:8", "10:6, 9:7, 8:8", "9:7, 8:8", "9:7", "9:7"),
        passes=64,
        entrain=(4, 4),
        disttrain=(5, 3),
    ),
    "ChartQA, 1b": Trials(
        encoder_gpus=9.6,
        spread=0.03,
        seen=("10:6, 9:7", "10:6, 9:7", "10:6", "10:6", "10:6"),
        passes=16,
        entrain=(5, 3),
        disttrain=(5, 3),
    ),
    "CocoQA, 1b": Trials(
        encoder_gpus=9.6,
        spread=0.03,
        seen=("10:6, 9:7", "10:6, 9:7", "10:6", "10:6", "10:6"),
        passes=16,
        entrain=(5, 3),
        disttrain=(4, 4),
    ),
    "SynthChartNet, 3b": Trials(
        encoder_gpus=8.0,
        spread=0.19,
        seen=("10:6, 9:7, 8:8, 7:9, 6:10", "9:7, 8:8, 7:9", "9:7, 8:8, 7:9", "8:8", "8:8"),
        passes=64,
        entrain=(4, 4),
        disttrain=(5, 3),
    ),
    "LLaVA-150k, 3b": Trials(
        encoder_gpus=6.6,
        spread=0.07,
        seen=("7:9, 6:10, 5:11", "7:9, 6:10", "7:9, 6:10", "7:9, 6:10", "7:9"),
        passes=256,
        entrain=(3, 5),
        disttrain=(4, 4),
    ),
    "ChartQA, 3b": Trials(
        encoder_gpus=7.8,
        spread=0.03,
        seen=("8:8, 7:9", "8:8", "8:8", "8:8", "8:8"),
        passes=4,
        entrain=(4, 4),
        disttrain=(4, 4),
    ),
    "CocoQA, 3b": Trials(
        encoder_gpus=7.8,
        spread=0.03,
        seen=("8:8, 7:9", "8:8", "8:8", "8:8", "8:8"),
        passes=4,
        entrain=(3, 5),
        disttrain=(4, 4),
    ),
}
"""By data set and size of Llama 3."""
