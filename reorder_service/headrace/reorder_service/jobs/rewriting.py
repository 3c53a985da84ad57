"""A store that was put back to an earlier moment under its leader: what it has lost of a job is written again from memory.

The leader has written all of it in its own term and was told that it was there, so memory is right, and neither trainers nor
preprocessors notice. What lies further back than the memory reaches is left to the trainers (jobs.resuming).
"""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TYPE_CHECKING

from headrace.observability.logs import pairs

if TYPE_CHECKING:
    from headrace.reorder_service.jobs.job import JobRun
    from headrace.reorder_service.store.state import StateStore

log = logging.getLogger(__name__)


class Loss(StrEnum):
    """What a store has lost of a job."""

    NOTHING = "nothing"
    WRITTEN_AGAIN = "written again"
    """Something, which is in the store again."""
    BEYOND_MEMORY = "beyond memory"
    """More steps than the leader remembers. The job can go on from what the store has."""


async def write_again(run: JobRun, store: StateStore) -> Loss:
    """Write again what the store has lost of a job, and return what that was.

    The caller must hold `Cursor.moving`. Raises NotFoundError where the store has lost the job as a whole, and UnavailableError
    where it does not answer; may then be called again.
    """
    record = await store.load_job(run.name)
    cursor, spec = run.cursor, run.planned_spec
    if record.uid != cursor.uid or record.generation > cursor.generation:
        return Loss.BEYOND_MEMORY
    has_lost = (record.generation, record.cursor) != (cursor.generation, cursor.committed)
    if record.generation < cursor.generation and record.cursor > cursor.committed:  # it has lost that the job went back
        await store.rewind(run.name, cursor.committed)
        record = await store.load_job(run.name)
    for generation in range(record.generation + 1, cursor.generation + 1):
        documents = spec.topology.model_dump_json(), spec.execution.model_dump_json(), spec.to_peer_json()
        await store.set_topology(run.name, *documents, generation)
    if record.mixture != run.batches.changes:
        await store.set_mixture(run.name, run.batches.changes)
    if record.paused != run.paused:
        await store.set_paused(run.name, run.paused)
    committed = {step.index: step for step in cursor.recent}  # of two with one index the later one is the job's
    lost = range(record.cursor, cursor.committed)
    if not committed.keys() >= set(lost) or record.cursor > cursor.committed:
        return Loss.BEYOND_MEMORY
    for index in lost:
        await cursor.save(committed[index], *committed[index].record(run.manifest.source_of))
    if (record.state, record.message) != (cursor.state, cursor.message):
        await store.set_state(run.name, cursor.state, cursor.message)
    if not has_lost:
        return Loss.NOTHING
    log.warning("written again, as the store had lost it %s", pairs(job=run.name, first=record.cursor, steps=len(lost)))
    return Loss.WRITTEN_AGAIN
