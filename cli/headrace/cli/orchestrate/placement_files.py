"""The files of a placement: the job, the pipeline's topology, its costs, what starts it, and the commands that emulate it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from headrace.cli.orchestrate.launch_files import Launch, LaunchCommands, write_launch_files
from headrace.model_shape import MODEL_SHAPES
from headrace.plan import LLM

if TYPE_CHECKING:
    from headrace.cli.orchestrate.placement_problem import PlacementProblem
    from headrace.reorder_service.planning.batch import Ints
    from headrace.reorder_service.planning.orchestration.candidate import Candidate
    from headrace.reorder_service.planning.orchestration.judgement import Judgement

JOB, TOPOLOGY, COSTS = "job-execution.yaml", "topology.yaml", "costs.parquet"
_GIB, _MICRO = 2.0**30, 1e6
_EMULATED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFiles:
    """What was written, and the commands that go with it."""

    paths: tuple[Path, ...]
    launch: LaunchCommands
    """Start the trainers."""
    processes: int
    """Number of trainers in all."""
    emulate: str
    """Runs the pipelines with sleeps for computing; empty without a candidate that has pipelines."""
    emulated_processes: int
    small: str
    """Emulates one of so many equal groups of replicas; empty where there is only one."""
    small_processes: int


def write_files(
    out: Path, problem: PlacementProblem, best: Judgement, pipelines: Judgement | None, batches: Ints
) -> PlacementFiles:
    """Write the files of the best placement into a folder.

    pipelines: the best candidate with pipelines, whose costs and commands of emulation are written, if there is one.
    """
    paths = [out / JOB]
    head = f"# {problem.model} on {problem.demand.cluster.num_gpus} x {problem.demand.cluster.name}, by headrace orchestrate\n"
    (out / JOB).write_text(head + yaml.safe_dump(job_of(problem, best), sort_keys=False), encoding="utf-8")
    if best.candidate.placement != "colocated":
        hint = "" if problem.model in MODEL_SHAPES else "# model: {whole: FOLDER}  # of the published model, see docs/models.md\n"
        (out / TOPOLOGY).write_text(
            head + hint + yaml.safe_dump(topology_of(problem, best.candidate), sort_keys=False), encoding="utf-8"
        )
        paths.append(out / TOPOLOGY)
    launched, launch = write_launch_files(out, launch_of(problem, best.candidate))
    emulate = small = ""
    groups, emulated = 1, 0
    if pipelines is not None:
        _write_costs(out / COSTS, problem, pipelines.candidate, batches)
        paths.append(out / COSTS)
        candidate = pipelines.candidate
        groups = math.gcd(problem.demand.global_batch, *(grid.dp for grid in candidate.grids.values()))
        emulated = sum(
            grid.gpus if candidate.guests and unit == LLM else grid.dp * grid.pp
            for unit, grid in candidate.grids.items()
            if unit not in candidate.guests
        )
        emulate = emulate_command(out / COSTS, problem, pipelines, 1)
        small = emulate_command(out / COSTS, problem, pipelines, groups) if groups > 1 else ""
    return PlacementFiles(
        paths=(*paths, *launched),
        launch=launch,
        processes=best.candidate.gpus,
        emulate=emulate,
        emulated_processes=emulated,
        small=small,
        small_processes=emulated // groups,
    )


def launch_of(problem: PlacementProblem, candidate: Candidate) -> Launch:
    """Return what is started on which nodes. Matrix products are in bfloat16, unless the user's times are of something else."""
    cluster = problem.demand.cluster
    colocated = candidate.placement == "colocated"
    measured_on = {} if problem.coefficients is None else problem.coefficients.get("measured_on", {})
    return Launch(
        title=f"{problem.model} on {cluster.num_gpus} x {cluster.name}",
        job=problem.data.spec.name,
        spec=JOB,
        processes=candidate.gpus,
        per_node=min(cluster.gpus_per_node, candidate.gpus),
        precision="fp32" if measured_on.get("dtype") == "fp32" else "bf16",
        topology="" if colocated or problem.model in MODEL_SHAPES else TOPOLOGY,
        has_own_loop=colocated,
    )


def job_of(problem: PlacementProblem, judgement: Judgement) -> dict[str, Any]:
    """Return the job that is planned for a placement, as plain data of a job spec."""
    demand, candidate, spec = problem.demand, judgement.candidate, problem.data.spec
    grids, llm = candidate.grids, candidate.grids[LLM]
    colocated = candidate.placement == "colocated"
    units = {}
    for unit in demand.units:
        said: dict[str, Any] = {}
        if not colocated:
            said |= _guest(candidate, unit.name)
            said |= _cuts(problem, candidate, unit.name)
            said |= {"dp": grids[unit.name].dp} if grids[unit.name].dp != llm.dp else {}
            said |= {"tp": grids[unit.name].tp} if grids[unit.name].tp > 1 else {}
            said |= _exchange(problem, candidate, unit.name)
        said |= {"frozen": True} if unit.name in problem.frozen else {}
        said |= {"checkpointing": True} if unit.name in problem.checkpointing else {}
        if said:
            units[unit.name] = said
    execution: dict[str, Any] = {"trainer": "colocated"} if colocated else _of_pipelines(problem, candidate)
    execution |= {"units": units} if units else {}
    execution["coefficients"] = coefficients_of(problem, candidate)
    sections = {
        name: dumped
        for name in ("image", "audio", "text")
        if (dumped := getattr(spec, name).model_dump(mode="json", exclude_defaults=True))
    }
    return {
        "name": spec.name,
        "sources": [source.model_dump(mode="json", exclude_defaults=True) for source in spec.sources],
        "global_batch": demand.global_batch,
        **({"model": problem.model} if problem.model in MODEL_SHAPES else {}),
        **sections,
        "topology": {
            "replicas": llm.dp,
            "microbatches": candidate.microbatches,
            "stages": {unit: grid.pp for unit, grid in grids.items()},
        },
        "execution": execution,
    }


def _of_pipelines(problem: PlacementProblem, candidate: Candidate) -> dict[str, Any]:
    from headrace.reorder_service.planning.orchestration.judge import execution_of, room_bytes

    demand = problem.demand
    said: dict[str, Any] = {"trainer": "pipeline", "schedule": demand.schedule}
    said |= {"chunks": demand.chunks} if demand.chunks > 1 else {}
    said |= {"sharing": candidate.sharing} if candidate.guests else {}
    said |= {} if candidate.in_flight is None else {"in_flight": candidate.in_flight}
    execution = execution_of(demand, candidate)
    said |= {"bandwidth_gb_s": execution.bytes_per_s / 1e9, "latency_us": round(execution.latency_s * _MICRO, 6)}
    if problem.model in MODEL_SHAPES:  # of others the planner does not know the activations
        said["memory_gib"] = round(min(room_bytes(demand, candidate).values()) / _GIB, 3)
    return said


def _guest(candidate: Candidate, unit: str) -> dict[str, Any]:
    """Return what is said of a unit on the LLM's GPUs, besides its grid; nothing of others."""
    if unit not in candidate.guests:
        return {}
    return {"on": LLM, **({"pieces": candidate.pieces} if candidate.pieces > 1 else {})}


def _cuts(problem: PlacementProblem, candidate: Candidate, unit: str) -> dict[str, Any]:
    """Return where the LLM is cut into stages; nothing of others, which the trainers cut alike."""
    from headrace.reorder_service.planning.orchestration.stage_cuts import first_layers

    parts = candidate.grids[unit].pp * problem.demand.chunks
    if unit != LLM or parts == 1:
        return {}
    [demand] = [one for one in problem.demand.units if one.name == unit]
    return {"cuts": list(first_layers(demand, parts))}


def _exchange(problem: PlacementProblem, candidate: Candidate, name: str) -> dict[str, Any]:
    from headrace.reorder_service.planning.orchestration.judge import execution_of

    seconds = execution_of(problem.demand, candidate).exchange_s.get(name, (0.0, 0.0))
    return {"exchange_s": [float(f"{one_s:.4g}") for one_s in seconds]} if sum(seconds) > 0 else {}


def coefficients_of(problem: PlacementProblem, candidate: Candidate) -> Any:
    """Return the costs of the model's layers at the candidate's widths, in the form of a coefficients file.

    They are those of the user, or counted at the cluster's rate. A model that the trainer has no name for is named as that of
    each part, since the job's own model has other layers.
    """
    from headrace.reorder_service.planning.cost_model.coefficients import TARGETS, total
    from headrace.reorder_service.planning.cost_model.coefficients_document import document_of
    from headrace.reorder_service.planning.cost_model.cost import DEVICE_FLOPS_PER_S, nominal_coefficients
    from headrace.reorder_service.planning.cost_model.measured_costs import MeasuredCosts, PartCosts

    if problem.coefficients is not None:
        return problem.coefficients
    cluster, spec, shape = problem.demand.cluster, problem.data.spec, problem.shape
    rate = DEVICE_FLOPS_PER_S / (cluster.flops_per_s * cluster.efficiency)

    widths = {unit: grid.tp for unit, grid in candidate.grids.items()}
    vocab = 0 if shape.llm.vocab else problem.data.vocab
    [llm] = [unit for unit in problem.demand.units if unit.name == LLM]
    reruns = llm.backward_factor if LLM in problem.checkpointing else 0.0
    layers = nominal_coefficients(shape, image=spec.image, audio=spec.audio, vocab=vocab, tp=widths, reruns=reruns)
    ends = {unit: {"ends": layers[unit][shape.units[unit].layers :]} for unit in widths if unit != LLM}
    ends[LLM] = {TARGETS: layers[TARGETS]} if TARGETS in layers else {}
    parts = {
        unit: PartCosts(
            layers=tuple(layer.scaled(rate) for layer in layers[unit][: shape.units[unit].layers]),
            ends={name: total(costs).scaled(rate) for name, costs in ends[unit].items()},
            tp=tp,
        )
        for unit, tp in widths.items()
    }
    known = problem.model in MODEL_SHAPES
    return document_of(
        MeasuredCosts(
            parts=parts,
            model=problem.model if known else "",
            huggingface={} if known else dict.fromkeys(parts, problem.model),
            measured_on={"counted": f"at {cluster.efficiency:.0%} of the peak of {cluster.name}"},
        )
    )


def topology_of(problem: PlacementProblem, candidate: Candidate) -> dict[str, Any]:
    """Return the topology of the trainers, as plain data of the file of `headrace train --topology`."""
    units: dict[str, Any] = {}
    for unit, grid in candidate.grids.items():
        units[unit] = _guest(candidate, unit)
        units[unit] |= {"dp": grid.dp, "tp": grid.tp, "pp": grid.pp}
        units[unit] |= _cuts(problem, candidate, unit)
        units[unit] |= {"frozen": True} if unit in problem.frozen else {}
        units[unit] |= {"checkpointing": True} if unit in problem.checkpointing else {}
    said: dict[str, Any] = {"schedule": problem.demand.schedule}
    said |= {"chunks": problem.demand.chunks} if problem.demand.chunks > 1 else {}
    said |= {"sharing": candidate.sharing} if candidate.guests else {}
    said |= {} if candidate.in_flight is None else {"in_flight": candidate.in_flight}
    return {**said, "units": units}


def _write_costs(path: Path, problem: PlacementProblem, candidate: Candidate, batches: Ints) -> None:
    """Write what the samples of the judge's batches cost at the candidate's widths, one batch after the other."""
    from headrace.cli.costs.cost_table import CostTableWriter

    rows = batches.ravel()
    probes = [problem.probes[row] for row in rows.tolist()]
    widths: Mapping[str, int] = {unit: grid.tp for unit, grid in candidate.grids.items()}
    units = problem.demand.units
    with CostTableWriter(path) as writer:
        writer.add(
            [probe.name for probe in probes],
            np.array([probe.num_tokens for probe in probes], np.int64),
            {unit.name: unit.forward_s[widths[unit.name]][rows] for unit in units},
            {unit.name: unit.kept_bytes[widths[unit.name]][rows] for unit in units},
            {unit.name: unit.sent_bytes[rows] for unit in units},
        )


def emulate_command(costs: Path, problem: PlacementProblem, judgement: Judgement, groups: int) -> str:
    """Return the command that emulates a candidate's pipelines: all of them, or one of `groups` equal groups of replicas."""
    candidate, demand = judgement.candidate, problem.demand
    grids = candidate.grids
    own = [f"{unit}={grid.dp // groups}" for unit, grid in grids.items() if grid.dp != grids[LLM].dp]
    options = [
        "headrace", "train", "--emulate", str(costs), "--global-batch", str(demand.global_batch // groups),
        "--steps", str(_EMULATED_STEPS), "--replicas", str(grids[LLM].dp // groups), *(["--dp", ",".join(own)] if own else []),
        "--microbatches", str(candidate.microbatches), "--stages", ",".join(f"{unit}={grid.pp}" for unit, grid in grids.items()),
        "--strategy", judgement.strategy, "--crossing", "--schedule", demand.schedule,
    ]  # fmt: skip
    options += ["--chunks", str(demand.chunks)] if demand.chunks > 1 else []
    options += [] if candidate.in_flight is None else ["--in-flight", str(candidate.in_flight)]
    if candidate.guests:
        widths = ",".join(f"{unit}={grids[unit].tp}" for unit in (*candidate.guests, LLM))
        options += ["--on-llm", ",".join(candidate.guests), "--sharing", str(candidate.sharing), "--tp", widths]
        cut = ",".join(f"{unit}={candidate.pieces}" for unit in candidate.guests)
        options += ["--pieces", cut] if candidate.pieces > 1 else []
    options += [] if problem.coefficients_file is None else ["--coefficients", str(problem.coefficients_file)]
    for flag, named in (("--frozen", problem.frozen), ("--checkpointing", problem.checkpointing)):
        options += [flag, ",".join(named)] if named else []
    return shlex.join(options)
