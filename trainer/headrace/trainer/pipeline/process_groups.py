"""The groups of torch.distributed in which the processes of a topology sum gradients, activations and losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from headrace.trainer.devices import check_operations
from headrace.trainer.pipeline.channels import Channels, OpenEnd
from headrace.trainer.pipeline.topology import Groups, PipelineTopology
from headrace.trainer.starting import GROUP_TIMEOUT


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The process groups that this process is in. None: it would be alone in the group, or has no such group."""

    everybody: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    """Data-parallel group: the processes with the same slice of the same stage."""
    slices: dist.ProcessGroup | None
    """Tensor-parallel group: the slices of the same stage of the same replica."""
    tied: dist.ProcessGroup | None
    """The LLM's first and last stage, where they share the matrix of embedding and head."""
    channels: Channels
    """This process's ends of the channels for messages between stages."""

    @classmethod
    def make(cls, topology: PipelineTopology, device: torch.device, *, tied: bool, open_end: OpenEnd | None = None) -> Self:
        """Create the groups. Every process of the world calls it, also processes that have no place in the topology.

        No process waits for others than those in its own groups. `tied`: whether the LLM's head is its embedding. `open_end`:
        as `Channels` takes it. Raises UserError if the backend lacks an operation that training needs.
        """
        everybody = _own((tuple(range(topology.world_size)),), device, alone=True)
        return cls(
            everybody=everybody,  # type: ignore[arg-type]  # None only where there is no place
            replicas=_own(topology.data_groups(), device),
            slices=_own(topology.tensor_groups(), device),
            tied=_own(topology.tied_groups(), device) if tied else None,
            channels=Channels(topology, dist.get_rank(), device, open_end),
        )


def _own(groups: Groups, device: torch.device, *, alone: bool = False) -> dist.ProcessGroup | None:
    """Create these groups, on every process in the same order, and return the one that this process is in, if any.

    Its processes are connected, and have what training needs of them. Groups of one process are skipped unless `alone`.
    """
    own = None
    for ranks in groups:
        if len(ranks) > 1 or alone:
            group = dist.new_group(list(ranks), timeout=GROUP_TIMEOUT)
            own = group if dist.get_rank() in ranks else own
    if own is not None:
        check_operations(own, device)
    return own
