"""What a model asks of a cluster in training on given data: the input of every search for a placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.planning.orchestration.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitDemand:
    """What one unit of the model takes of n sampled samples of the data, at every tensor-parallel width that it may have."""

    name: str
    """Name of the unit, as in `topology.stages`."""
    layers: int
    """Most stages that the unit can be cut into."""
    parameters: float
    """Number of weights of its layers and of what stands at both ends of them."""
    trained_share: float
    """Share of these that is trained; the others are frozen and have no gradients and no optimizer's state."""
    backward_factor: float
    """Backward over forward time; 0 for a unit without a backward (`headrace.backward_factors`)."""
    forward_s: Mapping[int, Floats]
    """By tensor-parallel width: (n,) forward seconds of each sample in the whole unit, with what the slices exchange."""
    kept_bytes: Mapping[int, Floats]
    """By tensor-parallel width: (n,) activations of each sample that all stages together keep for the backward, on one slice."""
    sent_bytes: Floats
    """(n,) bytes that one stage sends to the next for each sample."""
    end_layers: float = 0.0
    """Time of what stands behind its last layer (head, projector) on these samples, over that of a layer."""
    front_parameters: float = 0.0
    """Of its weights, those in front of the first layer (embedding), which the first stage has besides its layers."""
    back_parameters: float = 0.0
    """Of its weights, those behind the last layer, which the last stage has."""
    microbatch_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of a microbatch's forward and backward in all its stages together, besides those of its samples."""
    step_s: tuple[float, float] = (0.0, 0.0)
    """Seconds once a step for all its weights: to collect gradients, and to update the weights (`measured_costs.PartCosts`)."""
    only_dp: tuple[int, ...] | None = None
    """Numbers of replicas that the user allows it, ascending; None: any."""
    only_pp: tuple[int, ...] | None = None
    """Numbers of stages that the user allows it, ascending; None: any."""

    def most_replicas(self, most: int) -> int:
        """Return the largest number of replicas, up to `most`, that is allowed; 0 if none is."""
        return _largest(self.only_dp, most)

    def most_stages(self, most: int) -> int:
        """Return the largest number of stages, up to `most` and its layers, that is allowed; 0 if none is."""
        return _largest(self.only_pp, min(most, self.layers))

    def allows(self, dp: int, pp: int) -> bool:
        """Return whether the user allows so many replicas and stages."""
        return self.most_replicas(dp) == dp > 0 and self.most_stages(pp) == pp > 0


def _largest(allowed: tuple[int, ...] | None, most: int) -> int:
    return most if allowed is None else max((number for number in allowed if number <= most), default=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """What a model asks of a cluster: its units in pipeline order, and the global batch that they are to train on together."""

    units: tuple[UnitDemand, ...]
    cluster: Cluster
    global_batch: int
    """Samples of a step."""
    schedule: str = "1f1b"
    """Name of the pipeline schedule (`headrace.schedule.SCHEDULES`)."""
    chunks: int = 1
    """Parts of a unit on each of its stages, for 'interleaved'."""

    @property
    def num_samples(self) -> int:
        """n, the number of samples of the data whose demand is known."""
        return len(self.units[0].sent_bytes)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Names of the units in pipeline order."""
        return tuple(unit.name for unit in self.units)

    def step_s(self, unit: UnitDemand, tp: int) -> float:
        """Return the mean seconds of one sample's forward and backward in the whole unit, at a tensor-parallel width."""
        return float(unit.forward_s[tp].mean()) * (1.0 + unit.backward_factor)
