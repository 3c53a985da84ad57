"""Headrace's own trainer in a disaggregated pipeline: what each of its processes runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headrace.errors import UserError
from headrace.manifest import Vocabulary
from headrace.measured import MeasuredWork
from headrace.observability.logs import pairs
from headrace.spec import JobSpec
from headrace.trainer.devices import check_device, local_device, warn_quadratic_attention, warn_unproven
from headrace.trainer.evaluation import Evaluations
from headrace.trainer.hang_detection import HANG_TIMEOUT_S
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.glue import GluedModel, in_units
from headrace.trainer.models.whole_model import WholeModel
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.agreement import check_alike, training_record, warn_differences
from headrace.trainer.pipeline.beginning import begin_from, goes_on
from headrace.trainer.pipeline.checkpoint import CheckpointWriter, load
from headrace.trainer.pipeline.checkpoint_files import TRAINING_RECORD
from headrace.trainer.pipeline.feed import PipelineLoader
from headrace.trainer.pipeline.layer_partition import bounds, with_cuts
from headrace.trainer.pipeline.memory_forecast import log_measured
from headrace.trainer.pipeline.pipeline_step import PipelineStep
from headrace.trainer.pipeline.places_loader import PlacesLoader
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.rank_progress import PROGRESS
from headrace.trainer.starting import check_fresh, num_ranks, process_group, rank, watched
from headrace.trainer.train_step import PRECISIONS, log_step
from headrace.transport.base import TRANSPORTS
from headrace.validation_spec import evaluation_of

log = logging.getLogger(__name__)


def train_pipeline(
    endpoint: str,
    *,
    job: str,
    topology: PipelineTopology,
    model_name: str = "",
    threads: int | None = None,
    transports: Sequence[str] = TRANSPORTS,
    precision: str = "fp32",
    checkpoint: Path | None = None,
    checkpoint_every: int = 100,
    resume: Path | None = None,
    device: torch.device | None = None,
    fresh_weights: bool = False,
    hang_timeout_s: float = HANG_TIMEOUT_S,
    evaluate_every: int | None = None,
    make_model: Callable[[JobSpec, Vocabulary], GluedModel] | None = None,
) -> None:
    """Train until the job's last step is committed, as one of the processes that torchrun started.

    Without `resume`, training starts with fresh weights. Raises UserError if the job is not done but has committed steps already,
    unless `fresh_weights`, and if topology, model, job, checkpoint, device and number of processes do not fit each other.

    `model_name`, `threads`, `transports`, `precision`, `device`, `hang_timeout_s`, `evaluate_every`: as in `train.train`.
    `checkpoint`: folder, visible to all processes, for checkpoints after every `checkpoint_every` steps and after the last one.
    `resume`: folder with checkpoints of the job, of any topology; the job goes back to the newest complete one, or, where that is
    `checkpoint` and has none yet, to its first step.
    `make_model`: makes a model of modules of the user's in place of the topology's, in every process, which keeps its unit of it.
    It must give all processes equal weights.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    with watched(hang_timeout_s) as watch:
        topology.check_world(num_ranks())
        device = device or local_device()
        check_device(device)
        warn_unproven(device.type, num_ranks())
        places = topology.places(rank())
        PROGRESS.place = " and ".join(map(str, places))
        loaders = [
            PipelineLoader(endpoint, job=job, topology=topology, place=place, device=device, transports=transports)
            for place in places
        ]
        with PlacesLoader(loaders) as loader:
            begin = begin_from(endpoint, job, loader, resume=resume, checkpoint=checkpoint, every=checkpoint_every, watch=watch)
            name = model_name or loader.spec.model
            _check_units(loader, topology)
            topology.check_execution(loader.spec.execution, loader.spec.topology.stages)
            model = _model(loader, topology, name, make_model)
            topology.check(num_ranks(), model.shape)
            warn_quadratic_attention(device.type, precision, model.shape)
            spec = loader.spec
            topology = with_cuts(topology, model.shape, vocab_size=loader.vocabulary.size, image=spec.image, audio=spec.audio)
            settings = topology.optimizer.resolved(name, model.pretrained)
            with process_group(device, watch, alone=True):
                groups = ProcessGroups.make(topology, device, tied=model.make().decoder.head is None)
                dtype = PRECISIONS[precision]
                document = topology.model_dump(mode="json", exclude={"model"})  # the model's folders may differ between hosts
                alike = {"topology": document, "--model": name, "--precision": precision, "--resume": begin and begin.step}
                check_alike(alike, groups.everybody, device)
                frozen_layers = {unit: size.frozen_layers for unit, size in topology.units.items()}
                record = training_record(name, dtype, topology.units, frozen_layers)
                stages = {place: _stages(loader, topology, place, model, device, groups, dtype) for place in places}
                step = PipelineStep(topology, stages, groups, dtype=dtype, settings=settings)
                if begin is not None:
                    load(begin, step)
                    warn_differences(begin.loader.get(TRAINING_RECORD, {}), record)
                    del begin  # it is mapped into memory, and its files may soon be removed
                elif loader.has_next():
                    check_fresh(job, loader.next_step, allowed=fresh_weights)
                evaluations = Evaluations(spec, evaluate_every, lambda name: _evaluate(loader, step, name))
                for of_place in step.places:
                    of_place.check_replicas()
                    of_place.forecast_memory(spec.image, spec.audio)
                with _saving(checkpoint, step, goes_on=goes_on(resume, checkpoint), record=record) as writer:
                    _train(job, loader, step, writer, settings, evaluations, every=checkpoint_every)


def _saving(
    folder: Path | None, step: PipelineStep, *, goes_on: bool, record: Mapping[str, Any]
) -> AbstractContextManager[CheckpointWriter | None]:
    return nullcontext() if folder is None else CheckpointWriter(folder, step, goes_on=goes_on, record=record)


def _train(
    job: str,
    loader: PlacesLoader,
    step: PipelineStep,
    writer: CheckpointWriter | None,
    settings: OptimizerSpec,
    evaluations: Evaluations,
    *,
    every: int,
) -> None:
    for one in step.places:
        log.info("training %s", pairs(job=job, parameters=sum(p.numel() for p in one.parameters), **asdict(one.place)))
    committed = 0
    if step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(step.device)
    if loader.has_next():
        evaluations.begin(loader.next_step)
    for steps, feeds in loader.steps([place.prepare for place in step.places]):
        planned = max(steps, key=lambda one: one.data_wait_s)
        PROGRESS.begin_step(planned.index)
        try:
            result = step.run(feeds[0].routes, feeds, settings.rate(planned.index))
        except UserError as err:
            raise UserError(f"step {planned.index}: {err}") from err
        if settings.checks_replicas(planned.index):
            PROGRESS.begin("comparison of replicas")
            for place in step.places:
                place.check_replicas(planned.index)
        PROGRESS.begin("commit")
        measured = [place.executor.clock.work() for place in step.places]
        loader.commit_fed(steps, feeds, loss=result.recorded_loss, measured=measured)
        PROGRESS.excuse("waits for the next step")
        log_step(job, planned, result, step.non_finite_samples)
        if not committed and step.device.type == "cuda":
            log_measured(PROGRESS.place, step.forecast_bytes, torch.cuda.max_memory_allocated(step.device))
        committed = planned.index + 1
        if writer is not None and committed % every == 0:
            loader.settle()
            writer.save(committed, loader.state_dict())
        evaluations.after(committed)
    loader.settle()
    evaluations.end()
    for place in step.places:
        place.optimizer.wait()
    if writer is not None and committed:
        writer.save(committed, loader.state_dict())


def _evaluate(loader: PlacesLoader, step: PipelineStep, name: str) -> tuple[float, float]:
    """Evaluate a validation set. Return the loss sum and the weight of targets, over all processes."""
    loss_sum, target_weight = 0.0, 0.0
    with loader.evaluation(evaluation_of(loader.spec, name)) as evaluating:
        for steps, feeds in evaluating.steps([place.prepare for place in step.places]):
            loss, targets = step.evaluate(feeds[0].routes, feeds)
            nothing: list[Sequence[MeasuredWork]] = [() for _ in steps]
            evaluating.commit_fed(steps, feeds, loss=loss / targets if targets else math.nan, measured=nothing)
            loss_sum, target_weight = loss_sum + loss, target_weight + targets
        evaluating.settle()
    return loss_sum, target_weight


def _model(
    loader: PlacesLoader,
    topology: PipelineTopology,
    name: str,
    make_model: Callable[[JobSpec, Vocabulary], GluedModel] | None,
) -> WholeModel:
    spec, vocabulary = loader.spec, loader.vocabulary
    if make_model is None:
        return WholeModel.of(name, spec, vocabulary, topology.model, dropout=topology.dropout)
    if topology.model != HuggingFaceUnits() or topology.dropout:
        raise UserError("make_model gives the whole model: leave model and dropout out of the topology")
    return in_units(make_model(spec, vocabulary), name=name)


def _check_units(loader: PlacesLoader, topology: PipelineTopology) -> None:
    planned = set(loader.spec.topology.stages)
    if planned != set(topology.units):
        raise UserError(
            f"the job plans for the units {', '.join(sorted(planned))}, but the topology of the trainers has "
            f"{', '.join(sorted(topology.units))}: name the same ones in the job's topology.stages"
        )


def _stages(
    loader: PlacesLoader,
    topology: PipelineTopology,
    place: Place,
    model: WholeModel,
    device: torch.device,
    groups: ProcessGroups,
    dtype: torch.dtype,
) -> list[Stage]:
    """Build the stages of one of this process's places."""
    spec, vocabulary = loader.spec, loader.vocabulary
    cuts = bounds(topology, model.shape, vocab_size=vocabulary.size, image=spec.image, audio=spec.audio)[place.unit]
    return build_stages(
        model.make,
        topology,
        place,
        cuts,
        seed=spec.seed,
        device=device,
        slices=groups.of_place[place].slices,
        context=groups.of_place[place].context,
        initialise=model.initialise,
        dtype=dtype,
    )
