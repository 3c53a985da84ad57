"""How level blocks of queries are distributed, and how long that takes: ours beside LPT, random, zigzag, ring and the optimum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from benchmarks.context.random_masks import MASKS, embedded
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import progress, time_calls
from headrace.block_distribution import BLOCK, distribute
from headrace.reorder_service.planning.batch import Ints
from headrace.reorder_service.planning.context.compute_units import kernel_time
from headrace.reorder_service.planning.context.exact_distribution import solve
from headrace.reorder_service.planning.context.published_distributions import longest_first, ring, shuffled, unevenness, zigzag

RANKS = 8
MILLION = 1 << 20
TIME_GOAL_MS, LEVEL_GOAL, GOLDEN_WORK = 1.0, 1.02, 13.0
FIGURE_3_3A = (1, 2, 2, 4, 5, 2, 2, 8)
# arXiv:2503.11367, table 4: ms of attention by LPT, ring and zigzag on 8 ranks, by tokens and kind of mask.
TABLE_4 = {
    (16_384, "EP"): (3.92, 4.24, 3.96),
    (16_384, "EE"): (4.31, 4.86, 4.37),
    (16_384, "MP"): (3.00, 3.12, 3.08),
    (32_768, "EP"): (10.01, 11.76, 10.21),
    (32_768, "EE"): (11.12, 13.43, 11.60),
    (32_768, "MP"): (6.09, 6.76, 6.57),
    (65_536, "EP"): (25.43, 32.24, 28.17),
    (65_536, "EE"): (36.99, 46.67, 37.36),
    (65_536, "MP"): (14.18, 16.56, 15.33),
}
# Dissertation, table 3.3, LLM-S: how much faster one layer's attention is than with zigzag and whole blocks.
TABLE_3_3 = {"inter": 0.95, "intra": 1.08, "both": 1.19}
UNITS, SUBBLOCKS, JOINING = 132, 24, 0.2  # units: of an H100; subblocks: of the longest block, published as 16 to 32
HEADS = 4  # of one kernel: those that share gathered keys, as in Llama 3's models of 1 and 8 billion weights


def sections(*, quick: bool) -> Iterator[Section]:
    """Time of planning, the published example, and the levels of all rules on random masks."""
    yield _time_section(quick=quick)
    works = {key: _works(*key, count=10 if quick else 50) for key in TABLE_4}
    yield _level_section(works)
    yield _gain_section(works)
    yield _optimum_section(quick=quick)
    yield _units_section(works[65_536, "EE"])


def _time_section(*, quick: bool) -> Section:
    mask = embedded(np.random.default_rng(1), MILLION)
    work, budget_s = mask.touched_blocks(BLOCK), 0.5 if quick else 2.0
    rows = []
    for ranks in (8, 16, 32, 64):
        progress(f"distributions: {ranks} ranks")
        timing = time_calls(functools.partial(distribute, work, ranks), budget_s=budget_s)
        found = distribute(work, ranks)
        rows.append(
            Row(
                name=f"distribute {work.size:,} blocks over {ranks} ranks",
                value=timing.best_s * 1e3,
                unit="ms",
                rival=Rival(value=1.0, source="Cornstarch, 4.3.2: within"),
                goal=at_most(TIME_GOAL_MS),
                detail=f"{timing.detail}; work {unevenness(work, found, ranks):.4f}",
            )
        )
    counts: dict[str, Callable[[], object]] = {
        "blocks that blocks see": functools.partial(mask.touched_blocks, BLOCK),
        "tokens that tokens see": mask.row_counts,
    }
    for name, call in counts.items():
        progress(f"distributions: {name}")
        timing = time_calls(call, budget_s=budget_s)
        rows.append(Row(name=f"count {name}, before", value=timing.best_s * 1e3, unit="ms", detail=timing.detail))
    rows.append(Row(name="the mask", value=mask.fields.nbytes / 2**20, unit="MiB", goal=at_most(8.0)))
    golden = np.bincount(distribute(np.array(FIGURE_3_3A), 2), weights=FIGURE_3_3A).max()
    rival = Rival(value=13.0, source="Cornstarch, figure 3.3a, by LPT")
    rows.append(Row(name="heavier of two ranks in the published example", value=golden, rival=rival, goal=at_most(GOLDEN_WORK)))
    return Section(title=f"plan 1 M tokens of a mask with media in text, blocks of {BLOCK}; warm, one core", rows=rows)


def _works(num_tokens: int, kind: str, *, count: int) -> list[Ints]:
    rng = np.random.default_rng(num_tokens)
    return [MASKS[kind](rng, num_tokens).touched_blocks(BLOCK) for _ in range(count)]


def _choices(work: Ints, seed: int) -> dict[str, Ints]:
    return {
        "ours": distribute(work, RANKS),
        "LPT": longest_first(work, RANKS),
        "random": shuffled(work.size, RANKS, seed),
        "zigzag": zigzag(work.size, RANKS),
        "ring": ring(work.size, RANKS),
    }


def _level_section(works: Mapping[tuple[int, str], list[Ints]]) -> Section:
    rows = []
    for (num_tokens, kind), several in works.items():
        levels: dict[str, list[float]] = {}
        tokens: dict[str, list[float]] = {}
        for seed, work in enumerate(several):
            for name, ranks in _choices(work, seed).items():
                levels.setdefault(name, []).append(unevenness(work, ranks, RANKS))
                tokens.setdefault(name, []).append(unevenness(np.ones(work.size), ranks, RANKS))
        others = ", ".join(f"{name} {np.mean(levels[name]):.3f}" for name in levels if name != "ours")
        name = f"{kind}, {num_tokens // 1024} k tokens"
        most = f"worst {max(levels['ours']):.4f} of {len(several)}; {others}"
        rows.append(Row(name=f"{name}: work", value=float(np.mean(levels["ours"])), goal=at_most(LEVEL_GOAL), detail=most))
        detail = f"LPT {np.mean(tokens['LPT']):.3f}"
        rows.append(Row(name=f"{name}: tokens", value=max(tokens["ours"]), goal=at_most(LEVEL_GOAL), detail=detail))
    return Section(title=f"most over mean of {RANKS} ranks, random masks; work in blocks of keys", rows=rows)


def _gain_section(works: Mapping[tuple[int, str], list[Ints]]) -> Section:
    """Work of the heaviest rank, by other rules over ours, beside times that the paper measured on GPUs."""
    rows = []
    for (num_tokens, kind), several in works.items():
        lpt_ms, *others_ms = TABLE_4[num_tokens, kind]
        for name, ms in zip(("ring", "zigzag"), others_ms, strict=True):
            heaviest = np.array([_heaviest(work, name) for work in several]).sum(axis=0)
            rows.append(
                Row(
                    name=f"SIMULATED {kind}, {num_tokens // 1024} k tokens: {name} over ours",
                    value=heaviest[1] / heaviest[0],
                    unit="x",
                    rival=Rival(value=ms / lpt_ms, source="arXiv:2503.11367, table 4: over LPT"),
                )
            )
    return Section(title="SIMULATED by counted blocks: attention of the slowest rank; theirs was measured on GPUs", rows=rows)


def _heaviest(work: Ints, name: str) -> tuple[float, float]:
    choices = _choices(work, 0)
    ours, theirs = (np.bincount(choices[rule], weights=work).max() for rule in ("ours", name))
    return float(ours), float(theirs)


def _optimum_section(*, quick: bool) -> Section:
    rng, rows = np.random.default_rng(9), []
    for num_blocks, ranks in ((24, 3), (32, 4), (40, 4)):
        progress(f"distributions: optimum of {num_blocks} blocks")
        work = embedded(rng, num_blocks * BLOCK).touched_blocks(BLOCK)
        best = solve(work, ranks, most_blocks=num_blocks // ranks, time_limit_s=2.0 if quick else 15.0)
        ours = np.bincount(distribute(work, ranks), weights=work).max()
        detail = f"{ours:.0f} blocks beside at least {best.bound:.2f}"
        name = f"{num_blocks} blocks on {ranks} ranks"
        rows.append(Row(name=name, value=ours / best.bound, goal=at_most(LEVEL_GOAL), detail=detail))
    return Section(title="heaviest rank over the proved bound of the integer program (HiGHS), equal tokens", rows=rows)


def _units_section(works: list[Ints]) -> Section:
    """Table 3.3 by the model of `compute_units`: kernels of few heads, one after the other."""
    times: dict[str, float] = dict.fromkeys(("causal", "inter", "intra", "both"), 0.0)
    for work in works:
        width = -(-int(work.max()) // SUBBLOCKS)
        for ranks, whole, cut in (
            (zigzag(work.size, RANKS), "causal", "intra"),
            (distribute(work, RANKS), "inter", "both"),
        ):
            shares = [np.tile(work[ranks == rank], HEADS) for rank in range(RANKS)]
            times[whole] += max(kernel_time(share, UNITS) for share in shares)
            times[cut] += max(kernel_time(share, UNITS, width=width, joining=JOINING) for share in shares)
    rows = [
        Row(
            name=f"SIMULATED {name} over zigzag with whole blocks",
            value=times["causal"] / times[name],
            unit="x",
            rival=Rival(value=published, source="Cornstarch, table 3.3, LLM-S"),
        )
        for name, published in TABLE_3_3.items()
    ]
    title = f"SIMULATED: {UNITS} compute units, {HEADS} heads a kernel, 64 k tokens; intra: {SUBBLOCKS} subblocks at most"
    return Section(title=title, rows=rows)
