"""Pipeline templates (Oobleck, dissertation section 2.4.1): every pipeline that a job may ever need, planned before it starts.

A template says how a number of nodes computes the whole model: its stages, the GPUs and layers of each, and the node each is on.
Templates have consecutive sizes, so that pipelines made from them can use any number of remaining nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.errors import UserError
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.recovery.stage_mapping import Chains, iteration_time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelProfile:
    """Layer times and sizes of a model of L layers, of which up to M GPUs of a node may share each.

    Raises ValueError if the parts do not fit together.
    """

    units: Mapping[str, int]
    """Number of layers of each unit, in pipeline order; their sum is L."""
    seconds: Floats
    """(L, M) seconds of forward plus backward of a microbatch through a layer that 1 .. M GPUs of one node share."""
    gpu_bytes: Ints
    """(L, M) bytes that the layer then takes on each of those GPUs. The first column, for one GPU, is the whole layer."""
    memory_bytes: int
    """Memory of one GPU."""
    gpus_per_node: int = 0
    """At least M; 0: M. With M = 1, every GPU of a node has a stage to itself."""

    def __post_init__(self) -> None:
        num_layers = sum(self.units.values())
        if self.seconds.ndim != 2 or self.seconds.shape != self.gpu_bytes.shape or len(self.seconds) != num_layers:
            raise ValueError(
                f"seconds and gpu_bytes must be ({num_layers} layers, GPUs), got {self.seconds.shape} and {self.gpu_bytes.shape}"
            )
        if self.gpus_per_node and self.gpus_per_node < self.seconds.shape[1]:
            raise ValueError(f"{self.seconds.shape[1]} GPUs cannot share a stage on nodes of {self.gpus_per_node}")
        if min(self.units.values(), default=0) < 1 or self.seconds.size == 0:
            raise ValueError(f"there must be a unit and a GPU, and a layer of each unit, got {dict(self.units)}")
        if not (np.isfinite(self.seconds) & (self.seconds > 0)).all() or (self.gpu_bytes < 0).any():
            raise ValueError("seconds of layers must be positive and finite, and bytes not negative")

    @property
    def unit_bounds(self) -> Ints:
        """(units + 1,) index of the first layer of every unit, followed by L."""
        return np.cumsum([0, *self.units.values()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage: consecutive layers of one unit, on GPUs of one node."""

    unit: str
    node: int
    """Index of the node within the pipeline, in pipeline order."""
    gpu: int = 0
    """Index of the stage's first GPU within the node."""
    gpus: int
    layers: range
    """Indices of the layers within the whole model."""
    seconds: float
    """Seconds of forward plus backward of one microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A pipeline planned for nodes that have no names yet."""

    stages: tuple[Stage, ...]

    @property
    def num_nodes(self) -> int:
        return self.stages[-1].node + 1

    def layers_of(self, node: int) -> range:
        """The layers on a node of the pipeline: contiguous, as the node's stages are neighbours."""
        stages = [stage for stage in self.stages if stage.node == node]
        return range(stages[0].layers.start, stages[-1].layers.stop)

    def nodes_of(self, unit: str) -> range:
        """The nodes of the pipeline that hold stages of a unit; one node may hold stages of several units."""
        nodes = [stage.node for stage in self.stages if stage.unit == unit]
        return range(nodes[0], nodes[-1] + 1)

    def iteration_time(self, num_microbatches: int) -> float:
        """Predicted seconds of a step; see `iteration_time`."""
        return iteration_time(np.array([stage.seconds for stage in self.stages]), num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpecification:
    """How many nodes the pipelines of a job may have."""

    num_nodes: int
    """Number of nodes at the start of the job."""
    max_failures: int
    """Number of nodes that may be lost at the same time."""
    smallest: int
    """The fewest nodes that hold the model."""
    largest: int
    """The most nodes of one pipeline: all but those of `max_failures` smallest ones; fewer if the model has too few layers."""

    @property
    def sizes(self) -> range:
        return range(self.smallest, self.largest + 1)

    @property
    def least_nodes(self) -> int:
        """The fewest nodes that hold enough replicas to lose `max_failures` nodes at once."""
        return (self.max_failures + 1) * self.smallest

    def usable(self, num_nodes: int) -> int:
        """Return how many of `num_nodes` nodes, at least `least_nodes`, pipelines can use.

        Theorem 1: all of them, if there are as many sizes as nodes in the smallest one (the Frobenius condition).
        """
        return min(num_nodes, num_nodes // self.smallest * self.largest)

    def say_spare(self, num_nodes: int) -> str:
        """Return a warning if `num_nodes` nodes do not survive a loss; empty if they do, or if `max_failures` is 0."""
        if not self.max_failures or num_nodes > self.least_nodes:
            return ""
        return (
            f"none of {num_nodes} nodes may be lost, for {self.max_failures + 1} replicas need {self.smallest} each: training "
            "ends where one is, unless others have joined by then"
        )

    @property
    def caveat(self) -> str:
        """A sentence on the smallest number of nodes of which some would be idle; empty if there is none."""
        end = self.least_nodes + self.smallest**2  # from there on, pipelines of two sizes are enough to even out any remainder
        wasteful = next((count for count in range(self.least_nodes, end) if self.usable(count) < count), None)
        if wasteful is None:
            return ""
        enough = self.least_nodes + self.smallest - 1
        return (
            f"of {wasteful} nodes {wasteful - self.usable(wasteful)} would be idle, as pipelines have {self.smallest} to "
            f"{self.largest} nodes, and only {self.smallest} consecutive sizes add up to every number: start with at least "
            f"{enough} nodes, or with nodes that have more memory, so that a pipeline needs fewer of them"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Templates:
    """All pipeline templates of a job."""

    specification: NodeSpecification
    of_size: Mapping[int, Template]
    """Number of nodes -> template, for each of the specification's sizes."""
    layer_bytes: Ints
    """(L,) bytes to copy for each layer."""


def plan_templates(profile: ModelProfile, num_nodes: int, max_failures: int) -> Templates:
    """Plan the node specification, and for each size the fastest template: least T1 + T2 + T3 per microbatch, four per stage.

    The paper minimises T1 + T2 + T3 itself, which prefers few stages of many GPUs even where these gain little: fewer stages
    process fewer microbatches in it.

    Raises UserError if the nodes do not hold as many replicas as it takes to lose `max_failures` nodes at once.
    """
    bounds = profile.unit_bounds
    unit_ends = np.repeat(bounds[1:], np.diff(bounds))
    chains = Chains.of(
        profile.seconds, profile.gpu_bytes, unit_ends, profile.memory_bytes, num_nodes, gpus_per_node=profile.gpus_per_node
    )
    specification = _specify(chains, num_nodes, max_failures)
    names = list(profile.units)
    of_size = {}
    for size in specification.sizes:
        stages = chains.fastest(size)
        quanta = chains.stage_quanta(stages)
        used = np.cumsum(stages[:, 0]) - 1
        of_size[size] = Template(
            stages=tuple(
                Stage(
                    unit=names[int(np.searchsorted(bounds, first, side="right")) - 1],
                    node=int(last_gpu) // chains.gpus_per_node,
                    gpu=int(last_gpu + 1 - gpus) % chains.gpus_per_node,
                    gpus=int(gpus),
                    layers=range(int(first), int(end)),
                    seconds=float(time) * chains.quantum,
                )
                for (gpus, first, end), time, last_gpu in zip(stages, quanta, used, strict=True)
            )
        )
    return Templates(specification=specification, of_size=of_size, layer_bytes=profile.gpu_bytes[:, 0])


def _specify(chains: Chains, num_nodes: int, max_failures: int) -> NodeSpecification:
    """Find the fewest nodes that hold the model, and the most that one pipeline can then have. Raises UserError if too few."""
    smallest = next((size for size in range(1, num_nodes + 1) if chains.feasible(size)), None)
    if smallest is None:
        raise UserError(
            f"{num_nodes} nodes do not hold the model once, with a layer or more on each GPU: give more nodes, or more memory"
        )
    if num_nodes < (max_failures + 1) * smallest:
        raise UserError(
            f"{num_nodes} nodes do not hold the {max_failures + 1} replicas that outlast {max_failures} failures at once, with "
            f"{smallest} nodes each: give at least {(max_failures + 1) * smallest} nodes, or outlast fewer failures"
        )
    largest = smallest
    while largest < num_nodes - max_failures * smallest and chains.feasible(largest + 1):
        largest += 1
    return NodeSpecification(num_nodes=num_nodes, max_failures=max_failures, smallest=smallest, largest=largest)
