"""What an experiment found: rows of ours beside published ones, what they claim, and what had to be assumed for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Figure = float | tuple[float, float] | str
"""A number, a range of numbers such as "1.7 to 2.8", or words, where what is compared is no number."""
Kind = Literal["SIMULATED", "COMPUTED", "MEASURED"]
"""Steps that no GPU ran; worked examples, which need none; and times of searches on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of ours and the one that was published.

    Raises ValueError for a claim on words that is no equality, or on a row of which nothing was published.
    """

    name: str
    ours: float | str
    published: Figure | None = None
    unit: str = ""
    within: float | None = None
    """Share of the published figure by which ours is claimed to differ at most, beyond either end of a range; 0 for words, which
    are equal. None claims nothing: the row is there to be seen."""
    detail: str = ""

    def __post_init__(self) -> None:
        if self.within is None:
            return
        if self.published is None or self.within < 0:
            raise ValueError(f"{self.name}: a claim is a share from 0 of a published figure, got {self.within}")
        if isinstance(self.ours, str) != isinstance(self.published, str) or (isinstance(self.ours, str) and self.within):
            raise ValueError(f"{self.name}: words are compared with words, and only for being equal")

    @property
    def agrees(self) -> bool | None:
        """Whether the claim holds; None without one."""
        if self.within is None:
            return None
        if isinstance(self.ours, str) or isinstance(self.published, str):
            return self.ours == self.published
        low, high = self.bounds
        return low * (1 - self.within) <= self.ours <= high * (1 + self.within)

    @property
    def bounds(self) -> tuple[float, float]:
        """Both ends of the published range, which are the same for a single number."""
        assert self.published is not None
        assert not isinstance(self.published, str)
        return self.published if isinstance(self.published, tuple) else (self.published, self.published)

    def to_json(self) -> dict[str, Any]:
        """Return the public JSON form."""
        return {
            "name": self.name,
            "ours": self.ours,
            "published": list(self.published) if isinstance(self.published, tuple) else self.published,
            "unit": self.unit,
            "within": self.within,
            "agrees": self.agrees,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The rows of one experiment."""

    what: str
    """What a row's figure is, in a line."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """What was assumed or fitted, and where the paper contradicts itself: a sentence each."""
    kind: Kind = "SIMULATED"

    @property
    def agrees(self) -> bool:
        """Whether all claims hold."""
        return all(row.agrees is not False for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the public JSON form."""
        return {
            "kind": self.kind,
            "simulated": self.kind == "SIMULATED",
            "what": self.what,
            "agrees": self.agrees,
            "rows": [row.to_json() for row in self.rows],
            "notes": list(self.notes),
        }
