"""A loader for loops with Hugging Face's Accelerate (1): its processes, its devices, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from accelerate import Accelerator
from torch import nn

from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.connecting import connect as connect_rank
from headrace.trainer.loading.step_loader import StepLoader
from headrace.trainer.loading.steps import Step


def connect(accelerator: Accelerator, endpoint: str, *, job: str, **options: Any) -> StepLoader:
    """Return the loader of this process, whose state is in `accelerator.save_state` and `load_state` from now on.

    It needs no `accelerator.prepare`. Where the accelerator has a `parallelism_config`, its mesh says which processes get the
    same microbatches. Every rank has as many microbatches, as collectives of the backward pass need it.

    options: others of `headrace.trainer.connect`.
    """
    if (mesh := getattr(accelerator, "torch_device_mesh", None)) is not None:
        options["mesh"] = mesh
    else:
        options |= {"rank": accelerator.process_index, "num_ranks": accelerator.num_processes}
    loader = connect_rank(endpoint, job=job, equal_microbatches=True, **options)
    accelerator.register_for_checkpointing(loader)
    return loader


def microbatches(accelerator: Accelerator, model: nn.Module, step: Step) -> Iterator[PackedMicrobatch]:
    """Yield the microbatches of a step on the accelerator's device. Gradients are exchanged in the last one's backward pass.

    Run forward and `accelerator.backward` in the loop's body, with `gradient_accumulation_steps` left at 1, and step the
    optimizer behind the loop.
    """
    for number, microbatch in enumerate(step, 1):
        with nullcontext() if number == step.num_microbatches else accelerator.no_sync(model):
            yield microbatch.data.to(accelerator.device)


def evaluate(accelerator: Accelerator, loader: StepLoader, name: str) -> Iterator[PackedMicrobatch]:
    """Yield this process's microbatches of one pass over a validation set (`StepLoader.evaluate`), on the accelerator's device.

    The loss of the set is the sum of their losses over the sum of their `target_weight`, both over all processes.
    """
    for step in loader.evaluate(name):
        for microbatch in step:
            yield microbatch.data.to(accelerator.device)


def loss_scale(accelerator: Accelerator, step: Step) -> float:
    """Return the factor of a microbatch's summed loss: gradients, which are averaged over processes, become those of the mean
    over the targets of the whole global batch."""
    return float(accelerator.num_processes) / (step.target_weight or 1.0)
