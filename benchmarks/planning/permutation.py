"""Node-wise permutation of balanced batches over ranks: its time on thousands of ranks, its distance to the integer program."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.planning.inputs import OMNI, SEED, resampled
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import progress, time_calls
from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, Ints, Slots, make_batch
from headrace.reorder_service.planning.search.node_permutation import Traffic, node_bound, permute_heuristically, solve
from headrace.reorder_service.planning.strategies.orchmllm import PostBalancing, arrival_ranks, plan_slots

LARGE_RANKS, PER_RANK, RANKS_PER_NODE = 2_560, 60, 8
GOAL_MS = 1_000.0
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

    permuting = PostBalancing(ranks_per_node=RANKS_PER_NODE)
    timing = time_calls(lambda: plan_slots(batch, permuting), budget_s=1.0, least=2)
    return Row(
        name="balancing and permuting",
        value=timing.best_s * 1e3,
        unit="ms",
        goal=at_most(GOAL_MS),
        detail=timing.detail,
    )


def sections(*, quick: bool) -> Iterator[Section]:
    """The heuristic against a bound on many ranks, and against the optimum on few."""
    batch = ranks_batch(LARGE_RANKS, PER_RANK)
    yield Section(
        title=f"heaviest volume from a rank to other nodes, permuted over not: D={LARGE_RANKS:,}, nodes of {RANKS_PER_NODE}, "
        f"{PER_RANK} samples a rank",
        rows=list(_bound_rows(batch)),
    )
    yield _optimum_section(batches=2 if quick else 6)


def _optimum_section(batches: int) -> Section:
    """At a size at which HiGHS can prove its optimum."""
    before, ours, exact = (np.zeros((batches, len(OMNI.stages))) for _ in range(3))
    proven = 0
    for seed in range(batches):
        progress(f"permutation: {_SMALL_RANKS} ranks, HiGHS, {seed + 1} of {batches}")
        batch = ranks_batch(_SMALL_RANKS, _SMALL_SHARE, seed)
        for u, traffic in enumerate(_traffics(batch, plan_slots(batch))):
            best = solve(traffic, _SMALL_NODE, _TIME_LIMIT_S)
            before[seed, u] = traffic.leaving(_nodes(batch, _SMALL_NODE), _SMALL_NODE).max()
            ours[seed, u] = permute_heuristically(traffic, _SMALL_NODE).heaviest_outgoing
            exact[seed, u] = best.heaviest_outgoing
            proven += best.heaviest_outgoing <= best.lower_bound * (1 + _PROVEN)
    return Section(
        title=f"the same against the optimum: D={_SMALL_RANKS}, nodes of {_SMALL_NODE}, "
        f"{_SMALL_SHARE} samples a rank, {batches} batches",
        rows=[
            Row(
                name=f"permutation of {unit} by the heuristic",
                value=float((ours[:, u] / before[:, u]).mean()),
                rival=Rival(value=float((exact[:, u] / before[:, u]).mean()), source=f"HiGHS, {proven}/{exact.size} proven"),
            )
            for u, unit in enumerate(OMNI.stages)
        ],
    )


def _bound_rows(batch: Batch) -> Iterator[Row]:
    """How far the permuted units are from the least that the node of their heaviest rank could reach by itself."""
    for unit, traffic in zip(batch.units, _traffics(batch, plan_slots(batch)), strict=True):
        progress(f"permutation: {batch.topology.replicas:,} ranks, bound of {unit}")
        rank_of_batch = permute_heuristically(traffic, RANKS_PER_NODE, SEED).rank_of_batch
        volumes = traffic.leaving(rank_of_batch // RANKS_PER_NODE, RANKS_PER_NODE)
        before = float(traffic.leaving(_nodes(batch, RANKS_PER_NODE), RANKS_PER_NODE).max())
        bound = node_bound(traffic, RANKS_PER_NODE, int(volumes.argmax()) // RANKS_PER_NODE, _TIME_LIMIT_S)
        yield Row(
            name=f"permutation of {unit} by the heuristic",
            value=float(volumes.max()) / before,
            rival=Rival(value=bound / before, source="lower bound, HiGHS"),
        )


def _traffics(batch: Batch, slots: Slots) -> list[Traffic]:
    """Per unit: sample i moves from the rank that sampled it to rank slots[u, i], its cost standing for its volume."""
    num_ranks = batch.topology.replicas
    arrived = arrival_ranks(batch.sample_ids.size, num_ranks, "round_robin")
    return [Traffic.of_samples(arrived, slot, cost, num_ranks) for slot, cost in zip(slots, batch.costs, strict=True)]


def _nodes(batch: Batch, ranks_per_node: int) -> Ints:
    """(D,) node of every rank."""
    return np.arange(batch.topology.replicas) // ranks_per_node
