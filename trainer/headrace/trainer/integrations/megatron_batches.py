"""Batches for training loops of Megatron-Core (0.16), and an external data loader for Megatron-LM and Megatron-Bridge.

The keys are those of `get_batch` in Megatron-LM's pretrain_gpt.py. With `dataloader_type="external"`, Megatron's loops call
`next` on what the data provider returned, and `save_state` when they save a checkpoint (`maybe_save_dataloader_state` of
megatron/training/checkpointing.py and megatron/bridge/training/checkpointing.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from headrace.sample import LABEL_IGNORED
from headrace.trainer.integrations.model_inputs import with_tokens
from headrace.trainer.integrations.same_samples import same_samples
from headrace.trainer.integrations.step_stream import StepStream
from headrace.trainer.loading.connecting import connect
from headrace.trainer.loading.steps import Microbatch, Step


class MegatronBatches(Iterator[dict[str, Any]]):
    """The microbatches of this data-parallel rank, in every process of it: tensor- and pipeline-parallel ones get the same.

    A step is committed when the loop asks for the first microbatch behind it. `save_state`, which Megatron calls in some
    processes of a data-parallel rank only, waits for no other.
    """

    def __init__(self, endpoint: str, *, job: str, padded: bool = False, **options: Any) -> None:
        """Call it behind `parallel_state.initialize_model_parallel`, in all processes.

        padded: rows of one sample each, with a causal mask, for attention that knows no packed sequences. options: others of
        `headrace.trainer.connect`.
        """
        dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        options |= {"parallel": same_samples(dp_rank, dp_size), "equal_microbatches": True}
        self._stream = StepStream(connect(endpoint, job=job, **options), commits_when_asked=True)
        self._microbatches: Iterator[Microbatch] = iter(())
        self._padded = padded

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next microbatch. Raises StopIteration behind the last step."""
        if (microbatch := next(self._microbatches, None)) is None:
            if (step := self._stream.next_step()) is None:
                raise StopIteration
            self._microbatches = iter(step)
            microbatch = next(self._microbatches)
        assert self._stream.step is not None, "this is a microbatch of it"
        return self._batch(self._stream.step, microbatch)

    def evaluate(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the microbatches of one pass over a validation set of the job (`StepLoader.evaluate`), in every process.

        A step of the training that was applied is committed before.
        """
        for step in self._stream.evaluate(name):
            for microbatch in step:
                yield self._batch(step, microbatch)

    def _batch(self, step: Step, microbatch: Microbatch) -> dict[str, Any]:
        """Return the arguments of a model. Weights of targets are in the mask, times what makes their mean over the step 1, as
        Megatron divides by the number of targets."""
        data = with_tokens(microbatch.data, self._stream.loader.vocabulary)
        if self._padded:
            rows = data.padded()
            tokens, labels, positions, packed = rows.input_ids, rows.labels, rows.position_ids, None
            weights = rows.target_weights
        else:
            tokens, labels, positions = data.input_ids[None], data.labels[None], data.position_ids[None]
            weights = data.target_weights[None]
            packed = PackedSeqParams(qkv_format="thd", **_lengths(data.flash_kwargs()))
        return {
            "tokens": tokens,
            "labels": labels.clamp(min=0),  # looked up by the loss even where the mask is 0
            "loss_mask": weights * (step.num_targets / step.target_weight)
            if weights.numel()
            else (labels != LABEL_IGNORED).float(),
            "attention_mask": None,
            "position_ids": positions,
            "packed_seq_params": packed,
        }

    def commit(self) -> None:
        """Commit the last step: at the end of training, behind its optimizer step."""
        self._stream.commit()

    def save_state(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `save_state` returned, with any number of data-parallel ranks. Comes before the first step."""
        self._stream.load_state_dict(state)

    def close(self) -> None:
        self._stream.loader.close()


def get_batch(batches: Iterator[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Return the next microbatch with its tensors on the device: in place of `get_batch` of a forward step."""
    batch = next(batches)
    return {key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for key, value in batch.items()}


def masked_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the summed loss, the number of targets, and both for the log: a loss function for the forward step of a model whose
    config has `calculate_per_token_loss`. Megatron divides by the targets of all microbatches and ranks.

    loss_mask, losses: (b, s).
    """
    loss = (losses.float() * loss_mask).sum()
    num_targets = loss_mask.count_nonzero().to(torch.int)
    return loss, num_targets, {"lm loss": torch.stack([loss.detach(), num_targets.float()])}


def _lengths(flash: Mapping[str, Tensor | int]) -> dict[str, Any]:
    return {
        "cu_seqlens_q": flash["cu_seqlens_q"],
        "cu_seqlens_kv": flash["cu_seqlens_k"],
        "max_seqlen_q": flash["max_seqlen_q"],
        "max_seqlen_kv": flash["max_seqlen_k"],
    }
