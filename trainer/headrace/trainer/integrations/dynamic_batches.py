"""Steps as lists of token-balanced micro-batches, in the form in which VeOmni's and verl's own loaders give them.

VeOmni (0.1): `veomni.trainer.base.BaseTrainer.train_step` takes a list of dicts a step from `next(data_iterator)`, with the keys
of `veomni.data.data_collator.MainCollator`, labels shifted. verl (0.9): `verl.utils.seqlen_balancing.rearrange_micro_batches`
makes micro-batches of jagged tensors, as `verl.utils.dataset.dataset_utils.SFTTensorCollator` collates them; `loss_mask` is of
the token itself, and the model's engine shifts it. Both cut a batch by tokens when it has arrived; here it is planned that way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.manifest import Vocabulary
from headrace.sample import LABEL_IGNORED
from headrace.trainer.integrations.model_inputs import check_no_weights, with_tokens
from headrace.trainer.integrations.step_stream import StepStream
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.step_loader import StepLoader

Form = Callable[[PackedMicrobatch, Vocabulary], dict[str, Any]]


def veomni_form(data: PackedMicrobatch, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return a micro-batch of VeOmni: (1, T) tokens, positions ((1, 3, T) with M-RoPE), mask and shifted labels, and the
    arguments of flash attention."""
    data = with_tokens(data, vocabulary)
    flash, mrope = data.flash_kwargs(), data.mrope_position_ids
    return {
        "input_ids": data.input_ids[None],
        "position_ids": (mrope if mrope.shape[1] else data.position_ids)[None],
        "labels": data.labels[None],
        "attention_mask": torch.ones_like(data.input_ids)[None],
        "cu_seq_lens_q": flash["cu_seqlens_q"],
        "cu_seq_lens_k": flash["cu_seqlens_k"],
        "max_length_q": flash["max_seqlen_q"],
        "max_length_k": flash["max_seqlen_k"],
    }


def verl_form(data: PackedMicrobatch, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return a micro-batch of verl: jagged (n, *) `input_ids`, `position_ids` and `loss_mask`, a row a sample."""
    data = with_tokens(data, vocabulary)

    def jagged(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, offsets=data.cu_seqlens.long())

    loss_mask = (data.unshifted_labels != LABEL_IGNORED).long()
    return {
        "input_ids": jagged(data.input_ids),
        "position_ids": jagged(data.position_ids),
        "loss_mask": jagged(loss_mask),
    }


class DynamicBatches:
    """Iterates over the steps of a job as lists of micro-batches, as many on every rank where the loader has them equal.

    Each step is committed when the loop asks for the next one: nothing may fetch ahead of it, such as VeOmni's
    `use_background_prefetcher`.
    """

    def __init__(self, loader: StepLoader, form: Form = veomni_form) -> None:
        self._stream, self._form = StepStream(loader, commits_when_asked=True), form

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        check_no_weights(self._stream.loader.open().spec, "VeOmni and verl")
        while (step := self._stream.next_step()) is not None:
            yield [self._form(microbatch.data, self._stream.loader.vocabulary) for microbatch in step]

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state_dict)
