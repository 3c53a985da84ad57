"""Searches for a placement: the published ones, each by its name, to be compared by one judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.searches import (
    cornstarch,
    disttrain_exact,
    disttrain_relaxed,
    entrain_two_tier,
    megatron,
    ratio,
)

SEARCHES: Mapping[str, Callable[[Demand], list[Candidate]]] = {
    megatron.NAME: megatron.search,
    ratio.NAME: ratio.search,
    disttrain_relaxed.NAME: disttrain_relaxed.search,
    disttrain_exact.NAME: disttrain_exact.search,
    cornstarch.NAME: cornstarch.search,
    entrain_two_tier.NAME: entrain_two_tier.search,
}
"""By name. Each returns at least one candidate, the best first, or raises ValueError with one sentence for the user."""
