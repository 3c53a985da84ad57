"""Checks, before a step computes anything, that its actions can all run: nothing could end a deadlock later."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from headrace.errors import HeadraceError, UserError
from headrace.held_activations import activation_memory, freed_by
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.schedule import Action, Kind, Schedule, build
from headrace.trainer.pipeline.gradient_flow import GradientFlow
from headrace.trainer.pipeline.routes import Handover, Portion, Routes
from headrace.trainer.pipeline.topology import PipelineTopology, Place


def actions_of(topology: PipelineTopology, routes: Routes, unit: str, replica: int) -> list[list[Action]]:
    """Return the actions of each stage of one replica of a unit, in schedule order, with the plan's microbatch numbers."""
    occupied = routes.occupied(replica)
    in_flight = topology.in_flight if routes.in_flight is None else routes.in_flight
    schedule = _schedule(topology.schedule, tuple(topology.stages.items()), len(occupied), topology.chunks, in_flight)
    units = list(topology.stages)
    first = sum(topology.stages[other] for other in units[: units.index(unit)])
    return [
        [replace(action, microbatch=occupied[action.microbatch]) for action in actions]
        for actions in schedule[first : first + topology.stages[unit]]
    ]


@lru_cache(maxsize=64)
def _schedule(name: str, stages: tuple[tuple[str, int], ...], count: int, chunks: int, in_flight: int | None) -> Schedule:
    """Build the schedule of `count` microbatches numbered from 0; cached, as most steps have the same one as the step before."""
    return build(name, dict(stages), range(count), chunks=chunks, in_flight=in_flight)


def check_order(topology: PipelineTopology, routes: Routes, place: Place) -> None:
    """Raise HeadraceError, naming a blocked action, if this replica or one that it exchanges samples with would wait forever.

    Replicas that it exchanges samples with through others count too. If samples change replicas, which connects nearly all of
    them, all are rehearsed as one first, which suffices for most plans and does not grow with their number.
    """
    if routes.crosses:
        one_of_each = [(unit, 0) for unit in topology.units]
        if _Rehearsal(topology, _as_one_replica(routes, topology), one_of_each).is_done():
            return
    rehearsal = _Rehearsal(topology, routes, _connected_replicas(routes, place))
    if not rehearsal.is_done():
        raise HeadraceError(rehearsal.blocked())


def check_rows(
    topology: PipelineTopology, place: Place, actions: Sequence[Action], num_rows: Callable[[Kind], Mapping[int, int]]
) -> None:
    """Raise UserError if a stage would keep more rows for backwards than its unit's `max_rows` while it runs these actions.

    num_rows: returns, for FORWARD or BACKWARD, the rows of each microbatch; called only if there is a limit. With several
    chunks per stage, a row in one chunk counts as 1 / chunks, since the chunk has that share of the layers.
    """
    size, flow = topology.units[place.unit], GradientFlow.of(topology, place.unit)
    if size.max_rows is None:
        return
    has_backward = np.array([flow.has_backward(action.chunk * size.pp + place.stage) for action in actions])
    takes, gives = (
        has_backward * np.array([rows.get(action.microbatch, 0) for action in actions])
        for rows in (num_rows(Kind.FORWARD), num_rows(Kind.BACKWARD))
    )
    kinds = np.array([action.kind for action in actions], np.int64)
    # Only 'zero-bubble' asks for weights, and it has one chunk: a stage is at the position of its number.
    until = freed_by(topology.schedule, has_weights=flow.has_weights(place.stage))
    peak = activation_memory(kinds, takes, gives, until).max(initial=0.0) / topology.chunks
    if peak > size.max_rows:
        raise UserError(
            f"stage {place.stage} of {place.unit} replica {place.replica} would keep {peak:.0f} rows at once, more than the "
            f"max_rows {size.max_rows} of its unit: let fewer microbatches be in flight, plan smaller ones (more microbatches), "
            "or turn on checkpointing and raise max_rows"
        )


def _connected_replicas(routes: Routes, place: Place) -> set[tuple[str, int]]:
    """Return the (unit, replica) pairs that exchange samples with this place's replica, directly or through others, and it."""
    neighbours: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for handover in routes.handovers:
        one, other = ((portion.unit, portion.replica) for portion in (handover.source, handover.target))
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    found, new = set(), {(place.unit, place.replica)}
    while new:
        found |= new
        new = {other for one in new for other in neighbours.get(one, ())} - found
    return found


@dataclass(frozen=True, slots=True)
class _PortionAction:
    """The forward, backward or weight action of one portion at one position of its unit."""

    kind: Kind
    portion: Portion
    position: int


def _as_one_replica(routes: Routes, topology: PipelineTopology) -> Routes:
    """Return routes in which one replica of each unit takes the samples of all, one for all that are in the same microbatches.

    An action then waits for all that it waits for in any replica. So if these actions can all run, so can those of every replica,
    since all replicas run the same ones where samples change replicas.
    """
    places: dict[int, dict[str, int]] = {}
    for handover in routes.handovers:
        for sample in handover.samples:
            places.setdefault(sample, {}).update({end.unit: end.forward for end in (handover.source, handover.target)})
    ways = list(dict.fromkeys(tuple(place[unit] for unit in topology.units) for place in places.values()))
    samples: list[dict[str, list[int]]] = [{unit: [] for unit in topology.units} for _ in range(1 + max(map(max, ways)))]
    for sample, way in enumerate(ways):
        for unit, index in zip(topology.units, way, strict=True):
            samples[index][unit].append(sample)
    microbatches = [Microbatch(units={unit: tuple(ids) for unit, ids in of_index.items()}) for of_index in samples]
    shape = Topology(replicas=1, microbatches=len(microbatches), stages=topology.stages)
    plan = StepPlan(strategy="", seed=0, topology=shape, replicas=[microbatches], in_flight=routes.in_flight)
    return Routes(plan, dict.fromkeys(topology.units, 1))


class _Rehearsal:
    """A dry run of all stages: each in turn takes its actions for as long as their inputs are available."""

    def __init__(self, topology: PipelineTopology, routes: Routes, replicas: Collection[tuple[str, int]]) -> None:
        self._topology, self._routes = topology, routes
        self._done: set[_PortionAction] = set()
        self._left: dict[tuple[str, int, int], list[Action]] = {}
        self._forward: dict[tuple[str, int, int], list[Portion]] = {}
        self._backward: dict[tuple[str, int, int], list[Portion]] = {}
        for unit, replica in sorted(replicas):
            for portion in routes.portions(unit, replica):
                self._forward.setdefault((unit, replica, portion.forward), []).append(portion)
                self._backward.setdefault((unit, replica, portion.backward), []).append(portion)
            for stage, actions in enumerate(actions_of(topology, routes, unit, replica)):
                self._left[unit, replica, stage] = list(reversed(actions))

    def is_done(self) -> bool:
        """Run all actions that can run, and return whether these are all."""
        waiting = True
        while waiting and any(self._left.values()):
            waiting = False
            for (unit, replica, stage), actions in self._left.items():
                while actions and self._take(unit, replica, stage, actions[-1]):
                    actions.pop()
                    waiting = True
        return not any(self._left.values())

    def blocked(self) -> str:
        """Name an action that waits for ever, and why."""
        (unit, replica, stage), action = next((place, actions[-1]) for place, actions in self._left.items() if actions)
        what = f"the {action.kind.name.lower()} of microbatch {action.microbatch}"
        return (
            f"the plan makes schedule {self._topology.schedule!r} wait for itself: {what} on stage {stage} of {unit} "
            f"replica {replica} never gets its inputs; the plan must not have a sample in a unit before the one in front"
        )

    def _take(self, unit: str, replica: int, stage: int, action: Action) -> bool:
        """Run an action if its inputs are available; return whether it ran."""
        portions = self._forward if action.kind == Kind.FORWARD else self._backward  # a weight action has its backward's portions
        position = action.chunk * self._topology.units[unit].pp + stage
        steps = [
            _PortionAction(action.kind, portion, position) for portion in portions.get((unit, replica, action.microbatch), ())
        ]
        if not all(needed in self._done for step in steps for needed in self._needs(step)):
            return False
        self._done.update(steps)
        return True

    def _needs(self, step: _PortionAction) -> list[_PortionAction]:
        here, last = step.position, self._topology.num_parts(step.portion.unit) - 1
        if step.kind == Kind.WEIGHT:
            return [_PortionAction(Kind.BACKWARD, step.portion, here)]
        if step.kind == Kind.FORWARD:
            if here > 0:
                return [_PortionAction(step.kind, step.portion, here - 1)]
            return self._of_others(step.kind, self._routes.into(step.portion), lambda handover: handover.source, first=False)
        needs = [_PortionAction(Kind.FORWARD, step.portion, here)]
        if here < last:
            return [*needs, _PortionAction(step.kind, step.portion, here + 1)]
        return needs + self._of_others(step.kind, self._routes.out_of(step.portion), lambda handover: handover.target, first=True)

    def _of_others(
        self, kind: Kind, handovers: Sequence[Handover], side: Callable[[Handover], Portion], *, first: bool
    ) -> list[_PortionAction]:
        portions = [side(handover) for handover in handovers]
        return [_PortionAction(kind, portion, 0 if first else self._topology.num_parts(portion.unit) - 1) for portion in portions]
