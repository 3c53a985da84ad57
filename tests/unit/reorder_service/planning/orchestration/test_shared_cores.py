"""Steps on cores that services share: what they take, trainers lack, where all cores are busy; idle cores cost nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate, Placement, UnitGrid
from headrace.reorder_service.planning.orchestration.cluster import Cluster
from headrace.reorder_service.planning.orchestration.cluster import cluster_of as described
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.headrace_search import search
from headrace.reorder_service.planning.orchestration.judge import draw_batches, judge
from headrace.reorder_service.planning.orchestration.judgement import SERVICES
from headrace.reorder_service.planning.orchestration.shared_cores import Computing, beside_services_s
from tests.examples import with_examples
from tests.unit.reorder_service.planning.orchestration.orchestration_world import cluster_of, unit_of


def cores(number: int, *, threads: int = 1, trainers: int = 2, **services: float) -> Cluster:
    return replace(cluster_of(1, trainers), cores_per_node=number, threads=threads, **services)  # type: ignore[arg-type]


def computing(*pieces: tuple[float, float]) -> Computing:
    starts, ends = np.array(pieces).T
    return Computing(start_s=starts, end_s=ends, trainers=np.ones(len(pieces)))


def test_where_all_cores_compute_all_the_time_a_step_takes_what_all_work_takes_of_them() -> None:
    cluster = cores(2, service_s_per_sample=0.25)
    assert beside_services_s(cluster, computing((0, 3), (0, 3)), 3.0, 0.0, 4, 2) == pytest.approx((3 + 3 + 4 * 0.25) / 2)


def test_services_on_idle_cores_cost_nothing() -> None:
    in_turn = computing((0, 2), (2, 4))
    assert beside_services_s(cores(2, service_s_per_sample=0.25), in_turn, 4.0, 0.0, 8, 2) == pytest.approx(4.0)
    assert beside_services_s(cores(3, service_s_per_sample=0.25), computing((0, 4), (0, 4)), 4.0, 0.0, 8, 2) == pytest.approx(4.0)


def test_half_of_the_time_on_busy_cores() -> None:
    """Services take a core second. Of T seconds 2 are as before, and the others what 4 core seconds take on 2 - 1 / T cores."""
    seconds = beside_services_s(cores(2, service_s_per_sample=0.5), computing((0, 4), (2, 4)), 4.0, 0.0, 2, 2)
    assert seconds == pytest.approx(2 + 4 / (2 - 1 / seconds))
    assert 4.0 < seconds < 4.5, "less than if services took half of every core second from each trainer"


def test_what_services_take_at_rest_is_gone_all_the_time() -> None:
    assert beside_services_s(cores(2, service_cores=0.5), computing((0, 3), (0, 3)), 3.0, 0.0, 4, 2) == pytest.approx(6 / 1.5)


def test_the_update_of_the_weights_is_on_all_trainers_cores() -> None:
    seconds = beside_services_s(cores(2, service_cores=0.5), computing((0, 3)), 3.0, 1.5, 4, 2)
    assert seconds == pytest.approx(3.0 + 1.5 * 2 / 1.5)


def test_services_that_need_more_than_there_is_determine_the_step() -> None:
    seconds = beside_services_s(cores(2, service_s_per_sample=1.0), computing((0, 1)), 1.0, 0.0, 16, 2)
    assert seconds > 8.0
    assert seconds == pytest.approx(max(1.0, 1.0 / (2 - 16 / seconds)))


@with_examples(60)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)).map(sorted), min_size=1, max_size=6),
    st.integers(1, 6),
    st.floats(0, 1),
    st.floats(0, 0.9),
)
def test_work_is_never_done_faster_than_the_cores_can(pieces: list[list[float]], number: int, each_s: float, rest: float) -> None:
    trainers = min(number, len(pieces))
    work = computing(*(tuple(piece) for piece in pieces[:trainers]))  # type: ignore[misc]
    alone_s = float(work.end_s.max())
    seconds = beside_services_s(
        cores(number, trainers=trainers, service_s_per_sample=each_s, service_cores=rest), work, alone_s, 0.0, 3, trainers
    )
    assert seconds >= alone_s * (1 - 1e-12)
    assert number * seconds >= (float((work.end_s - work.start_s).sum()) + 3 * each_s + rest * seconds) * (1 - 1e-9)


def demand(**options: object) -> Demand:
    sizes = np.random.default_rng(0).lognormal(0, 0.5, 40)
    units = tuple(unit_of(name, seconds, layers=4, parameters=1e6, widths=(1,), samples=sizes / sizes.mean()) for name, seconds in
                  (("vision", 0.4), (LLM, 0.6)))  # fmt: skip
    return Demand(units=units, cluster=cores(2, **options), global_batch=12)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", ["disaggregated", "encoders-first", "nested", "colocated"])
def test_the_judge_counts_services_in_every_placement(placement: Placement) -> None:
    """All work, 12 samples of a second, is spread over both cores as well as can be, so that services find few idle."""
    on_all = placement != "disaggregated"
    grids = {"vision": UnitGrid(dp=1 + on_all, tp=1, pp=1), LLM: UnitGrid(dp=1 + on_all, tp=1, pp=1)}
    candidate = Candidate(search="test", grids=grids, microbatches=6, placement=placement)
    batches = draw_batches(demand(), 3, 0)
    alone, beside = (judge(of, candidate, batches) for of in (demand(), demand(service_s_per_sample=0.2)))
    assert alone.parts[SERVICES] == pytest.approx(0.0, abs=1e-6)
    assert (beside.steps_s > alone.steps_s).all()
    assert beside.steps_s == pytest.approx(alone.steps_s, rel=0.25), "a fifth of all work, on two cores"
    assert (2 * beside.steps_s >= 12 * 1.2 * 0.5).all()
    assert sum(beside.parts.values()) == pytest.approx(2 * beside.step_s)
    assert beside.share(SERVICES) == pytest.approx(1 - alone.steps_s[0] / beside.steps_s[0])


def test_the_search_takes_what_is_best_beside_services() -> None:
    found = search(demand(service_s_per_sample=0.2), {}, num_batches=2, shortlist=10)
    assert all(found.best.key <= one.key for one in found.alternatives)
    assert found.best.parts[SERVICES] > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"service_cores": 0.1},
            "service_s_per_sample and service_cores are of services on the cores of trainers: give cores_per_node",
        ),
        ({"cores_per_node": 0}, "cores_per_node must be a whole number from 1, got 0"),
        ({"cores_per_node": 3}, "4 trainers of a node with 1 threads each are more than its 3 cores"),
        ({"cores_per_node": 8, "threads": 3}, "4 trainers of a node with 3 threads each are more than its 8 cores"),
        ({"cores_per_node": 4, "service_s_per_sample": -1.0}, "service_s_per_sample must be a number from 0, got -1.0"),
        ({"cores_per_node": 4, "service_cores": 4.0}, "service_cores must be less than the 4 cores that there are, got 4.0"),
    ],
)
def test_cores_that_cannot_be_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"^machine.yaml: {words}"):
        described({"preset": "a40", **fields}, "machine.yaml")
