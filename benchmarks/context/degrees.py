"""SIMULATED steps with a degree of context parallelism for each sequence, beside the best degree for all sequences."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Goal, Row, Section, at_least
from benchmarks.timing import progress, time_calls
from headrace.model_shape import LLM_SHAPES
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.context.context_cost import ContextCost
from headrace.reorder_service.planning.context.degree_plan import fixed_degree, least_degrees, lower_bound, plan_degrees
from headrace.reorder_service.planning.orchestration.cluster import CLUSTERS
from headrace.reorder_service.planning.packing import pack

MODEL = "llama3-8b"
SHORT, LONG, LONG_SHARE = 2048, 65_536, 0.01
GAIN_GOAL = 1.3
STEP_OF_FORWARD, ATTENTION_OF_FORWARD, GATHERS = 3.0, 3.5, 3.0  # the step over its forward; gathers: again, and of gradients
BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Ranks and what they hold, and how many samples a global batch has."""

    preset: str
    ranks: int
    tokens_per_rank: int
    samples: int
    goal: Goal | None = None


# A rank without checkpointing keeps about 5 MB a token of this model, beside its share of weights and optimizer.
CASES = (
    Case(preset="a40", ranks=64, tokens_per_rank=4096, samples=512, goal=at_least(GAIN_GOAL)),
    Case(preset="h100", ranks=64, tokens_per_rank=4096, samples=512, goal=at_least(GAIN_GOAL)),
    Case(preset="h100", ranks=64, tokens_per_rank=8192, samples=512),
    Case(preset="h100", ranks=64, tokens_per_rank=8192, samples=128),
)


def section(*, quick: bool) -> Section:
    """Sums of the steps of the same batches, over the best of all degrees that hold the long sequences."""
    rows = []
    for case in CASES:
        progress(f"degrees: {case.preset}, {case.tokens_per_rank} tokens a rank, {case.samples} samples")
        cost = cost_of(case.preset)
        batches = [_batch(np.random.default_rng(seed), case.samples) for seed in range(4 if quick else 16)]
        ours = [_planned(cost, case, tokens) for tokens in batches]
        degrees = range(-(-LONG // case.tokens_per_rank), case.ranks + 1)
        fixed = {degree: sum(_fixed(cost, case, tokens, degree) for tokens in batches) for degree in degrees}
        best = min(fixed, key=lambda degree: fixed[degree])
        step_s, bound_s, most = (sum(values) for values in zip(*ours, strict=True))
        timing = time_calls(functools.partial(_planned, cost, case, batches[0]), budget_s=0.5)
        rows.append(
            Row(
                name=f"SIMULATED {case.ranks} {case.preset}, {case.tokens_per_rank:,} tokens a rank, {case.samples} samples",
                value=fixed[best] / step_s,
                unit="x",
                goal=case.goal,
                detail=f"best fixed degree {best}; {step_s / bound_s:.3f} of the lower bound; widest {most / len(batches):.1f} "
                f"on average; planned in {timing.best_s * 1e3:.0f} ms",
            )
        )
    mixture = f"{LONG_SHARE:.0%} of {LONG // 1024} k samples among {SHORT // 1024} k ones"
    title = f"SIMULATED {MODEL}, {mixture}: step of the best fixed degree over ours"
    return Section(title=title, rows=rows)


def cost_of(preset: str) -> ContextCost:
    """Return the counted cost of the model on nodes of a preset: two operations for a weight, four for a channel of a pair."""
    shape, cluster = LLM_SHAPES[MODEL], CLUSTERS[preset]
    rate = cluster.flops_per_s * cluster.efficiency
    gathered = shape.layers * GATHERS * 2 * shape.kv_width * BYTES
    return ContextCost(
        token_s=STEP_OF_FORWARD * (2 * shape.layers * shape.layer_weights + 2 * shape.width * shape.vocab) / rate,
        pair_s=ATTENTION_OF_FORWARD * 4 * shape.layers * shape.width / rate,
        gather_s=gathered / cluster.intra_node_bytes_per_s,
        far_gather_s=gathered / cluster.inter_node_bytes_per_s,
        start_s=GATHERS * shape.layers * cluster.latency_s,
        ranks_per_node=cluster.gpus_per_node,
    )


def _batch(rng: np.random.Generator, samples: int) -> Ints:
    return np.where(rng.random(samples) < LONG_SHARE, LONG, SHORT)


def _seconds(cost: ContextCost, case: Case, tokens: Ints, packs: Ints | None = None) -> tuple[Ints, Floats]:
    """Return tokens and seconds of sequences, each a sample, or the samples of a pack under causal masks of their own."""
    groups = np.arange(tokens.size) if packs is None else packs
    together = np.bincount(groups, weights=tokens).astype(np.int64)
    return together, cost.seconds(together, np.bincount(groups, weights=tokens * (tokens + 1) / 2), case.ranks)


def _planned(cost: ContextCost, case: Case, tokens: Ints) -> tuple[float, float, int]:
    tokens, seconds = _seconds(cost, case, tokens)
    least = least_degrees(tokens, case.ranks, case.tokens_per_rank)
    plan = plan_degrees(seconds, least, cost.ranks_per_node)
    return plan.step_s, lower_bound(seconds, least), int(plan.degrees.max())


def _fixed(cost: ContextCost, case: Case, tokens: Ints, degree: int) -> float:
    """Return the shorter step of samples one by one, and in packs that fill the ranks of a group: then latency counts once."""
    packs = pack(tokens, degree * case.tokens_per_rank)
    return min(fixed_degree(_seconds(cost, case, tokens, some)[1], degree, cost.ranks_per_node).step_s for some in (None, packs))
