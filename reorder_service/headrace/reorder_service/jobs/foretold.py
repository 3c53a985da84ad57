"""What ranks are told of a whole step before they begin it, besides their own microbatches."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

from headrace.plan import StepPlan
from headrace.sample import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """Totals of a step as it is planned: samples that turn out to be damaged when they are decoded are counted."""

    num_targets: int
    """Tokens that carry loss."""
    target_weight: float | None
    """Sum of their weights; None: each weighs 1."""
    max_tokens: int
    """LLM tokens of the largest microbatch of any replica, padding of packs included."""
    counts: tuple[int, ...]
    """Number of microbatches of each replica."""
    _most: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: StepPlan, probes: Mapping[int, Probe], packs: Mapping[int, int], pack_length: int | None) -> Self:
        """Return the totals of a plan. `packs`: sample -> number of its pack. `pack_length`: tokens of a padded pack; None: none
        is padded."""

        def num_tokens(samples: tuple[int, ...]) -> int:
            if pack_length is not None:
                return len({packs[i] for i in samples}) * pack_length
            return sum(probes[i].num_tokens for i in samples)

        return cls(
            num_targets=sum(probe.num_targets for probe in probes.values()),
            target_weight=_weight(probes.values()),
            max_tokens=max((num_tokens(k.sample_ids) for replica in plan.replicas for k in replica), default=0),
            counts=tuple(map(len, plan.replicas)),
        )

    def most_microbatches(self, num_ranks: int) -> int:
        """Return the most microbatches that any rank takes, where rank r of n takes the replicas r, r + n, r + 2n, ..."""
        if num_ranks not in self._most:  # every rank asks
            taken = [0] * num_ranks
            for r, count in enumerate(self.counts):
                taken[r % num_ranks] += count
            self._most[num_ranks] = max(taken)
        return self._most[num_ranks]


def _weight(probes: Collection[Probe]) -> float | None:
    """Return the weight of all targets, the same in whichever order the samples are; None where each weighs 1."""
    weights = [probe.target_weight for probe in probes]
    if all(weight is None for weight in weights):
        return None
    return math.fsum(probe.num_targets if probe.target_weight is None else probe.target_weight for probe in probes)
