"""A multimodal model of which each rank of a context-parallel group computes its share of every microbatch's tokens.

    model = ContextModel(headrace.trainer.models.load(...), group, image=spec.image, audio=spec.audio)
    step = TrainStep(model, optimizer)  # sums losses, targets and gradients over all ranks of all groups

Each rank of the group calls it with the same microbatch, or with its own `balanced` slice of one. Each encodes some of the media,
and their tokens go to the ranks that have their placeholders. The loss is the sum over a rank's own targets; the sums of losses,
of gradients and of targets over the group are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.attention_mask import AttentionMask, Ints
from headrace.block_distribution import BLOCK
from headrace.errors import UserError
from headrace.mask_layouts import AUDIO, VISION, Sight
from headrace.sample import LABEL_IGNORED
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.context.context_share import ContextShare
from headrace.trainer.context.degree_share import share_by_degrees
from headrace.trainer.context.media_parts import with_media
from headrace.trainer.context.media_rows import MediaRows, encoding_ranks
from headrace.trainer.context.rank_groups import RankGroups
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.loading.microbatch_mask import media_lengths, microbatch_mask, slice_mask
from headrace.trainer.loading.slices import slice_of
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.loss import StepLoss, Targets, token_loss
from headrace.trainer.models.multimodal import AudioInputs, ImageInputs, MultimodalModel
from headrace.trainer.models.padded_decoder import PaddedDecoder


class ContextModel(nn.Module):
    """Maps a PackedMicrobatch to this rank's part of its loss."""

    def __init__(
        self,
        model: MultimodalModel,
        group: dist.ProcessGroup | None,
        *,
        image: ImageSpec,
        audio: AudioSpec,
        images: Sight = Sight.TEXT,
        recordings: Sight = Sight.TEXT,
        block: int = BLOCK,
        heads_at_once: int = 1,
        degrees: Callable[[Ints, Ints], Sequence[Sequence[int]]] | None = None,
    ) -> None:
        """group: the ranks that share sequences; None: this one alone, under the same mask.

        image, audio: of the job. images, recordings: what tokens of media see of whole microbatches; slices come with their mask.
        block: tokens of a block of the distribution, for slices that of their order. heads_at_once: heads of keys that are
        gathered together. degrees: chooses the ranks of each sequence of a whole microbatch, on all ranks alike, by the (n,)
        tokens of each and the (n,) pairs of tokens that see each other; None: all ranks for all of them.

        Raises UserError for a model with a generator, or whose attention is not packed, and where `degrees` are given with a
        group that some processes are not in.
        """
        super().__init__()
        check_sequences(model)
        self.model = model
        self._group = group
        self._image, self._audio = image, audio
        self._images, self._recordings = images, recordings
        self._block, self._heads_at_once = block, heads_at_once
        self._degrees = degrees
        self._groups = None if group is None or degrees is None else RankGroups(group)

    def forward(self, microbatch: PackedMicrobatch) -> StepLoss:
        """Return the summed loss of this rank's tokens; without any token in the whole, a constant 0.

        The backward is to run on all ranks (`StepLoss.is_shared`). Raises UserError, on all ranks and before they exchange
        anything, where a microbatch cannot be cut.
        """
        decoder = self.model.decoder
        device = decoder.output_weight.device
        if not int(microbatch.cu_seqlens[-1]):
            return StepLoss(loss_sum=torch.zeros((), device=device), target_weight=0.0)
        data, mask, share = self._cut(microbatch)
        segments = replace(Segments.of(data.cu_seqlens), attend=share.attention)
        found = Targets.of(data.labels, data.target_weights)
        sequence = data.input_ids, decoder.positions(data), segments, found, decoder.dropout_keys(data)
        ids, positions, segments, targets, keys = to_device(sequence, device)
        x: Tensor = decoder.embed(ids)
        for kind in self._media(data, mask, share):
            x = self._filled(x, to_device(kind, device))
        loss_sum = token_loss(decoder(x, positions, segments, keys), targets, decoder.output_weight)
        return StepLoss(loss_sum=loss_sum, target_weight=data.target_weight, is_shared=self._group is not None)

    def _cut(self, data: PackedMicrobatch) -> tuple[PackedMicrobatch, AttentionMask, ContextShare]:
        """Return this rank's slice of a microbatch, the mask of the whole, and its share of it."""
        is_slice = len(data.rows) > 0
        if is_slice:
            mask = slice_mask(data)
        else:
            mask = microbatch_mask(
                data,
                image=self._image,
                audio=self._audio,
                image_token=self.model.image_token_id,
                audio_token=self.model.audio_token_id,
                images=self._images,
                recordings=self._recordings,
            )
        share = self._share(mask, data)
        if not is_slice:
            num_targets = int((share.take(data.labels) != LABEL_IGNORED).sum())
            return slice_of(data, share.places, num_targets), mask, share
        if not torch.equal(data.rows, share.places):
            raise UserError(
                f"the slice is not this rank's share of cp {share.shares.num_ranks} in blocks of {self._block} tokens: give "
                "ContextModel the group of the loader's cp, and the block of its cp_order"
            )
        return data, mask, share

    def _share(self, mask: AttentionMask, data: PackedMicrobatch) -> ContextShare:
        """Return this rank's share, of all sequences as one or of each by itself."""
        if self._degrees is None or self._groups is None or len(data.rows):
            return ContextShare.of(mask, self._group, block=self._block, heads_at_once=self._heads_at_once)
        bounds = data.cu_seqlens.numpy().astype(np.int64)
        bounds = bounds[np.concatenate([[True], np.diff(bounds) > 0])]  # without empty sequences
        ranks = self._degrees(np.diff(bounds), np.add.reduceat(mask.row_counts(), bounds[:-1]))
        return share_by_degrees(mask, bounds, ranks, self._groups, block=self._block, heads_at_once=self._heads_at_once)

    def _media(self, data: PackedMicrobatch, mask: AttentionMask, share: ContextShare) -> list[_Kind]:
        """Return the kinds of media that the whole microbatch has, each with what this rank encodes of it."""
        model, rank = self.model, dist.get_rank(self._group) if self._group is not None else 0
        lengths = media_lengths(data, image=self._image, audio=self._audio)
        ranks = [encoding_ranks(of_kind, share.shares.num_ranks) for of_kind in lengths]
        own = with_media(data, *(np.flatnonzero(of_kind == rank) for of_kind in ranks))
        image_rows, audio_rows = (
            self._rows_of(modality, mask, share, np.repeat(of_kind, counts))
            for modality, of_kind, counts in zip((VISION, AUDIO), ranks, lengths, strict=True)
        )
        kinds = [
            _Kind(rows=image_rows, inputs=model.image_inputs(own), learns=_learns(model.vision, model.vision_projector)),
            _Kind(rows=audio_rows, inputs=model.audio_inputs(own), learns=_learns(model.audio, model.audio_projector)),
        ]
        return [kind for kind, of_kind in zip(kinds, lengths, strict=True) if of_kind.any()]

    def _rows_of(self, modality: int, mask: AttentionMask, share: ContextShare, encoders: Ints) -> MediaRows:
        return share.media(np.flatnonzero(mask.own == modality), encoders)

    def _filled(self, x: Tensor, kind: _Kind) -> Tensor:
        """Return this rank's embeddings with tokens of one kind of media in their places."""
        tokens = x.new_zeros(0, x.shape[1])
        if isinstance(kind.inputs, ImageInputs):
            tokens = self.model.image_tokens(kind.inputs)
        elif kind.inputs is not None:
            tokens = self.model.audio_tokens(kind.inputs)
        if kind.learns and not tokens.requires_grad:  # all ranks meet in the backward, those that encode nothing too
            tokens = tokens.detach().requires_grad_()
        return kind.rows.fill(x, tokens)


def check_sequences(model: MultimodalModel) -> None:
    """Raise UserError for a model whose sequences several ranks cannot share."""
    if model.generator is not None:
        raise UserError("context parallelism does not cut a generator's input: train the model without one, or leave out cp")
    if isinstance(model.decoder, PaddedDecoder) or type(model).embed is not MultimodalModel.embed:
        raise UserError(
            "context parallelism takes a compact model, or one of headrace.trainer.models.load: a glued one takes whole sequences"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    """Images or recordings."""

    rows: MediaRows
    inputs: ImageInputs | AudioInputs | None
    """Of those that this rank encodes; None: of none."""
    learns: bool
    """Whether gradients of their tokens are asked for, the same on all ranks."""


def _learns(*modules: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(parameter.requires_grad for module in modules for parameter in module.parameters())
