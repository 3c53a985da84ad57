"""The LLM's cargo on a rank that shares samples with others: its own rows of each, and their places among the media tokens.

Encoders send what they make of a sample to all ranks that share it, each of which takes the tokens of its placeholders.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from headrace.block_distribution import BLOCK
from headrace.errors import UserError
from headrace.trainer.context.context_model import check_sequences
from headrace.trainer.context.sequence_rows import Groups, PlannedAttention, SequenceRows
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.attention import Segments
from headrace.trainer.orchestrated.unit_roots import StageRoot, UnitRoot
from headrace.trainer.pipeline.cargo import Cargo, CargoMaker
from headrace.trainer.pipeline.chunk import Chunk, Inputs
from headrace.trainer.pipeline.layer_inputs import attending, mapped
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.pipeline.unit_exchange import Join


def check_shares(llm: UnitRoot) -> None:
    """Raise UserError for an LLM whose sequences ranks cannot share."""
    if not isinstance(llm, StageRoot):
        raise UserError("the job's execution has cp of the llm, but a module of one's own takes whole sequences: leave out cp")
    check_sequences(llm.stage.model)


class SequenceCargoMaker(CargoMaker):
    """Makes the LLM's cargo for one rank, of portions in which samples may be shared."""

    def __init__(self, topology: PipelineTopology, place: Place, root: StageRoot, *, block: int = BLOCK) -> None:
        """block: tokens of the blocks by which sequences are divided."""
        super().__init__(topology, place, [cast(Chunk, root)])
        self._root, self._rank, self._block = root, place.replica, block

    def __call__(self, routes: Routes, portion: Portion, data: PackedMicrobatch) -> Cargo:
        """As `CargoMaker`; data: of whole samples."""
        members = [routes.sharers(sample, self._rank) for sample in data.sample_ids.tolist()]
        if all(len(ranks) == 1 for ranks in members):
            return super().__call__(routes, portion, data)
        rows = SequenceRows.of(data.cu_seqlens, members, self._rank, block=self._block)
        inputs = attending(self._root.prepare(rows.take(data)), rows.attention)
        arriving, joins = self._arriving(routes, portion, data)
        own: dict[str, Join] = {}
        for unit, join in joins.items():
            taken = rows.among(self._root.stage.model.placeholders(unit, data.input_ids))
            own[unit] = replace(join, num_rows=len(taken), order=taken if join.order is None else join.order[taken])
        return Cargo(inputs=[inputs], arriving=arriving, joins=own)


def joined(inputs: Inputs, groups: Groups) -> Inputs:
    """Return the LLM's inputs with process groups in the place of their ranks, where it shares any sample."""

    def change(segments: Segments) -> Segments:
        planned = segments.attend
        return replace(segments, attend=planned.joined(groups)) if isinstance(planned, PlannedAttention) else segments

    return replace(inputs, layers=mapped(inputs.layers, Segments, change))
