"""Agreement on the samples that are left out of a part, so that all ranks that fetch the part get the same samples.

One preprocessor may decode a sample that another cannot, for lack of a codec or with another release of it. So each is told
which samples to leave out, and keeps a part only if it can decode all others: copies made by equal orders are equal. If it
cannot, it reports the samples that it takes for damaged, and others are asked. What none of them can decode is left out from then
on, everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.quarantine import Rejected

OPINIONS = 3  # preprocessors asked before a sample is left out, or all where there are fewer


@dataclass(slots=True, eq=False)
class Agreement:
    """The samples left out of one part, and the claims of preprocessors about further ones."""

    left_out: dict[int, Rejected] = field(default_factory=dict)
    """Sample id -> the sample that every copy of the part leaves out, with the reason."""
    decoded_by: str = ""
    """The first preprocessor that decoded the part with `left_out` as it is; ranks may have its copy. Empty: none is known."""
    claims: dict[str, tuple[Rejected, ...]] = field(default_factory=dict)
    """Preprocessor -> further samples that it cannot decode."""
    is_missed: bool = False
    """Whether a rank could not fetch a copy of the part, and none was decoded since."""

    def decoded(self, preprocessor: str) -> None:
        """Note that a preprocessor has decoded all samples that are not left out."""
        self.decoded_by = self.decoded_by or preprocessor
        self.claims.clear()
        self.is_missed = False

    def claim(self, preprocessor: str, damaged: Iterable[Rejected]) -> bool:
        """Note that a preprocessor cannot decode these samples of the part.

        Return whether OPINIONS of them have failed and none has decoded it, so that no others need to be asked.
        """
        if further := tuple(item for item in damaged if item.sample_id not in self.left_out):
            self.claims[preprocessor] = further
        return not self.decoded_by and len(self.claims) >= OPINIONS

    def leave_out(self) -> tuple[Rejected, ...]:
        """Leave out the samples of the smallest claim, since its preprocessor can decode the rest; return those samples."""
        fewest = min(self.claims.values(), key=len)
        self.left_out |= {item.sample_id: item for item in fewest if item.sample_id is not None}
        self.claims.clear()
        self.decoded_by = ""
        return fewest

    def dispute(self) -> str:
        """Return a sentence that says which preprocessor has decoded a sample and which one cannot."""
        preprocessor, damaged = next(iter(self.claims.items()))
        item = damaged[0]
        return (
            f"preprocessor {self.decoded_by} has decoded sample {item.name}, and {preprocessor} cannot ({item.reason}: "
            f"{item.detail}): ranks of one pipeline would have different samples. Give all preprocessors the same codecs, "
            "and submit the job again"
        )
