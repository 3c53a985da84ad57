"""Options of OrchMLLM's post-balancing, which travel to the strategy in `Execution.post_balancing`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Form = Literal["no_padding", "padded", "third", "fourth"]
FORMS: tuple[Form, ...] = get_args(Form)
TOLERANCE = 0.01  # the paper sets its tolerance by hand and does not say how; half of it is the error in the sum


@dataclass(frozen=True, slots=True, kw_only=True)
class PostBalancing:
    """How strategy `orchmllm` balances the units. The defaults balance costs and do not permute replicas over nodes."""

    forms: Mapping[str, Form] = field(default_factory=dict)
    """Post-balancing form of each unit; a unit that is not named has "no_padding", as microbatches are packed.

    A convolutional audio encoder pads its attention and so needs "fourth".
    """
    quadratic: float = 0.0
    """The paper's lambda, for the forms "third" and "fourth": how long the part that grows with the square of a sample's length
    takes over the part that grows with the length, in a sample of mean cost (among those of the unit that cost anything).

    0 means unknown: these forms then follow the paper's algorithms, which do without it.
    """
    tolerance: float = TOLERANCE
    """Tolerance with which the "third" form compares sums where lambda is unknown, as a share of a bin's mean load."""
    ranks_per_node: int = 0
    """Ranks of a node, for permutations of the units' replicas after which little data crosses nodes.

    A replica counts as one rank. With 0, nothing is permuted.
    """

    def __post_init__(self) -> None:
        unknown = {unit: form for unit, form in self.forms.items() if form not in FORMS}
        if unknown:
            raise ValueError(f"forms are {', '.join(FORMS)}, got {unknown}")
        if not 0 <= self.quadratic < math.inf:
            raise ValueError(f"lambda must be finite and not negative, got {self.quadratic}")
        if not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance must be finite and positive, got {self.tolerance}")
        if self.ranks_per_node < 0:
            raise ValueError(f"ranks per node must not be negative, got {self.ranks_per_node}; 0 permutes nothing")
