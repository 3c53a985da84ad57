"""The `Trainer` of Hugging Face's transformers (5), fed by a loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput

from headrace.errors import UserError
from headrace.trainer.integrations.model_inputs import packed_inputs, weighted_loss
from headrace.trainer.integrations.step_stream import StepStream
from headrace.trainer.integrations.validation_batches import ValidationBatches
from headrace.trainer.loading.step_loader import StepLoader
from headrace.trainer.loading.steps import Microbatch

_STATE = "HeadraceCommits"
"""Name under which the loader's state stands in a checkpoint's trainer_state.json: that of the class below."""


class HeadraceTrainer(Trainer):
    """A Trainer whose optimizer steps are the steps of a job. Give `loader` in place of `train_dataset` and `data_collator`.

    The model is called with packed samples (`headrace.trainer.integrations.model_inputs.packed_inputs`), and its loss is divided
    by the targets of the whole global batch, or by their weights. A step is committed when the optimizer has made it, before a
    checkpoint is saved.

    `eval_dataset` may be the name of a validation set of the job, or have such names for values; by default it is all sets of the
    job. An evaluation is one pass over a set, and its loss the mean over all targets of the set.
    """

    def __init__(
        self,
        *args: Any,
        loader: StepLoader,
        inputs: Callable[[Microbatch], dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """`inputs`: makes the arguments of the model from a microbatch; None: packed tokens. Other arguments: see Trainer."""
        if kwargs.get("eval_dataset") is None and (sets := list(loader.open().spec.validation)):
            kwargs["eval_dataset"] = sets[0] if len(sets) == 1 else {name: name for name in sets}
        super().__init__(*args, **kwargs)
        self.args.ignore_data_skip = True  # the loader goes on from where the checkpoint is
        self._stream = StepStream(loader, commits_when_asked=False)
        self._inputs = inputs or (lambda microbatch: packed_inputs(microbatch.data, loader.vocabulary, weights=True))
        self._own_loss = self.compute_loss_func
        self.add_callback(HeadraceCommits(self._stream))

    def get_train_dataloader(self) -> Any:
        """Return what the Trainer iterates over once an epoch: nothing of it is used but that it is one."""
        return _Nothing()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """Return the microbatches of the next step, and the weight of its targets; behind the last step none, and end."""
        step = self._stream.next_step()
        if step is None:
            self.control.should_training_stop = True
            return [], None
        if step.num_microbatches != num_batches:
            raise UserError(
                f"a step of the job has {step.num_microbatches} microbatches on each rank, and gradient_accumulation_steps is "
                f"{num_batches}: set it to {step.num_microbatches}, or change the job's topology.microbatches"
            )
        return [self._inputs(microbatch) for microbatch in step], torch.tensor(step.target_weight or 1.0, device=device)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a microbatch: the model's own, or that of its logits where targets have weights."""
        weights, evaluated = inputs.pop("target_weights", None), inputs.pop("target_weight", None)
        self.compute_loss_func = self._own_loss if weights is None else partial(_weighted_mean, weights)
        if evaluated is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)  # the mean over the microbatch
        if evaluated:
            self._loss_sum += loss.double() * evaluated
            self._target_weight += evaluated
        return loss, outputs

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the batches of a validation set of the job by its name, and of another data set what the Trainer would."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str) and isinstance(self.eval_dataset, dict):
            chosen = self.eval_dataset.get(chosen, chosen)
        if isinstance(chosen, str):
            return ValidationBatches(self._stream, chosen, self._inputs)
        return super().get_eval_dataloader(eval_dataset)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as the Trainer does, with the mean loss over all targets of a validation set, of all ranks."""
        self._loss_sum, self._target_weight = torch.zeros((), dtype=torch.float64, device=self.args.device), 0.0
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if not isinstance(dataloader, ValidationBatches):
            return output
        sums = torch.stack([self._loss_sum, self._loss_sum.new_tensor(self._target_weight)])
        loss_sum, target_weight = self.accelerator.reduce(sums, "sum").tolist()
        loss = loss_sum / target_weight if target_weight else math.nan
        metrics = {**(output.metrics or {}), f"{metric_key_prefix}_loss": loss}
        return output._replace(metrics=metrics, num_samples=dataloader.num_samples)


def _weighted_mean(weights: Tensor, outputs: Any, labels: Tensor, *, num_items_in_batch: Tensor | None) -> Tensor:
    divisor = weights.sum() if num_items_in_batch is None else num_items_in_batch
    return weighted_loss(outputs.logits, labels, weights) / divisor


class HeadraceCommits(TrainerCallback, ExportableState):
    """Commits steps, and keeps the loader's state in the Trainer's checkpoints."""

    def __init__(self, stream: StepStream) -> None:
        self._stream = stream

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        saved = cast(Mapping[str, Any], state.stateful_callbacks)[_STATE]["attributes"]
        if saved != self._stream.state_dict():
            self._stream.load_state_dict(saved)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._stream.commit()

    def state(self) -> dict[str, Any]:
        """Return what stands in trainer_state.json."""
        return {"args": {}, "attributes": self._stream.state_dict()}


class _Nothing:
    def __iter__(self) -> Iterator[Any]:
        return iter(())
