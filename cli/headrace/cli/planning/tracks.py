"""The tracks in which pictures and traces show a step: one for each stage of each replica, or for each rank that units share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.cli.planning.outcome import Outcome
from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Ints
from headrace.reorder_service.planning.simulation.list_schedule import CELL, WIDTH
from headrace.reorder_service.planning.simulation.shared_ranks import SharedStep
from headrace.reorder_service.planning.simulation.simulator import Timeline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tracks:
    """The t tracks of a step, and which of them each of its a actions takes."""

    names: Sequence[str]
    """Of the tracks."""
    replica: Ints
    """(t,) replica to which each track belongs: of the LLM, where units share its ranks."""
    ranks: Sequence[range]
    """Of each track, by the numbers that the trainers have; empty ones where tracks are stages."""
    first: Ints
    """(a,) first of the tracks that an action takes."""
    width: Ints
    """(a,) number of neighbouring tracks that it takes."""

    @classmethod
    def of(cls, outcome: Outcome, timeline: Timeline) -> Tracks:
        """Return those of the simulated actions of `outcome.timeline()`."""
        if outcome.shared is None:
            return _stage_tracks(outcome, timeline)
        columns = outcome.shared.actions
        return _rank_tracks(outcome, outcome.shared, columns[:, CELL], columns[:, WIDTH])

    @property
    def most_of_a_replica(self) -> int:
        """The largest number of tracks of a replica."""
        return int(np.bincount(self.replica).max())

    def boxes(self, actions: Ints) -> tuple[Ints, Ints]:
        """Return (b,) the action and the track of each box that is drawn of the given actions: one in each of their tracks."""
        width = self.width[actions]
        which = np.repeat(actions, width)
        offset = np.arange(which.size) - np.repeat(np.cumsum(width) - width, width)
        return which, self.first[which] + offset

    def slowest(self, timeline: Timeline, most: int) -> list[int]:
        """Return the sorted indices of the `most` replicas whose tracks end last.

        Among replicas that end at the same time, those with more actions on the critical path are preferred.
        """
        which, track = self.boxes(np.arange(self.first.size))
        replica, number = self.replica[track], int(self.replica.max()) + 1
        ends = np.zeros(number)
        np.maximum.at(ends, replica, timeline.end_s[which])
        critical = np.bincount(replica[timeline.critical[which]], minlength=number)
        return sorted(np.lexsort((-critical, -ends))[:most].tolist())


def _stage_tracks(outcome: Outcome, timeline: Timeline) -> Tracks:
    """Return a track for each stage of each replica, also of those that a unit does not have, for the actions of a timeline."""
    num_stages, replicas = outcome.plan.topology.num_stages, outcome.batch.most_replicas
    return Tracks(
        names=outcome.stage_names * replicas,
        replica=np.repeat(np.arange(replicas), num_stages),
        ranks=[range(0)] * (replicas * num_stages),
        first=timeline.replica * num_stages + timeline.stage,
        width=np.ones_like(timeline.stage),
    )


def tracks_of_places(outcome: Outcome, timeline: Timeline, slices: Ints) -> Tracks:
    """Return the tracks of a planned step for actions that were measured, each on one rank.

    slices: (a,) tensor-parallel slice of the process that took each action of the timeline.
    """
    if outcome.shared is None:
        return _stage_tracks(outcome, timeline)
    begin, between, _ = outcome.shared.cells[timeline.stage].T
    cell = begin + timeline.replica * between + slices // outcome.shared.sharing.cell
    return _rank_tracks(outcome, outcome.shared, cell, np.ones_like(cell))


def _rank_tracks(outcome: Outcome, shared: SharedStep, first: Ints, width: Ints) -> Tracks:
    """Return a track for each cell: the ranks of the LLM that always act together, and a stage that has ranks of its own."""
    batch, topology = outcome.batch, outcome.plan.topology
    names, replica, ranks = {}, {}, {}
    first_rank = first_stage = 0
    for unit, replicas in zip(batch.units, batch.unit_replicas, strict=True):
        stages = topology.stages[unit]
        if unit not in shared.sharing.guests:
            begin, between, _ = shared.cells[first_stage].tolist()
            together = shared.sharing.cell if unit == LLM else 1
            for place in range(replicas * between):
                of_place = range(first_rank + place * together, first_rank + (place + 1) * together)
                names[begin + place] = _name(of_place) if unit == LLM else outcome.stage_names[first_stage + place % between]
                replica[begin + place], ranks[begin + place] = place // between, of_place
            first_rank += replicas * between * together
        first_stage += stages
    tracks = range(len(names))
    return Tracks(
        names=[names[track] for track in tracks],
        replica=np.array([replica[track] for track in tracks]),
        ranks=[ranks[track] for track in tracks],
        first=first,
        width=width,
    )


def _name(ranks: range) -> str:
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start}-{ranks.stop - 1}"
