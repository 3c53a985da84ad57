"""The orders that preprocessors get."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.codec import ref_message, shard_message
from headrace.manifest import ShardInfo
from headrace.sample import SampleRef
from headrace.v1 import fleet_pb2
from headrace.v1.fleet_pb2 import FleetOrder
from reorder_service.step import Part


def job_opened(job: str, spec_json: str, shards: Iterable[ShardInfo], key: bytes) -> FleetOrder:
    messages = [shard_message(shard) for shard in shards]
    return FleetOrder(job_opened=fleet_pb2.JobOpened(job=job, spec_json=spec_json, shards=messages, ticket_key=key))


def job_closed(job: str) -> FleetOrder:
    return FleetOrder(job_closed=fleet_pb2.JobClosed(job=job))


def list_shards(lease: str, job: str) -> FleetOrder:
    return FleetOrder(list_shards=fleet_pb2.ListShards(lease=lease, job=job))


def index_shard(lease: str, job: str, shard: int) -> FleetOrder:
    return FleetOrder(index_shard=fleet_pb2.IndexShard(lease=lease, job=job, shard=shard))


def probe_samples(lease: str, job: str, refs: Sequence[SampleRef]) -> FleetOrder:
    samples = [ref_message(ref) for ref in refs]
    return FleetOrder(probe_samples=fleet_pb2.ProbeSamples(lease=lease, job=job, samples=samples))


def decode_part(lease: str, job: str, part: Part, step: int, priority: int) -> FleetOrder:
    samples = [ref_message(ref) for ref in part.samples]
    order = fleet_pb2.DecodePart(lease=lease, job=job, ticket=part.ticket, step=step, priority=priority, samples=samples)
    return FleetOrder(decode_part=order)


def step_committed(job: str, step: int) -> FleetOrder:
    return FleetOrder(step_committed=fleet_pb2.StepCommitted(job=job, step=step))
