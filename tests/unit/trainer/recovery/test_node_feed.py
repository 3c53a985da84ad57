"""Which of two plans of a step a node keeps."""

from __future__ import annotations

import pytest

from headrace.trainer.recovery.node_feed import is_outdated
from headrace.v1.sessions_pb2 import RankPlan


@pytest.mark.parametrize(
    ("held", "told", "outdated"), [(None, 0, False), (3, 3, False), (3, 4, False), (3, 0, True), (4, 3, True)]
)
def test_the_plan_for_the_latest_pipelines_is_kept_also_where_the_node_is_not_in_them_yet(
    held: int | None, told: int, outdated: bool
) -> None:
    there = None if held is None else RankPlan(step=7, formation=held)
    assert is_outdated(RankPlan(step=7, formation=told), there) == outdated
