"""Which samples of a part are left out, whoever decodes it: one fact for all ranks that fetch the part.

What one preprocessor can decode another may not: it lacks a codec, or has another release of it. So a preprocessor is told which
samples to leave out, and keeps a part only if it can decode all others: copies that were ordered alike are equal. One that cannot
says which samples it takes for damaged, and others are asked. What none of them can decode is left out from then on, everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.quarantine import Rejected

OPINIONS = 3  # preprocessors that are asked before a sample is left out; as many as there are, where those are fewer


@dataclass(slots=True, eq=False)
class Agreement:
    """Of one part."""

    left_out: dict[int, Rejected] = field(default_factory=dict)
    """By sample id."""
    decoded_by: str = ""
    """The preprocessor that has decoded it so first: ranks may have it. Empty: none has, as far as is known."""
    claims: dict[str, tuple[Rejected, ...]] = field(default_factory=dict)
    """By preprocessor, the further samples that it cannot decode."""
    is_missed: bool = False
    """Whether a rank could not get a copy, and none was decoded since."""

    def decoded(self, preprocessor: str) -> None:
        """It has decoded all that is not left out."""
        self.decoded_by = self.decoded_by or preprocessor
        self.claims.clear()
        self.is_missed = False

    def claim(self, preprocessor: str, damaged: Iterable[Rejected]) -> bool:
        """It cannot decode these samples of the part. Whether enough others have been asked."""
        if further := tuple(item for item in damaged if item.sample_id not in self.left_out):
            self.claims[preprocessor] = further
        return not self.decoded_by and len(self.claims) >= OPINIONS

    def leave_out(self) -> tuple[Rejected, ...]:
        """Leave out, of the claims, the one with the fewest samples: who made it can decode the rest. Those samples."""
        fewest = min(self.claims.values(), key=len)
        self.left_out |= {item.sample_id: item for item in fewest if item.sample_id is not None}
        self.claims.clear()
        self.decoded_by = ""
        return fewest

    def dispute(self) -> str:
        """The sentence that says who could decode what, and who cannot."""
        preprocessor, damaged = next(iter(self.claims.items()))
        item = damaged[0]
        return (
            f"preprocessor {self.decoded_by} has decoded sample {item.name}, and {preprocessor} cannot ({item.reason}: "
            f"{item.detail}): ranks of one pipeline would have different samples. Give all preprocessors the same codecs, "
            "and submit the job again"
        )
