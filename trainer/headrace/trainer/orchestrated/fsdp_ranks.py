"""The places of FSDP ranks, each of which has all units, and the checks that a job is planned for as many of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import UserError
from headrace.execution_spec import FSDP, ExecutionSpec, UnitExecution
from headrace.plan import LLM
from headrace.spec import JobSpec
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.topology import PipelineTopology


def topology_of(spec: JobSpec, num_ranks: int, settings: Mapping[str, Any] | None = None) -> PipelineTopology:
    """Return the topology of a job's ranks: rank r has replica r of every unit, whole, so that its places are r, r + n, ...

    settings: what a topology file says besides units (`model`, `optimizer`, `dropout`). Raises UserError where the job is not
    planned for so many FSDP ranks.
    """
    check_planned(spec, num_ranks)
    units = {}
    for unit in spec.topology.stages:
        said = spec.execution.units.get(unit, UnitExecution())
        units[unit] = {**said.model_dump(exclude={"cp"}), "dp": num_ranks, "pp": 1, "on": None if unit == LLM else LLM}
    return PipelineTopology.model_validate({**(settings or {}), "units": units})


def planned_for_ranks(spec: JobSpec, num_ranks: int) -> JobSpec:
    """Return the spec of a job that is planned for so many FSDP ranks; what of its units is frozen or checkpointed stays so.

    Raises SpecError where the job has other units than FSDP ranks take.
    """
    units = {
        unit: UnitExecution(
            frozen=size.frozen,
            frozen_layers=size.frozen_layers,
            frozen_projector=size.frozen_projector,
            checkpointing=bool(size.checkpointing),  # "auto" is of pipelines, whose memory it forecasts
            fp32_residual_connection=size.fp32_residual_connection,
            cp=size.cp,
        )
        for unit, size in spec.execution.units.items()
    }
    execution = ExecutionSpec(
        trainer=FSDP,
        units={unit: size for unit, size in units.items() if size != UnitExecution()},
        coefficients=spec.execution.coefficients,
        correct_costs=spec.execution.correct_costs,
    )
    topology = spec.topology.changed(replicas=num_ranks, stages=dict.fromkeys(spec.topology.stages, 1))
    return spec.planned_for(topology, execution)


def check_planned(spec: JobSpec, num_ranks: int) -> None:
    """Raise UserError unless the job is planned for so many FSDP ranks."""
    if spec.execution.trainer != FSDP:
        planned = f"trainer: {spec.execution.trainer}" if spec.execution.trainer else "no trainer"
        raise UserError(
            f"job {spec.name!r} says {planned} in its execution, and these are FSDP ranks: set execution: {{trainer: fsdp}} in a "
            "job with a name of its own, or leave out --fsdp"
        )
    if spec.topology.replicas != num_ranks:
        raise UserError(
            f"job {spec.name!r} is planned for {spec.topology.replicas} FSDP ranks, and there are {num_ranks}: start "
            f"{spec.topology.replicas} processes by torchrun, or plan it anew with `headrace job topology {spec.name} --replicas "
            f"{num_ranks}`"
        )


def check_undeferred(step: int, routes: Routes, topology: PipelineTopology) -> None:
    """Raise UserError for a plan in which a sample is in the LLM in a later microbatch than in an encoder."""
    for unit in topology.units:
        for replica in range(topology.units[unit].dp):
            for portion in routes.portions(unit, replica):
                if portion.forward != portion.backward:
                    raise UserError(
                        f"step {step} defers sample {portion.samples[0]} from microbatch {portion.forward} of {unit} to "
                        f"{portion.backward} of the LLM, and FSDP ranks take a sample's units in one: set strategy to orchmllm"
                    )
