"""The client of the reorder service's Jobs API, which returns its messages; `headrace.jobs` is the one for users."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from headrace import rpc
from headrace.execution_spec import ExecutionSpec
from headrace.ledger import LedgerEntry
from headrace.manifest import ShardTable
from headrace.message_codec import rejection_value, shard_table
from headrace.peer_spec import load_peer_spec_json
from headrace.plan import StepPlan
from headrace.quarantine import Rejected
from headrace.spec import JobSpec
from headrace.topology_spec import TopologySpec
from headrace.v1 import jobs_pb2, jobs_pb2_grpc

STREAM_TIMEOUT_S = 300.0
LEDGER_PAGE = 256  # steps per request


class JobsClient:
    """Blocking client of the Jobs API. Every method raises the Headrace error of the service's reply, or of a missing service."""

    def __init__(self, endpoint: str, token: str | None = None, tls: str | Path | None = None) -> None:
        """`token`, `tls`: as in `headrace.rpc.channel`; None: the environment's."""
        self.endpoint, self._tls = endpoint, tls
        self._channel = rpc.channel(endpoint, token=token, tls=tls)
        self._stub = jobs_pb2_grpc.JobsStub(self._channel)

    def __enter__(self) -> JobsClient:
        """Wait for the reorder service. Raises EndpointError if none answers."""
        rpc.await_reorder_service(self.endpoint, tls=self._tls)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._channel.close()

    def submit(self, spec: JobSpec) -> str:
        """Submit a job and return its name."""
        reply = rpc.call(self._stub.Submit, jobs_pb2.SubmitRequest(spec_json=spec.to_peer_json()), self.endpoint)
        return str(reply.job)

    def show(self, job: str) -> jobs_pb2.JobStatus:
        status: jobs_pb2.JobStatus = rpc.call(self._stub.Show, jobs_pb2.ShowRequest(job=job), self.endpoint)
        return status

    def spec(self, job: str) -> JobSpec:
        """Return the spec of a job, with the topology and the execution that it is planned for now."""
        return load_peer_spec_json(self.show(job).spec_json)

    def about(self) -> jobs_pb2.ServiceStatus:
        """Return what the service tells of itself. Raises EndpointError if it is of a release that tells nothing."""
        status: jobs_pb2.ServiceStatus = rpc.call(self._stub.About, jobs_pb2.AboutRequest(), self.endpoint)
        return status

    def jobs(self, finished: int = 0) -> Iterator[jobs_pb2.JobStatus]:
        """Yield the jobs, in the order of their submission. `finished`: most jobs that are over, the latest; 0: all of them."""
        with rpc.translated(self.endpoint):
            for page in self._stub.List(jobs_pb2.ListRequest(finished=finished), timeout=STREAM_TIMEOUT_S):
                yield from page.jobs

    def delete(self, job: str) -> None:
        """Delete a job that is over, with all that is kept of it."""
        rpc.call(self._stub.Delete, jobs_pb2.DeleteRequest(job=job), self.endpoint)

    def cancel(self, job: str) -> jobs_pb2.JobStatus:
        status: jobs_pb2.JobStatus = rpc.call(self._stub.Cancel, jobs_pb2.CancelRequest(job=job), self.endpoint)
        return status

    def pause(self, job: str, paused: bool) -> jobs_pb2.JobStatus:
        """Stop planning further steps of a job or, with `paused` False, continue."""
        status: jobs_pb2.JobStatus = rpc.call(self._stub.Pause, jobs_pb2.PauseRequest(job=job, paused=paused), self.endpoint)
        return status

    def reset(self, job: str, step: int) -> jobs_pb2.JobStatus:
        """Undo the commits of `step` and of all later steps."""
        status: jobs_pb2.JobStatus = rpc.call(self._stub.Reset, jobs_pb2.ResetRequest(job=job, step=step), self.endpoint)
        return status

    def set_weights(self, job: str, step: int, weights: Mapping[str, float]) -> jobs_pb2.JobStatus:
        """Mix the sources by other weights from `step` on."""
        request = jobs_pb2.WeightsRequest(job=job, step=step, weights=weights)
        status: jobs_pb2.JobStatus = rpc.call(self._stub.SetWeights, request, self.endpoint)
        return status

    def set_topology(
        self, job: str, topology: TopologySpec, execution: ExecutionSpec | None = None, generation: int | None = None
    ) -> jobs_pb2.JobStatus:
        """Plan a job for another topology from its first uncommitted step on, and for trainers of that execution.

        `execution`: None: as it is. `generation`: the change is refused unless this is the job's current one; None: any.
        """
        request = jobs_pb2.TopologyRequest(
            job=job,
            topology_json=topology.model_dump_json(),
            execution_json="" if execution is None else execution.model_dump_json(),
            generation=generation,
        )
        status: jobs_pb2.JobStatus = rpc.call(self._stub.SetTopology, request, self.endpoint)
        return status

    def manifest(self, job: str) -> tuple[ShardTable, NDArray[np.int64]]:
        """Return the shards of a job and (n,) int64 the rows of each, UNCOUNTED until it is indexed."""
        with rpc.translated(self.endpoint):
            pages = list(self._stub.Manifest(jobs_pb2.ManifestRequest(job=job), timeout=STREAM_TIMEOUT_S))
        items = [item for page in pages for item in page.shards]
        num_rows = np.array([item.num_samples for item in items], np.int64)
        return shard_table([item.shard for item in items]), num_rows

    def ledger(self, job: str) -> Iterator[LedgerEntry]:
        """Yield committed steps in order. They are fetched by the page, so that a slow caller exceeds no deadline."""
        start = 0
        while True:
            request = jobs_pb2.LedgerRequest(job=job, start=start, count=LEDGER_PAGE)
            with rpc.translated(self.endpoint):
                page = list(self._stub.Ledger(request, timeout=STREAM_TIMEOUT_S))
            yield from (LedgerEntry(step=item.step, samples=tuple(item.samples), loss=item.loss) for item in page)
            if len(page) < LEDGER_PAGE:
                return
            start += LEDGER_PAGE

    def quarantine(self, job: str) -> list[Rejected]:
        """Return the quarantined samples of a job, by name."""
        with rpc.translated(self.endpoint):
            replies = self._stub.Quarantine(jobs_pb2.QuarantineRequest(job=job), timeout=STREAM_TIMEOUT_S)
            found = {item.name: rejection_value(item) for item in replies}  # one may come twice
        return [found[name] for name in sorted(found)]

    def show_plan(self, job: str, step: int = -1) -> tuple[int, StepPlan, list[int], dict[str, list[float]]]:
        """Return (step, plan, sample ids in arrival order, seconds per unit and sample) of a step.

        -1: the latest step with a full global batch.
        """
        reply = rpc.call(self._stub.ShowPlan, jobs_pb2.ShowPlanRequest(job=job, step=step), self.endpoint)
        plan = StepPlan.from_json(json.loads(reply.plan_json))
        return reply.step, plan, list(reply.sample_ids), {column.unit: list(column.cost_s) for column in reply.costs}


def state_name(status: jobs_pb2.JobStatus) -> str:
    """Name of a job's state, such as `running` for JOB_STATE_RUNNING; `paused` if it is indexing or running but paused."""
    if status.paused and status.state in (jobs_pb2.JOB_STATE_INDEXING, jobs_pb2.JOB_STATE_RUNNING):
        return "paused"
    return str(jobs_pb2.JobState.Name(status.state)).removeprefix("JOB_STATE_").lower()
