"""The unit behind the LLM: where its samples pass, which way gradients go, and what its processes fetch."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.plan import Microbatch, StepPlan, Topology
from headrace.trainer.pipeline.feed import columns_of
from headrace.trainer.pipeline.gradient_flow import GradientFlow, needs_output_gradient
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.topology import PipelineTopology, Place


def topology_of(**units: dict[str, Any]) -> PipelineTopology:
    return PipelineTopology.model_validate({"units": {"vision": {}, "llm": {}, "generator": {}, **units}})


def test_samples_come_back_where_the_generator_has_them() -> None:
    """Sample 1 goes through the LLM in microbatch 0 and through the generator in microbatch 1."""
    microbatches = [
        Microbatch(units={"vision": (1, 2), "llm": (1, 2), "generator": (2,)}),
        Microbatch(units={"vision": (3,), "llm": (3,), "generator": (1, 3)}),
    ]
    topology = Topology(replicas=1, microbatches=2, stages={"vision": 1, "llm": 1, "generator": 1})
    plan = StepPlan(strategy="by hand", seed=0, topology=topology, replicas=[microbatches])
    routes = Routes(plan, {"vision": 1, "llm": 1, "generator": 1})
    for unit in ("vision", "llm"):
        portions = [(p.forward, p.backward, p.samples) for p in routes.portions(unit, 0)]
        assert portions == [(0, 0, (2,)), (0, 1, (1,)), (1, 1, (3,))]
    (alone, both) = routes.portions("generator", 0)
    assert (alone.samples, both.samples) == ((2,), (1, 3))
    assert [(handover.source.unit, handover.samples) for handover in routes.into(both)] == [("llm", (1,)), ("llm", (3,))]


WHOLLY = {"frozen": True, "frozen_projector": True}


@pytest.mark.parametrize(
    ("units", "llm", "generator"),
    [
        ({}, [True, True], [True, True]),
        ({"vision": WHOLLY, "llm": WHOLLY}, [False, False], [True, True]),  # the LLM has a loss, and nothing to learn from it
        ({"vision": WHOLLY, "llm": {"frozen": True}}, [False, True], [True, True]),  # its last stage has the projector
        ({"vision": WHOLLY, "generator": {"frozen": True}}, [True, True], [True, True]),
        ({"llm": WHOLLY, "generator": {"frozen": True}}, [True, True], [True, True]),
        ({"vision": WHOLLY, "llm": WHOLLY, "generator": {"frozen": True}}, [False, False], [False, False]),
    ],
)
def test_a_stage_has_a_backward_where_anything_learns_from_it(
    units: dict[str, Any], llm: list[bool], generator: list[bool]
) -> None:
    topology = topology_of(**{unit: {"pp": 2, **units.get(unit, {})} for unit in ("vision", "llm", "generator")})
    flows = {unit: GradientFlow.of(topology, unit) for unit in topology.units}
    assert [flows["llm"].has_backward(position) for position in (0, 1)] == llm
    assert [flows["generator"].has_backward(position) for position in (0, 1)] == generator
    assert needs_output_gradient(topology, "llm") == any(llm) == flows["generator"].sends_gradient(0)


@pytest.mark.parametrize("schedule", [{}, {"schedule": "interleaved", "chunks": 2}], ids=["1f1b", "interleaved"])
def test_the_stages_of_a_generator_that_read_pixels_are_its_first_and_last(schedule: dict[str, Any]) -> None:
    topology = topology_of(vision={"pp": 2}, generator={"pp": 3}).model_copy(update=schedule)
    fetch = {
        (unit, stage): "patches" in columns_of(topology, Place(unit, 0, stage, 0))
        for unit, size in topology.units.items()
        for stage in range(size.pp)
    }
    assert [place for place, reads in fetch.items() if reads] == [("vision", 0), ("generator", 0), ("generator", 2)]
