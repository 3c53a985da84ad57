"""What trainers have measured corrects the costs of later steps, and is recorded before anything is planned with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headrace.execution_spec import ExecutionSpec, UnitExecution
from headrace.measured import MeasuredWork
from headrace.reorder_service.jobs.corrections import LEAST_STEPS, PERIOD_STEPS, Corrections
from headrace.reorder_service.jobs.job_execution import execution_of
from headrace.reorder_service.jobs.measurements import observation
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.planning.cost_model.correction import UNCORRECTED, Correction, UnitCorrection
from headrace.reorder_service.planning.unequal_pipelines import PipelineShape
from headrace.reorder_service.store.state import StateStore
from headrace.schedule import Kind
from headrace.spec import JobSpec
from tests.unit.reorder_service.job_world import Start, consume, submit, told_by
from tests.unit.reorder_service.jobs.machine_world import STAGES, form, job, planned, train

MACHINE = Correction(
    units={
        "vision": UnitCorrection(scale=(3.0, 5.0, 0.0), microbatch_s=(1e-4, 2e-4, 0.0)),
        "llm": UnitCorrection(scale=(1.0, 2.2, 0.0), microbatch_s=(3e-4, 5e-4, 0.0), stages=((0.9, 0.8, 1.0), (1.1, 1.2, 1.0))),
    },
    unexplained_s=0.02,
)
SPLIT = Correction(
    units={
        unit: replace(lines, scale=(lines.scale[0], 1.1, 0.8), microbatch_s=(1e-4,) * 3) for unit, lines in MACHINE.units.items()
    }
)
FROZEN = Correction(units={**MACHINE.units, "vision": UnitCorrection(scale=(3.0, 0.0, 0.0))})
COLOCATED = Correction(units={"vision": UnitCorrection(scale=(3.0, 6.0, 0.0)), "llm": UnitCorrection(scale=(1.0, 2.0, 0.0))})


UNEQUAL = (  # pipelines of nodes, of which the second lacks one
    PipelineShape(stages={"vision": (1.0,), "llm": (0.25, 0.25, 0.5)}, microbatches=5),
    PipelineShape(stages={"vision": (1.0,), "llm": (0.6, 0.4)}, microbatches=3),
)


async def lived(
    corrections: Corrections, spec: JobSpec, machine: Correction, steps: int, pipelines: Sequence[PipelineShape] = ()
) -> list[PlannedStep]:
    """Steps that were planned, trained and committed one after the other. pipelines: of the job's nodes, if it has some."""
    done: list[PlannedStep] = []
    for index in range(steps):
        correction = await corrections.of_step(index, done, spec, 1)
        done.append(planned(spec, index, correction))
        if pipelines:
            form(spec, done[-1], pipelines)
        train(spec, done[-1], machine)
    return done


@pytest.mark.parametrize(
    ("machine", "execution"),
    [
        (MACHINE, {}),
        (MACHINE, {"schedule": "gpipe"}),
        (MACHINE, {"schedule": "eager", "in_flight": 4}),
        (MACHINE, {"schedule": "interleaved", "chunks": 2}),
        (SPLIT, {"schedule": "zero-bubble"}),
        (FROZEN, {"units": {"vision": {"frozen": True, "frozen_projector": True}}}),
        (MACHINE, {"units": {"llm": {"checkpointing": True}}}),
        (COLOCATED, {"trainer": "colocated", "meet": "microbatch"}),
        (COLOCATED, {"trainer": "colocated", "meet": "step"}),
    ],
    ids=["1f1b", "gpipe", "eager", "interleaved", "zero-bubble", "frozen", "checkpointing", "meet-microbatch", "meet-step"],
)
@pytest.mark.parametrize("store_url", ["embedded"], indirect=True)
async def test_a_job_whose_costs_are_wrong_by_three_in_one_unit_learns_what_its_steps_take(
    store: StateStore, machine: Correction, execution: dict[str, Any]
) -> None:
    spec = job(**execution)
    steps = await lived(Corrections("job", store), spec, machine, 3 * PERIOD_STEPS)
    for step in steps[-PERIOD_STEPS:]:
        assert step.forecast_s == pytest.approx(step.measured_s, rel=0.01)


@pytest.mark.parametrize("store_url", ["embedded"], indirect=True)
async def test_so_do_the_unequal_pipelines_of_nodes(store: StateStore) -> None:
    spec = job()
    machine = replace(MACHINE, units={unit: replace(lines, stages=()) for unit, lines in MACHINE.units.items()})
    steps = await lived(Corrections("job", store), spec, machine, 3 * PERIOD_STEPS, UNEQUAL)
    for step in steps[-PERIOD_STEPS:]:
        assert step.forecast_s == pytest.approx(step.measured_s, rel=0.01)


@pytest.mark.parametrize("store_url", ["embedded"], indirect=True)
async def test_the_correction_makes_the_plans_of_somebody_who_knew_the_costs_all_along(store: StateStore) -> None:
    spec = job("disttrain")
    [*_, last] = await lived(Corrections("job", store), spec, MACHINE, 3 * PERIOD_STEPS)
    knowing = planned(spec, last.index, MACHINE)
    assert last.plan is not None
    assert knowing.plan is not None
    assert last.plan.replicas == knowing.plan.replicas
    assert planned(spec, last.index).plan.replicas != knowing.plan.replicas  # type: ignore[union-attr]


@pytest.mark.parametrize("store_url", ["embedded"], indirect=True)
async def test_a_job_that_asks_for_the_same_plans_in_every_run_is_not_corrected(store: StateStore) -> None:
    spec = job(correct_costs=False)
    steps = await lived(Corrections("job", store), spec, MACHINE, 3 * PERIOD_STEPS)
    for step in steps:
        assert step.plan == planned(spec, step.index).plan


@pytest.mark.parametrize("store_url", ["embedded"], indirect=True)
async def test_whoever_plans_a_step_again_finds_the_correction_that_it_was_planned_with(store: StateStore) -> None:
    spec = job()
    steps = await lived(Corrections("job", store), spec, MACHINE, 2 * PERIOD_STEPS + 1)
    another = Corrections("job", store)  # of a process that took over
    for step in reversed(steps):
        correction = await another.of_step(step.index, steps[:LEAST_STEPS], spec, 1)
        again = planned(spec, step.index, correction)
        assert again.plan == step.plan


@pytest.mark.parametrize("store_url", ["embedded"], indirect=True)
async def test_before_enough_steps_are_measured_a_correction_stays_as_it_was(store: StateStore) -> None:
    spec = job()
    corrections = Corrections("job", store)
    measured = [planned(spec, index) for index in range(LEAST_STEPS)]
    for step in measured:
        train(spec, step, MACHINE)
    assert await corrections.of_step(0, (), spec, 1) == UNCORRECTED
    assert await corrections.of_step(PERIOD_STEPS, measured[1:], spec, 1) == UNCORRECTED
    fitted = await corrections.of_step(2 * PERIOD_STEPS, measured, spec, 1)
    assert fitted.units.keys() == STAGES.keys()
    former = measured  # of a generation whose plans may have been for other trainers
    assert await corrections.of_step(3 * PERIOD_STEPS, former, spec, 2) == fitted


def test_the_padding_of_packs_is_part_of_what_the_llm_was_measured_on() -> None:
    padded = job().model_copy(update={"pack_tokens": 4_096, "pad_to_max_length": True})
    plain = planned(job())
    step = planned(padded)
    num_packs, tokens = len(set(step.packs.values())), sum(probe.num_tokens for probe in step.probes.values())
    assert step.estimated["vision"].sum() == plain.estimated["vision"].sum()
    padding = num_packs * 4_096 / tokens
    assert padding > 1.05
    assert step.estimated["llm"].sum() == pytest.approx(padding * plain.estimated["llm"].sum())
    of_packs = [sum(step.estimated["llm"][i] for i in step.packs if step.packs[i] == pack) for pack in range(num_packs)]
    assert of_packs == pytest.approx([of_packs[0]] * num_packs), "they all have the same length"


@pytest.mark.parametrize("store_url", ["embedded"], indirect=True)
async def test_units_that_the_topology_has_no_more_are_not_corrected(store: StateStore) -> None:
    spec = job()
    steps = await lived(Corrections("job", store), spec, MACHINE, 2 * PERIOD_STEPS + 1)
    fewer = spec.with_topology(spec.topology.changed(stages={"encoder": 1, "llm": 2}))
    corrections = Corrections("job", store)
    before = await corrections.of_step(steps[-1].index, steps, spec, 1)
    after = await corrections.of_step(steps[-1].index, steps, fewer, 2)
    assert (before.units.keys(), after.units.keys()) == ({"vision", "llm"}, {"llm"})


@pytest.mark.parametrize("store_url", ["embedded"], indirect=True)
async def test_what_was_recorded_of_other_trainers_does_not_count(store: StateStore) -> None:
    spec = job()
    steps = await lived(Corrections("job", store), spec, MACHINE, 2 * PERIOD_STEPS + 1)
    frozen = spec.with_execution(ExecutionSpec(units={"vision": UnitExecution(frozen=True)}))
    assert await Corrections("job", store).of_step(steps[-1].index, steps, frozen, 2) == UNCORRECTED


@pytest.mark.parametrize("store_url", ["embedded"], indirect=True)
async def test_numbers_that_make_no_sense_do_not_end_the_job(store: StateStore) -> None:
    spec = job()
    steps = [planned(spec, index) for index in range(LEAST_STEPS)]
    strange = MeasuredWork(unit="llm", replica=-5, stage=0, kind=Kind.WEIGHT, microbatches=(0,), seconds=(1.0,))
    for step in steps:
        train(spec, step, MACHINE)
        step.commits[0] = replace(step.commits[0], measured=(*step.commits[0].measured, strange))
    correction = await Corrections("job", store).of_step(PERIOD_STEPS, steps, spec, 1)
    assert correction.units.keys() == STAGES.keys()


def test_trainers_of_another_kind_than_the_job_says_tell_nothing_about_it() -> None:
    colocated, pipeline = job(trainer="colocated"), job()
    step = planned(colocated)
    train(colocated, step, COLOCATED)
    execution = execution_of(pipeline, step.plan.topology)  # type: ignore[union-attr]
    assert observation(step, execution) is None


def test_what_a_stranger_reports_of_stages_and_microbatches_that_are_not_there_is_left_out() -> None:
    spec = job()
    step = planned(spec)
    train(spec, step, MACHINE)
    execution = execution_of(spec, step.plan.topology)  # type: ignore[union-attr]
    known = observation(step, execution)
    strange = MeasuredWork(unit="llm", replica=0, stage=7, kind=Kind.FORWARD, microbatches=(0, -1, 99), seconds=(1.0, 1.0, 1.0))
    infinite = MeasuredWork(
        unit="llm", replica=1, stage=0, kind=Kind.FORWARD, microbatches=(-1, 99, 0, 1), seconds=(1.0, 1.0, float("inf"), -1.0)
    )
    step.commits[0] = replace(step.commits[0], measured=(*step.commits[0].measured, strange, infinite))
    noisy = observation(step, execution)
    assert known is not None
    assert noisy is not None
    for key, line in known.units.items():
        assert noisy.units[key].measured_s.tolist() == line.measured_s.tolist()


async def test_a_job_that_goes_back_plans_its_steps_with_the_recorded_corrections(start: Start) -> None:
    run = await submit(await start(), window=4)
    await consume(run, run.open_session(0, 1), stop=5)
    recorded = await run._store.load_correction(run.name, PERIOD_STEPS)
    assert recorded is not None
    assert Correction.from_document(json.loads(recorded)) == UNCORRECTED
    special = Correction(units={"llm": UnitCorrection(scale=(7.0, 14.0, 0.0))})
    replaced = json.dumps({**json.loads(recorded), **special.to_document()})
    await run._store.save_correction(run.name, PERIOD_STEPS, replaced)
    await run.rewind(0)
    async for event in told_by(run.open_session(0, 1)):
        if isinstance(event, PlannedStep) and event.index == 0:
            break
    assert await run._store.load_correction(run.name, PERIOD_STEPS) == replaced
