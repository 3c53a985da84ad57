"""The cluster that a model is to be trained on: its GPUs, their memory, speed and links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

_GIGABIT_BYTES = 1e9 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A number of equal nodes of equal GPUs. Raises ValueError for a number that cannot be, in a sentence that names it."""

    name: str
    """Name of the preset that it comes from, or of the user's file."""
    nodes: int
    gpus_per_node: int
    memory_gib: float
    """Memory of one GPU."""
    flops_per_s: float
    """Peak rate of one GPU in bf16 matrix products, without sparsity."""
    efficiency: float = 0.5
    """Share of the peak that the layers of a model reach, where their times are counted from operations and not measured."""
    intra_node_bytes_per_s: float
    """What one GPU sends to the others of its node, in one direction."""
    inter_node_bytes_per_s: float
    """What one GPU sends to those of other nodes when all GPUs of its node do, in one direction."""
    latency_s: float = 10e-6
    """Of one transfer."""
    cores_per_node: int | None = None
    """Processor cores of a node where trainers compute on them and share them with a job's services; None: these have others."""
    threads: int = 1
    """Of a trainer, where cores are shared."""
    service_s_per_sample: float = 0.0
    """Core seconds that services, and loading in the trainers, take for a sample where they share cores with trainers."""
    service_cores: float = 0.0
    """Cores of all nodes together that services take besides, whatever trainers do."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a whole number from 1, got {number!r}")
        for name in ("memory_gib", "flops_per_s", "efficiency", "intra_node_bytes_per_s", "inter_node_bytes_per_s", "latency_s"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
                raise ValueError(f"{name} must be a positive number, got {number!r}")
        if self.cores_per_node is None:
            if self.service_s_per_sample or self.service_cores:
                raise ValueError(
                    "service_s_per_sample and service_cores are of services on the cores of trainers: give cores_per_node"
                )
        else:
            self._check_cores(self.cores_per_node)
        if self.efficiency > 1:
            raise ValueError(f"efficiency is a share of the peak rate and at most 1, got {self.efficiency}")

    def _check_cores(self, cores: int) -> None:
        for name, number in (("cores_per_node", cores), ("threads", self.threads)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a whole number from 1, got {number!r}")
        if self.threads * self.gpus_per_node > cores:
            raise ValueError(
                f"{self.gpus_per_node} trainers of a node with {self.threads} threads each are more than its {cores} cores: "
                "lower gpus_per_node or threads"
            )
        for name in ("service_s_per_sample", "service_cores"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
                raise ValueError(f"{name} must be a number from 0, got {number!r}")
        if self.service_cores >= self.nodes * cores:
            raise ValueError(
                f"service_cores must be less than the {self.nodes * cores} cores that there are, got {self.service_cores}"
            )

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def memory_bytes(self) -> float:
        """Memory of one GPU in bytes."""
        return self.memory_gib * 2**30

    def of_gpus(self, num_gpus: int) -> Cluster:
        """Return the cluster with so many GPUs: whole nodes, or one node that is not full.

        Raises ValueError if they are more than a node and no whole number of nodes.
        """
        if num_gpus < 1:
            raise ValueError(f"a cluster has at least 1 GPU, got {num_gpus}")
        if num_gpus <= self.gpus_per_node:
            return replace(self, nodes=1, gpus_per_node=num_gpus)
        if num_gpus % self.gpus_per_node:
            below = num_gpus - num_gpus % self.gpus_per_node
            raise ValueError(
                f"{num_gpus} GPUs are no whole number of nodes of {self.gpus_per_node}: "
                f"take {below} or {below + self.gpus_per_node}"
            )
        return replace(self, nodes=num_gpus // self.gpus_per_node)


def _preset(
    name: str, gpus_per_node: int, memory_gib: float, tflops: float, intra_gb_s: float, links: int, gigabits: float
) -> Cluster:
    """links, gigabits: network links of a node, and the rate of one."""
    return Cluster(
        name=name,
        nodes=1,
        gpus_per_node=gpus_per_node,
        memory_gib=memory_gib,
        flops_per_s=tflops * 1e12,
        intra_node_bytes_per_s=intra_gb_s * 1e9,
        inter_node_bytes_per_s=links * gigabits * _GIGABIT_BYTES / gpus_per_node,
    )


# Rates in one direction: half of what is published for both. A40: PCIe 4.0 x16 between most pairs of a node. A800: 400 GB/s of
# NVLink in its data sheet, but DistTrain (section 8) says 300 GB/s of its cluster.
CLUSTERS: Mapping[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        _preset("a40", 4, 48, 149.7, 32, 1, 200),
        _preset("a100", 8, 80, 312, 300, 8, 200),
        _preset("a800", 8, 80, 312, 150, 4, 200),
        _preset("h100", 8, 80, 989, 450, 8, 400),
        _preset("h200", 8, 141, 989, 450, 8, 400),
    )
}
"""Nodes as they are commonly sold, by name of their GPU."""


def cluster_of(document: Any, where: str) -> Cluster:
    """Return the cluster that the content of a user's file describes: all fields, or `preset` and those that differ from it.

    where: name of the file, which the cluster takes. Raises ValueError in a sentence that names the field.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"{where}: a cluster is a mapping of fields, got {document!r}")
    known = [field.name for field in fields(Cluster) if field.name != "name"]
    given = {name: value for name, value in document.items() if name != "preset"}
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{where}: there is no field {unknown[0]!r}; a cluster has preset, {', '.join(known)}")
    preset = document.get("preset")
    if preset is not None and preset not in CLUSTERS:
        raise ValueError(f"{where}: no preset {preset!r}; there are {', '.join(CLUSTERS)}")
    try:
        if preset is not None:
            return replace(CLUSTERS[preset], name=where, **given)
        required = [field.name for field in fields(Cluster) if field.name != "name" and field.default is MISSING]
        if lacking := [name for name in required if name not in given]:
            raise ValueError(f"{lacking[0]} is missing; give it, or a preset ({', '.join(CLUSTERS)})")
        return Cluster(name=where, **given)
    except ValueError as err:
        raise ValueError(f"{where}: {err}") from err
