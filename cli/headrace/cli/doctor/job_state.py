"""Which jobs wait, for what, and how fast they go. Pure: looks at each job in, diagnoses out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.bottleneck import bottleneck, is_held_up, is_over
from headrace.cli.doctor.diagnosis import Diagnosis, fault, ok, severity, warning
from headrace.jobs_client import state_name
from headrace.rates import Look, decoding_rates, samples_per_s, steps_per_s
from headrace.v1 import jobs_pb2
from headrace.v1.jobs_pb2 import JobStatus

MAX_JOBS = 20  # that have rows of their own


def is_examined(status: JobStatus) -> bool:
    """Whether there is anything to examine of a job: it goes on, has failed, or cannot be read."""
    return not is_over(status) or status.state == jobs_pb2.JOB_STATE_FAILED


def waits_for_preprocessors(status: JobStatus) -> bool:
    """Whether a job would go on with a preprocessor, and has none."""
    is_waiting = status.state in (jobs_pb2.JOB_STATE_INDEXING, jobs_pb2.JOB_STATE_RUNNING)
    return is_waiting and not status.paused and not status.preprocessors


def jobs(looks: Sequence[Sequence[Look]]) -> Iterator[Diagnosis]:
    """Tell of each job what holds it up, the faulty ones first, and how fast those go that were looked at twice.

    `looks`: of each job that `is_examined`, the earliest first.
    """
    if not looks:
        yield ok("jobs", "none runs")
        return
    found = sorted(map(_job, looks), key=lambda one: severity(one.state), reverse=True)
    yield from found[:MAX_JOBS]
    if len(found) > MAX_JOBS:
        yield ok("jobs", f"{len(found) - MAX_JOBS} more, which are no worse")
    if trained := [one for one in looks if len(one) > 1]:
        yield _rates(trained)


def _job(looks: Sequence[Look]) -> Diagnosis:
    status = looks[-1].status
    check = f"job {status.job}"
    if status.state == jobs_pb2.JOB_STATE_SET_ASIDE:
        read = "run the release that wrote it, or delete the job with `headrace job delete`"
        return fault(check, f"its record cannot be read: {status.message}", read)
    if status.state == jobs_pb2.JOB_STATE_FAILED:
        again = "mend that and submit the job again, it goes on from its last commit"
        return warning(check, f"failed after {status.committed_steps} steps: {status.message}", again)
    finding = bottleneck(looks)
    steps = f"{state_name(status)}, step {status.committed_steps} of {status.num_steps or 'an unknown number'}; "
    if is_held_up(looks) and finding.remedy:
        return warning(check, steps + finding.sentence, finding.remedy)
    return ok(check, steps + finding.sentence, finding.remedy)


def _rates(trained: Sequence[Sequence[Look]]) -> Diagnosis:
    decoded = sum(rate.samples_per_s for rate in decoding_rates(trained[-1]).values())  # those of all jobs together
    committed = sum(map(samples_per_s, trained))
    span_s = max(looks[-1].at_s - looks[0].at_s for looks in trained)
    steps = sum(map(steps_per_s, trained))
    return ok(
        "rates", f"in {span_s:.1f} s: {committed:.1f} samples/s committed in {steps:.2f} steps/s, {decoded:.1f} samples/s decoded"
    )
