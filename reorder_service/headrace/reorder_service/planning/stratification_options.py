"""Options of Entrain's stratified assignment, which travel to the strategy in `Execution.stratification`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stratification:
    """How strategy `entrain` assigns samples to microbatches (dissertation, section 4.5.1)."""

    coarse_quantile: float = 0.5
    """Samples above this quantile of their replica's LLM costs are the coarse-grained ones, which are spread first.

    The paper names no threshold; 0.5 is the median.
    """
    common_count: bool = True
    """Whether all replicas use the same number of microbatches, the largest K_eff of any of them.

    If not, each uses its own K_eff, as Alg. 4 says. Replicas then hold microbatches of unlike size, and those with few of them
    take longest: a step waits for the slowest replica.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.coarse_quantile <= 1:
            raise ValueError(f"coarse_quantile must be between 0 and 1, got {self.coarse_quantile}")
