"""What the GPUs of the LLM's pipelines hold over one global batch where encoders share them: the state and activations of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.judge import Simulated, sharing_of
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.list_schedule import CELL, KIND, REPLICA, SLOT, STAGE, UNIT, WIDTH
from headrace.reorder_service.planning.simulation.shared_ranks import simulate_shared
from headrace.schedule import Kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOnStage:
    """What the fullest GPU of a stage holds of activations, and from when on it has gradients of which unit."""

    replica: int
    times_s: Floats
    """(e,) ascending, when activations change, to `held`."""
    held: Floats
    gradients: Sequence[tuple[str, float, float]]
    """By unit: when its first backward begins, and when its last action ends."""


def held_on_shared_ranks(candidate: Candidate, step: Simulated, stages: Sequence[int]) -> list[HeldOnStage]:
    """Return what the fullest GPU of each of these stages, of those of all units, holds over a global batch."""
    work = planned_work(step.batch, step.slots)
    shared = simulate_shared(step.batch, step.slots, sharing_of(candidate))
    order = np.lexsort((shared.end_s, shared.start_s))  # a GPU does one thing at a time
    actions, start_s, end_s = shared.actions[order], shared.start_s[order], shared.end_s[order]
    units = list(candidate.grids)
    frees = np.array([work.execution.freed_by(unit) for unit in units])[actions[:, UNIT]] == actions[:, KIND]
    takes = actions[:, KIND] == Kind.FORWARD
    pieces = np.array([candidate.pieces if unit in candidate.guests else 1 for unit in units])[actions[:, UNIT]]
    amounts = work.memory[:, actions[:, SLOT], actions[:, UNIT]] / pieces
    begin, end = actions[:, CELL], actions[:, CELL] + actions[:, WIDTH]

    def on(cell: int) -> NDArray[np.bool_]:
        return (begin <= cell) & (cell < end)

    def held_on(cell: int) -> tuple[Floats, Floats]:
        own = on(cell) & (takes | frees)
        times: Floats = np.where(takes, start_s, end_s)[own]
        held: Floats = np.maximum(np.cumsum(np.where(takes, amounts[0], -amounts[1])[own]), 0.0)
        return times, held

    found = []
    for stage in stages:
        hosts = actions[:, STAGE] == stage
        cells = np.unique(begin[hosts][:, None] + np.arange(actions[hosts, WIDTH].max()))
        fullest = max(cells.tolist(), key=lambda cell: float(held_on(cell)[1].max(initial=0.0)))
        times_s, held = held_on(fullest)
        there = on(fullest)
        gradients = [
            (
                name,
                float(start_s[there & of_unit & frees].min(initial=step.step_s)),
                float(end_s[there & of_unit].max(initial=0.0)),
            )
            for u, name in enumerate(units)
            if (there & (of_unit := actions[:, UNIT] == u)).any()
        ]
        replica = int(actions[hosts & there, REPLICA][0])
        found.append(HeldOnStage(replica=replica, times_s=times_s, held=held, gradients=gradients))
    return found


def host_stages(candidate: Candidate) -> list[int]:
    """Return the places of the stages that have GPUs of their own, or share those that they have with guests."""
    places: Ints = np.concatenate(([0], np.cumsum([grid.pp for grid in candidate.grids.values()])))
    return [
        int(places[u]) + stage
        for u, (unit, grid) in enumerate(candidate.grids.items())
        if unit == LLM or unit not in candidate.guests
        for stage in range(grid.pp)
    ]
