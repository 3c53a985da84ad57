"""When a part that does not come is asked of another preprocessor. Pure: times are passed in."""

from __future__ import annotations

from collections import deque
from statistics import median

from headrace.errors import UserError

HEDGE_S = 5.0
"""Many times what a part takes to decode, and as long as a cut wire takes to be noticed: a shorter deadline would add little."""
_SLOW = 4.0  # times the median: parts differ in size, and those asked for together wait for each other
_RECENT = 32  # deliveries that the median is of: enough to be steady, few enough to follow a change of load


class Hedging:
    """The deadline of a part that the consumer waits for, and the preprocessors that let one pass.

    A fleet that is slow as a whole is not loaded twice: the deadline grows with what deliveries usually take. A preprocessor
    that has let a deadline pass and delivered nothing since is not waited for again.
    """

    def __init__(self, hedge_s: float = HEDGE_S) -> None:
        """`hedge_s`: the least deadline. Raises UserError."""
        if not hedge_s > 0:
            raise UserError(
                f"hedge_s is {hedge_s}, but must be above 0: the seconds after which a part is asked of another preprocessor"
            )
        self._hedge_s = hedge_s
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self._stalled: set[str] = set()

    @property
    def deadline_s(self) -> float:
        """How long an awaited part is waited for at one preprocessor."""
        return max(self._hedge_s, _SLOW * median(self._recent_s)) if self._recent_s else self._hedge_s

    def due_s(self, endpoint: str, *, awaited_s: float, asked_s: float) -> float:
        """When to ask another preprocessor for a part than the one at `endpoint`.

        `awaited_s`: since when the consumer has waited for it; `asked_s`: when that preprocessor was asked.
        """
        since_s = max(awaited_s, asked_s)
        return since_s if endpoint in self._stalled else since_s + self.deadline_s

    def passed(self, endpoint: str) -> None:
        """A part there was waited for until its deadline, or is not waited for."""
        self._stalled.add(endpoint)

    def answered(self, endpoint: str, took_s: float | None = None) -> None:
        """It delivered a part `took_s` after it was asked for it, or failed to: nobody waits there in vain."""
        self._stalled.discard(endpoint)
        if took_s is not None:
            self._recent_s.append(took_s)
