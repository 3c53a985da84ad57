"""Headrace's own trainer on FSDP ranks, which all have all units: what `headrace train --fsdp` runs on each."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from headrace.errors import UserError
from headrace.jobs_client import JobsClient
from headrace.observability.logs import pairs
from headrace.plan import LLM
from headrace.trainer.devices import check_device, check_operations, local_device, warn_quadratic_attention
from headrace.trainer.evaluation import Evaluations
from headrace.trainer.hang_detection import HANG_TIMEOUT_S
from headrace.trainer.models.whole_model import WholeModel
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.orchestrated.fsdp_checkpoint import FsdpCheckpoints, load
from headrace.trainer.orchestrated.fsdp_ranks import topology_of
from headrace.trainer.orchestrated.orchestrated_loader import OrchestratedLoader, OrchestratedStep, connect
from headrace.trainer.orchestrated.orchestrated_model import OrchestratedModel
from headrace.trainer.orchestrated.unit_roots import StageRoot
from headrace.trainer.pipeline.agreement import check_alike, training_record, warn_differences
from headrace.trainer.pipeline.beginning import begin_from, goes_on
from headrace.trainer.pipeline.checkpoint_files import TRAINING_RECORD
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.rank_progress import PROGRESS
from headrace.trainer.starting import check_fresh, num_ranks, process_group, rank, watched
from headrace.trainer.train_step import PRECISIONS, SkipPolicy, StepResult, embedding_parameters, log_step, make_optimizer
from headrace.transport.base import TRANSPORTS
from headrace.validation_spec import evaluation_of

log = logging.getLogger(__name__)


def train_fsdp(
    endpoint: str,
    *,
    job: str,
    settings: dict[str, Any] | None = None,
    shard_ranks: int | None = None,
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
) -> None:
    """Train until the job's last step is committed, as one of the FSDP ranks that torchrun started.

    settings: of a topology file without units: `model`, `optimizer`, `dropout`. shard_ranks: over how many ranks weights are cut,
    between whose groups they are replicated; None: over all. Others: as in `pipeline_training.train_pipeline`; `resume` takes the
    checkpoints of any number of ranks.

    Raises UserError if the job is not planned for these ranks, and where job, model, checkpoint and device do not fit each other.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    with watched(hang_timeout_s) as watch:
        check_device(device := device or local_device())
        PROGRESS.place = f"rank {rank()}"
        check_shards(shard_ranks, num_ranks())
        with JobsClient(endpoint) as client:
            topology = topology_of(client.spec(job), num_ranks(), settings)
        loading = connect(
            endpoint, job=job, rank=rank(), num_ranks=num_ranks(), topology=topology, device=device, transports=transports
        )
        with loading as loader:
            begin = begin_from(endpoint, job, loader, resume=resume, checkpoint=checkpoint, every=checkpoint_every, watch=watch)
            spec = loader.spec
            name = model_name or spec.model
            whole = WholeModel.of(name, spec, loader.vocabulary, topology.model, dropout=topology.dropout)
            topology.check(num_ranks(), whole.shape)
            warn_quadratic_attention(device.type, precision, whole.shape)
            optimizer_spec = topology.optimizer.resolved(name, whole.pretrained)
            with process_group(device, watch, alone=True):
                everybody = dist.group.WORLD
                assert everybody is not None, "there is a process group"
                check_operations(everybody, device, exchange_rows=True)
                document = topology.model_dump(mode="json", exclude={"model"})  # the model's folders may differ between hosts
                alike = {"topology": document, "--model": name, "--precision": precision, "--resume": begin and begin.step}
                check_alike({**alike, "--shard-ranks": shard_ranks}, everybody, device)
                dtype = PRECISIONS[precision]
                model = _model(loader, topology, whole, _mesh(device, shard_ranks), dtype)
                training = _Training(job, model, optimizer_spec)
                frozen_layers = {unit: size.frozen_layers for unit, size in topology.units.items()}
                record = training_record(name, dtype, topology.units, frozen_layers)
                if begin is not None:
                    load(begin, model, training.optimizer)
                    warn_differences(begin.loader.get(TRAINING_RECORD, {}), record)
                    del begin  # it is mapped into memory, and its files may soon be removed
                elif loader.has_next():
                    check_fresh(job, loader.next_step, allowed=fresh_weights)
                saving = None
                if checkpoint is not None:
                    saving = FsdpCheckpoints(checkpoint, model, training.optimizer, goes_on=goes_on(resume, checkpoint))
                evaluations = Evaluations(spec, evaluate_every, lambda name: _evaluate(loader, model, name))
                _train(training, loader, saving, record, evaluations, every=checkpoint_every)


def check_shards(shard_ranks: int | None, count: int) -> None:
    """Raise UserError unless groups of so many ranks make up all `count` ranks."""
    if shard_ranks is not None and (shard_ranks < 1 or count % shard_ranks):
        raise UserError(
            f"--shard-ranks is {shard_ranks}, which does not divide the {count} ranks: take a divisor, or leave it out"
        )


class _Training:
    """The model of all ranks with its optimizer."""

    def __init__(self, job: str, model: OrchestratedModel, settings: OptimizerSpec) -> None:
        self.job, self.model, self.settings = job, model, settings
        self.optimizer = make_optimizer(model.sharded, settings, embeddings=embedding_parameters(model))
        self._skip_policy = SkipPolicy(settings)

    def run(self, step: OrchestratedStep) -> StepResult:
        """Run a step: forward and backward of all microbatches, clipping and update, or none where it is not finite."""
        model = self.model
        for microbatch in step:
            PROGRESS.begin(f"microbatch {microbatch.index}")
            model.accumulate(microbatch)
        PROGRESS.begin("update")
        result = model.average(self.settings.max_grad_norm)
        try:
            if not result.target_weight:
                return result
            updates = self._skip_policy.may_update(result.loss, result.grad_norm)
            self._skip_policy.record(skipped=not updates)
            if updates:
                for options in self.optimizer.param_groups:
                    options["lr"] = self.settings.rate(step.index)
                self.optimizer.step()
        finally:
            model.discard()
        return replace(result, skipped=self._skip_policy.in_row)


def _train(
    training: _Training,
    loader: OrchestratedLoader,
    saving: FsdpCheckpoints | None,
    record: dict[str, Any],
    evaluations: Evaluations,
    *,
    every: int,
) -> None:
    model = training.model
    parameters = sum(p.numel() for p in model.sharded)
    log.info("training %s", pairs(job=training.job, parameters=parameters, rank=rank(), ranks=num_ranks(), device=model.device))
    committed = 0
    if loader.has_next():
        evaluations.begin(loader.next_step)
    for step in loader.steps(model):
        PROGRESS.begin_step(step.index)
        try:
            result = training.run(step)
        except UserError as err:
            raise UserError(f"step {step.index}: {err}") from err
        PROGRESS.begin("commit")
        planned = max(step.steps, key=lambda one: one.data_wait_s)
        loader.commit(step, loss=result.recorded_loss)
        PROGRESS.excuse("waits for the next step")
        log_step(training.job, planned, result)
        committed = step.index + 1
        if saving is not None and committed % every == 0:
            loader.settle()
            saving.save(committed, loader.state_dict(), record)
        evaluations.after(committed)
    loader.settle()
    evaluations.end()
    if saving is not None and committed:
        saving.save(committed, loader.state_dict(), record)
    log.info("exchanged: %d bytes sent, %d planned", model.exchanged.sent, model.exchanged.planned)


def _evaluate(loader: OrchestratedLoader, model: OrchestratedModel, name: str) -> tuple[float, float]:
    """Evaluate a validation set. Return the loss sum and the weight of targets, over all ranks."""
    totals = torch.zeros(2, dtype=torch.float64, device=model.device)
    training = model.training
    model.eval()
    try:
        with loader.evaluation(evaluation_of(loader.spec, name)) as evaluating:
            for step in evaluating.steps(model):
                of_step = torch.zeros_like(totals)
                for microbatch in step:
                    loss = model.evaluate(microbatch)
                    of_step += torch.stack([loss.loss_sum.double(), of_step.new_tensor(loss.target_weight)])
                dist.all_reduce(of_step, group=model.group)
                loss_sum, weight = of_step.tolist()
                evaluating.commit(step, loss=loss_sum / weight if weight else math.nan)
                totals += of_step
            evaluating.settle()
    finally:
        model.train(training)
    loss_sum, weight = totals.tolist()
    return loss_sum, weight


def _mesh(device: torch.device, shard_ranks: int | None) -> DeviceMesh:
    count = dist.get_world_size()
    if shard_ranks is None or shard_ranks == count:
        return init_device_mesh(device.type, (count,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (count // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard"))


def _model(
    loader: OrchestratedLoader, topology: PipelineTopology, whole: WholeModel, mesh: DeviceMesh, dtype: torch.dtype
) -> OrchestratedModel:
    """Build the units on the host, from where each rank takes its shards to its device, layer by layer."""
    roots = {}
    for unit, size in topology.units.items():
        layers = whole.shape.units[unit].layers
        [stage] = build_stages(
            whole.make,
            topology,
            Place(unit, rank(), 0, 0),
            (0, layers),
            seed=loader.spec.seed,
            device=torch.device("cpu"),
            slices=None,
            initialise=whole.initialise,
        )
        roots[unit] = StageRoot(stage, loader.spec.orchmllm.forms.get(unit, "no_padding"))
        assert size.num_places == dist.get_world_size(), "every rank has all of the unit"
    half = dtype != torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False) if half else None
    llm = roots.pop(LLM)
    return OrchestratedModel(roots, llm, mesh=mesh, spec=loader.spec, vocabulary=loader.vocabulary, mp_policy=policy, dtype=dtype)
