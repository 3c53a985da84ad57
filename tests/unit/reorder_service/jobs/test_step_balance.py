"""How even a plan is: 1.0 where nobody waits, and as strategy `random` deals where that made the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan import Microbatch, StepPlan, Topology
from headrace.reorder_service.jobs import step_balance
from headrace.reorder_service.jobs.step_balance import Balance, balance_of

UNITS = {"encoder": 1, "llm": 2}


def plan_of_slots(*slots: list[list[int]]) -> StepPlan:
    """`slots[r][k]`: the samples of a microbatch, in both units."""
    replicas = [[Microbatch(units=dict.fromkeys(UNITS, tuple(samples))) for samples in replica] for replica in slots]
    topology = Topology(replicas=len(slots), microbatches=max(map(len, slots)), stages=dict(UNITS))
    return StepPlan(strategy="joint", seed=0, topology=topology, replicas=replicas)


def judged(plan: StepPlan, meet: str = "", **costs: list[float]) -> Balance | None:
    ids = np.array(plan.sample_ids())
    return balance_of(plan, ids, {unit: np.array(costs[unit]) for unit in UNITS}, meet)


def test_the_heaviest_microbatch_of_a_pipeline_is_compared_with_the_mean() -> None:
    costs = {"encoder": [0.0] * 4, "llm": [3.0, 1.0, 3.0, 1.0]}
    assert judged(plan_of_slots([[0, 1]], [[2, 3]]), **costs) == Balance(before=1.5, after=1.0)


def test_each_unit_waits_for_its_own_heaviest_microbatch() -> None:
    costs = {"encoder": [4.0, 0.0, 0.0, 0.0], "llm": [1.0, 1.0, 1.0, 1.0]}
    found = judged(plan_of_slots([[0], [1]], [[2], [3]]), **costs)
    assert found == Balance(before=2.5, after=2.5)  # (4 + 1) over (1 + 1)


@pytest.mark.parametrize(("meet", "slowest_s"), [("microbatch", 3.0), ("step", 2.0), ("phases", 4.0)])
def test_ranks_with_all_units_are_compared_where_they_wait_for_each_other(meet: str, slowest_s: float) -> None:
    plan = plan_of_slots([[0], [1]], [[2], [3]])
    found = judged(plan, meet, encoder=[2.0, 0.0, 0.0, 1.0], llm=[0.0, 0.0, 1.0, 0.0])
    assert found is not None
    assert found.after == slowest_s / 2.0  # seconds of a rank on the mean


def test_unequal_pipelines_are_dealt_as_many_microbatches_as_they_have() -> None:
    costs = {"encoder": [0.0] * 3, "llm": [1.0, 1.0, 1.0]}
    assert judged(plan_of_slots([[0], [1]], [[2]]), **costs) == Balance(before=1.0, after=1.0)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 4), st.integers(1, 4), st.lists(st.floats(0.1, 9.0), min_size=1, max_size=40), st.sampled_from(["", "step"])
)
def test_a_plan_in_arrival_order_is_as_even_as_arrival_order(
    replicas: int, microbatches: int, llm: list[float], meet: str
) -> None:
    slots: list[list[list[int]]] = [[[] for _ in range(microbatches)] for _ in range(replicas)]
    for sample in range(len(llm)):
        card = sample % (replicas * microbatches)
        slots[card % replicas][card // replicas].append(sample)
    found = judged(plan_of_slots(*slots), meet, encoder=[0.0] * len(llm), llm=llm)
    assert found is not None
    assert found.before == pytest.approx(found.after)
    assert found.after >= 1.0 - 1e-9


def test_a_step_without_costs_and_a_very_large_one_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of_slots([[0, 1]])
    nothing: dict[str, Any] = {}
    assert balance_of(plan, np.array([0, 1]), nothing, "") is None
    assert judged(plan, encoder=[0.0, 0.0], llm=[0.0, 0.0]) is None
    monkeypatch.setattr(step_balance, "MOST_SAMPLES", 1)
    assert judged(plan, encoder=[1.0, 1.0], llm=[1.0, 1.0]) is None
