"""The global order of a job, as its reorder service has it, for commands that look back at what a job did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import ConflictError, JobFailedError
from headrace.manifest import ShardInfo
from headrace.spec import JobSpec, load_spec_json
from reorder_service.layout import Layout
from reorder_service.manifest import CountedShards

if TYPE_CHECKING:
    from cli.client import JobsClient
    from headrace.v1.jobs_pb2 import JobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """Which samples each step of a job has, and in which shards they are."""

    spec: JobSpec
    shards: tuple[ShardInfo, ...]
    num_rows: tuple[int, ...]
    layout: Layout


def job_order(client: JobsClient, status: JobStatus) -> JobOrder:
    """Of the job that `status` is of. Raises ConflictError where its shards are not all indexed."""
    spec = load_spec_json(status.spec_json)
    manifest = client.manifest(status.job)
    shards, num_rows = tuple(shard for shard, _ in manifest), tuple(count for _, count in manifest)
    if not shards or -1 in num_rows:
        raise ConflictError(
            f"job {status.job!r} has indexed {status.indexed_shards} of {len(shards) or '?'} shards: it has no order yet, "
            "nor any step; wait until it runs"
        )
    changes = tuple((step, tuple(weights)) for step, weights in json.loads(status.mixture_json))
    layout = Layout(spec, CountedShards(spec, shards, dict(enumerate(num_rows))), changes)
    try:
        layout.lay_out()
    except JobFailedError as err:
        raise ConflictError(f"job {status.job!r} has no order: {err}") from err
    return JobOrder(spec=spec, shards=shards, num_rows=num_rows, layout=layout)
