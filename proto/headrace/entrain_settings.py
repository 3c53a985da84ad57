"""What a job says of strategy `entrain`: which samples count as the large ones that are spread first."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.user_document import SpecSection


class EntrainSettings(SpecSection):
    """Settings of Entrain's stratified assignment, for the strategies `entrain` and `auto`."""

    coarse_quantile: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Samples above this quantile of their replica's LLM costs are the coarse-grained ones, which are spread first. The paper
    names no threshold; 0.5 is the median."""

    def check(self, strategy: str) -> None:
        """Raise ValueError for settings that the strategy has no use for."""
        if self != EntrainSettings() and strategy not in ("entrain", "auto"):
            raise ValueError(
                f"entrain is for the strategies entrain and auto, got {strategy!r}: take one of them, or leave it out"
            )
