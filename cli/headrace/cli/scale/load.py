"""What a service's jobs have their preprocessors do, from the latest looks at them. Pure: looks in, a load out."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.bottleneck import Stages, bottleneck, is_over
from headrace.cli.scale.scaling_policy import Load
from headrace.rates import Look, data_wait, samples_per_s
from headrace.v1.jobs_pb2 import JOB_STATE_INDEXING, JobStatus


def load_of(jobs: Sequence[Sequence[Look]]) -> Load:
    """Return the load of all jobs of a service, of which there is one at least, from one look or more at each, earliest first.

    All jobs share the preprocessors, so that those of any job's looks are those of all. Nobody waits in a job that is paused or
    has lost its trainers, whatever they had waited before.
    """
    running = [looks for looks in jobs if not is_over(looks[-1].status)]
    shown = running or list(jobs[-1:])
    waits = [_wait(looks) for looks in shown]
    wait = max(waits)
    slowest = shown[waits.index(wait)]
    count = len(slowest[-1].status.preprocessors)
    stages, finding = Stages.of(slowest), bottleneck(slowest)
    return Load(
        preprocessors=count,
        busy=count * stages.decoding / stages.decoders if stages.decoders and running else 0.0,
        wait=wait if running else 0.0,
        helps=finding.more_preprocessors,
        begins=any(_begins(looks[-1].status) for looks in running),
        samples_per_s=sum(samples_per_s(looks) for looks in running),
        why=finding.sentence,
    )


def _wait(looks: Sequence[Look]) -> float:
    """Share of their time that the trainers of a job wait for data; 0 where there are none that could take any."""
    first, last = looks[0].status, looks[-1].status
    takes = any(rank.connected for rank in last.ranks) or last.committed_steps > first.committed_steps
    return data_wait(looks) or 0.0 if takes and not last.paused else 0.0


def _begins(status: JobStatus) -> bool:
    """Whether it is not known yet what the trainers of a job take: its shards are counted, or no rank has reported a step."""
    if status.paused:
        return False
    if status.state == JOB_STATE_INDEXING:
        return True
    connected = [rank for rank in status.ranks if rank.connected]
    return bool(connected) and not any(rank.step_s for rank in connected)
