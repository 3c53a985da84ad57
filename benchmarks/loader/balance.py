"""How evenly the tokens of a step are spread over data-parallel ranks, beside other libraries' samplers and packers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import LOOPS
from benchmarks.peers.environment import NotInstalledError, python_of, variables
from benchmarks.planning.inputs import LLAVA, SEED, resampled
from benchmarks.preprocess.services import LONGEST_S
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import progress
from headrace.plan import LLM, Topology
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.packing import pack_batch, unpack
from headrace.reorder_service.planning.strategies import AUTO, run_strategy

RANKS, SAMPLES, STEPS, PACK_TOKENS = 8, 16, 100, 8_192
MEAN_TOKENS = 1_000
GOAL = 1.02
PADDED_SAMPLES = 15
"""The same as `SAMPLES` where rows are padded: so many fill two rows of a rank, and one more would often not fit."""
OURS = {"balanced": "Headrace, packed", "padded": "Headrace, packed in rows that are padded"}
OTHERS = {
    "shuffled": "transformers' Trainer, shuffled",
    "grouped": "transformers' Trainer, group_by_length",
    "packed": "torchtitan's packer, grain",
}
Steps = Sequence[Sequence[tuple[int, int]]]
"""[tokens of samples, tokens computed] of each rank in each step."""


def sections(*, quick: bool) -> Iterator[Section]:
    """The same samples, dealt by everybody. Nothing is trained: what is told are counts of tokens."""
    progress("balance: dealing samples to ranks")
    lengths = _lengths(RANKS * SAMPLES * (STEPS // 10 if quick else STEPS))
    dealt = {"balanced": list(_ours(lengths)), "padded": list(_ours_padded(lengths))}
    try:
        theirs = _theirs(lengths)
    except (NotInstalledError, subprocess.SubprocessError) as err:
        theirs = {}
        absent = [Row(name="other libraries: not measured", value=0, detail=str(err)[-300:])]
    else:
        absent = []
    title = (
        f"tokens of a step on {RANKS} data-parallel ranks, {RANKS * SAMPLES} samples of {MEAN_TOKENS:,} tokens on average "
        f"(LLaVA's spread, up to {max(lengths):,}), {RANKS * PADDED_SAMPLES} in rows of {PACK_TOKENS:,} where these are padded"
    )
    yield Section(title=title, rows=[*_rows(dealt, theirs), *absent])


def _rows(dealt: Mapping[str, Steps], theirs: Mapping[str, Steps]) -> Iterator[Row]:
    best = min(theirs, key=lambda way: _computed(theirs[way]), default=None)
    for way, name in OURS.items():
        yield Row(
            name=f"{name}: slowest rank over the mean, tokens computed",
            value=_slowest(dealt[way], computed=True),
            goal=at_most(GOAL) if way == "balanced" else None,
            detail=f"tokens of samples {_slowest(dealt[way], computed=False):.3f}",
        )
        yield Row(
            name=f"{name}: tokens computed by the slowest rank, over the mean of samples' tokens",
            value=_computed(dealt[way]),
            rival=Rival(value=_computed(theirs[best]), source=f"the best: {OTHERS[best]}") if best else None,
        )
    for way, steps in theirs.items():
        yield Row(
            name=f"{OTHERS[way]}: slowest rank over the mean, tokens computed",
            value=_slowest(steps, computed=True),
            detail=f"tokens of samples {_slowest(steps, computed=False):.3f}",
        )
        yield Row(
            name=f"{OTHERS[way]}: tokens computed by the slowest rank, over the mean of samples' tokens", value=_computed(steps)
        )


def _slowest(steps: Steps, *, computed: bool) -> float:
    """Return the mean over steps of the largest rank's tokens over the ranks' mean."""
    return mean(max(rank[computed] for rank in ranks) / mean(rank[computed] for rank in ranks) for ranks in steps)


def _computed(steps: Steps) -> float:
    """Return the most tokens that a rank computes in a step, which all wait for, over the mean of what samples have."""
    return mean(max(rank[1] for rank in ranks) / mean(rank[0] for rank in ranks) for ranks in steps)


def _lengths(count: int) -> list[int]:
    """Return tokens of samples that are spread as the LLM's time is over those of LLaVA's data."""
    seconds = resampled(LLAVA.table(), count, SEED).costs[LLM]
    return np.clip(np.ceil(MEAN_TOKENS * seconds / seconds.mean()), 1, PACK_TOKENS).astype(int).tolist()  # type: ignore[no-any-return]


def _ours(lengths: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield what the planner gives to ranks that meet once a step."""
    for tokens in _global_batches(lengths, SAMPLES):
        batch = _batch(tokens)
        slots = run_strategy(AUTO, batch)[1][0]
        of_ranks = np.bincount(slots, weights=tokens, minlength=RANKS).astype(int).tolist()
        yield [(count, count) for count in of_ranks]


def _ours_padded(lengths: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield the same where samples are packed first, and rows padded (`pack_tokens`, `pad_to_max_length`)."""
    for tokens in _global_batches(lengths, PADDED_SAMPLES):
        of_packs, packs = pack_batch(_batch(tokens), tokens, PACK_TOKENS, padded=True)
        slots = run_strategy(AUTO, of_packs)[1]
        of_samples = unpack(slots, packs)[0]
        real = np.bincount(of_samples, weights=tokens, minlength=RANKS).astype(int).tolist()
        rows = np.bincount(slots[0], minlength=RANKS).tolist()
        yield [(count, num * PACK_TOKENS) for count, num in zip(real, rows, strict=True)]


def _global_batches(lengths: Sequence[int], samples: int) -> Iterator[NDArray[np.int64]]:
    whole = len(lengths) // (RANKS * samples) * RANKS * samples
    yield from np.asarray(lengths[:whole], np.int64).reshape(-1, RANKS * samples)


def _batch(tokens: NDArray[np.int64]) -> Batch:
    topology = Topology(replicas=RANKS, microbatches=1, stages={LLM: 1})
    costs = {LLM: tokens.astype(np.float64)}
    return make_batch(np.arange(tokens.size), costs, topology, SEED, execution=Execution(colocated="step"), tokens=tokens)


def _theirs(lengths: Sequence[int]) -> dict[str, Steps]:
    """Raises NotInstalledError or SubprocessError."""
    rows = round(SAMPLES * MEAN_TOKENS / PACK_TOKENS)
    given = {"lengths": lengths, "ranks": RANKS, "samples": SAMPLES, "pack": PACK_TOKENS, "rows": rows}
    command = [str(python_of(LOOPS)), "-m", "benchmarks.peers.rank_tokens"]
    done = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, check=True, timeout=LONGEST_S, env=variables()
    )
    found: dict[str, Steps] = json.loads(done.stdout)
    return found
