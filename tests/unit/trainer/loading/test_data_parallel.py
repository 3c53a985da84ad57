"""Which ranks may be counted as a loader's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.errors import UserError
from headrace.trainer.loading.data_parallel import check_ranks


@pytest.fixture
def four_processes() -> Iterator[None]:
    """As the first of four sees them; the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "names", "group"),
    [((2, 2), ("dp", "tp"), "mesh_tp"), ((2, 2), ("dp", "cp"), "mesh_cp"), ((2, 2), ("pp", "dp"), "mesh_pp")],
)
def test_every_process_as_a_rank_is_refused_where_some_train_on_the_same_samples(
    four_processes: None, shape: tuple[int, ...], names: tuple[str, ...], group: str
) -> None:
    init_device_mesh("cpu", shape, mesh_dim_names=names)
    with pytest.raises(
        UserError, match=f"num_ranks=4 counts every process, but the . of group '{group}' .*: give mesh= or parallel="
    ):
        check_ranks(4)
    check_ranks(2)  # those of the data-parallel group


def test_a_group_as_megatron_names_it_is_known_too(four_processes: None) -> None:
    dist.new_group([0, 1, 2, 3], group_desc="DATA_PARALLEL_GROUP_WITH_CP")
    dist.new_group([0], group_desc="CONTEXT_PARALLEL_GROUP")
    check_ranks(4)
    dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    with pytest.raises(UserError, match="TENSOR_MODEL_PARALLEL_GROUP"):
        check_ranks(4)


def test_data_parallel_ranks_of_any_kind_are_counted(four_processes: None) -> None:
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    init_device_mesh("cpu", (2, 2))
    check_ranks(4)


def test_without_process_groups_nothing_is_checked() -> None:
    check_ranks(4)


def test_torch_still_lists_its_process_groups_where_they_are_looked_for(four_processes: None) -> None:
    """By a name that is not public: where this fails, others are refused no more."""
    assert dist.group.WORLD in distributed_c10d._world.pg_map


def test_a_torch_that_lists_them_elsewhere_checks_nothing(four_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    with monkeypatch.context() as patched:
        patched.setattr("headrace.trainer.loading.data_parallel.distributed_c10d", object())
        check_ranks(4)
    with pytest.raises(UserError, match="TENSOR_MODEL_PARALLEL_GROUP"):
        check_ranks(4)
