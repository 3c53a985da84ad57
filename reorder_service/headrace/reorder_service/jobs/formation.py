"""For which pipelines the steps of a recoverable job are planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.reorder_service.planning.unequal_pipelines import PipelineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """The pipelines that a job's nodes have formed, and the first step that is planned for them."""

    generation: int
    """Generation of the snapshot of the nodes that has these pipelines."""
    first_step: int
    pipelines: tuple[PipelineShape, ...]


def formation_of(formations: Sequence[Formation], step: int) -> Formation | None:
    """Return the formation that a step is planned for: the newest one that begins with it or an earlier step; None: none."""
    return max((one for one in formations if one.first_step <= step), key=lambda one: one.generation, default=None)
