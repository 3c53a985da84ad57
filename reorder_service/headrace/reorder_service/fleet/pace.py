"""Measure how fast a preprocessor works, from when it was given leases and when it reported them. The caller tells the time.

The rate and the gap between reports cover only the time in which the member had work, however many leases at once, and follow a
change within some reports.
"""

from __future__ import annotations

EMA_WEIGHT = 1 / 16  # of the latest report: less reacts late, more mistakes a burst of reports from several threads for speed
MAX_GAP_RATIO = 4.0  # of a gap to the usual one: a longer one was a mishap, and counts as this many
LEASE_S = 0.05  # seconds of work in a lease that can be cut to size: messages cost little, and others can still share the rest
FIRST_SAMPLES = 64  # in such a lease for a member that has not reported yet: about 20 ms of local files
LEAST_SAMPLES = 8
MOST_SAMPLES = 1024


class Pace:
    """The pace of one member at one kind of work."""

    def __init__(self) -> None:
        self.num_open = 0
        """Number of leases that have not ended."""
        self.since_s = 0.0
        """Time of the last report, or of the first lease after an idle time, whichever is later."""
        self._samples = 0.0
        self._busy_s = 0.0
        self._gaps_s = 0.0
        self._squares = 0.0
        self._has_begun = False

    def begin(self, now_s: float) -> None:
        """Note that the member gets a lease."""
        if not self.num_open:
            self.since_s = now_s
        self.num_open += 1

    def report(self, now_s: float, num_samples: int, *, held_up: bool = False) -> None:
        """Note that the member reports a lease, for which `end` must still be called.

        `held_up`: the time since its last report says nothing about its speed.
        """
        if self._has_begun and not held_up:
            passed_s = now_s - self.since_s
            self._samples += EMA_WEIGHT * (num_samples - self._samples)
            self._busy_s += EMA_WEIGHT * (passed_s - self._busy_s)
            gap_s = min(passed_s, MAX_GAP_RATIO * max(self.gap_s, LEASE_S)) if self.gap_s is not None else passed_s
            self._gaps_s += EMA_WEIGHT * (gap_s - self._gaps_s)
            self._squares += EMA_WEIGHT * (gap_s**2 - self._squares)
        self._has_begun = True  # the time until the first report includes starting, and is no measure
        self.since_s = now_s

    def end(self) -> None:
        """Note that a lease is over, done or not."""
        self.num_open -= 1

    @property
    def gap_s(self) -> float | None:
        """Mean seconds between two reports, weighted by time: four at once and then a pause count as one pause. None: unknown."""
        return self._squares / self._gaps_s if self._gaps_s else None

    def silence_s(self, now_s: float) -> float:
        """Seconds without a report while the member had work; 0 if it has none."""
        return now_s - self.since_s if self.num_open else 0.0

    def rate(self, now_s: float) -> float | None:
        """Samples per second, lower after a silence that is longer than usual. None: unknown."""
        if self.gap_s is None:
            return None
        return self._samples / (self._busy_s + EMA_WEIGHT * max(0.0, self.silence_s(now_s) - self.gap_s))

    def lease_samples(self, now_s: float) -> int:
        """Number of samples to put in a lease of about LEASE_S, from LEAST_SAMPLES to MOST_SAMPLES."""
        rate = self.rate(now_s)
        return FIRST_SAMPLES if rate is None else max(LEAST_SAMPLES, min(MOST_SAMPLES, round(rate * LEASE_S)))
