"""A loader for the `Trainer` of Lightning (2): the data it iterates over, and the callback that commits, in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from headrace.errors import UserError
from headrace.trainer.integrations.model_inputs import packed_inputs
from headrace.trainer.integrations.step_stream import StepStream
from headrace.trainer.integrations.validation_batches import ValidationBatches
from headrace.trainer.loading.step_loader import StepLoader
from headrace.trainer.loading.steps import Microbatch

_NO_END = 1 << 40  # more batches than any job has


class HeadraceBatches(Callback):
    """The microbatches of a job, a batch each: both `Trainer(callbacks=[batches])` and `fit(model, train_dataloaders=batches)`.

    A batch has the model's inputs, and "loss_scale": the training step returns the summed loss times it, which is the mean over
    the targets of the whole global batch by the time that Lightning has averaged it over batches and ranks. Steps are committed
    when the optimizer has made them, and the loader's state is in Lightning's checkpoints.
    """

    def __init__(self, loader: StepLoader, *, inputs: Callable[[Microbatch], dict[str, Any]] | None = None) -> None:
        """`inputs`: makes a batch from a microbatch; None: packed tokens, as models of Hugging Face take them."""
        self._stream = StepStream(loader, commits_when_asked=False)
        self._inputs = inputs or (lambda microbatch: packed_inputs(microbatch.data, loader.vocabulary))
        self._trainer: Trainer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    def __len__(self) -> int:
        """Batches of the whole job, as far as its spec says its steps. With a length, Lightning does not fetch a batch ahead,
        behind which the step could not be committed; the data may end before."""
        steps = self._stream.loader.open().spec.steps
        assert self._trainer is not None
        return steps * self._trainer.accumulate_grad_batches if steps else _NO_END

    def __iter__(self) -> Iterator[dict[str, Any]]:
        assert self._trainer is not None, "it is in the trainer's callbacks"
        accumulated, num_ranks = self._trainer.accumulate_grad_batches, self._trainer.world_size
        while (step := self._stream.next_step()) is not None:
            if step.num_microbatches != accumulated:
                raise UserError(
                    f"a step of the job has {step.num_microbatches} microbatches on each rank, and accumulate_grad_batches is "
                    f"{accumulated}: set it to {step.num_microbatches}, or change the job's topology.microbatches"
                )
            scale = accumulated * num_ranks / (step.target_weight or 1.0)
            for microbatch in step:
                yield {**self._inputs(microbatch), "loss_scale": scale}

    def validation(self, name: str) -> ValidationBatches:
        """Return the batches of a validation set of the job (`ValidationBatches`), for `val_dataloaders` or `validate`.

        Logged with `batch_size=target_weight`, the mean losses of batches become that of all targets of the set.
        """
        return _ValidationBatches(self._stream, name, self._inputs)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._stream.commit()

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state_dict)


class _ValidationBatches(ValidationBatches):
    def __len__(self) -> int:
        """With a length, Lightning does not fetch a batch ahead, for which a step whose last batch is not used yet would be
        committed."""
        return _NO_END
