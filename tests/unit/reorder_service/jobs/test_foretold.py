"""What ranks are told of a whole step before its first microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from headrace.reorder_service.api.plan_events import plan_events
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.jobs.sessions import EventBatch, Sessions
from headrace.sample import Probe, SampleRef
from headrace.spec import parse_spec
from headrace.v1 import sessions_pb2

TOKENS = [5, 30, 2, 17, 64, 9, 40]


def planned(
    replicas: int, microbatches: int, *, source_of: Any = None, weights: Mapping[int, float] | None = None, **fields: Any
) -> PlannedStep:
    """Seven samples, the odd ones of shard 1; sample i has i targets, whose weights add up to `weights[i]`."""
    document = {"name": "job", "sources": [{"path": "/d"}], "text": {"max_tokens": 64}, "strategy": "random"}
    spec = parse_spec(document | fields | {"topology": {"replicas": replicas, "microbatches": microbatches}})
    step = PlannedStep(index=0, refs=[SampleRef(sample_id=i, shard=i % 2, row=i) for i in range(len(TOKENS))])
    step.probes = {
        i: Probe(name=f"n{i}", num_tokens=length, num_targets=i, target_weight=(weights or {}).get(i))
        for i, length in enumerate(TOKENS)
    }
    step.sample_ids = np.arange(len(TOKENS))
    step.cut(step.make_plan(spec, spec.topology, vocab=9, generation=1), part_samples=2, ticket=str, source_of=source_of)
    return step


def told(step: PlannedStep, num_ranks: int, replicas: int) -> list[sessions_pb2.RankPlan]:
    sessions = Sessions("job")
    opened = [sessions.open(rank, num_ranks, replicas) for rank in range(num_ranks)]
    return [sessions_pb2.PlanEvents.FromString(plan_events(EventBatch([step]), one)).events[0].plan for one in opened]


@pytest.mark.parametrize(("replicas", "num_ranks", "most"), [(3, 2, 4), (3, 3, 2), (4, 2, 4), (1, 1, 2)])
def test_every_rank_is_told_the_same_totals(replicas: int, num_ranks: int, most: int) -> None:
    plans = told(planned(replicas, 2), num_ranks, replicas)
    assert {plan.num_targets for plan in plans} == {sum(range(7))}
    assert {plan.most_microbatches for plan in plans} == {most}
    assert max(len(plan.microbatches) for plan in plans) == most


def test_the_weight_of_all_targets_is_told_where_some_have_weights() -> None:
    assert not any(plan.HasField("target_weight") for plan in told(planned(2, 2), 2, 2)), "the same bytes as ever"
    step = planned(2, 2, weights={1: 0.5, 4: 10.25})
    assert {plan.target_weight for plan in told(step, 2, 2)} == {0.5 + 10.25 + (2 + 3 + 5 + 6)}


def test_the_largest_microbatch_of_any_rank_is_told() -> None:
    step = planned(2, 2)
    assert step.plan is not None
    largest = max(sum(TOKENS[i] for i in k.sample_ids) for replica in step.plan.replicas for k in replica)
    assert [plan.max_tokens for plan in told(step, 2, 2)] == [largest] * 2


def test_padding_counts_among_the_tokens_of_the_largest_microbatch() -> None:
    step = planned(1, 2, pack_tokens=64, pad_to_max_length=True)
    most_packs = max(len(step.packs_in(0, k)) for k in range(2))
    (plan,) = told(step, 1, 1)
    assert plan.max_tokens == 64 * most_packs


def test_sources_are_told_where_there_are_several() -> None:
    for plan in told(planned(2, 2, source_of=lambda shard: 5 + shard), 2, 2):
        said = {i: of.source for k in plan.microbatches for of in k.sources for i in of.sample_ids}
        assert len(said) == sum(k.num_samples for k in plan.microbatches)
        assert all(source == 5 + i % 2 for i, source in said.items())
    assert not any(k.sources for plan in told(planned(2, 2), 2, 2) for k in plan.microbatches)


def test_processes_of_a_pipeline_are_told_totals_but_no_sources_and_no_counts() -> None:
    session = Sessions("job").open(0, 1, 1, [0])
    step = planned(1, 2, source_of=lambda shard: shard)
    plan = sessions_pb2.PlanEvents.FromString(plan_events(EventBatch([step]), session)).events[0].plan
    assert plan.num_targets == sum(range(7))
    assert not plan.HasField("most_microbatches")
    assert not any(k.sources for k in plan.microbatches)
