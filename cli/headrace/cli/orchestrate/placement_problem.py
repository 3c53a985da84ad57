"""What `headrace orchestrate` is asked: the demand of a model on the samples of a data set, and the cluster for it."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.costs.reading_options import reading_spec, shown_source
from headrace.cli.orchestrate.allowed_grids import allowed_demand
from headrace.cli.orchestrate.stable_demand import stable_demand
from headrace.cli.planning import option_values
from headrace.errors import DatasetError, UserError
from headrace.model_shape import ModelShape
from headrace.plan import LLM
from headrace.published_models import PLANNED_MODELS
from headrace.schedule import SCHEDULES

if TYPE_CHECKING:
    from headrace.cli.costs.probed_data import ProbedData
    from headrace.reorder_service.planning.cost_model.measured_costs import MeasuredCosts
    from headrace.reorder_service.planning.orchestration.cluster import Cluster
    from headrace.reorder_service.planning.orchestration.demand import Demand
    from headrace.sample import Probe

MOST_GPUS = 1 << 14
"""More would take minutes to search."""
SAMPLES_PER_GPU = 4
"""Of a global batch, where the user names none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementProblem:
    """A model to be placed, with the data that it is to be trained on."""

    model: str
    shape: ModelShape
    data: ProbedData
    probes: Sequence[Probe]
    """Those of the data that the model has units for, in the order of the demand's samples."""
    demand: Demand
    frozen: tuple[str, ...]
    checkpointing: tuple[str, ...]
    coefficients: Any
    """Content of the user's file of measured times; None: operations are counted."""
    coefficients_file: Path | None
    notes: tuple[str, ...]
    """What the user should know of the data, one sentence each."""


def cluster_asked(args: argparse.Namespace) -> Cluster:
    """Return the cluster of --device or --cluster with --gpus. Raises UserError."""
    from headrace.reorder_service.planning.orchestration.cluster import CLUSTERS, cluster_of
    from headrace.user_document import read_yaml

    if (args.device is None) == (args.cluster is None):
        raise UserError("say what the GPUs are: --device NAME, or --cluster FILE.yaml with all of it, not both")
    if args.device is not None and args.device not in CLUSTERS:
        raise UserError(f"no device {args.device!r}; there are {', '.join(CLUSTERS)}; --cluster FILE.yaml describes any other")
    if args.gpus is None and args.cluster is None:
        raise UserError("--gpus says how many there are, and is missing")
    if args.gpus is not None and not 1 <= args.gpus <= MOST_GPUS:
        raise UserError(f"--gpus must be from 1 to {MOST_GPUS:,}, got {args.gpus}")
    try:
        described = None if args.cluster is None else _with_numbers(read_yaml(args.cluster, "cluster"))
        cluster = CLUSTERS[args.device] if args.device else cluster_of(described, str(args.cluster))
        return cluster if args.gpus is None else cluster.of_gpus(args.gpus)
    except ValueError as err:
        raise UserError(str(err)) from err


def _with_numbers(document: Any) -> Any:
    """Return a document with numbers for texts that are some: YAML 1.1 reads 989e12, which has no point, as text."""
    if not isinstance(document, dict):
        return document
    numbers = {}
    for name, value in document.items():
        try:
            numbers[name] = float(value) if isinstance(value, str) else value
        except ValueError:
            numbers[name] = value
    return numbers


def placement_problem(args: argparse.Namespace) -> PlacementProblem:
    """Read the data set and return what is to be placed. Raises UserError, SpecError and DatasetError."""
    from headrace.cli.costs.probed_data import probe_data
    from headrace.reorder_service.planning.orchestration.model_demand import Training, demand_of, units_of

    if args.path is None and args.spec is None:
        raise UserError("say what the model is to be trained on: --data PATH, or the sources of a job, --spec JOB.yaml")
    if args.model not in PLANNED_MODELS:
        raise UserError(f"no model {args.model!r}; there are {', '.join(PLANNED_MODELS)}")
    if args.schedule not in SCHEDULES:
        raise UserError(f"no schedule {args.schedule!r}; there are {', '.join(SCHEDULES)}")
    for flag, number, most in (("--global-batch", args.global_batch, 1 << 20), ("--chunks", args.chunks, 256)):
        if number is not None and not 1 <= number <= most:
            raise UserError(f"{flag} must be from 1 to {most:,}, got {number}")
    if args.chunks > 1 and args.schedule != "interleaved":
        raise UserError(f"--chunks {args.chunks} needs --schedule interleaved, got {args.schedule}")
    cluster, shape = cluster_asked(args), PLANNED_MODELS[args.model]
    document = None if args.coefficients is None else _document(args.coefficients)
    spec = reading_spec(args, {"name": "orchestrated"}, {"path": args.path})
    told = str(args.path) if args.spec is None else f"--spec {args.spec}"
    data = probe_data(spec, args.limit, shown=shown_source(args), told=told)
    probes, left_out = _taken(data.probes, shape, args.model)
    if not probes:
        raise DatasetError(f"{shown_source(args)} has no sample that {args.model} takes: {left_out}")
    units = units_of(shape, probes)
    if units == (LLM,):
        raise UserError(
            f"no sample of {shown_source(args)} has what {args.model} has an encoder or a generator for, so there is one unit "
            "only and nothing to place: take data with images or recordings, or another model"
        )
    unused = [unit for unit in shape.units if unit != "encoder" and shape.units[unit].layers and unit not in units]
    notes = [left_out] * bool(left_out)
    notes += [f"no sample needs {unit}, which is left out of the placement" for unit in unused]
    frozen, checkpointing = (
        option_values.parse_units(flag, text, units)
        for flag, text in (("--frozen", args.frozen), ("--checkpointing", args.checkpointing))
    )
    training = Training(
        global_batch=args.global_batch or SAMPLES_PER_GPU * cluster.num_gpus,  # more, where that is below b_min
        frozen=frozen,
        checkpointing=checkpointing,
        schedule=args.schedule,
        chunks=args.chunks,
    )
    try:
        measured = None if document is None else _measured(document, args.model, shape, units)
        demand = demand_of(
            probes, shape, cluster, training,
            image=data.spec.image, audio=data.spec.audio, vocab=0 if shape.llm.vocab else data.vocab, measured=measured,
        )  # fmt: skip
    except ValueError as err:
        raise UserError(f"{args.coefficients}: {err}" if document is not None else str(err)) from err
    demand = allowed_demand(demand, dp=args.dp, tp=args.tp, pp=args.pp)
    demand, note = stable_demand(demand, args)
    notes += [note] * bool(note)
    return PlacementProblem(
        model=args.model,
        shape=shape,
        data=data,
        probes=probes,
        demand=demand,
        frozen=frozen,
        checkpointing=checkpointing,
        coefficients=document,
        coefficients_file=args.coefficients,
        notes=tuple(notes),
    )


def _taken(probes: Sequence[Probe], shape: ModelShape, model: str) -> tuple[list[Probe], str]:
    """Return the samples that a model has encoders for, and what is said of the others."""
    taken = [
        probe
        for probe in probes
        if (shape.vision.layers or not probe.image_patches) and (shape.audio.layers or not probe.mel_frames)
    ]
    if len(taken) == len(probes):
        return taken, ""
    lacking = "recordings" if not shape.audio.layers else "images"
    return taken, (
        f"{len(probes) - len(taken):,} samples with {lacking} are left out, for which {model} has no encoder: "
        "take them out of the sources of the job too"
    )


def _document(path: Path) -> Any:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror}") from err
    except ValueError as err:
        raise UserError(f"{path} is not JSON: {err}") from err
    for where, positions, seconds in _measurements(document, ""):
        pairs = sorted(zip(positions, seconds, strict=False))
        for (x, y), (longer, less) in itertools.pairwise(pairs):
            if less < y and longer > x:
                raise UserError(
                    f"{path}: {where} takes {less:g} s on {longer:g} positions and {y:g} s on {x:g}: costs that fall with size "
                    "are no costs of a layer; measure it again with `headrace profile`"
                )
    return document


def _measurements(document: Any, where: str) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yield the place, the positions and the seconds of every layer that is given by measurements."""
    if isinstance(document, Mapping):
        positions, seconds = document.get("positions"), document.get("seconds")
        numbers = [*positions, *seconds] if isinstance(positions, list) and isinstance(seconds, list) else [None]
        if all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
            yield where, document["positions"], document["seconds"]
        for name, value in document.items():
            yield from _measurements(value, f"{where}.{name}".lstrip("."))
    elif isinstance(document, list):
        for place, value in enumerate(document):
            yield from _measurements(value, f"{where}[{place}]")


def _measured(document: Any, model: str, shape: ModelShape, units: Sequence[str]) -> dict[int, MeasuredCosts]:
    """Return the measured costs by tensor-parallel width, of all widths that were measured of all units.

    Raises ValueError, also where none was.
    """
    from headrace.reorder_service.planning.cost_model.coefficients_document import parse_coefficients
    from headrace.reorder_service.planning.orchestration.model_demand import WIDTHS

    found, refusal = {}, None
    for tp in WIDTHS:
        try:
            costs = parse_coefficients(document, dict.fromkeys(units, tp))
        except ValueError as err:
            refusal = refusal or err
            continue
        costs.check_model(model, shape, units)
        found[tp] = dataclasses.replace(costs, parts={part: of for part, of in costs.parts.items() if part in units})
    if not found:
        assert refusal is not None
        raise refusal
    return found
