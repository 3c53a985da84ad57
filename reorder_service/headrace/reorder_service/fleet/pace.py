"""How fast a member works, from when it was given work and when it reported. Time is passed in.

Both numbers are of the time in which it had work, however many leases of it at once, and follow a change within some reports.
"""

from __future__ import annotations

NEWEST = 1 / 16  # weight of the latest report: less would be late, more would take reports of some threads at once for speed
ODD = 4.0  # times the usual: a longer gap was a mishap, and counts as one of so many
LEASE_S = 0.05  # of work in a lease that can be cut to size: messages cost little, and others can still share the rest
FIRST_SAMPLES = 64  # of such a lease of a member that has not reported yet: about 20 ms of local files
LEAST_SAMPLES = 8
MOST_SAMPLES = 1024


class Pace:
    """Of one member at one kind of work."""

    def __init__(self) -> None:
        self.num_open = 0
        """Leases that it has not reported."""
        self.since_s = 0.0
        """When it reported last, or was given work after it had none."""
        self._samples = 0.0
        self._busy_s = 0.0
        self._gaps_s = 0.0
        self._squares = 0.0
        self._has_begun = False

    def begin(self, now_s: float) -> None:
        """It gets a lease."""
        if not self.num_open:
            self.since_s = now_s
        self.num_open += 1

    def report(self, now_s: float, num_samples: int, *, held_up: bool = False) -> None:
        """It reports a lease, which `end` is still to be called for. `held_up`: the time since its last report says nothing."""
        if self._has_begun and not held_up:
            passed_s = now_s - self.since_s
            self._samples += NEWEST * (num_samples - self._samples)
            self._busy_s += NEWEST * (passed_s - self._busy_s)
            gap_s = min(passed_s, ODD * max(self.gap_s, LEASE_S)) if self.gap_s is not None else passed_s
            self._gaps_s += NEWEST * (gap_s - self._gaps_s)
            self._squares += NEWEST * (gap_s**2 - self._squares)
        self._has_begun = True  # how long it took to start is no measure
        self.since_s = now_s

    def end(self) -> None:
        """A lease is over, done or not."""
        self.num_open -= 1

    @property
    def gap_s(self) -> float | None:
        """Between two reports, the mean over time: four that come at once and then a pause are one pause. None: unknown."""
        return self._squares / self._gaps_s if self._gaps_s else None

    def silence_s(self, now_s: float) -> float:
        """Since it ought to have said something; 0 where it has nothing to do."""
        return now_s - self.since_s if self.num_open else 0.0

    def rate(self, now_s: float) -> float | None:
        """Samples a second; silence that is longer than usual counts. None: unknown."""
        if self.gap_s is None:
            return None
        return self._samples / (self._busy_s + NEWEST * max(0.0, self.silence_s(now_s) - self.gap_s))

    def lease_samples(self, now_s: float) -> int:
        """How many samples make a lease of LEASE_S."""
        rate = self.rate(now_s)
        return FIRST_SAMPLES if rate is None else max(LEAST_SAMPLES, min(MOST_SAMPLES, round(rate * LEASE_S)))
