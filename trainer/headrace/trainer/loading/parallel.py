"""Which processes train on the same microbatches, and what part of them this process takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from headrace.errors import UserError
from headrace.trainer.loading.data_parallel import takes_other_samples, takes_same_samples
from headrace.trainer.loading.slices import ORDERS, Balanced, SliceOrder

_CUTS_SEQUENCES = {"cp", "sp", "context", "sequence", "ulysses"}
_CUTS_LAYERS = {"pp", "pipeline"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The place of one process among those that train together.

    All processes of one data-parallel rank get the same microbatches: one of them fetches, and the others get what it has over
    `group`, so that every byte comes once from the preprocessors.
    """

    dp_rank: int = 0
    dp_size: int = 1
    """This process's rank in the data-parallel group, and the size of that group."""
    group: dist.ProcessGroup | None = None
    """The processes of this data-parallel rank: all tensor-, context- and pipeline-parallel ones; None: this process alone."""
    cp: tuple[int, int] = (0, 1)
    """(rank, size) of context parallelism: the process gets its rows of every microbatch."""
    pp: tuple[int, int] = (0, 1)
    """(rank, size) of pipeline parallelism: patches and mel go to the first stage only; on others they are empty."""
    cp_order: str | SliceOrder | Balanced = "zigzag"
    """Which rows each context-parallel rank gets: a name of `headrace.trainer.loading.slices.ORDERS`, `Balanced` with other
    settings, or a function (`SliceOrder`), such as one that a plan gives."""
    pad_to: int = 1
    """Microbatches are padded until each context-parallel rank has a multiple of so many tokens."""

    def __post_init__(self) -> None:
        for name, (rank, size) in {"dp": (self.dp_rank, self.dp_size), "cp": self.cp, "pp": self.pp}.items():
            if not 0 <= rank < size:
                raise UserError(f"{name} rank {rank} of {size}: ranks count from 0, and there are fewer than their size")
        if self.pad_to < 1:
            raise UserError(f"pad_to is {self.pad_to}: give 1 for no padding, or a multiple that is larger")
        if isinstance(self.cp_order, str) and self.cp_order not in ORDERS:
            raise UserError(f"cp_order {self.cp_order!r} must be one of {', '.join(ORDERS)}, or a function")
        if self.num_processes % (together := self.cp[1] * self.pp[1]):
            raise UserError(
                f"the group has {self.num_processes} processes, which cp {self.cp[1]} x pp {self.pp[1]} = {together} does not "
                "divide: give the group of all tensor-, context- and pipeline-parallel processes of the data-parallel rank"
            )

    @property
    def num_processes(self) -> int:
        """Number of processes that train on the same microbatches."""
        return dist.get_world_size(self.group) if self.group is not None else 1

    @property
    def order(self) -> SliceOrder | Balanced:
        """What `cp_order` stands for."""
        return ORDERS[self.cp_order] if isinstance(self.cp_order, str) else self.cp_order

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, *, cp_order: str | SliceOrder | Balanced = "zigzag", pad_to: int = 1) -> Self:
        """Return this process's place in a device mesh whose dimensions are named.

        Dimensions for data parallelism (dp, fsdp, dp_replicate, dp_shard, ...) count as data-parallel ranks; the processes
        along all others (tp, cp, sp, pp, ...) get the same microbatches. cp, sp, context, sequence and ulysses cut them. All
        processes of the mesh call this, as it makes a process group.

        Raises UserError for a dimension whose name says nothing, and for a process outside of the mesh.
        """
        names, place = mesh.mesh_dim_names, mesh.get_coordinate()
        if names is None or place is None:
            raise UserError(
                "the mesh has no mesh_dim_names, or not this process: give one with names such as ('dp', 'tp') to all"
            )
        sizes = dict(zip(names, mesh.shape, strict=True))
        ranks = dict(zip(names, place, strict=True))
        if unknown := [name for name in names if not takes_other_samples(name) and not takes_same_samples(name)]:
            raise UserError(
                f"mesh dimension {unknown[0]!r} does not say whether its processes train on the same samples: name it dp, tp, cp "
                "or pp, or give parallel=Parallel(...) in place of mesh="
            )
        shared = [name for name in names if not takes_other_samples(name)]

        def along(dims: Sequence[str]) -> tuple[int, int]:
            """Return this process's (rank, size) along some dimensions, of which the last one counts fastest."""
            rank = 0
            for name in dims:
                rank = rank * sizes[name] + ranks[name]
            return rank, math.prod(sizes[name] for name in dims)

        dp_rank, dp_size = along([name for name in names if name not in shared])
        return cls(
            dp_rank=dp_rank,
            dp_size=dp_size,
            group=_group_along(mesh, shared) if along(shared)[1] > 1 else None,
            cp=along([name for name in shared if not _CUTS_SEQUENCES.isdisjoint(name.lower().split("_"))]),
            pp=along([name for name in shared if not _CUTS_LAYERS.isdisjoint(name.lower().split("_"))]),
            cp_order=cp_order,
            pad_to=pad_to,
        )


def _group_along(mesh: DeviceMesh, names: Sequence[str]) -> dist.ProcessGroup:
    """Return a group of this process and all those that differ from it along these dimensions of the mesh only."""
    all_names, place = mesh.mesh_dim_names, mesh.get_coordinate()
    assert all_names is not None
    assert place is not None
    fixed = tuple(slice(None) if name in names else at for name, at in zip(all_names, place, strict=True))
    ranks = sorted(mesh.mesh[fixed].flatten().tolist())
    group = dist.new_group(ranks, use_local_synchronization=True, group_desc="headrace")
    assert isinstance(group, dist.ProcessGroup), "this process is one of the ranks"
    return group
