"""The processes of a data-parallel rank, where a library says no more than that rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from headrace.trainer.loading.parallel import Parallel


def same_samples(dp_rank: int, dp_size: int, *, pp: tuple[int, int] = (0, 1)) -> Parallel:
    """Return this process's place among those of its data-parallel rank, all of which get the same microbatches.

    Every process calls this, as it makes a process group where there are several of a rank. pp: as `Parallel.pp`.
    """
    if not dist.is_initialized() or dist.get_world_size() == dp_size:
        return Parallel(dp_rank=dp_rank, dp_size=dp_size)
    gpu = torch.device("cuda", torch.cuda.current_device()) if "cpu:" not in dist.get_backend_config() else "cpu"
    mine = torch.tensor([dp_rank], device=gpu)
    of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, mine)
    ranks = [rank for rank, theirs in enumerate(of_all) if int(theirs) == dp_rank]
    group = dist.new_group(ranks, use_local_synchronization=True, group_desc="headrace")
    assert isinstance(group, dist.ProcessGroup), "this process is one of the ranks"
    return Parallel(dp_rank=dp_rank, dp_size=dp_size, group=group, pp=pp)
