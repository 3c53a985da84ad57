"""Headrace's own data-parallel training loop: the compact multimodal model on the steps that `connect` delivers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from headrace.model_shape import MODEL_SHAPES
from headrace.observability.logs import pairs
from headrace.trainer.devices import check_operations, local_device, warn_quadratic_attention
from headrace.trainer.evaluation import Evaluations
from headrace.trainer.hang_detection import HANG_TIMEOUT_S
from headrace.trainer.loading.connecting import connect
from headrace.trainer.models.dropout import ResidualDropout
from headrace.trainer.models.multimodal import build_model
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.rank_progress import PROGRESS
from headrace.trainer.replica_check import check_replicas
from headrace.trainer.starting import check_fresh, num_ranks, process_group, rank, watched
from headrace.trainer.train_step import DEFAULTS, PRECISIONS, TrainStep, embedding_parameters, log_step, make_optimizer
from headrace.transport.base import TRANSPORTS

log = logging.getLogger(__name__)


def train(
    endpoint: str,
    *,
    job: str,
    model_name: str = "",
    threads: int | None = None,
    transports: Sequence[str] = TRANSPORTS,
    precision: str = "fp32",
    device: torch.device | None = None,
    optimizer: OptimizerSpec = DEFAULTS,
    dropout: float = 0.0,
    fresh_weights: bool = False,
    hang_timeout_s: float = HANG_TIMEOUT_S,
    evaluate_every: int | None = None,
) -> None:
    """Train the compact model until the job's last step is committed; under torchrun, as one of its data-parallel ranks.

    The weights start afresh. Raises UserError where the job has committed steps already and is not done, unless `fresh_weights`.

    `model_name`: a named shape; empty: the one that the job's costs are computed from. `threads`: CPU threads of torch; beside
    busy processes fewer are faster; None: torch's choice. `transports`: see `headrace.trainer.connect`.
    `precision`: a key of PRECISIONS. `device`: None means this rank's GPU, or the CPU if there is none. `dropout`: rate in the
    LLM's layers (`models.dropout`). `evaluate_every`: steps between evaluations of the job's validation sets (`Evaluations`);
    None: no evaluation.
    `hang_timeout_s`: after so many seconds without progress on any rank the job ends (`hang_detection`).
    """
    if threads is not None:
        torch.set_num_threads(threads)
    with (
        watched(hang_timeout_s) as watch,
        process_group(device := device or local_device(), watch),
        connect(endpoint, job=job, rank=rank(), num_ranks=num_ranks(), transports=transports) as loader,
    ):
        replicas = dist.group.WORLD if dist.is_initialized() else None
        if replicas is not None:
            check_operations(replicas, device)
        name = model_name or loader.spec.model
        warn_quadratic_attention(device.type, precision, MODEL_SHAPES[name])
        model = build_model(
            name,
            loader.spec,
            loader.vocabulary.size,
            loader.vocabulary.image_token,
            loader.vocabulary.audio_token,
            seed=loader.spec.seed,
            device=device,
        )
        if dropout:
            model.decoder.dropout = ResidualDropout(model.decoder.layers, dropout, loader.spec.seed)
        settings = optimizer.resolved(name)
        adamw = make_optimizer(model.parameters(), settings, embeddings=embedding_parameters(model))
        train_step = TrainStep(model, adamw, dtype=PRECISIONS[precision], settings=settings)
        log.info("training %s", pairs(job=job, model=name, parameters=sum(p.numel() for p in model.parameters()), device=device))
        check_replicas(model.named_parameters(), replicas, "the model", device)
        evaluations = Evaluations(loader.spec, evaluate_every, lambda name: train_step.evaluate(loader.evaluate(name)))
        if loader.has_next():
            check_fresh(job, loader.next_step, allowed=fresh_weights)
            evaluations.begin(loader.next_step)
        for step in loader:
            PROGRESS.begin_step(step.index)
            for microbatch in step:
                PROGRESS.begin("microbatch")
                train_step.accumulate(microbatch.data)
            PROGRESS.begin("update")
            result = train_step.finish(settings.rate(step.index))
            if settings.checks_replicas(step.index):
                PROGRESS.begin("comparison of replicas")
                check_replicas(model.named_parameters(), replicas, "the model", device, step=step.index)
            PROGRESS.begin("commit")
            loader.commit(step, loss=result.recorded_loss)
            PROGRESS.excuse("waits for the next step")
            log_step(job, step, result)
            evaluations.after(step.index + 1)
        evaluations.end()
