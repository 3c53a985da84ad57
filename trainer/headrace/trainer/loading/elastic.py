"""Elastic training: a job is planned again for another topology, for example after nodes were lost or came back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace import rpc
from headrace.peer_spec import load_peer_spec_json
from headrace.v1 import jobs_pb2, jobs_pb2_grpc


def replan(
    endpoint: str,
    *,
    job: str,
    replicas: int | None = None,
    microbatches: int | None = None,
    stages: Mapping[str, int] | None = None,
    speeds: Sequence[float] | None = None,
    generation: int | None = None,
    token: str | None = None,
    tls: str | Path | None = None,
) -> int:
    """Have a job planned for another topology from its first uncommitted step on, and return its new generation.

    The global batches stay the same. Loaders of the former generation raise SupersededError at their next step or commit: close
    them, and connect again with as many ranks as there are now. Only one rank calls this; the others wait for it, then connect.

    What is None stays as it is. `speeds`: relative speeds of the replicas; they lapse when the number of replicas changes.
    `generation`: the job's present generation as known to the caller (`StepLoader.generation`): if several ranks notice
    the same loss, only the first call takes effect.

    `token`, `tls`: the cluster's token and the folder of this process's papers; None: the environment's, as in
    `headrace.trainer.connect`.

    Raises SpecError for an invalid topology, ConflictError where another generation has begun or the job is over, NotFoundError
    for an unknown job, and UnavailableError where the reorder service does not answer.
    """
    rpc.await_reorder_service(endpoint, tls=tls)
    with rpc.channel(endpoint, token=token, tls=tls) as channel:
        stub = jobs_pb2_grpc.JobsStub(channel)
        present = load_peer_spec_json(rpc.call(stub.Show, jobs_pb2.ShowRequest(job=job), endpoint).spec_json).topology
        topology = present.changed(replicas=replicas, microbatches=microbatches, stages=stages, speeds=speeds)
        request = jobs_pb2.TopologyRequest(job=job, topology_json=topology.model_dump_json(), generation=generation)
        return int(rpc.call(stub.SetTopology, request, endpoint).generation)
