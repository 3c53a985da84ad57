"""Which processes sum what: groups of torch.distributed for a topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from headrace.trainer.pipeline.topology import Groups, PipelineTopology


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """This process's groups. None: it is alone, or there is no such group."""

    everybody: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    """That have the same slice of the same stage."""
    slices: dist.ProcessGroup | None
    """Of the same stage of the same replica."""
    tied: dist.ProcessGroup | None
    """The first and the last stage of the LLM."""

    @classmethod
    def make(cls, topology: PipelineTopology) -> Self:
        """To be called by every process of the world, also by those that the topology has no place for."""
        everybody = _own((tuple(range(topology.world_size)),), alone=True)
        return cls(
            everybody=everybody,  # type: ignore[arg-type]  # None only where there is no place
            replicas=_own(topology.data_groups()),
            slices=_own(topology.tensor_groups()),
            tied=_own(topology.tied_groups()),
        )

    def close(self) -> None:
        """Leave them."""
        for group in (self.everybody, self.replicas, self.slices, self.tied):
            if group is not None:
                dist.destroy_process_group(group)


def _own(groups: Groups, *, alone: bool = False) -> dist.ProcessGroup | None:
    """This process's group of several; every process makes them all, in the same order. `alone`: also those of one process."""
    own = None
    for ranks in groups:
        if len(ranks) > 1 or alone:
            group = dist.new_group(list(ranks))
            own = group if dist.get_rank() in ranks else own
    return own
