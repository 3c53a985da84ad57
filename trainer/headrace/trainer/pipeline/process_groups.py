"""The groups of torch.distributed in which the processes of a topology sum gradients, activations and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from headrace.trainer.devices import check_operations
from headrace.trainer.pipeline.channels import Channels, OpenEnd
from headrace.trainer.pipeline.place_groups import Groups, context_groups, data_groups, tensor_groups, tied_groups
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.starting import GROUP_TIMEOUT


@dataclass(frozen=True, slots=True)
class PlaceGroups:
    """The process groups of one place. None: the place is alone in the group, or has no such group."""

    replicas: dist.ProcessGroup | None
    """Data-parallel group: the places with the same weights, those that share sequences included."""
    slices: dist.ProcessGroup | None
    """Tensor-parallel group: the slices of the layers of one stage of one replica, for the same part of its sequences."""
    context: dist.ProcessGroup | None
    """Context-parallel group: the places with the same slice of the layers of one stage of one replica, which share sequences."""
    tied: dist.ProcessGroup | None
    """The LLM's first and last stage, where they share the matrix of embedding and head."""


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The process groups that this process is in."""

    everybody: dist.ProcessGroup
    channels: Channels
    """This process's ends of the channels for messages between stages."""
    of_place: Mapping[Place, PlaceGroups]
    """The groups of each of its places."""

    @classmethod
    def make(cls, topology: PipelineTopology, device: torch.device, *, tied: bool, open_end: OpenEnd | None = None) -> Self:
        """Create the groups. Every process of the world calls it, also processes that have no place in the topology.

        No process waits for others than those in its own groups. `tied`: whether the LLM's head is its embedding. `open_end`:
        as `Channels` takes it. Raises UserError if the backend lacks an operation that training needs.
        """
        rank = dist.get_rank()
        [everybody] = _make([range(topology.world_size)], device, alone=True)
        kinds = (data_groups(topology), tensor_groups(topology), context_groups(topology), tied_groups(topology) if tied else ())
        replicas, slices, context, ends = (_by_place(groups, topology.rank_of, device) for groups in kinds)
        of_place = {}
        for place in topology.places(rank) if rank < topology.world_size else ():
            number = topology.number(place)
            of_place[place] = PlaceGroups(replicas.get(number), slices.get(number), context.get(number), ends.get(number))
        channels = Channels(topology, rank, device, open_end)
        return cls(everybody, channels, of_place)  # type: ignore[arg-type]  # everybody is None only where there is no place


def _by_place(groups: Groups, rank_of: Sequence[int], device: torch.device) -> dict[int, dist.ProcessGroup | None]:
    """Create groups of places, and return those of this process's places by their number."""
    made = _make([[rank_of[number] for number in group] for group in groups], device)
    own = dist.get_rank()
    return {number: one for group, one in zip(groups, made, strict=True) for number in group if rank_of[number] == own}


def _make(groups: Sequence[Sequence[int]], device: torch.device, *, alone: bool = False) -> list[dist.ProcessGroup | None]:
    """Create groups of these ranks, on every process in the same order, and return those that this process is in, in their place.

    Their processes are connected, and have what training needs of them. Groups of one process are skipped unless `alone`.
    """
    found: list[dist.ProcessGroup | None] = []
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=GROUP_TIMEOUT) if len(ranks) > 1 or alone else None
        found.append(group if dist.get_rank() in ranks else None)
    for group in found:
        if group is not None:
            check_operations(group, device)
    return found
