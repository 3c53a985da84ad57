"""What the planning benchmark compares with published figures is the same quantity."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import numpy as np

from benchmarks.planning.inputs import spread_of
from benchmarks.planning.rank_balance import balance_each_microbatch
from benchmarks.report import RESULTS
from headrace.plan import Topology
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.strategies import arrival


def test_the_spread_is_in_seconds_of_the_microbatches_that_hold_a_sample() -> None:
    """Published deviations are absolute: fewer, heavier microbatches must not look level because their mean is larger."""
    many = np.array([[[1.0], [3.0], [1.0], [3.0]]])
    few = np.array([[[2.0], [6.0], [0.0], [0.0]]])
    assert spread_of(many, many[..., 0] > 0).tolist() == [1.0]
    assert spread_of(few, few[..., 0] > 0).tolist() == [2.0]


def test_the_rule_of_megatron_bridge_places_samples_as_its_own_test_does() -> None:
    """Their functional test has costs 4, 3, 1, 2 on two ranks: the first and the third go to the first rank."""
    costs = np.array([4.0, 3.0, 1.0, 2.0])
    topology = Topology(replicas=2, microbatches=1, stages={"encoder": 1, "llm": 1})
    batch = make_batch(np.arange(4), {"encoder": costs, "llm": costs}, topology, 0)
    assert balance_each_microbatch(batch, costs)[0].tolist() == [0, 1, 0, 1]


def test_the_rule_of_megatron_bridge_keeps_microbatches_and_the_number_of_samples_on_each_replica() -> None:
    rng = np.random.default_rng(0)
    topology = Topology(replicas=4, microbatches=3, stages={"encoder": 1, "llm": 1})
    batch = make_batch(np.arange(48), {unit: rng.random(48) for unit in topology.stages}, topology, 0)
    dealt, balanced = arrival.plan_slots(batch)[0], balance_each_microbatch(batch, batch.costs[0])[0]
    assert (dealt % 3 == balanced % 3).all()
    assert np.bincount(balanced, minlength=12).tolist() == [4] * 12
    heaviest = [np.bincount(slot, weights=batch.costs[0], minlength=12).reshape(4, 3).max(axis=0) for slot in (dealt, balanced)]
    assert (heaviest[1] <= heaviest[0]).all()


def test_the_page_beside_megatron_bridge_has_the_figures_that_were_measured() -> None:
    page = (Path(__file__).parents[3] / "docs" / "comparison" / "megatron-bridge.md").read_text()
    rows = json.loads((RESULTS / "rank-balance.json").read_text())["rows"]
    measured = [
        f"| {family} | " + " | ".join(f"{row['value']:.3f}" for row in of_family) + " |"
        for (_, family), of_family in groupby(rows, key=lambda row: (row["section"], row["name"].partition(",")[0]))
    ]
    assert len(measured) == 8
    assert [line for line in measured if line not in page] == []
