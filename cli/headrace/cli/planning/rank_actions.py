"""What the ranks that units share do in a step, in turn: the field `ranks` of plans and simulations in JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.cli.planning.outcome import Outcome
from headrace.cli.planning.tracks import Tracks
from headrace.reorder_service.planning.simulation.simulator import Timeline
from headrace.schedule import Kind


def ranks_json(outcome: Outcome) -> dict[str, Any]:
    """Return the field, with an entry for each rank of all units; nothing where every unit has ranks of its own.

    It has the actions that take no time, too, which trainers take in turn like all others.
    """
    if outcome.shared is None:
        return {}
    timeline = outcome.timeline()
    tracks = Tracks.of(outcome, timeline)
    which, track = tracks.boxes(np.argsort(outcome.shared.turn))
    found = [
        (rank, _of_rank(outcome, timeline, which[track == number].tolist()))
        for number, together in enumerate(tracks.ranks)
        for rank in together
    ]
    return {"ranks": [{"rank": rank} | of_rank for rank, of_rank in sorted(found, key=lambda one: one[0])]}


def _of_rank(outcome: Outcome, actions: Timeline, turns: list[int]) -> dict[str, Any]:
    """Return the places that a rank has in its units, and its actions in turn."""
    units, first = outcome.batch.units, np.cumsum([0, *outcome.plan.topology.stages.values()])
    places: dict[str, dict[str, int]] = {}
    taken = []
    for a in turns:
        unit = outcome.unit_of_stage[actions.stage[a]]
        name = units[unit]
        places[name] = {"replica": int(actions.replica[a]), "stage": int(actions.stage[a] - first[unit])}
        part = "piece" if name in outcome.cut_units else "chunk" if outcome.batch.execution.chunks > 1 else None
        taken.append(
            {
                "unit": name,
                "kind": Kind(actions.kind[a]).name.lower(),
                "microbatch": int(actions.microbatch[a]),
                **({part: int(actions.chunk[a])} if part else {}),
                "start_s": float(actions.start_s[a]),
                "end_s": float(actions.end_s[a]),
            }
        )
    return {"units": {unit: places[unit] for unit in units if unit in places}, "actions": taken}
