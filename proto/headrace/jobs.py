"""Jobs from Python: what `headrace job` does, as typed calls with the same errors.

with headrace.jobs.Jobs("127.0.0.1:7070") as jobs:
    status = jobs.submit("job.yaml")
    for status in jobs.watch(status.job):
        print(status.state, status.committed_steps, status.last_loss)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from headrace.execution_spec import ExecutionSpec
from headrace.jobs_client import JobsClient, state_name
from headrace.spec import JobSpec, load_spec_yaml, parse_spec
from headrace.topology_spec import TopologySpec
from headrace.v1 import jobs_pb2

DEFAULT_ENDPOINT = "127.0.0.1:7070"
LISTED_FINISHED = 100  # finished jobs that are listed where nobody asks for all


class JobState(StrEnum):
    """Where a job stands, as `headrace job` prints it."""

    INDEXING = "indexing"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SET_ASIDE = "set_aside"
    """The job's record in the store cannot be read: nothing but its name is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job at one moment."""

    job: str
    state: JobState
    message: str
    """Why it failed or was set aside; empty otherwise."""
    committed_steps: int
    num_steps: int
    """Steps of the whole job; 0 until that is known."""
    num_shards: int
    indexed_shards: int
    samples: int
    """Samples of the committed steps."""
    quarantined: int
    generation: int
    """Rises whenever the job is planned for another topology or goes back; 0 in a list of a job that is over."""
    first_loss: float
    last_loss: float
    """Losses of the first and the last committed step that reported one; NaN where none did, or in a list of a job that is over.
    """

    @property
    def is_over(self) -> bool:
        """Whether no further step follows: the job is done, failed, cancelled or set aside."""
        return self.state not in (JobState.INDEXING, JobState.RUNNING, JobState.PAUSED)

    @classmethod
    def of(cls, message: jobs_pb2.JobStatus) -> Self:
        return cls(
            job=message.job,
            state=JobState(state_name(message)),
            message=message.message,
            committed_steps=message.committed_steps,
            num_steps=message.num_steps,
            num_shards=message.num_shards,
            indexed_shards=message.indexed_shards,
            samples=message.committed_samples,
            quarantined=message.quarantined_samples,
            generation=message.generation,
            first_loss=message.first_loss if message.generation else float("nan"),
            last_loss=message.last_loss if message.generation else float("nan"),
        )


class Jobs:
    """The jobs of one reorder service. Use it in a `with` block, which waits for the service.

    Methods raise the errors of `headrace.errors` that the commands print: EndpointError where no service answers, NotFoundError
    for a job that there is not, ConflictError for what does not fit the job's state, SpecError for an invalid spec.
    """

    def __init__(self, endpoint: str = DEFAULT_ENDPOINT, *, token: str | None = None, tls: str | Path | None = None) -> None:
        """`endpoint`, `token`, `tls`: as in `headrace.trainer.connect`."""
        self._client = JobsClient(endpoint, token, tls)

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._client.__exit__(*error)

    def submit(self, spec: JobSpec | Mapping[str, Any] | str | Path) -> JobStatus:
        """Start the job of a spec, of its fields, or of its YAML file. The same spec again resumes a job that had failed.

        A metadataset among the sources, a YAML file that blends data sets, is for `headrace job submit`, which reads it.
        """
        if isinstance(spec, str | Path):
            spec = load_spec_yaml(Path(spec))
        elif not isinstance(spec, JobSpec):
            spec = parse_spec(dict(spec))
        return self.show(self._client.submit(spec))

    def show(self, job: str) -> JobStatus:
        """Return where a job stands now."""
        return JobStatus.of(self._client.show(job))

    def spec(self, job: str) -> JobSpec:
        """Return the spec of a job, with the topology and the execution that it is planned for now."""
        return self._client.spec(job)

    def list(self, *, finished: int | None = LISTED_FINISHED) -> Sequence[JobStatus]:
        """Return the jobs in the order of their submission: all that run, and so many of those that are over; None: all."""
        return [JobStatus.of(status) for status in self._client.jobs(finished or 0)] if finished != 0 else self._running()

    def _running(self) -> Sequence[JobStatus]:
        return [status for status in map(JobStatus.of, self._client.jobs(1)) if not status.is_over]

    def watch(self, job: str, *, every_s: float = 1.0) -> Iterator[JobStatus]:
        """Yield the job's status now and whenever it is another one, looking each `every_s`; the last one is that of its end."""
        shown: JobStatus | None = None
        while shown is None or not shown.is_over:
            if shown is not None:
                time.sleep(every_s)
            if repr(status := self.show(job)) != repr(shown):  # NaN is not equal to itself
                shown = status
                yield status

    def pause(self, job: str) -> JobStatus:
        """Plan no further step of a job; what is planned can still be consumed."""
        return JobStatus.of(self._client.pause(job, True))

    def resume(self, job: str) -> JobStatus:
        """Go on with a paused job."""
        return JobStatus.of(self._client.pause(job, False))

    def reset(self, job: str, step: int) -> JobStatus:
        """Undo the commits of `step` and of all later steps: ranks connect again, and consume them once more."""
        return JobStatus.of(self._client.reset(job, step))

    def set_weights(self, job: str, from_step: int, weights: Mapping[str, float]) -> JobStatus:
        """Mix the sources by other weights, one for each, from a step on that is not planned yet."""
        return JobStatus.of(self._client.set_weights(job, from_step, weights))

    def set_topology(
        self, job: str, topology: TopologySpec, execution: ExecutionSpec | None = None, *, generation: int | None = None
    ) -> JobStatus:
        """Plan the same global batches for another topology, from the first uncommitted step on: ranks connect again.

        `execution`: how the trainers run the plans; None: as it is. `generation`: refuse unless this is the present one.
        """
        return JobStatus.of(self._client.set_topology(job, topology, execution, generation))

    def cancel(self, job: str) -> JobStatus:
        """End a job for good; its ledger stays."""
        return JobStatus.of(self._client.cancel(job))

    def delete(self, job: str) -> None:
        """Delete a job that is over, with its ledger; its name is free then."""
        self._client.delete(job)
