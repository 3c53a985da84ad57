"""`python -m tests.nursery.kernels`: compile the kernels of the planner, which needs no more than every service does."""

from __future__ import annotations

from functools import cache

from headrace.reorder_service import planning
from headrace.reorder_service.nodes import snapshots


def warm_up() -> None:
    """Compile what plans and memberships need, or load it from numba's cache."""
    planning.warm_up()
    snapshots.warm_up()


def warm_up_once() -> None:
    """Have whoever warms the planner up in this process or a fork of it do so once: each time takes a quarter of a second."""
    for module in (planning, snapshots):
        module.warm_up = cache(module.warm_up)  # type: ignore[attr-defined]


if __name__ == "__main__":
    warm_up()
