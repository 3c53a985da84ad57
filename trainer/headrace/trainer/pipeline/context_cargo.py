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
from headrace.errors import UserError
from headrace.trainer.context.context_model import check_sequences
from headrace.trainer.context.gathered_attention import GatheredAttention
from headrace.trainer.context.sequence_rows import SequenceRows
from headrace.trainer.loading.collate import PackedMicrobatch
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

    def __call__(self, routes: Routes, portion: Portion, data: PackedMicrobatch) -> Cargo:
        """As `CargoMaker`; data: of whole samples. Raises UserError, in all places alike, where one would have no token."""
        num_tokens = len(data.input_ids)
        if not num_tokens:
            return super().__call__(routes, portion, data)
        if num_tokens < len(self._parts):
            raise UserError(
                f"samples {data.sample_ids.tolist()} have {num_tokens} tokens together in microbatch {portion.forward} of llm, "
                f"too few for cp {len(self._parts)}, which gives each rank one: lower cp, or leave them out (a source's filter)"
            )
        several = [self._parts] * (len(data.cu_seqlens) - 1)
        rows = SequenceRows.of(data.cu_seqlens, several, self._part, block=block_of(num_tokens, len(self._parts)))
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
        return Cargo(inputs=inputs, arriving=_as_received(arriving), joins=_apart(joins), most_rows=attention.longest)

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


def _as_received(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Return exchanges whose rows are those of what the place itself receives from a unit, one behind the other."""
    found, ends = [], dict[str, int]()
    for exchange in exchanges:
        begin = ends.get(exchange.unit, 0)
        ends[exchange.unit] = begin + exchange.num_rows
        found.append(replace(exchange, rows=slice(begin, ends[exchange.unit])))
    return found


def _apart(joins: Mapping[str, Join]) -> dict[str, Join]:
    """Return joins under which each place has what it receives itself, padded: they are joined inside of the stage."""
    return {unit: Join(num_rows=join.num_own, num_own=join.num_own, order=None) for unit, join in joins.items()}
