"""From what a job says of its trainers to what the planner needs to know of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from headrace.backward_factors import BackwardTimes, backward_factors, weight_factor
from headrace.errors import SpecError
from headrace.execution_spec import COLOCATED, FSDP, ExecutionSpec, UnitExecution
from headrace.model_shape import MODEL_SHAPES
from headrace.peer_spec import load_stored_json
from headrace.plan import LLM, Topology
from headrace.reorder_service.planning.cost_model.coefficients_document import parse_coefficients
from headrace.reorder_service.planning.cost_model.cost import SampleCosts, estimate
from headrace.reorder_service.planning.cost_model.measured_costs import MeasuredCosts
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.post_balancing_options import PostBalancing
from headrace.reorder_service.planning.sharing import Sharing
from headrace.reorder_service.planning.stratification_options import Stratification
from headrace.reorder_service.store.state import JobRecord
from headrace.sample import Probe
from headrace.spec import JobSpec
from headrace.topology_spec import TopologySpec

PLANNING_SHARE = 0.8  # of a service's memory that one job's planning may take
SLOT_BYTES, SAMPLE_BYTES = 820, 1_024  # of a plan's simulation, and of a sample planned ahead: the figures of headrace.limits


def submitted_spec(record: JobRecord) -> JobSpec:
    """Return the spec with which a stored job was submitted. Raises SpecError where the record does not hold a valid one."""
    return load_stored_json(JobSpec, record.spec_json, "job spec", record.chosen_json)


def planned_spec(record: JobRecord) -> JobSpec:
    """Return the spec of a stored job with the topology and the execution that its steps are planned for now.

    Raises SpecError where the record does not hold valid ones.
    """
    changes = dict[str, object]()
    if record.topology_json:
        changes["topology"] = load_stored_json(TopologySpec, record.topology_json, "topology", record.chosen_json)
    if record.execution_json:
        changes["execution"] = load_stored_json(ExecutionSpec, record.execution_json, "execution", record.chosen_json)
    return submitted_spec(record).model_copy(update=changes)


def measured_costs(spec: ExecutionSpec) -> MeasuredCosts | None:
    """Return the measured costs that a job gives of its model's layers; None if it gives none.

    Raises ValueError, also where they are of another number of slices than the job's units have.
    """
    return None if spec.coefficients is None else parse_coefficients(spec.coefficients, spec.widths())


def check_coefficients(spec: JobSpec) -> None:
    """Raise SpecError for a job whose coefficients are not valid, are of another model, or lack a part of its units."""
    try:
        costs = measured_costs(spec.execution)
        if costs is not None:
            costs.check_model(spec.model, MODEL_SHAPES[spec.model], spec.topology.stages)
    except ValueError as err:
        raise SpecError(f"execution.coefficients: {err}") from err


def check_memory(spec: JobSpec, memory_bytes: float) -> None:
    """Raise SpecError for a job whose planning would take more than PLANNING_SHARE of a service's memory, `memory_bytes`."""
    topology, samples = spec.topology, spec.window * spec.global_batch
    slots = topology.replicas * topology.microbatches * sum(topology.stages.values())
    needed = SLOT_BYTES * slots + SAMPLE_BYTES * samples
    if needed > PLANNING_SHARE * memory_bytes:
        raise SpecError(
            f"planning {samples} samples ahead (window x global_batch) on {slots} slots (replicas x microbatches x stages) takes "
            f"about {needed / 2**30:.1f} GiB, and the reorder service may use {PLANNING_SHARE:g} of {memory_bytes / 2**30:.1f} "
            "GiB for it: lower one of them, or give the service more memory"
        )


def where_ranks_meet(spec: ExecutionSpec) -> Literal["", "microbatch", "step", "phases"]:
    """Return where ranks that have all units wait for each other (`Execution.colocated`); empty for pipelines."""
    return "phases" if spec.trainer == FSDP else spec.meet if spec.trainer == COLOCATED else ""


def execution_of(job: JobSpec, topology: Topology) -> Execution:
    """Return how the job's trainers run plans for this topology, as the planner and its simulator see it.

    Samples may change their replica between units only in a job that says that its trainers are pipelines, or FSDP ranks.
    """
    spec, orchmllm = job.execution, job.orchmllm
    frozen, layers = spec.of_units("frozen"), MODEL_SHAPES[job.model].units
    frozen_shares = {unit: number / layers[unit].layers for unit, number in spec.of_units("frozen_layers").items()}
    costs = measured_costs(spec)
    measured = {} if costs is None else costs.backward_times(topology.stages)
    factors = backward_factors(
        topology.stages,
        frozen=frozen,
        frozen_projectors=spec.of_units("frozen_projector"),
        frozen_shares=frozen_shares,
        checkpointing=[unit for unit, value in spec.of_units("checkpointing").items() if value is True],
        measured=measured,
    )
    execution = Execution(
        colocated=where_ranks_meet(spec),
        cp=spec.cp if spec.trainer == FSDP else 1,
        max_tokens=spec.max_tokens,
        schedule=spec.schedule,
        chunks=spec.chunks,
        in_flight=spec.in_flight,
        backward_factors=factors,
        weight_gradient_factors={
            unit: weight_factor(
                frozen=unit in frozen, frozen_share=frozen_shares.get(unit, 0.0), times=measured.get(unit, BackwardTimes())
            )
            for unit in topology.stages
        },
        exchange_s=spec.of_units("exchange_s"),
        latency_s=spec.latency_us / 1e6,
        bytes_per_s=math.inf if spec.bandwidth_gb_s is None else spec.bandwidth_gb_s * 1e9,
        may_cross_replicas=spec.trainer in ("pipeline", FSDP),
        memory_limit=math.inf if spec.memory_gib is None else spec.memory_gib * 2**30,
        unit_replicas=spec.unit_replicas(topology.replicas),
        sharing=_sharing_of(spec, topology),
        stratification=Stratification(coarse_quantile=job.entrain.coarse_quantile),
        post_balancing=PostBalancing(
            forms=orchmllm.forms,
            quadratic=orchmllm.quadratic,
            tolerance=orchmllm.tolerance,
            ranks_per_node=orchmllm.ranks_per_node,
        ),
    )
    fixed = {} if costs is None else costs.microbatch_s(topology.stages, factors)
    return replace(execution, microbatch_s={unit: execution.by_kind(unit, *seconds) for unit, seconds in fixed.items()})


def sample_costs_of(
    job: JobSpec, probes: Sequence[Probe], *, units: Sequence[str], execution: Execution, vocab: int
) -> SampleCosts:
    """Return the estimated costs of samples in the units of a job's trainers.

    execution: of the job. vocab: size of its vocabulary, 0 if it is not known. Raises ValueError as `estimate` does. Ranks of a
    pipeline that share a sequence take equal parts of what it costs; what they send each other is not counted.
    """
    spec, costs = job.execution, measured_costs(job.execution)
    estimated = estimate(
        probes,
        MODEL_SHAPES[job.model],
        image=job.image,
        audio=job.audio,
        vocab=vocab,
        units=units,
        measured=None if costs is None else costs.coefficients,
        tp=spec.of_units("tp"),
        checkpointing=spec.of_units("checkpointing"),
        frozen=spec.of_units("frozen"),
        bf16_residual=spec.of_units("fp32_residual_connection"),
        backward_factors=execution.backward_factors,
    )
    return estimated.shared(LLM, spec.cp) if spec.trainer == "pipeline" and spec.cp != "auto" else estimated


def _sharing_of(spec: ExecutionSpec, topology: Topology) -> Sharing | None:
    guests = spec.of_units("on")
    if not guests:
        return None
    sizes = {unit: spec.units.get(unit, UnitExecution()) for unit in topology.stages}
    return Sharing(
        order=spec.sharing,
        slices={unit: size.num_slices for unit, size in sizes.items() if unit in (*guests, LLM)},
        pieces=spec.of_units("pieces"),
    )
