"""Groups of some of all ranks: made once, kept for later, and never more of a rank than there may be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.trainer.context.rank_groups import RankGroups


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of six, of which this is the first; the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def num_groups() -> int:
    """How many this process is in, besides that of all."""
    return len(dist.distributed_c10d._world.pg_map) - 1


def test_a_group_is_made_once_and_one_rank_needs_none(group: dist.ProcessGroup) -> None:
    groups = RankGroups(group)
    found = groups.of_sets([(0, 1), (3,), (0, 1, 2, 3, 4, 5), (0, 1)])
    assert found[(3,)] is None
    assert found[(0, 1, 2, 3, 4, 5)] is group
    assert groups.of_sets([(0, 1)])[(0, 1)] is found[(0, 1)]
    assert num_groups() == 1


def test_the_group_asked_for_least_recently_is_given_up(group: dist.ProcessGroup) -> None:
    groups = RankGroups(group, most=2)
    first, second = (groups.of_sets([ranks])[ranks] for ranks in ((0, 1), (0, 2)))
    assert groups.of_sets([(0, 1)])[(0, 1)] is first
    groups.of_sets([(0, 3)])
    assert num_groups() == 2
    assert groups.of_sets([(0, 1)])[(0, 1)] is first, "it was asked for after the second one"
    assert groups.of_sets([(0, 2)])[(0, 2)] is not second


def test_each_rank_has_its_own_bound_and_all_ranks_give_up_the_same(group: dist.ProcessGroup) -> None:
    groups = RankGroups(group, most=1)
    kept = groups.of_sets([(0, 1)])[(0, 1)]
    groups.of_sets([(2, 3), (4, 5)])
    assert groups.of_sets([(0, 1)])[(0, 1)] is kept, "others have none of its ranks"
    groups.of_sets([(1, 2)])
    assert num_groups() == 0, "this rank is not in the new one, and knows that rank 1 has given up the old one"


def test_a_microbatch_has_all_the_groups_that_it_needs(group: dist.ProcessGroup) -> None:
    groups = RankGroups(group, most=1)
    sets = [(0, 1), (0, 2), (0, 3)]
    assert len(set(map(id, groups.of_sets(sets).values()))) == num_groups() == 3
    groups.of_sets([(0, 4)])
    assert num_groups() == 1
