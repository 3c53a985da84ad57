"""The global order of a job, as its reorder service has it, for commands that look back at what a job did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import ConflictError, JobFailedError
from headrace.reorder_service.jobs.batches import Layout
from headrace.reorder_service.jobs.counted_shards import CountedShards
from headrace.spec import JobSpec, load_spec_json

if TYPE_CHECKING:
    from headrace.cli.jobs_client import JobsClient
    from headrace.v1.jobs_pb2 import JobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """Which samples each step of a job has, as far as its shards are indexed, and in which shards they are."""

    job: str
    spec: JobSpec
    manifest: CountedShards
    layout: Layout

    def check(self, step: int) -> None:
        """Raises ConflictError where more shards must be indexed before the samples of a step can be told."""
        shards, counted = len(self.manifest.shards), self.manifest.num_counted
        if not shards or self.layout.to_count(step):
            raise ConflictError(
                f"job {self.job!r} has indexed {counted} of {shards or '?'} shards: its order does not reach step {step} yet; "
                "wait until it has planned that"
            )


def job_order(client: JobsClient, status: JobStatus) -> JobOrder:
    """Of the job that `status` is of, up to its latest commit at least. Raises ConflictError where it has no step yet."""
    spec = load_spec_json(status.spec_json)
    manifest = CountedShards(spec, *client.manifest(status.job))
    changes = tuple((step, tuple(weights)) for step, weights in json.loads(status.mixture_json))
    order = JobOrder(job=status.job, spec=spec, manifest=manifest, layout=Layout(spec, manifest, changes))
    try:
        if len(manifest.shards):
            order.layout.lay_out()
        order.check(max(0, status.committed_steps - 1))
    except JobFailedError as err:
        raise ConflictError(f"job {status.job!r} has no order: {err}") from err
    return order
