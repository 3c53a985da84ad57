"""Where every sample of a step passes: a StepPlan laid over units that have their own numbers of replicas.

A *portion* is the samples of one microbatch whose backward runs in the same microbatch too: what goes forth, and comes back,
as one. A sample comes back, in every unit, in the microbatch in which the last unit has it (Entrain, section 4.5.3: the split
backward of deferred samples). So a microbatch without deferral is one portion, and the portions of another one are computed
apart, which costs some launches and no arithmetic: samples never see each other.

Where a unit has other replicas than the plan, gcd(theirs, the plan's) lanes connect them, and within a lane each microbatch is
dealt out anew, in order (3 encoder replicas to 2 of the LLM are one lane: microbatch k of both is cut into three).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.plan import StepPlan


@dataclass(frozen=True, slots=True, order=True)
class Portion:
    """Samples that one replica of a unit processes together."""

    unit: str
    replica: int
    forward: int
    """The microbatch in which they go forth."""
    backward: int
    """The microbatch in which they come back, never an earlier one."""
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Handover:
    """Samples that pass from a portion of one unit to a portion of the next, in the order in which the former has them."""

    source: Portion
    target: Portion
    samples: tuple[int, ...]
    number: int
    """Among all of the step."""


@dataclass(frozen=True, slots=True)
class _Place:
    replica: int
    microbatch: int


class Routes:
    """All portions of a step, and what they hand over."""

    def __init__(self, plan: StepPlan, replicas: Mapping[str, int]) -> None:
        """`replicas`: of each unit of the plan. Raises ValueError where it names other units than the plan."""
        if set(replicas) != set(plan.topology.stages):
            raise ValueError(f"the plan is for the units {', '.join(plan.topology.stages)}, not for {', '.join(replicas)}")
        units = list(plan.topology.stages)
        places = {unit: _places(plan, unit, replicas[unit]) for unit in units}
        back = {sample: place.microbatch for sample, place in places[units[-1]].items()}
        self._portions = {unit: _portions(unit, places[unit], back) for unit in units}
        self._into: dict[Portion, list[Handover]] = {}
        self._out_of: dict[Portion, list[Handover]] = {}
        self.handovers: list[Handover] = []
        for unit, behind in plan.topology.feeds.items():
            self._connect(self._portions[unit], self._portions[behind])
        self.crosses = any(handover.source.replica != handover.target.replica for handover in self.handovers)
        """Whether a sample changes its replica on the way."""

    def _connect(self, sources: Sequence[Portion], targets: Sequence[Portion]) -> None:
        target_of = {sample: portion for portion in targets for sample in portion.samples}
        for source in sources:
            taken: dict[Portion, list[int]] = {}
            for sample in source.samples:
                taken.setdefault(target_of[sample], []).append(sample)
            for target, samples in sorted(taken.items()):
                handover = Handover(source, target, tuple(samples), len(self.handovers))
                self.handovers.append(handover)
                self._out_of.setdefault(source, []).append(handover)
                self._into.setdefault(target, []).append(handover)

    def portions(self, unit: str, replica: int) -> list[Portion]:
        """In the order of their forwards, those of one microbatch in the order of their backwards."""
        return [portion for portion in self._portions[unit] if portion.replica == replica]

    def into(self, portion: Portion) -> Sequence[Handover]:
        """What it receives from the units in front, ordered by them; nothing in an encoder."""
        return self._into.get(portion, ())

    def out_of(self, portion: Portion) -> Sequence[Handover]:
        """What it gives to the unit behind; nothing in the last one."""
        return self._out_of.get(portion, ())

    def occupied(self, replica: int) -> tuple[int, ...]:
        """The microbatches that a replica, of any unit, has to run, in order.

        Where samples change replicas, everybody runs all that anybody has, so that nobody waits for himself (as the planner's
        simulator has it); else those in which any unit of this replica has a sample.
        """
        portions = [
            portion for of_unit in self._portions.values() for portion in of_unit if self.crosses or portion.replica == replica
        ]
        return tuple(sorted({index for portion in portions for index in (portion.forward, portion.backward)}))


def _places(plan: StepPlan, unit: str, replicas: int) -> dict[int, _Place]:
    """Of every sample of a unit, in the order in which its replicas have them."""
    num_lanes = math.gcd(replicas, plan.topology.replicas)
    per_lane, planned_per_lane = replicas // num_lanes, plan.topology.replicas // num_lanes
    places: dict[int, _Place] = {}
    for lane in range(num_lanes):
        planned = plan.replicas[lane * planned_per_lane : (lane + 1) * planned_per_lane]
        for index in range(plan.topology.microbatches):
            samples = [sample for replica in planned for sample in replica[index].units.get(unit, ())]
            for number, sample in enumerate(samples):
                share = number * per_lane // len(samples)
                places[sample] = _Place(replica=lane * per_lane + share, microbatch=index)
    return places


def _portions(unit: str, places: Mapping[int, _Place], back: Mapping[int, int]) -> list[Portion]:
    samples: dict[tuple[int, int, int], list[int]] = {}
    for sample, place in places.items():
        samples.setdefault((place.replica, place.microbatch, back[sample]), []).append(sample)
    return [Portion(unit, *key, tuple(of_portion)) for key, of_portion in sorted(samples.items())]
