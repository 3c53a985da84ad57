"""Rebuild the global order of a job as its reorder service has it, for commands that look back at what the job did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import ConflictError, JobFailedError
from headrace.peer_spec import load_peer_spec_json
from headrace.reorder_service.jobs.batches import GlobalBatches
from headrace.reorder_service.jobs.counted_shards import CountedShards
from headrace.spec import JobSpec

if TYPE_CHECKING:
    from headrace.jobs_client import JobsClient
    from headrace.v1.jobs_pb2 import JobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """The samples of each step of a job, as far as its shards are indexed, and the shards they are in."""

    job: str
    spec: JobSpec
    manifest: CountedShards
    batches: GlobalBatches

    def check(self, step: int) -> None:
        """Raise ConflictError if more shards must be indexed before the samples of `step` can be told."""
        shards, counted = len(self.manifest.shards), self.manifest.num_counted
        if not shards or self.batches.to_count(step):
            raise ConflictError(
                f"job {self.job!r} has indexed {counted} of {shards or '?'} shards: its order does not reach step {step} yet; "
                "wait until it has planned that"
            )


def job_order(client: JobsClient, status: JobStatus) -> JobOrder:
    """Return the global order of the job that `status` describes, at least up to its latest commit.

    Raises ConflictError if it has no step yet.
    """
    spec = load_peer_spec_json(status.spec_json)
    manifest = CountedShards(spec, *client.manifest(status.job))
    changes = tuple((step, tuple(weights)) for step, weights in json.loads(status.mixture_json))
    order = JobOrder(job=status.job, spec=spec, manifest=manifest, batches=GlobalBatches(spec, manifest, changes))
    try:
        if len(manifest.shards):
            order.batches.set_up_order()
        order.check(max(0, status.committed_steps - 1))
    except JobFailedError as err:
        raise ConflictError(f"job {status.job!r} has no order: {err}") from err
    return order
