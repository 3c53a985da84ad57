"""Compute how fast a job goes from the latest looks at it. Pure: statuses and times in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.v1.jobs_pb2 import JobStatus

SPAN_S = 5.0  # looks of the last SPAN_S seconds count as the present
MAX_SPAN_S = 300.0  # the most that is kept, if steps take longer than SPAN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A job's status, and the time at which it was asked for, in seconds by any clock."""

    at_s: float
    status: JobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRate:
    """Samples and bytes that a preprocessor decodes per second."""

    samples_per_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(slots=True)
class Looks:
    """The latest looks at a job, back to `span_s` ago, further while no step was committed since, but not beyond MAX_SPAN_S."""

    held: list[Look] = field(default_factory=list)
    span_s: float = SPAN_S

    def add(self, look: Look) -> None:
        """Add a look. If it is at another job, term or generation, whose counters start anew, the earlier looks are dropped."""
        if self.held and _life(self.held[-1].status) != _life(look.status):
            self.held.clear()
        self.held.append(look)
        while len(self.held) > 2 and _reaches_back(self.held[1], look, self.span_s):
            del self.held[0]


def recent(looks: Sequence[Look]) -> Sequence[Look]:
    """Return the looks of the last SPAN_S; at least two if there are two."""
    first = next(i for i, look in enumerate(looks) if looks[-1].at_s - look.at_s <= SPAN_S)
    return looks[max(0, min(first, len(looks) - 2)) :]


def steps_per_s(looks: Sequence[Look]) -> float:
    """Committed steps per second, from the first look to the last."""
    return _rate(looks, looks[0].status.committed_steps, looks[-1].status.committed_steps)


def samples_per_s(looks: Sequence[Look]) -> float:
    """Committed samples per second, from the first look to the last."""
    return _rate(looks, looks[0].status.committed_samples, looks[-1].status.committed_samples)


def data_wait(looks: Sequence[Look]) -> float | None:
    """Share of the step time that the slowest ranks waited for data; None before the first commit.

    It is that of the steps committed between the first and the last look, or of all steps if there are none.
    """
    first, last = looks[0].status, looks[-1].status
    if last.step_s > first.step_s:
        return max(0.0, last.data_wait_s - first.data_wait_s) / (last.step_s - first.step_s)
    return last.data_wait_s / last.step_s if last.step_s else None


def decoding_rates(looks: Sequence[Look]) -> dict[str, DecodingRate]:
    """Return the decoding rate of each preprocessor that is connected now, by name; zero until it has reported twice."""
    looks = recent(looks)
    # A preprocessor that has just connected (again) has not reported its counters yet: they would leap.
    before = {member.preprocessor: member for member in looks[0].status.preprocessors if member.HasField("occupancy")}
    rates = {}
    for member in looks[-1].status.preprocessors:
        former = before.get(member.preprocessor)
        rates[member.preprocessor] = DecodingRate()
        if former is not None:
            rates[member.preprocessor] = DecodingRate(
                samples_per_s=_rate(looks, former.samples_decoded, member.samples_decoded),
                bytes_per_s=_rate(looks, former.bytes_decoded, member.bytes_decoded),
            )
    return rates


def _life(status: JobStatus) -> tuple[str, int, int]:
    return status.job, status.term, status.generation


def _reaches_back(look: Look, last: Look, span_s: float) -> bool:
    """Whether this look is old enough for the looks before it to be dropped."""
    age_s = last.at_s - look.at_s
    return age_s >= MAX_SPAN_S or (age_s >= span_s and look.status.committed_steps < last.status.committed_steps)


def _rate(looks: Sequence[Look], before: int, now: int) -> float:
    seconds = looks[-1].at_s - looks[0].at_s
    return max(0, now - before) / seconds if seconds > 0 else 0.0
