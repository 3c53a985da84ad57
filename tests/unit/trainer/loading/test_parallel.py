"""The place of a process, given by a device mesh or by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace import trainer
from headrace.errors import UserError
from headrace.trainer import Parallel


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of eight; the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=8)
    yield request.param
    dist.destroy_process_group()


def ranks_of(parallel: Parallel) -> list[int]:
    return dist.get_process_group_ranks(parallel.group) if parallel.group is not None else []


@pytest.mark.parametrize("process", [5], indirect=True)
@pytest.mark.parametrize(
    ("shape", "names", "dp", "cp", "pp", "group"),
    [
        ((2, 2, 2), ("pp", "dp", "tp"), (0, 2), (0, 1), (1, 2), [0, 1, 4, 5]),
        ((2, 2, 2), ("dp_replicate", "dp_shard", "cp"), (2, 4), (1, 2), (0, 1), [4, 5]),
        ((2, 2, 2), ("dp", "context_parallel", "tensor_parallel"), (1, 2), (0, 2), (0, 1), [4, 5, 6, 7]),
        ((2, 4), ("dp_replicate", "dp_shard"), (5, 8), (0, 1), (0, 1), []),
        ((2, 4), ("pp", "cp"), (0, 1), (1, 4), (1, 2), [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_mesh_says_which_processes_share_samples(
    process: int, shape: Any, names: Any, dp: Any, cp: Any, pp: Any, group: list[int]
) -> None:
    parallel = Parallel.of_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), pad_to=4)
    assert (parallel.dp_rank, parallel.dp_size) == dp
    assert (parallel.cp, parallel.pp, parallel.pad_to) == (cp, pp, 4)
    assert ranks_of(parallel) == group


@pytest.mark.parametrize("process", [0], indirect=True)
def test_a_mesh_whose_dimensions_say_nothing_is_refused(process: int) -> None:
    with pytest.raises(UserError, match=r"mesh dimension 'x' does not say whether .* name it dp, tp, cp or pp"):
        trainer.connect("127.0.0.1:1", job="job", mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("x",)))
    with pytest.raises(UserError, match="the mesh has no mesh_dim_names"):
        Parallel.of_mesh(init_device_mesh("cpu", (8,)))


@pytest.mark.parametrize("process", [0], indirect=True)
def test_a_group_that_is_not_divided_is_refused(process: int) -> None:
    with pytest.raises(UserError, match="the group has 8 processes, which cp 3 x pp 1 = 3 does not divide"):
        Parallel(group=dist.group.WORLD, cp=(0, 3))
    with pytest.raises(UserError, match="the group has 1 processes, which cp 2 x pp 1 = 2 does not divide"):
        Parallel(cp=(0, 2))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dp_rank": 2, "dp_size": 2}, "dp rank 2 of 2"),
        ({"cp": (0, 0)}, "cp rank 0 of 0"),
        ({"pp": (-1, 2)}, "pp rank -1 of 2"),
        ({"pad_to": 0}, "pad_to is 0"),
        ({"cp_order": "striped"}, "cp_order 'striped' must be one of zigzag, contiguous, balanced, or a function"),
    ],
)
def test_impossible_places_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Parallel(**wrong)


def test_places_said_twice_are_refused() -> None:
    with pytest.raises(UserError, match="rank=1 and num_ranks=2 beside mesh or parallel"):
        trainer.connect("127.0.0.1:1", job="job", rank=1, num_ranks=2, parallel=Parallel())
