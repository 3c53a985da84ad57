"""Replay an availability trace: the throughput of a job under a given policy, while nodes are lost and come back.

Steps all take the same predicted time. A loss interrupts the step in progress; nodes that come back join at the end of one. The
policy says what a change costs and how fast the job goes on. A change during a recovery adds its own pause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from headrace.errors import UnrecoverableError
from headrace.reorder_service.recovery.forecast.availability import NodeChange, Trace

_NOISE = 1e-6  # of a step: the rounding error of sums of times


class Activity(Enum):
    """What a job does during a span of time."""

    TRAINS = "trains"
    SAVES = "saves a checkpoint"
    RECOVERS = "recovers"
    WAITS = "waits for nodes"
    UNDONE = "trains in vain"  # the work was lost afterwards
    STOPPED = "has stopped"


class Undone(Enum):
    """The finished or unfinished work that a change of nodes undoes."""

    NOTHING = "nothing"
    STEP = "the step in progress"
    UNSAVED = "all since the last checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """How fast a job trains while its nodes do not change."""

    step_s: float
    samples: float
    """Samples per step."""
    save_every: float = math.inf
    """Steps between checkpoints."""
    save_s: float = 0.0
    """Seconds without training while a checkpoint is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a job does after a change of nodes, and what that costs."""

    throughput: Throughput | None
    """How the job trains after the pause; None: not at all until nodes come back."""
    pause_s: float
    undone: Undone = Undone.NOTHING
    saved: bool = False
    """Whether the pause begins with a checkpoint."""


class Policy(Protocol):
    """A way for a job to deal with nodes that are lost and come back."""

    @property
    def name(self) -> str: ...

    def start(self, nodes: Sequence[str]) -> Throughput:
        """Return how the job trains on its first nodes. Raises UserError if it cannot start on them."""

    def change(self, lost: Sequence[str], joined: Sequence[str], *, announced: bool) -> Recovery | None:
        """Return the job's recovery from a change of nodes; None if training is not affected.

        It is not called again after it raised UnrecoverableError.
        announced: whether the change comes at the end of a step and as no surprise, as always when nodes only join.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of time in which a job does one thing."""

    start_s: float
    end_s: float
    activity: Activity
    samples_per_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(slots=True, kw_only=True)
class Run:
    """What a job did on a trace, and how much it trained."""

    name: str
    spans: list[Span] = field(default_factory=list)
    """The job's time from the start of the trace to its end, without gaps."""
    recoveries: int = 0
    stopped: str = ""
    """Why the job stopped, in a sentence; empty if it did not."""

    @property
    def samples(self) -> float:
        return math.fsum(span.samples_per_s * span.seconds for span in self.spans)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.spans[-1].end_s

    def share_of(self, bound: Run) -> float:
        """Samples of this run as a share of another run's; 0 if that has none."""
        return self.samples / bound.samples if bound.samples else 0.0

    def seconds(self, activity: Activity) -> float:
        return math.fsum(span.seconds for span in self.spans if span.activity is activity)

    @property
    def lost_s(self) -> float:
        """Seconds in which the job did not train, or did work that was undone later."""
        return math.fsum(span.seconds for span in self.spans if span.activity is not Activity.TRAINS)

    def mean_over(self, start_s: float, end_s: float) -> float:
        """Mean samples per second from `start_s` to `end_s`."""
        parts = (span.samples_per_s * max(0.0, min(end_s, span.end_s) - max(start_s, span.start_s)) for span in self.spans)
        return math.fsum(parts) / (end_s - start_s)


def replay(policy: Policy, trace: Trace, *, notice_s: float = 0.0) -> Run:
    """Return the run of a job under a policy on a trace. Raises UserError if the job cannot start.

    notice_s: how long before its loss a node is told of it, as spot instances are. The node then leaves at the end of a step, if
    one ends in that time.
    """
    clock = _Clock(run=Run(name=policy.name), throughput=policy.start(trace.nodes))
    coming: list[str] = []
    there = set(trace.nodes)
    try:
        for change in (*trace.changes, NodeChange(time_s=trace.end_s)):
            if coming and clock.step_end_s <= change.time_s:
                clock.advance(clock.step_end_s)
                clock.apply(policy.change((), coming, announced=True))
                there, coming = there.union(coming), []
            lost = [node for node in change.lost if node in there]
            coming = [node for node in coming if node not in change.lost]
            if lost:
                clock.advance(change.time_s - notice_s)
                announced = notice_s > 0 and clock.step_end_s <= change.time_s
                clock.advance(clock.step_end_s if announced else change.time_s)
                clock.apply(policy.change(lost, coming, announced=announced))
                there, coming = there.difference(lost).union(coming), []
            clock.advance(change.time_s)
            coming += change.joined
    except UnrecoverableError as err:
        clock.stop(trace.end_s, str(err))
    return clock.run


@dataclass(slots=True, kw_only=True)
class _Clock:
    """The state of a job during a replay, and the run that its spans are added to."""

    run: Run
    throughput: Throughput | None
    now_s: float = 0.0
    resume_s: float = 0.0
    """Time at which training resumes; until then the job does `instead`."""
    instead: Activity = Activity.RECOVERS
    steps: float = 0.0
    """Steps trained since the last checkpoint was begun."""
    saved_s: float = 0.0
    """Time at which the last checkpoint was complete."""

    @property
    def step_end_s(self) -> float:
        """Time at which nodes that have come back can join: the end of the current step or pause."""
        if self.now_s < self.resume_s:
            return self.resume_s
        if self.throughput is None:
            return self.now_s
        rest = math.ceil(self.steps - _NOISE) - self.steps
        return self.now_s + max(0.0, rest * self.throughput.step_s)

    def advance(self, until_s: float) -> None:
        while self.now_s < until_s:
            if self.now_s < self.resume_s:
                self._spend(min(until_s, self.resume_s), self.instead)
                if self.now_s == self.resume_s and self.instead is Activity.SAVES:
                    self.saved_s = self.now_s
            elif self.throughput is None:
                self._spend(until_s, Activity.WAITS)
            else:
                self._train(until_s, self.throughput)

    def _train(self, until_s: float, throughput: Throughput) -> None:
        begun_s = self.now_s
        self._spend(min(until_s, begun_s + (throughput.save_every - self.steps) * throughput.step_s), Activity.TRAINS)
        self.steps += (self.now_s - begun_s) / throughput.step_s
        if self.steps >= throughput.save_every - _NOISE:
            self.steps = 0.0
            self.resume_s, self.instead = self.now_s + throughput.save_s, Activity.SAVES
            if not throughput.save_s:
                self.saved_s = self.now_s

    def apply(self, recovery: Recovery | None) -> None:
        if recovery is None:
            return
        if recovery.saved:
            self.saved_s = self.now_s
        if recovery.undone is Undone.STEP:
            self._undo_step()
        if recovery.undone is Undone.UNSAVED:
            self._undo(self.saved_s)
        if recovery.saved or recovery.undone is not Undone.NOTHING:
            self.steps = 0.0
        self.throughput = recovery.throughput
        if self.now_s >= self.resume_s or self.instead is Activity.SAVES:
            self.resume_s = self.now_s
        self.resume_s += recovery.pause_s
        self.instead = Activity.RECOVERS
        self.run.recoveries += 1

    def stop(self, end_s: float, why: str) -> None:
        self._undo_step()
        self.run.stopped = f"after {self.now_s:,.0f} s: {why}"
        self._spend(end_s, Activity.STOPPED)

    def _spend(self, until_s: float, activity: Activity) -> None:
        rate = self.throughput.samples / self.throughput.step_s if self.throughput and activity is Activity.TRAINS else 0.0
        if until_s > self.now_s:
            self.run.spans.append(Span(start_s=self.now_s, end_s=until_s, activity=activity, samples_per_s=rate))
        self.now_s = until_s

    def _undo_step(self) -> None:
        if self.throughput is not None and self.now_s >= self.resume_s:
            self._undo(self.now_s - max(0.0, self.steps - math.floor(self.steps + _NOISE)) * self.throughput.step_s)

    def _undo(self, since_s: float) -> None:
        """Mark the training since `since_s` as undone."""
        spans = self.run.spans
        redone = []
        while spans and spans[-1].end_s > since_s:
            span = spans.pop()
            if span.activity is Activity.TRAINS:
                start_s = max(span.start_s, since_s)
                redone.append(Span(start_s=start_s, end_s=span.end_s, activity=Activity.UNDONE))
                if start_s > span.start_s:
                    redone.append(
                        Span(start_s=span.start_s, end_s=start_s, activity=span.activity, samples_per_s=span.samples_per_s)
                    )
            else:
                redone.append(span)
        spans += reversed(redone)
