"""The way of every sample through a step: a StepPlan mapped onto units that each have their own number of replicas.

A *portion* is the samples of one microbatch whose backwards also run in the same microbatch, so forward and backward process
them together. In every unit, a sample's backward runs in the microbatch that has the sample in the last unit (Entrain, section
4.5.3: the split backward of deferred samples). So a microbatch without deferral is one portion; with deferral its portions are
computed separately, which costs some launches and no arithmetic, as samples do not attend to each other.

If a unit has another number of replicas than the LLM, gcd(both numbers) lanes connect them (3 encoder replicas and 2 of the LLM
are one lane), and the plan says how the samples of a lane are dealt to the unit's replicas (`StepPlan.unit_replicas`). Plans of
a job that does not say the unit's dp (`execution.units`) do not: the samples of a lane's microbatch are then cut by number, in
order, and some replicas take longer than others.

A sample that several replicas of the LLM share (`StepPlan.degrees`) is in a portion of each, and its encoders hand it to all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from headrace.plan import LLM, StepPlan


@dataclass(frozen=True, slots=True, order=True)
class Portion:
    """The samples that one replica of a unit processes together in forward and backward."""

    unit: str
    replica: int
    forward: int
    """The microbatch of their forward."""
    backward: int
    """The microbatch of their backward, never earlier than `forward`."""
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Handover:
    """The samples that pass from a portion of one unit to a portion of the next unit, in the order of the source."""

    source: Portion
    target: Portion
    samples: tuple[int, ...]
    number: int
    """Index among all handovers of the step."""


@dataclass(frozen=True, slots=True)
class _Place:
    replica: int
    microbatch: int


class Routes:
    """All portions of a step, and the handovers between them."""

    def __init__(self, plan: StepPlan, replicas: Mapping[str, int]) -> None:
        """`replicas`: number of replicas of each unit.

        Raises ValueError if its units are not those of the plan, or a unit's number is not the one that the plan deals it.
        """
        if set(replicas) != set(plan.topology.stages):
            raise ValueError(f"the plan is for the units {', '.join(plan.topology.stages)}, not for {', '.join(replicas)}")
        units = list(plan.topology.stages)
        places = {unit: _places(plan, unit, replicas[unit]) for unit in units}
        back = {sample: place.microbatch for sample, place in places[units[-1]].items()}
        llm = places[LLM].items() if plan.degrees else ()
        self._sharers = {sample: plan.sharers(sample, place.replica) for sample, place in llm if sample in plan.degrees}
        self._shared_in = {sample: place.microbatch for sample, place in llm if sample in plan.degrees}
        of_unit = {unit: _portions(unit, places[unit], back, self._sharers if unit == LLM else {}) for unit in units}
        self._portions: dict[tuple[str, int], list[Portion]] = {}
        self._occupied: dict[int, set[int]] = {}  # by replica
        for portion in chain.from_iterable(of_unit.values()):
            self._portions.setdefault((portion.unit, portion.replica), []).append(portion)
            self._occupied.setdefault(portion.replica, set()).update((portion.forward, portion.backward))
        self._into: dict[Portion, list[Handover]] = {}
        self._out_of: dict[Portion, list[Handover]] = {}
        self.handovers: list[Handover] = []
        for unit, behind in plan.topology.feeds.items():
            self._connect(of_unit[unit], of_unit[behind])
        self._forward_s = plan.forward_s
        self.in_flight = plan.in_flight
        """Most microbatches that a stage may hold in this step under the 'eager' schedule; None: as many as the topology says."""
        ends = ((handover.source, handover.target) for handover in self.handovers)
        self.pairs = {((source.unit, source.replica), (target.unit, target.replica)) for source, target in ends}
        """The pairs of a replica and one of the next unit between which samples pass."""
        self.crosses = any(source != target for (_, source), (_, target) in self.pairs)
        """Whether any sample passes from a replica of one unit to a replica with another index in the next unit."""

    def _connect(self, sources: Sequence[Portion], targets: Sequence[Portion]) -> None:
        targets_of: dict[int, list[Portion]] = {}
        for portion in targets:
            for sample in portion.samples:
                targets_of.setdefault(sample, []).append(portion)
        for source in sources:
            taken: dict[Portion, list[int]] = {}
            for sample in source.samples:
                for target in targets_of[sample]:
                    taken.setdefault(target, []).append(sample)
            for target, samples in sorted(taken.items()):
                handover = Handover(source, target, tuple(samples), len(self.handovers))
                self.handovers.append(handover)
                self._out_of.setdefault(source, []).append(handover)
                self._into.setdefault(target, []).append(handover)

    def sharers(self, sample: int, replica: int) -> range:
        """Return the replicas of the LLM that share a sample. replica: one that has it."""
        return self._sharers.get(sample, range(replica, replica + 1))

    def shared_by(self, microbatch: int) -> tuple[tuple[int, ...], ...]:
        """Return the replicas of the LLM that share any sample of a microbatch with each other, each set of them once."""
        return tuple(sorted({tuple(self._sharers[sample]) for sample, k in self._shared_in.items() if k == microbatch}))

    def portions(self, unit: str, replica: int) -> list[Portion]:
        """Return the portions of one replica of a unit, ordered by the microbatch of their forward, then of their backward."""
        return self._portions.get((unit, replica), [])

    def into(self, portion: Portion) -> Sequence[Handover]:
        """Return the handovers into a portion, ordered by upstream unit; none in an encoder."""
        return self._into.get(portion, ())

    def out_of(self, portion: Portion) -> Sequence[Handover]:
        """Return the handovers from a portion to the downstream unit; none in the last unit."""
        return self._out_of.get(portion, ())

    def forward_s(self, portion: Portion) -> float:
        """Return how long the forward of a portion takes in its whole unit: seconds, or samples where the plan has no seconds."""
        of_unit = self._forward_s.get(portion.unit)
        return float(len(portion.samples)) if of_unit is None else sum(of_unit[sample] for sample in portion.samples)

    def occupied(self, replica: int, *, in_step: bool = False) -> tuple[int, ...]:
        """Return the microbatches that replica `replica` of every unit has to run, in order.

        They are those in which any unit has a sample on this replica. If samples change replicas (`crosses`), all replicas run
        the microbatches that any replica has, which avoids deadlocks; the planner's simulator does the same. So do they if
        `in_step`: where they meet in every action.
        """
        together = self.crosses or in_step
        occupied = set().union(*self._occupied.values()) if together else self._occupied.get(replica, ())
        return tuple(sorted(occupied))


def _places(plan: StepPlan, unit: str, replicas: int) -> dict[int, _Place]:
    """Return replica and microbatch of every sample of a unit, in the order in which its replicas have the samples."""
    if (dealt := plan.unit_replicas.get(unit)) is not None:
        if len(dealt) != replicas:
            raise ValueError(f"the plan deals unit {unit!r} to {len(dealt)} replicas, not to {replicas}")
        return {
            sample: _Place(replica=r, microbatch=index)
            for r, microbatches in enumerate(dealt)
            for index, samples in enumerate(microbatches)
            for sample in samples
        }
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


def _portions(unit: str, places: Mapping[int, _Place], back: Mapping[int, int], sharers: Mapping[int, range]) -> list[Portion]:
    """Return the portions of a unit. Samples that several replicas share come first, those of the same replicas together, in one
    order on all of them: so these meet in their exchanges."""
    samples: dict[tuple[int, int, int], list[int]] = {}

    def order(sample: int) -> tuple[int, int, int]:
        several = sharers.get(sample)
        return (1, 0, 0) if several is None else (0, several.start, several.stop)

    for sample in sorted(places, key=order) if sharers else places:
        place = places[sample]
        for replica in sharers.get(sample, (place.replica,)):
            samples.setdefault((replica, place.microbatch, back[sample]), []).append(sample)
    return [Portion(unit, *key, tuple(of_portion)) for key, of_portion in sorted(samples.items())]
