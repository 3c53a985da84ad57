"""Data loaders for torchtitan (0.3), named in `Trainer.Config.dataloader` and `Validator.Config.dataloader` like its own.

Their interface is `torchtitan.components.dataloader.BaseDataLoader`: pairs of model inputs and labels, a microbatch each, and a
state that torchtitan saves by `torch.distributed.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader

from headrace.errors import UserError
from headrace.trainer.integrations.model_inputs import check_no_weights, with_tokens
from headrace.trainer.integrations.same_samples import same_samples
from headrace.trainer.integrations.step_stream import StepStream
from headrace.trainer.loading.connecting import connect
from headrace.trainer.loading.steps import Microbatch


class HeadraceDataLoader(BaseDataLoader):
    """Microbatches of a job. A step is committed when torchtitan asks for the next one."""

    open_by_job: ClassVar[dict[str, HeadraceDataLoader]] = {}
    """Those of this process that are not closed, by the names of their jobs, for `HeadraceValidationLoader`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Where the job is."""

        endpoint: str = ""
        """HOST:PORT of the reorder service."""
        job: str = ""
        """Name of the job."""
        padded: bool = False
        """Give each sample a row of its own, padded at its end: for a model without masks. Otherwise samples are packed, one
        behind the other in one row or, where the job has `pad_to_max_length`, in rows of `pack_tokens`; `positions` begin anew
        at each, from which torchtitan makes its masks (`attn_backend` "flex" or "varlen")."""

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, seq_len: int, **_: object) -> None:
        """seq_len: the most positions that the model has. Other arguments of torchtitan say what the job says already."""
        self._seq_len, self._padded = seq_len, config.padded
        parallel = same_samples(dp_rank, dp_world_size)
        loader = connect(config.endpoint, job=config.job, parallel=parallel, equal_microbatches=True)
        self._stream = StepStream(loader, commits_when_asked=True)
        self._job = config.job
        self.open_by_job[config.job] = self

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        spec = self._stream.loader.open().spec
        check_no_weights(spec, "torchtitan")
        if spec.text.max_tokens > self._seq_len:
            raise UserError(
                f"the job's samples have up to {spec.text.max_tokens} tokens (text.max_tokens), and the model {self._seq_len} "
                "positions (training.seq_len): make them fit"
            )
        while (step := self._stream.next_step()) is not None:
            yield from map(self._batch, step)

    def evaluate(self, name: str) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield the batches of one pass over a validation set of the job (`StepLoader.evaluate`), as many on every rank.

        A step of the training that was applied is committed before.
        """
        for step in self._stream.evaluate(name):
            yield from map(self._batch, step)

    def _batch(self, microbatch: Microbatch) -> tuple[dict[str, Tensor], Tensor]:
        spec, data = self._stream.loader.spec, with_tokens(microbatch.data, self._stream.loader.vocabulary)
        if self._padded and len(data.sample_segments):  # without a sample it is one row of padding either way
            rows = data.padded()
            return {"input": rows.input_ids, "positions": rows.position_ids}, rows.labels
        in_packs = spec.pad_to_max_length and len(microbatch.data.input_ids)
        width = (spec.pack_tokens if in_packs else None) or len(data.input_ids)
        inputs = {"input": data.input_ids.view(-1, width), "positions": data.position_ids.view(-1, width)}
        return inputs, data.labels.view(-1, width)

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state_dict)

    def close(self) -> None:
        """Commit the last step, if it was applied, and end the session."""
        self._stream.commit()
        self._stream.loader.close()
        self.open_by_job.pop(self._job, None)


class HeadraceValidationLoader(BaseDataLoader):
    """One pass over a validation set of the job that this process trains on. torchtitan's `Validator` makes one for each pass.

    All ranks have as many batches, and all of them are taken, so that the loss is the exact mean over all targets of the set.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Which set it is: `dataset` is its name. Raises UserError where the Validator is to take a part of it."""

        job: str = ""
        """Name of the job, that of a `HeadraceDataLoader.Config`."""
        infinite: bool = False
        """Whether the set is to have no end, which the `Validator` sets where its `steps` are not -1."""

        def __post_init__(self) -> None:
            if self.infinite:
                raise UserError(
                    "a validation set is taken whole, for the mean over all of its targets: leave validator.steps at -1"
                )

    def __init__(self, config: Config, **_: object) -> None:
        """Arguments of torchtitan say what the training's loader knows. Raises UserError where the process has none."""
        if (training := HeadraceDataLoader.open_by_job.get(config.job)) is None:
            raise UserError(
                f"validation on a set of job {config.job!r} needs a HeadraceDataLoader of that job as the trainer's dataloader"
            )
        self._training, self._name = training, config.dataset

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return self._training.evaluate(self._name)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a pass begins anew."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: a pass begins anew."""
