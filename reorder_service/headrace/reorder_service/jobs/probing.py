"""Probing of a step's samples by the preprocessors: finds out their sizes, or why they are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.message_codec import probe_value, rejection_value
from headrace.quarantine import Rejected
from headrace.reorder_service.jobs import fleet_messages
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.jobs.work_orders import Orders, WorkKind
from headrace.sample import SampleRef
from headrace.v1 import common_pb2


async def probe(
    step: PlannedStep, refs: Sequence[SampleRef], job: str, orders: Orders, answers: list[common_pb2.Probe]
) -> list[Rejected]:
    """Have `refs` probed, fill the step's `probes` and `probed_by` with the results, and return the refused samples.

    `answers`: to which the messages are added that the probes come from, since writing these again takes three times as long.

    Raises JobFailedError where no preprocessor can probe them.
    """
    rejected: list[Rejected] = []
    as_stored = sorted(refs, key=lambda ref: (ref.shard, ref.row))  # neighbours are read together
    missing = {ref.sample_id for ref in as_stored}

    def take(reply: Any, preprocessor: str) -> bool:
        for item in reply.probes:
            if (sample_id := item.sample_id) in missing:
                missing.remove(sample_id)
                answers.append(item)
                step.probes[sample_id] = probe_value(item)
                step.probed_by[sample_id] = preprocessor
        for item in reply.rejections:
            if item.sample_id in missing:
                missing.remove(item.sample_id)
                rejected.append(rejection_value(item))
        return not missing

    await orders.ask_in_pieces(
        (step.index, WorkKind.PROBE),
        as_stored,
        lambda lease, refs: fleet_messages.probe_samples(
            lease, job, step.trace, refs, orders.manifest.message, orders.killed(refs)
        ),
        take,
    )
    return rejected
