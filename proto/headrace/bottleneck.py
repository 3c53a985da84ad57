"""Find what holds a job up and what to do about it, in words. Pure: the latest looks at the job in, one finding out.

The time that trainers wait for data says on which side the slowest part is. If they wait, the preprocessors' stages say why:

    ordered --read--> in memory --decode--> stored --> trainers

The slowest stage is the first that is busy, or full, while those behind it idle (docs/metrics.md has the same table).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from headrace.rates import Look, data_wait, recent
from headrace.v1 import jobs_pb2
from headrace.v1.jobs_pb2 import JobStatus

WAITS = 0.05  # share of the step time that trainers wait for data; less is not worth a remedy
BUSY = 2 / 3  # share of the decoding threads that decode, on average: looks fall between two parts, too
FULL = 0.75  # share of the store's budget: an eighth is set aside for what is read ahead, and the next part must fit in
BEHIND = 2  # steps: ranks that train in lockstep are one apart while they commit
STALL_S, STALL_STEPS = 5.0, 5.0  # no commit for so many seconds, and for so many times the latest step
MAX_NAMED = 3  # ranks that a finding names


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What holds a job up, and what to do about it, as a clause each; the remedy is empty if there is nothing to do."""

    sentence: str
    remedy: str = ""
    more_preprocessors: bool = False
    """Whether more preprocessors are a remedy."""

    def __str__(self) -> str:
        return f"{self.sentence}: {self.remedy}" if self.remedy else self.sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What the stages of all preprocessors together hold, on average over some looks."""

    waiting: float
    """Number of parts that are ordered, being read, or read and not being decoded."""
    decoding: float
    decoders: float
    """Number of decoding threads, and thus of parts that can be decoded at a time."""
    starved: float
    """Number of idle decoding threads whose own preprocessor has waiting parts: these are not read yet, or the store is full."""
    fill: float
    """Used share of the stores' budgets."""
    planned_steps: float

    @classmethod
    def of(cls, looks: Sequence[Look]) -> Stages:
        statuses = [look.status for look in looks]
        members = [member for status in statuses for member in status.preprocessors]
        waiting = [member.occupancy.ordered + member.occupancy.read for member in members]
        idle = [decoding_threads(member.slots) - member.occupancy.decoding for member in members]
        budget = sum(member.store_budget_bytes for member in members)
        return cls(
            waiting=sum(waiting) / len(looks),
            decoding=sum(member.occupancy.decoding for member in members) / len(looks),
            decoders=sum(decoding_threads(member.slots) for member in members) / len(looks),
            starved=sum(map(min, waiting, idle)) / len(looks),
            fill=sum(member.store_bytes for member in members) / budget if budget else 0.0,
            planned_steps=fmean(status.planned_steps for status in statuses),
        )


def decoding_threads(slots: int) -> int:
    """Number of a preprocessor's decoding threads: it has a slot for each, one more for each to read ahead, and two."""
    return max(1, (slots - 2) // 2)


def bottleneck(looks: Sequence[Look]) -> Finding:
    """Find the bottleneck of one job from one look or more, the earliest first (headrace.rates.Looks)."""
    status = looks[-1].status
    return _standing(status) or _late_ranks(status) or _start(status) or _stalled(looks) or _slowest_part(looks)


def is_held_up(looks: Sequence[Look]) -> bool:
    """Whether something other than the trainers' own work holds up one job that has not ended; looks as for `bottleneck`."""
    status = looks[-1].status
    if _standing(status) or _late_ranks(status):
        return True
    return not _start(status) and (_stalled(looks) is not None or (data_wait(looks) or 0.0) >= WAITS)


def is_over(status: JobStatus) -> bool:
    """Whether the job has ended, however it did."""
    return status.state in (jobs_pb2.JOB_STATE_DONE, jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_CANCELLED)


def _standing(status: JobStatus) -> Finding | None:
    """Why nothing can be measured of a job; None if it runs and has trainers."""
    if status.state == jobs_pb2.JOB_STATE_DONE:
        return Finding(sentence="every step is committed")
    if status.state == jobs_pb2.JOB_STATE_CANCELLED:
        return Finding(sentence=status.message)
    if status.state == jobs_pb2.JOB_STATE_FAILED:
        return Finding(sentence=status.message, remedy="mend that and submit the job again, it goes on from its last commit")
    if status.paused:
        planned = f"{_count(status.planned_steps, 'planned step')} left" if status.planned_steps else "no step is planned"
        return Finding(sentence=f"paused, {planned}", remedy=f"`headrace job resume {status.job}` goes on")
    if not status.preprocessors:
        start = f"start one with `headrace preprocessor --reorder {status.leader}`"
        return Finding(sentence="no preprocessor is connected", remedy=start)
    if status.state == jobs_pb2.JOB_STATE_INDEXING:
        if not status.num_shards:
            return Finding(sentence="waiting for the shards to be listed")
        sentence = f"the first steps wait for shards to be indexed ({status.indexed_shards} of {status.num_shards} are)"
        return Finding(sentence=sentence, remedy="more preprocessors index more at a time")
    if not status.ranks:
        start = f"start one with `headrace train --endpoint {status.leader} --job {status.job}`, or connect your own"
        return Finding(sentence="no trainer is connected", remedy=start)
    return None


def _late_ranks(status: JobStatus) -> Finding | None:
    if status.HasField("snapshot"):  # one node commits for all
        return None
    first = max(rank.committed_steps for rank in status.ranks)
    late = sorted((rank for rank in status.ranks if first - rank.committed_steps >= BEHIND), key=lambda r: r.committed_steps)
    if not late:
        return None
    last = late[0]
    steps = first - last.committed_steps
    if len(late) == 1:
        who = "it"
        sentence = f"rank {last.rank} is {steps} steps behind the others"
    else:
        who = f"rank {last.rank}"
        named = ", ".join(str(rank.rank) for rank in late[:MAX_NAMED])
        more = f" and {len(late) - MAX_NAMED} more" if len(late) > MAX_NAMED else ""
        sentence = f"ranks {named}{more} are up to {steps} steps behind the others"
    if not last.step_s:
        return Finding(sentence=sentence, remedy=f"{who} has committed none since it connected, see its log")
    share = last.data_wait_s / last.step_s
    if share >= WAITS:
        return Finding(sentence=sentence, remedy=f"{who} waits {share:.0%} of its step for data, look at its network")
    return Finding(sentence=sentence, remedy=f"{who} does not wait for data, look at its host and its log")


def _start(status: JobStatus) -> Finding | None:
    """Return what the job does while no rank has committed a step since it connected; else None."""
    if any(rank.step_s for rank in status.ranks):
        return None
    if not status.planned_steps:
        return Finding(sentence="the first steps are being planned")
    return Finding(sentence=f"the trainers begin, {_count(status.planned_steps, 'step')} planned")


def _stalled(looks: Sequence[Look]) -> Finding | None:
    last = looks[-1]
    steps = last.status.committed_steps
    idle_s = last.at_s - next(look.at_s for look in looks if look.status.committed_steps == steps)
    step_s = max(rank.step_s for rank in last.status.ranks)
    if idle_s < max(STALL_S, STALL_STEPS * step_s):
        return None
    sentence = f"no step was committed in the last {idle_s:.0f} s, and the latest took {step_s:.1f} s"
    return Finding(sentence=sentence, remedy="see the logs of the trainers, then those of the preprocessors")


def _slowest_part(looks: Sequence[Look]) -> Finding:
    wait = data_wait(looks) or 0.0
    stages = Stages.of(recent(looks))
    return _why_trainers_wait(wait, looks[-1].status, stages) if wait >= WAITS else _why_all_is_well(wait, stages)


def _why_all_is_well(wait: float, stages: Stages) -> Finding:
    if stages.fill >= FULL:
        sentence = "preprocessors wait: their stores are full, the trainer is the slowest part"
    elif stages.decoding < BUSY * stages.decoders:
        sentence = "preprocessors wait: all that is ordered is decoded, the trainer is the slowest part"
    else:
        sentence = f"preprocessors keep up: the trainer waits {wait:.0%} of its time for data and is the slowest part"
    return Finding(sentence=sentence, remedy="nothing to gain from more preprocessors")


def _why_trainers_wait(wait: float, status: JobStatus, stages: Stages) -> Finding:
    def because(why: str, remedy: str, *, more: bool = False) -> Finding:
        sentence = f"trainers wait {wait:.0%} of their time for data: {why}"
        return Finding(sentence=sentence, remedy=remedy, more_preprocessors=more)

    spec = json.loads(status.spec_json)
    window = min(spec["window"], status.num_steps - status.committed_steps) if status.num_steps else spec["window"]
    idle = stages.decoders - stages.decoding
    if stages.decoding >= BUSY * stages.decoders:
        busy = f"decoding {_decimal(stages.decoding)} of {_decimal(stages.decoders)}, stores {stages.fill:.0%} full"
        return because(f"preprocessors decode as fast as they can ({busy})", "add preprocessors", more=True)
    if stages.fill >= FULL:
        full = f"the stores are {stages.fill:.0%} full of what is needed later"
        return because(full, "raise the preprocessors' --budget-mib, or add preprocessors", more=True)
    if stages.starved >= idle / 2:
        parts = f"parts wait to be read while decoders idle (decoding {_decimal(stages.decoding)} of {_decimal(stages.decoders)})"
        remedy = "give preprocessors a --cache, or faster storage, or add preprocessors"
        return because(f"reading is the slowest stage, {parts}", remedy, more=True)
    if 0 < status.num_steps <= status.committed_steps + status.planned_steps:
        return because(f"the last {_count(window, 'step')} of the job are planned", "nothing is left to order")
    next_bytes = status.planned_bytes * (1 + 1 / max(1, status.planned_steps))
    if status.planned_steps < window and next_bytes > status.window_bytes > 0:
        sizes = f"{status.planned_bytes / 2**30:.1f} of {status.window_bytes / 2**30:.1f} GiB planned"
        if spec["window_bytes"] is None:
            return because(
                f"the stores hold no further step ({sizes})",
                "raise the preprocessors' --budget-mib, or add preprocessors",
                more=True,
            )
        return because(
            f"the window is full ({sizes})", "submit with more `window_bytes`, if the preprocessors' stores hold so much"
        )
    if stages.planned_steps < window / 2:
        planned = f"only {stages.planned_steps:.0f} of the window's {_count(window, 'step')} planned"
        return because(f"{planned}, probing and planning are the slowest part", "add preprocessors, which probe too", more=True)
    ordered = "too little" if round(stages.waiting + stages.decoding) else "nothing"
    small = f"the slots are free and {ordered} is ordered, the window ({_count(spec['window'], 'step')}) is too small"
    return because(small, "submit with a larger `window`; where that is no help, the network to the trainers is too slow")


def _decimal(number: float) -> str:
    return f"{round(number, 1):g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
