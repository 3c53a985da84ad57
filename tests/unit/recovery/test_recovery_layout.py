"""What a snapshot of the nodes means for one of them."""

from __future__ import annotations

import pytest

from headrace.errors import UserError
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.v1.membership_pb2 import Node, Pipeline, PipelineStage, Snapshot
from trainer.pipeline.topology import Place
from trainer.recovery.layout import Layout, shared
from trainer.recovery.spec import RecoverableUnit, RecoverySpec

SPEC = RecoverySpec(nodes=5, units={"vision": RecoverableUnit(), "llm": RecoverableUnit(frozen=True)})


def stage(rank: int, unit: str, first: int, end: int) -> PipelineStage:
    return PipelineStage(rank=rank, unit=unit, first_layer=first, end_layer=end)


def snapshot() -> Snapshot:
    """Three nodes and two, with different cuts of an llm of four layers."""
    return Snapshot(
        generation=3,
        nodes=[Node(name=name, address=f"{name}:1") for name in "abcde"],
        pipelines=[
            Pipeline(stages=[stage(0, "vision", 0, 2), stage(3, "llm", 0, 1), stage(2, "llm", 1, 4)], num_microbatches=5),
            Pipeline(stages=[stage(4, "vision", 0, 2), stage(1, "llm", 0, 4)], num_microbatches=3),
        ],
    )


def test_a_node_finds_its_place_in_its_pipeline() -> None:
    layout = Layout.of(snapshot(), "c", SPEC)
    assert layout is not None
    assert (layout.generation, layout.rank, layout.num_ranks, layout.pipeline) == (3, 2, 5, 0)
    assert layout.pipelines == ((0, 3, 2), (4, 1))
    assert layout.shares == (5, 3)
    assert layout.place == Place("llm", 0, 1, 0)
    assert layout.bounds == {"vision": (0, 2), "llm": (0, 1, 4)}
    assert layout.topology.units["llm"].cuts == (1,)
    assert layout.topology.units["llm"].frozen


def test_a_node_outside_of_all_pipelines_has_no_place() -> None:
    assert Layout.of(snapshot(), "f", SPEC) is None


def plan(replicas: list[list[dict[str, tuple[int, ...]]]]) -> StepPlan:
    return StepPlan(
        strategy="entrain",
        seed=0,
        topology=Topology(replicas=len(replicas), microbatches=len(replicas[0]), stages={"vision": 1, "llm": 1}),
        replicas=[[Microbatch(units=units) for units in microbatches] for microbatches in replicas],
    )


# Sample 1 is deferred by a microbatch.
DEFERRED = plan(
    [
        [{"vision": (0, 1), "llm": (0,)}, {"vision": (2,), "llm": (1, 2)}],
        [{"vision": (3,), "llm": (3,)}, {"vision": (4,), "llm": (4,)}],
    ]
)


def test_a_plan_for_these_pipelines_is_followed_as_it_is() -> None:
    assert shared(DEFERRED, (2, 2)) == list(DEFERRED.replicas)


def test_other_shares_take_the_microbatches_in_order_and_defer_nothing() -> None:
    first, second = shared(DEFERRED, (3, 1))
    assert [microbatch.units for microbatch in first] == [
        {"vision": (0,), "llm": (0,)},
        {"vision": (1, 2), "llm": (1, 2)},
        {"vision": (3,), "llm": (3,)},
    ]
    assert [microbatch.units for microbatch in second] == [{"vision": (4,), "llm": (4,)}]


def test_a_sample_that_changes_its_replica_stays_where_its_loss_is() -> None:
    crossing = plan([[{"vision": (0, 3), "llm": (0, 1)}], [{"vision": (1, 2), "llm": (2, 3)}]])
    first, second = shared(crossing, (1, 1))
    assert [microbatch.units for microbatch in first] == [{"vision": (0, 1), "llm": (0, 1)}]
    assert [microbatch.units for microbatch in second] == [{"vision": (2, 3), "llm": (2, 3)}]


def test_a_plan_with_another_number_of_microbatches_is_refused() -> None:
    with pytest.raises(UserError, match="has 4 microbatches, but the nodes were told of 6"):
        shared(DEFERRED, (3, 3))


def test_a_spec_without_an_llm_is_refused() -> None:
    with pytest.raises(ValueError, match="must name 'llm'"):
        RecoverySpec(nodes=2, units={"vision": RecoverableUnit()})
