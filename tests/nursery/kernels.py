"""`python -m tests.nursery.kernels`: compile the kernels of the planner, which needs no more than every service does."""

from __future__ import annotations

from headrace.reorder_service import planning
from headrace.reorder_service.nodes import snapshots


def warm_up() -> None:
    """Compile what plans and memberships need, or load it from numba's cache."""
    planning.warm_up()
    snapshots.warm_up()


if __name__ == "__main__":
    warm_up()
