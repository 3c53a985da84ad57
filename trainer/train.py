"""Headrace's own training loop: the compact multimodal model on whatever `connect` delivers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from headrace.errors import HeadraceError, UserError
from headrace.telemetry import pairs
from headrace.transport.base import TRANSPORTS
from trainer.connecting import connect
from trainer.devices import local_device
from trainer.models.multimodal import build_model
from trainer.optimizer_spec import OptimizerSpec
from trainer.step import DEFAULTS, PRECISIONS, StepResult, TrainStep, embeddings_of, make_optimizer
from trainer.steps import Step

log = logging.getLogger(__name__)


def train(
    endpoint: str,
    *,
    job: str,
    model_name: str = "",
    threads: int | None = None,
    transports: Sequence[str] = TRANSPORTS,
    tls_ca: Path | None = None,
    precision: str = "fp32",
    device: torch.device | None = None,
    optimizer: OptimizerSpec = DEFAULTS,
    fresh_weights: bool = False,
) -> None:
    """Train until the job's last step is committed. Under torchrun, one of its ranks.

    The weights start afresh. Raises UserError where the job has committed steps already and is not done, unless `fresh_weights`.

    `model_name`: a named shape; empty: the one that the job's costs are computed from. `threads`: of
    torch on the CPU; beside busy processes fewer are faster. None: torch's choice. `transports`, `tls_ca`: as of
    `trainer.connect`. `precision`: a name of PRECISIONS. `device`: None: this rank's GPU, or the CPU.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    with (
        process_group(device := device or local_device()),
        connect(endpoint, job=job, rank=rank(), num_ranks=num_ranks(), transports=transports, tls_ca=tls_ca) as loader,
    ):
        name = model_name or loader.spec.model
        model = build_model(
            name,
            loader.spec,
            loader.vocabulary.size,
            loader.vocabulary.image_token,
            loader.vocabulary.audio_token,
            seed=loader.spec.seed,
            device=device,
        )
        settings = optimizer.settled(name)
        adamw = make_optimizer(model.parameters(), settings, embeddings=embeddings_of(model))
        train_step = TrainStep(model, adamw, dtype=PRECISIONS[precision], settings=settings)
        log.info("training %s", pairs(job=job, model=name, parameters=sum(p.numel() for p in model.parameters()), device=device))
        if loader.has_next():
            check_fresh(job, loader.next_step, allowed=fresh_weights)
        for step in loader:
            for microbatch in step:
                train_step.accumulate(microbatch.data)
            result = train_step.finish(settings.rate(step.index))
            loader.commit(step, loss=result.recorded_loss)
            log_step(job, step, result)


def check_fresh(job: str, step: int, *, allowed: bool) -> None:
    """Before the first step that weights without a checkpoint take. Raises UserError where others have come before it."""
    if not step:
        return
    if not allowed:
        raise UserError(
            f"job {job!r} has committed {step} step(s), which fresh weights have not seen: go on from a checkpoint (--resume DIR "
            f"with --topology or --nodes), train it anew after `headrace job reset {job} --step 0`, or take --fresh-weights"
        )
    log.warning("weights are fresh, and the job goes on %s", pairs(job=job, from_step=step))


def log_step(job: str, step: Step, result: StepResult, not_finite: Sequence[int] = ()) -> None:
    """A line on a committed step, and a warning where its update was skipped. not_finite: samples that this process blames."""
    if result.skipped:
        log.warning(
            "update skipped, the step is not finite %s",
            pairs(
                job=job,
                step=step.index,
                loss=result.loss,
                grad_norm=result.grad_norm,
                skipped_in_row=result.skipped,
                samples=",".join(map(str, not_finite)) or "unknown",
            ),
        )
    log.info(
        "step %s",
        pairs(
            job=job,
            step=step.index,
            loss=result.loss,
            targets=result.num_targets,
            grad_norm=result.grad_norm,
            data_wait_s=step.data_wait_s,
        ),
    )


def rank() -> int:
    """As torchrun says; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """As torchrun says; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The group of all of torchrun's ranks, once they are there; none without it.

    Where one rank fails, the others see no more than its connections end: they raise HeadraceError with what it said.
    """
    if num_ranks() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, _, _ = next(rendezvous("env://"))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank(), world_size=num_ranks())
    try:
        with _the_first_words(store):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _the_first_words(store: Store) -> Iterator[None]:
    """What fails first is what all ranks say, but for those that have a sentence of their own."""
    try:
        yield
    except Exception as err:
        words = f"rank {rank()}: {err if isinstance(err, HeadraceError) else repr(err)}"
        try:
            first = store.compare_set("failure", "", words).decode()
        except dist.DistError:  # the store was rank 0's, and went with it
            first = "rank 0 has ended: its log says why"
        if isinstance(err, HeadraceError) or first == words:
            raise
        raise HeadraceError(first) from err
