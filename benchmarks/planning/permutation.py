"""Node-wise permutation of balanced batches over ranks: what still crosses nodes, its time, its distance to the optimum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.planning.inputs import OMNI, SEED, resampled
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import progress, time_calls
from headrace.plan import LLM, Topology
from headrace.reorder_service.planning.batch import Batch, Ints, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.post_balancing_options import PostBalancing
from headrace.reorder_service.planning.search.node_permutation import Traffic, node_bound, permute_heuristically, solve
from headrace.reorder_service.planning.strategies.orchmllm import heaviest_between_nodes, plan_slots, sent_to_llm

LARGE_RANKS, PER_RANK, RANKS_PER_NODE = 2_560, 60, 8
PAPER_RANKS = 128
PAPER = Rival(value=0.722, source="OrchMLLM, 0.436 to 0.722 of arrival traffic")  # figure 13
GOAL_MS = 1_000.0
GOAL_SHARE = 0.85  # of the heaviest volume, on 64 ranks
_SMALL_RANKS, _SMALL_NODE, _SMALL_SHARE = 32, 8, 6
_TIME_LIMIT_S = 5.0
_PROVEN = 1e-3  # HiGHS stops at a relative gap of 1e-4


def ranks_batch(num_ranks: int, per_rank: int, seed: int = SEED) -> Batch:
    """A batch of three units for ranks that each hold the whole model, as OrchMLLM trains."""
    table = resampled(OMNI.table(), num_ranks * per_rank, seed)
    topology = Topology(replicas=num_ranks, microbatches=1, stages=dict.fromkeys(OMNI.stages, 1))
    return make_batch(table.sample_ids, table.costs, topology, seed)


def large_row(batch: Batch) -> Row:
    """Balancing of all units and the permutation of each."""
    progress(f"permutation: {batch.topology.replicas:,} ranks")

    on_nodes = _on_nodes(batch)
    timing = time_calls(lambda: plan_slots(on_nodes), budget_s=1.0, least=2)
    return Row(
        name="balancing and permuting",
        value=timing.best_s * 1e3,
        unit="ms",
        goal=at_most(GOAL_MS),
        detail=timing.detail,
    )


def sections(*, quick: bool) -> Iterator[Section]:
    """What encoders send to the LLM on other nodes, and the LLM's permutation against a bound and the optimum."""
    for num_ranks, per_rank in ((64, 32), (PAPER_RANKS, PER_RANK), (LARGE_RANKS, PER_RANK)):
        yield Section(
            title=f"heaviest volume from an encoder's rank to the LLM's on other nodes, permuted over not: D={num_ranks:,}, "
            f"nodes of {RANKS_PER_NODE}, {per_rank} samples a rank",
            rows=list(_composed_rows(ranks_batch(num_ranks, per_rank))),
        )
    yield Section(
        title=f"permutation of the LLM's batches alone: D={LARGE_RANKS:,}, nodes of {RANKS_PER_NODE}, {PER_RANK} samples a rank",
        rows=[_bound_row(ranks_batch(LARGE_RANKS, PER_RANK))],
    )
    yield _optimum_section(batches=2 if quick else 6)


def _composed_rows(batch: Batch) -> Iterator[Row]:
    """What strategy `orchmllm` reaches with nodes given, for each encoder."""
    progress(f"permutation: {batch.topology.replicas:,} ranks, composed traffic")
    on_nodes = _on_nodes(batch)
    before, after = (heaviest_between_nodes(on_nodes, plan_slots(planned)) for planned in (batch, on_nodes))
    for unit in before:
        yield Row(
            name=f"permutations, {unit}",
            value=after[unit] / before[unit],
            rival=PAPER if batch.topology.replicas == PAPER_RANKS else None,
            goal=at_most(GOAL_SHARE) if batch.topology.replicas < PAPER_RANKS else None,
        )


def _optimum_section(batches: int) -> Section:
    """At a size at which HiGHS can prove its optimum."""
    before, ours, exact = np.zeros((3, batches))
    proven = 0
    for seed in range(batches):
        progress(f"permutation: {_SMALL_RANKS} ranks, HiGHS, {seed + 1} of {batches}")
        batch = ranks_batch(_SMALL_RANKS, _SMALL_SHARE, seed)
        traffic = _all_to_llm(batch)
        best = solve(traffic, _SMALL_NODE, _TIME_LIMIT_S)
        before[seed] = traffic.leaving(_nodes(batch, _SMALL_NODE), _SMALL_NODE).max()
        ours[seed] = permute_heuristically(traffic, _SMALL_NODE).heaviest_outgoing
        exact[seed] = best.heaviest_outgoing
        proven += best.heaviest_outgoing <= best.lower_bound * (1 + _PROVEN)
    return Section(
        title=f"the same against the optimum: D={_SMALL_RANKS}, nodes of {_SMALL_NODE}, "
        f"{_SMALL_SHARE} samples a rank, {batches} batches",
        rows=[
            Row(
                name="permutation by the heuristic",
                value=float((ours / before).mean()),
                rival=Rival(value=float((exact / before).mean()), source=f"HiGHS, {proven}/{batches} proven"),
            )
        ],
    )


def _bound_row(batch: Batch) -> Row:
    """How far the permuted LLM is from the least that the node of its heaviest rank could reach by itself."""
    progress(f"permutation: {batch.topology.replicas:,} ranks, bound")
    traffic = _all_to_llm(batch)
    rank_of_batch = permute_heuristically(traffic, RANKS_PER_NODE, SEED).rank_of_batch
    volumes = traffic.leaving(rank_of_batch // RANKS_PER_NODE, RANKS_PER_NODE)
    before = float(traffic.leaving(_nodes(batch, RANKS_PER_NODE), RANKS_PER_NODE).max())
    bound = node_bound(traffic, RANKS_PER_NODE, int(volumes.argmax()) // RANKS_PER_NODE, _TIME_LIMIT_S)
    return Row(
        name="permutation by the heuristic",
        value=float(volumes.max()) / before,
        rival=Rival(value=bound / before, source="lower bound, HiGHS"),
    )


def _on_nodes(batch: Batch) -> Batch:
    return replace(batch, execution=Execution(post_balancing=PostBalancing(ranks_per_node=RANKS_PER_NODE)))


def _all_to_llm(batch: Batch) -> Traffic:
    """What all encoders of the unpermuted plan send to the LLM's batches."""
    return sent_to_llm(batch, plan_slots(batch), [u for u, unit in enumerate(batch.units) if unit != LLM])


def _nodes(batch: Batch, ranks_per_node: int) -> Ints:
    """(D,) node of every rank."""
    return np.arange(batch.topology.replicas) // ranks_per_node
