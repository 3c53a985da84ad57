"""The LLM's cargo on a place that shares sequences with others: its blocks of their tokens, and the media's tokens in them.

All places of a context-parallel group take the same portions, whose samples they divide together, each for itself and alike. What
encoders make of a portion goes to them in equal shares, as to the slices of layers; they gather it, and each takes the tokens of
its own placeholders (`LlmStage`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.block_distribution import BLOCK
from headrace.trainer.context.context_model import check_sequences
from headrace.trainer.context.gathered_attention import GatheredAttention
from headrace.trainer.context.sequence_rows import SequenceRows
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.slices import contiguous, padded_to_slices
from headrace.trainer.pipeline.cargo import Cargo, CargoMaker
from headrace.trainer.pipeline.layer_inputs import attending
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.stage import ENCODERS
from headrace.trainer.pipeline.stage_building import LlmStage
from headrace.trainer.pipeline.topology import ENCODER, PipelineTopology, Place
from headrace.trainer.pipeline.unit_exchange import Exchange, Join

BLOCKS_OF_PLACE = 4
"""Blocks that a place has at least where a portion has few tokens: with one or two of them, work would not be level."""


class ContextCargoMaker(CargoMaker):
    """Makes the cargo of portions for one place of the LLM."""

    def __init__(self, topology: PipelineTopology, place: Place, stages: Sequence[LlmStage]) -> None:
        """stages: of the place, one for each chunk, with their context-parallel group.

        Raises UserError for a model whose sequences cannot be shared.
        """
        super().__init__(topology, place, stages)
        check_sequences(stages[0].model)
        self._stages, self._group = stages, stages[0].context
        self._part, self._parts = dist.get_rank(self._group), range(dist.get_world_size(self._group))
        model, size = stages[0].model, topology.units[place.unit]
        self._padding = next(token for token in range(3) if token not in (model.image_token_id, model.audio_token_id))
        self._tp, self._tensor_slice = size.tp, size.tensor_slice(place)

    def __call__(self, routes: Routes, portion: Portion, data: PackedMicrobatch) -> Cargo:
        """As `CargoMaker`; data: of whole samples, which are padded where they have fewer tokens than there are places."""
        if not len(data.input_ids):
            return super().__call__(routes, portion, data)
        if len(data.input_ids) < len(self._parts):
            data = padded_to_slices(data, len(self._parts), contiguous, 1, self._padding)
        block = block_of(len(data.input_ids), len(self._parts))
        several = [self._parts] * (len(data.cu_seqlens) - 1)
        rows = SequenceRows.of(data.cu_seqlens, several, self._part, block=block)
        [attention] = rows.attention.parts
        assert isinstance(attention, GatheredAttention), "several places share all samples"
        own, attend = rows.take(data), replace(attention, group=self._group)
        inputs = [attending(stage.prepare(own), attend) for stage in self._stages]
        if not self._is_first:
            return Cargo(inputs=inputs, most_rows=attention.longest)
        arriving, joins = self._arriving(routes, portion, data)
        received = {}
        for unit, join in joins.items():
            taken = rows.among(self._places(unit, data))
            received[unit] = taken if join.order is None else join.order[taken]
        inputs[0] = replace(inputs[0], entry=replace(inputs[0].entry, received=received))
        return Cargo(
            inputs=inputs,
            arriving=self._as_received(arriving, joins),
            joins={unit: replace(join, num_rows=self._tp * join.num_own, order=None) for unit, join in joins.items()},
            most_rows=attention.longest,
        )

    def _as_received(self, exchanges: Sequence[Exchange], joins: Mapping[str, Join]) -> list[Exchange]:
        """Return exchanges whose rows are places among what the tensor-parallel slices with this part of the sequences receive of
        a unit, slice by slice, each padded: that much is joined in front of the stage, and the rest inside of it."""
        found, ends = [], {unit: self._tensor_slice * join.num_own for unit, join in joins.items()}
        for exchange in exchanges:
            begin = ends[exchange.unit]
            ends[exchange.unit] += exchange.num_rows
            found.append(replace(exchange, rows=slice(begin, ends[exchange.unit])))
        return found

    def _places(self, unit: str, data: PackedMicrobatch) -> Tensor:
        """Return the places (t,) int64 of a unit's tokens in the portion, in the order in which they come from it."""
        model = self._stages[0].model
        if unit != ENCODER:
            return model.placeholders(unit, data.input_ids)
        places = torch.cat([model.placeholders(encoder, data.input_ids) for encoder in ENCODERS])
        return places[torch.searchsorted(data.cu_seqlens.long(), places, right=True).argsort(stable=True)]


def block_of(num_tokens: int, num_places: int) -> int:
    """Return the tokens of a block where so many places share so many tokens: `BLOCK`, or fewer where these are few."""
    return max(1, min(BLOCK, num_tokens // (BLOCKS_OF_PLACE * num_places)))
