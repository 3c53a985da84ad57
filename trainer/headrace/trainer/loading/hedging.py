"""Hedged fetches: when to ask another preprocessor for a part that does not come. Pure: times are passed in."""

from __future__ import annotations

from collections import deque
from statistics import median

from headrace.errors import UserError

HEDGE_S = 5.0
"""Default of the shortest hedging deadline: many times what a part takes to decode, and as long as a cut wire takes to be
noticed, so that a shorter one would gain little."""
_SLOW = 4.0  # deadline as a multiple of the median: parts differ in size, and those requested together wait for each other
_RECENT = 32  # deliveries in the median: enough to be steady, few enough to follow a change of load


class Hedging:
    """Keeps the deadline for parts that the consumer waits for, and the preprocessors that have missed one.

    The deadline grows with the usual delivery time, so that a fleet that is slow as a whole is not given the work twice. A
    preprocessor that has missed a deadline and delivered nothing since is not waited for again.
    """

    def __init__(self, hedge_s: float = HEDGE_S) -> None:
        """`hedge_s`: the shortest deadline in seconds. Raises UserError if it is not above 0."""
        if not hedge_s > 0:
            raise UserError(
                f"hedge_s is {hedge_s}, but must be above 0: the seconds after which a part is asked of another preprocessor"
            )
        self._hedge_s = hedge_s
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self._stalled: set[str] = set()

    @property
    def deadline_s(self) -> float:
        """Seconds to wait for an awaited part at one preprocessor before another one is asked."""
        return max(self._hedge_s, _SLOW * median(self._recent_s)) if self._recent_s else self._hedge_s

    def due_s(self, endpoint: str, *, awaited_s: float, asked_s: float) -> float:
        """Return the time at which to ask a preprocessor other than `endpoint` for a part.

        `awaited_s`: time since which the consumer waits for the part; `asked_s`: time at which `endpoint` was asked.
        """
        since_s = max(awaited_s, asked_s)
        return since_s if endpoint in self._stalled else since_s + self.deadline_s

    def mark_stalled(self, endpoint: str) -> None:
        """Note that an awaited part did not come from `endpoint` until it was due."""
        self._stalled.add(endpoint)

    def record_answer(self, endpoint: str, took_s: float | None = None) -> None:
        """Note that `endpoint` delivered a part after `took_s`, or failed to (None): it is not stalled any more."""
        self._stalled.discard(endpoint)
        if took_s is not None:
            self._recent_s.append(took_s)
