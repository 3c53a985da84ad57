"""Embedding and loss of an LLM whose slices have a part of the vocabulary each (Megatron-LM, Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from headrace.trainer.models.decoder import Decoder
from headrace.trainer.models.loss import MAX_LOGITS, Targets, add_product, targets_at_a_time
from headrace.trainer.pipeline.slice_collectives import gather, reduce, sum_parts
from headrace.trainer.pipeline.tensor_parallel import slice_of


@dataclass(frozen=True, slots=True)
class VocabularySlice:
    """The part of an LLM's vocabulary that one slice of its stages has: as many tokens as its weights have rows."""

    begin: int
    """Its first token."""
    group: dist.ProcessGroup
    """The tensor-parallel group of the stage."""

    @classmethod
    def of(cls, vocab_size: int, group: dist.ProcessGroup) -> Self:
        """Return the part that `slice_of` cuts for this slice of the group."""
        share, longer = divmod(vocab_size, group.size())
        return cls(begin=group.rank() * share + min(group.rank(), longer), group=group)

    def cut(self, whole: Tensor) -> nn.Parameter:
        """Return the slice's rows of a weight with one row for each token."""
        return slice_of(whole, 0, self.group.rank(), self.group.size())

    def local(self, ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return the row of each id among the slice's `size` rows, and whether the id has one; if not, the row is any."""
        rows = ids - self.begin
        return rows.remainder(size), (rows >= 0) & (rows < size)


class EmbeddingSlice(nn.Embedding):
    """One slice of an embedding table: ids (T,) -> rows (T, width) of the whole table, equal on all slices."""

    def __init__(self, whole: nn.Embedding, vocabulary: VocabularySlice) -> None:
        weight = vocabulary.cut(whole.weight)
        tokens, width = weight.shape
        super().__init__(tokens, width, _weight=weight)
        if whole.padding_idx is not None and 0 <= whole.padding_idx - vocabulary.begin < tokens:
            self.padding_idx = whole.padding_idx - vocabulary.begin
        self._vocabulary = vocabulary

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the ids that this slice has, and add what the others find."""
        rows, is_own = self._vocabulary.local(ids, self.num_embeddings)
        return sum_parts(super().forward(rows).masked_fill(~is_own[:, None], 0), self._vocabulary.group)


def cut_vocabulary(decoder: Decoder, group: dist.ProcessGroup) -> VocabularySlice | None:
    """Cut the embedding and the head that a stage has of a decoder down to this slice's part of the vocabulary.

    Returns that part; None for a stage that has neither.
    """
    if decoder.embed is None and decoder.head is None:
        return None
    vocabulary = VocabularySlice.of(len(decoder.output_weight), group)
    if decoder.embed is not None:
        decoder.embed = EmbeddingSlice(decoder.embed, vocabulary)
    if decoder.head is not None:
        decoder.head.weight = vocabulary.cut(decoder.head.weight)
    return vocabulary


def sliced_token_loss(
    hidden: Tensor, targets: Targets, output_weight: Tensor, vocabulary: VocabularySlice, *, max_logits: int = MAX_LOGITS
) -> Tensor:
    """Return what `headrace.trainer.models.loss.token_loss` returns of the whole head, on all slices.

    hidden: (T, width) and targets, equal on all slices; output_weight: (slice's tokens, width). Logits exist for at most
    `max_logits / tokens` positions at a time, and the backward computes them anew. The weight's gradient is summed in its dtype.
    """
    if not len(targets.rows):
        # In the graph with all it has gradients of, as others may have targets of the same sequences.
        return hidden[:0].float().sum() + output_weight[:0].float().sum()
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    chunk = targets_at_a_time(len(output_weight), max_logits)
    loss: Tensor = _SlicedCrossEntropy.apply(hidden[targets.rows], targets, output_weight, vocabulary, chunk, dtype)  # type: ignore[no-untyped-call]
    return loss


class _SlicedCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of a linear head of which each slice has some rows, with matrix products in `dtype`.

    The slices exchange two numbers for each target: the logarithm of the sum of a slice's exponentials, and the target's logit if
    it is the slice's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Targets,
        weight: Tensor,
        vocabulary: VocabularySlice,
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.targets, ctx.vocabulary, ctx.chunk, ctx.dtype = targets, vocabulary, chunk, dtype
        found = []
        with torch.autocast(hidden.device.type, enabled=False):  # it would cache this cast, which has no gradient, for other uses
            cast = weight.to(dtype)
            for x, y in zip(torch.split(hidden, chunk), torch.split(targets.ids, chunk), strict=True):
                logits = functional.linear(x.to(dtype), cast).float()
                local, is_own = vocabulary.local(y, len(weight))
                of_target = logits.gather(1, local[:, None]).squeeze(1).masked_fill(~is_own, 0)
                found.append(torch.stack((logits.logsumexp(1), of_target), dim=1))
        of_slices = gather(torch.cat(found), vocabulary.group).view(-1, *hidden.shape[:1], 2)
        log_sum, of_target = of_slices[..., 0].logsumexp(0), of_slices[..., 1].sum(0)
        ctx.save_for_backward(hidden, weight, log_sum)
        return targets.weighted_sum(log_sum - of_target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, log_sum = ctx.saved_tensors
        cast = weight.to(ctx.dtype)
        of_hidden = torch.empty_like(hidden, dtype=torch.float32)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[2] else None
        chunks = ctx.targets.split(ctx.chunk), *(torch.split(rows, ctx.chunk) for rows in (hidden, log_sum, of_hidden))
        for y, x, log_sum_of_x, of_x in zip(*chunks, strict=True):
            x = x.to(ctx.dtype)
            of_logits = (functional.linear(x, cast).float() - log_sum_of_x[:, None]).exp_()
            local, is_own = ctx.vocabulary.local(y.ids, len(weight))
            of_logits[torch.arange(len(x), device=x.device), local] -= is_own.float()
            of_logits = of_logits.mul_(y.gradients(gradient)).to(ctx.dtype)
            of_x.copy_(of_logits @ cast)
            if of_weight is not None:
                add_product(of_weight, of_logits.T, x)
        return reduce(of_hidden, ctx.vocabulary.group).to(hidden.dtype), None, of_weight, None, None, None
