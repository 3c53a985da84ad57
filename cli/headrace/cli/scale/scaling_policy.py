"""How many preprocessors to run: as many as the trainers can take from, and no more. Pure: measured load in, a number out.

A trainer's step takes its computing and its wait for data. Without the wait it would take data 1 / (1 - wait) times as fast, so
preprocessors that do all they can have to be that many times as many: one decision finds the number, from whatever number. If
trainers do not wait, as many preprocessors do the same as have their decoders busy now, and some more for bursts.

More are started at once, as GPUs wait; fewer only after a cool-down in which all decisions would have been for fewer. A number
under which trainers have waited is not gone back to for REMEMBER_S, and neither is more asked for for as long where more had not
made them faster: so the number settles. A job that begins leaves the number alone until its trainers tell what they take. Where
no job runs, or trainers have gone, nobody takes anything, and the fewest are enough after the cool-down.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

MOST_GROWTH = 4.0  # times as many at one decision: a wait of nearly all the time is a poor measure
SPARE = 1.2  # preprocessors over those that are busy on average
REMEMBER_S = 3600.0
START_S = 120.0  # how long preprocessors may take to come, or to go
LEAST_GAIN = 0.25  # of what the rate should gain by more preprocessors: less, and something else is the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the jobs of a service had their preprocessors do since the last decision."""

    preprocessors: int
    """How many are connected."""
    busy: float
    """How many of them decode, on average, counted by their decoders."""
    wait: float
    """Share of their time that trainers wait for data, of the job whose trainers wait most; 0 without one."""
    helps: bool
    """Whether more preprocessors are what these trainers wait for."""
    begins: bool
    """Whether a job has begun whose trainers have not told yet what they take."""
    samples_per_s: float
    """Samples that trainers have committed, of all jobs."""
    why: str
    """What holds that job up, as a clause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many preprocessors there should be, and why, as a clause."""

    wanted: int
    why: str


def needed(load: Load, least_wait: float) -> Decision:
    """Return the number of preprocessors that would do for this load, whatever it was before.

    least_wait: share of trainers' time below which a wait for data is not worth a remedy.
    """
    count = load.preprocessors
    if load.wait < least_wait and load.begins:
        return Decision(wanted=count, why=load.why)
    if load.wait < least_wait:
        return Decision(wanted=min(count, math.ceil(load.busy * SPARE)), why=load.why)
    if not load.helps:
        return Decision(wanted=count, why=load.why)
    growth = min(MOST_GROWTH, 1 / max(1 - load.wait, 1e-9))
    return Decision(wanted=max(count + 1, math.ceil(count * growth)), why=load.why)


class ScalingPolicy:
    """Decides from one load after the other. What has been decided is taken to be carried out, soon after."""

    def __init__(self, minimum: int, maximum: int, cool_down_s: float, *, least_wait: float) -> None:
        """`minimum`, `maximum`: of preprocessors. `cool_down_s`: how long fewer must do before there are. `least_wait`: as in
        `needed`."""
        self._minimum = minimum
        self._maximum = maximum
        self._cool_down_s = cool_down_s
        self._least_wait = least_wait
        self._wanted: int | None = None
        self._connected = 0  # at the last decision
        self._since_s = -math.inf  # when `_wanted` was last changed
        self._recent: deque[tuple[float, int]] = deque()  # (time, needed) of the decisions within the cool-down
        self._too_few: dict[int, float] = {}  # number under which trainers waited -> when, last
        self._before_growth: Load | None = None  # what was measured when there were fewer, until it is compared
        self._enough_until_s = -math.inf  # more were of no use
        self._idle_since_s: float | None = None  # when the service was first seen without a job

    def decide(self, load: Load, now_s: float) -> Decision:
        """Return how many there should be now. `now_s`: by any clock that does not go back."""
        self._idle_since_s = None
        if self._wanted is None:
            self._wanted, self._connected = self._within(load.preprocessors), load.preprocessors
        former, self._connected = self._connected, load.preprocessors
        if load.preprocessors != self._wanted and now_s - self._since_s < START_S:
            return Decision(wanted=self._wanted, why=f"{load.preprocessors} are connected so far")
        if load.preprocessors != former:
            return Decision(wanted=self._wanted, why=f"{load.preprocessors} are connected since, and not measured yet")
        self._compare(load, now_s)
        need = needed(load, self._least_wait)
        self._note(load, need.wanted, now_s)
        wanted, why = need.wanted, need.why
        if wanted > load.preprocessors and now_s < self._enough_until_s:
            wanted, why = load.preprocessors, f"{why}, but more did not make them faster"
        elif wanted < load.preprocessors:
            wanted, why = self._lowered(load, now_s, why)
        bounded = self._within(wanted)
        if bounded != wanted:
            why = f"{why}; {wanted} would do, the {'least' if bounded > wanted else 'most'} is {bounded}"
        if bounded > load.preprocessors:
            self._before_growth = load
        if bounded != self._wanted:
            self._wanted, self._since_s = bounded, now_s
            self._recent.clear()
        return Decision(wanted=bounded, why=why)

    def decide_without_jobs(self, now_s: float) -> Decision | None:
        """Return that the fewest are enough, once there has been no job for the whole cool-down; None: the number stays."""
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        if now_s - self._idle_since_s < self._cool_down_s:
            return None
        if self._wanted != self._minimum:
            self._wanted, self._since_s = self._minimum, now_s
            self._recent.clear()
        return Decision(wanted=self._minimum, why=f"there has been no job for {now_s - self._idle_since_s:.0f} s")

    def _within(self, wanted: int) -> int:
        return max(self._minimum, min(self._maximum, wanted))

    def _compare(self, load: Load, now_s: float) -> None:
        """Find out whether the last growth was of any use, as far as trainers still wait."""
        before, self._before_growth = self._before_growth, None
        if before is None or load.preprocessors <= before.preprocessors or not before.samples_per_s:
            return
        should_gain = min(load.preprocessors / max(before.preprocessors, 1), 1 / max(1 - before.wait, 1e-9)) - 1
        gained = load.samples_per_s / before.samples_per_s - 1
        if load.wait >= self._least_wait and gained < LEAST_GAIN * should_gain:
            self._enough_until_s = now_s + REMEMBER_S

    def _note(self, load: Load, need: int, now_s: float) -> None:
        if need > load.preprocessors:
            self._too_few[load.preprocessors] = now_s
        self._too_few = {count: at_s for count, at_s in self._too_few.items() if now_s - at_s < REMEMBER_S}
        self._recent.append((now_s, need))
        while len(self._recent) > 1 and self._recent[1][0] <= now_s - self._cool_down_s:
            self._recent.popleft()

    def _lowered(self, load: Load, now_s: float, why: str) -> tuple[int, str]:
        """Return the number to go down to, and why that or no lower one."""
        count, most = load.preprocessors, max(need for _, need in self._recent)
        alike = [few for few in self._too_few if few < count and load.busy > few / 2]  # the work is not another by now
        enough = 1 + max(alike, default=0)
        wanted = min(count, max(most, enough))
        waited_s = now_s - max(self._since_s, self._recent[0][0])
        if wanted == count:
            return count, f"{why}; {count - 1} were too few" if alike and enough == count else why
        if waited_s < self._cool_down_s:
            return count, f"{why}; {wanted} if that lasts for {self._cool_down_s - waited_s:.0f} s more"
        return wanted, why
