"""Builders of the FleetOrder messages that preprocessors get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from headrace.message_codec import ref_message, rejection_message
from headrace.quarantine import rejection_of_killer
from headrace.reorder_service.jobs.planned_step import PlannedPart
from headrace.sample import SampleRef
from headrace.v1 import fleet_pb2
from headrace.v1.common_pb2 import Shard
from headrace.v1.fleet_pb2 import FleetOrder


def job_opened(job: str, spec_json: str, key: bytes) -> FleetOrder:
    return FleetOrder(job_opened=fleet_pb2.JobOpened(job=job, spec_json=spec_json, ticket_key=key))


def job_closed(job: str) -> FleetOrder:
    return FleetOrder(job_closed=fleet_pb2.JobClosed(job=job))


def list_shards(lease: str, job: str) -> FleetOrder:
    return FleetOrder(list_shards=fleet_pb2.ListShards(lease=lease, job=job))


def index_shard(lease: str, job: str, shard: Shard) -> FleetOrder:
    return FleetOrder(index_shard=fleet_pb2.IndexShard(lease=lease, job=job, shard=shard))


def probe_samples(
    lease: str, job: str, trace: str, refs: Sequence[SampleRef], message_of: Callable[[int], Shard], killed: Mapping[int, int]
) -> FleetOrder:
    """Build the order to probe samples.

    `trace`: the step's id for tracing. `message_of`: returns the message of a shard by its number. `killed`: sample id -> how
    many preprocessors died of that sample, which is not to be touched.
    """
    order = fleet_pb2.ProbeSamples(
        lease=lease,
        job=job,
        trace=trace,
        samples=[ref_message(ref) for ref in refs],
        shards=_shards_of(refs, message_of),
        killed=killed,
    )
    return FleetOrder(probe_samples=order)


def try_sample(
    lease: str, job: str, part: PlannedPart, ref: SampleRef, step: int, priority: int, message_of: Callable[[int], Shard]
) -> FleetOrder:
    """Build the order to decode one sample of a part and keep nothing of it. `message_of`: returns a shard's message."""
    order = fleet_pb2.DecodePart(
        lease=lease,
        job=job,
        ticket=f"{part.ticket}/{ref.sample_id}",
        step=step,
        priority=priority,
        samples=[ref_message(ref)],
        shards=_shards_of([ref], message_of),
        trial=True,
    )
    return FleetOrder(decode_part=order)


def deadly_shard(name: str, deaths: int) -> fleet_pb2.ShardIndexed:
    """Build the index of a shard that killed `deaths` preprocessors, in place of a real one: it has no rows and one rejection."""
    return fleet_pb2.ShardIndexed(rejections=[rejection_message(rejection_of_killer(name, deaths))])


def decode_part(job: str, part: PlannedPart, step: int, priority: int, killed: Mapping[int, int]) -> fleet_pb2.DecodePart:
    """Build the order to decode a part and keep it, without its lease and shards.

    `killed`: sample id -> how many preprocessors died of that sample, which is not to be touched.
    """
    return fleet_pb2.DecodePart(
        job=job,
        ticket=part.ticket,
        step=step,
        priority=priority,
        samples=[ref_message(ref) for ref in part.samples],
        killed=killed,
        left_out=[rejection_message(item) for item in part.agreed.left_out.values()],
        strict=True,
    )


def decode_parts(lease: str, parts: Iterable[fleet_pb2.DecodePart], shards: Iterable[Shard]) -> FleetOrder:
    """Build the order to decode several parts under one lease. `shards`: those of all their samples."""
    return FleetOrder(decode_parts=fleet_pb2.DecodeParts(lease=lease, parts=parts, shards=shards))


def step_committed(job: str, step: int) -> FleetOrder:
    return FleetOrder(step_committed=fleet_pb2.StepCommitted(job=job, step=step))


def _shards_of(refs: Iterable[SampleRef], message_of: Callable[[int], Shard]) -> list[Shard]:
    return [message_of(number) for number in sorted({ref.shard for ref in refs})]
