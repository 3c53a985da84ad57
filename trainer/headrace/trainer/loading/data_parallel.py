"""A check that loaders count data-parallel ranks only: tensor-, context- and pipeline-parallel ranks share their samples."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch.distributed as dist
from torch.distributed import distributed_c10d

from headrace.errors import UserError

_SAME_SAMPLES = re.compile(r"(?<![a-z])(tp|cp|sp|pp|tensor|context|sequence|ulysses|pipeline)(?![a-z])", re.IGNORECASE)
_EXEMPT = re.compile(r"(?<![a-z])(dp|ddp|fsdp|hsdp|ep|data|expert|embedding|embd)(?![a-z])", re.IGNORECASE)
"""Words that exempt a process group whose description matches _SAME_SAMPLES as well.

A device mesh describes a group as `mesh_tp`, for example, and Megatron as TENSOR_MODEL_PARALLEL_GROUP.
"""


def check_ranks(num_ranks: int) -> None:
    """Raise UserError where `num_ranks` is the world size although some processes train on the same samples.

    That is inferred from the descriptions of the existing process groups. Nothing is checked if torch.distributed is not
    initialised or this version of torch does not list its groups.
    """
    if not dist.is_available() or not dist.is_initialized() or not 1 < num_ranks == dist.get_world_size():
        return
    for group in _groups():
        if group.size() > 1 and takes_same_samples(group.group_desc):
            raise UserError(
                f"num_ranks={num_ranks} counts every process, but the {group.size()} of group {group.group_desc!r} train on the "
                "same samples: give mesh= or parallel= to connect in all of them, or rank= and num_ranks= of the data-parallel "
                "group in one of them"
            )


def takes_same_samples(name: str) -> bool:
    """Return whether a process group or mesh dimension is, by its name, of processes that train on the same samples."""
    name = name.replace("_", " ")
    return bool(_SAME_SAMPLES.search(name)) and not _EXEMPT.search(name)


def takes_other_samples(name: str) -> bool:
    """Return whether a process group or mesh dimension is, by its name, of processes that train on different samples."""
    return bool(_EXEMPT.search(name.replace("_", " ")))


def _groups() -> Collection[dist.ProcessGroup]:
    """Return all process groups. Torch has no public name for them: empty if this version keeps them elsewhere."""
    return getattr(getattr(distributed_c10d, "_world", None), "pg_map", ())
