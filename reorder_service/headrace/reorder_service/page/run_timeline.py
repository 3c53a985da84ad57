"""When each stage, or each rank, has done what in a committed step, as trainers have measured it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.measured import ALL_UNITS, MeasuredWork
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.page.timeline_rows import MOST_ACTIONS, Row, action_of, rank_name, replica_name, stage_name

BY_CLOCK, BY_FIRST_ACTION = "clock", "first_action"
ALL_KINDS = "whole"
"""The kind of what a rank with all units says of them together: forward and backward of a microbatch."""
REDUCTION = "reduction"
"""The kind of what a stage waits behind its last action for the sums of its gradients over replicas; of no microbatch."""
# Ranks begin a step within the one before. Where their begins are further apart than this many times the step's time on its
# slowest rank, and some more, their clocks are.
MOST_APART, MORE_APART_S = 2.0, 1.0

_Place = tuple[int, int, int]
"""Replica, place of the unit in a pipeline, and stage: the order of rows."""


@dataclass(frozen=True, slots=True)
class RunTimeline:
    """A step as it ran. Time 0 is the begin of the first action of all ranks, or with BY_FIRST_ACTION of each row's own."""

    rows: Sequence[Row]
    aligned_by: str
    """BY_CLOCK: the clocks of the hosts; BY_FIRST_ACTION: where these say what cannot be."""

    @classmethod
    def of(cls, step: PlannedStep, planned: Sequence[str]) -> RunTimeline | None:
        """Return the run of a committed step, of those replicas or ranks that its planned rows are of; these are given by name.

        None where no rank has measured when its actions began.
        """
        names, works_at = _Names.of(step, planned), dict[_Place, list[MeasuredWork]]()
        for work in _begun(step):
            works_at.setdefault(names.place_of(work), []).append(work)
        if not works_at:
            return None
        begins = {place: min(work.origin_unix_s for work in works) for place, works in works_at.items()}
        first_s = min(begins.values())
        slowest_s = max(commit.step_s for commit in step.commits.values())
        by_clock = max(begins.values()) - first_s <= MOST_APART * slowest_s + MORE_APART_S
        rows, left = list[Row](), MOST_ACTIONS
        for place, works in sorted(works_at.items()):
            if left > 0 and (name := names.shown(works[0])) is not None:
                rows.append((name, list(_actions(works, first_s if by_clock else begins[place]))[:left]))
                left -= len(rows[-1][1])
        return cls(rows, BY_CLOCK if by_clock else BY_FIRST_ACTION) if rows else None


@dataclass(frozen=True, slots=True)
class _Names:
    """What the rows of measured places are called: like planned ones, unless a unit runs in another number of replicas than the
    plan has, whose samples its trainers have cut by number."""

    step: PlannedStep
    planned: frozenset[str]
    of_ranks: bool
    """Whether each planned row is that of a rank, with all units."""
    stages: Mapping[str, int]
    planned_replicas: Mapping[str, int]
    own_replicas: Mapping[str, int]

    @classmethod
    def of(cls, step: PlannedStep, planned: Sequence[str]) -> _Names:
        plan, own = step.plan, dict[str, int]()
        assert plan is not None, "only planned steps are shown"
        for work in _begun(step):
            own[work.unit] = max(own.get(work.unit, 1), 1 + work.replica)
        dealt = {unit: len(plan.unit_replicas.get(unit, plan.replicas)) for unit in plan.topology.stages}
        of_ranks = any(name in planned for name in (rank_name(work.replica) for work in _begun(step)))
        return cls(step, frozenset(planned), of_ranks, plan.topology.stages, dealt, own)

    def place_of(self, work: MeasuredWork) -> _Place:
        """Return the place of a work; its unit is behind all others if the plan does not have it."""
        if self.of_ranks:
            return work.replica, 0, 0
        unit = next((place for place, one in enumerate(self.stages) if one == work.unit), len(self.stages))
        return work.replica, unit, work.stage

    def shown(self, work: MeasuredWork) -> str | None:
        """Return the name of the row of a rank's work; None where the plan shows nothing that it belongs to."""
        unit, replica, formation = work.unit, work.replica, self.step.formation
        if self.of_ranks:
            return name if (name := rank_name(replica)) in self.planned else None
        if unit == ALL_UNITS:
            return f"{replica_name(self.step, replica)}all units" if self._shows(replica) else None
        if formation is not None:
            stages = formation.pipelines[replica].stages if 0 <= replica < len(formation.pipelines) else {}
            name = replica_name(self.step, replica) + stage_name(unit, work.stage, len(stages.get(unit, ())))
            return name if name in self.planned else None
        name = stage_name(unit, work.stage, self.stages.get(unit, 0))
        most, own = self.planned_replicas.get(unit, 0), self.own_replicas[unit]
        if own == most:
            name = replica_name(self.step, replica) + name
            return name if name in self.planned else None
        lanes = math.gcd(own, most)
        lane = replica * lanes // own
        if work.stage < self.stages.get(unit, 0) and any(
            map(self._shows, range(most * lane // lanes, most * (lane + 1) // lanes))
        ):
            return f"replica {replica} {name}" if own > 1 else name
        return None

    def _shows(self, replica: int) -> bool:
        """Whether there is a planned row of this replica."""
        return any(name.startswith(replica_name(self.step, replica)) for name in self.planned)


def has_begins(step: PlannedStep) -> bool:
    """Whether a rank has measured when its actions of a step began."""
    return any(_begun(step))


def _begun(step: PlannedStep) -> Iterator[MeasuredWork]:
    return (
        work
        for commit in step.commits.values()
        for work in commit.measured
        if work.begins_s and math.isfinite(work.origin_unix_s)
    )


def _actions(works: Sequence[MeasuredWork], zero_unix_s: float) -> Iterator[dict[str, Any]]:
    """Yield the actions of one row in order of time."""
    found = list[_Ran]()
    for work in works:
        kind, chunks = ALL_KINDS if work.unit == ALL_UNITS else work.kind.name.lower(), work.chunks or [0] * len(work.begins_s)
        columns = zip(work.begins_s, work.seconds, work.microbatches, chunks, strict=True)
        ran = [_Ran(begin_s, took_s, kind, microbatch, work.unit, chunk) for begin_s, took_s, microbatch, chunk in columns]
        ran.append(_Ran(work.reduction_begin_s, work.reduction_s, REDUCTION, None, work.unit, 0))
        for one in ran:
            if math.isfinite(one.begin_s) and math.isfinite(one.seconds) and one.seconds > 0:  # they come from the wire
                found.append(one._replace(begin_s=work.origin_unix_s - zero_unix_s + one.begin_s))
    for one in sorted(found, key=lambda one: one.begin_s):
        yield action_of(one.kind, one.microbatch, one.unit, one.begin_s, one.begin_s + one.seconds, one.chunk)


class _Ran(NamedTuple):
    """What is drawn of one work."""

    begin_s: float
    seconds: float
    kind: str
    microbatch: int | None
    unit: str
    chunk: int
