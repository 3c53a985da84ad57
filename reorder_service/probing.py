"""Finding out what a step's samples are, by the fleet."""

from __future__ import annotations

import asyncio
from collections import Counter

from headrace.codec import probe_value, rejection_value
from headrace.sample import SampleRef
from reorder_service import messages
from reorder_service.orders import PROBE, Orders
from reorder_service.step import Step

PROBE_SAMPLES = 64  # samples of one lease: about 20 ms of work, so that messages cost little; short enough to share


async def probe(step: Step, job: str, orders: Orders) -> None:
    """Fill a step's `probes` and `rejected`. Raises JobFailedError where no preprocessor can."""
    as_stored = sorted(step.refs, key=lambda ref: (ref.shard, ref.row))  # neighbours are read together
    chunks = [as_stored[i : i + PROBE_SAMPLES] for i in range(0, len(as_stored), PROBE_SAMPLES)]
    async with asyncio.TaskGroup() as group:
        for number, chunk in enumerate(chunks):
            group.create_task(_probe(step, number, chunk, job, orders))


async def _probe(step: Step, number: int, refs: list[SampleRef], job: str, orders: Orders) -> None:
    shards = Counter(ref.shard for ref in refs)
    reply = await orders.ask((step.index, PROBE, number), lambda lease: messages.probe_samples(lease, job, refs), shards)
    for item in reply.probes:
        step.probes[item.sample_id] = probe_value(item)
    step.rejected += [rejection_value(item) for item in reply.rejections]
