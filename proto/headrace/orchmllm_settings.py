"""What a job says of strategy `orchmllm`: how each unit batches its samples, and how many ranks share a node."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from headrace import limits
from headrace.user_document import SpecSection


class OrchMLLMSettings(SpecSection):
    """Settings of OrchMLLM's post-balancing, for the strategies `orchmllm` and `auto`. The defaults balance costs alone."""

    model_config = ConfigDict(serialize_by_alias=True)

    forms: dict[str, Literal["no_padding", "padded", "third", "fourth"]] = Field(default_factory=dict)
    """What the time of a unit's microbatch follows: "no_padding" the sum of its samples' costs, "padded" their number times the
    longest, "third" the sum plus `lambda` times the sum of squares, "fourth" the sum plus `lambda` times their number times the
    square of the longest (attention alone is padded). A unit that is not named has "no_padding"."""
    quadratic: Annotated[float, Field(ge=0, alias="lambda")] = 0.0
    """For "third" and "fourth": the time that grows with the square of a sample's length over the time that grows with the
    length, in a sample of mean cost. 0: unknown, and the paper's algorithms do without it."""
    tolerance: Annotated[float, Field(gt=0)] = 0.01
    """For "third" without a `lambda`: differences of sums that do not matter, as a share of the mean sum."""
    ranks_per_node: Annotated[int, Field(ge=0, le=limits.MAX_REPLICAS)] = 0
    """Replicas whose processes share a node. They are then permuted so that little of what encoders send to the LLM crosses
    nodes. 0: unknown, and nothing is permuted."""

    def check(self, units: Collection[str], strategy: str) -> None:
        """Raise ValueError for forms of other units than these, and for settings that the strategy has no use for."""
        if unknown := sorted(self.forms.keys() - set(units)):
            raise ValueError(f"orchmllm.forms names {unknown[0]!r}, but topology.stages has {', '.join(units)}")
        if self != OrchMLLMSettings() and strategy not in ("orchmllm", "auto"):
            raise ValueError(
                f"orchmllm is for the strategies orchmllm and auto, got {strategy!r}: take one of them, or leave it out"
            )
