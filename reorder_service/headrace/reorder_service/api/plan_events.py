"""What sessions are told, as bytes: plans of steps, places of their parts, and the job's end."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from headrace import message_codec
from headrace.reorder_service.jobs.planned_step import PlannedPart, PlannedStep
from headrace.reorder_service.jobs.sessions import Ended, EventBatch, Session
from headrace.v1 import sessions_pb2


def plan_events(batch: EventBatch, session: Session) -> bytes:
    """Serialize a batch of events as PlanEvents, once for all sessions of a lane: the first call keeps the bytes in `batch`."""
    if not batch.message:
        batch.message = b"".join(_event_message(event, session) for event in batch.events)
    return batch.message


def compressed_plan_events(batch: EventBatch, session: Session) -> bytes:
    """Return what `plan_events` does, compressed by zlib, once for all sessions of a lane."""
    if not batch.compressed:
        batch.compressed = zlib.compress(plan_events(batch, session), level=1)
    return batch.compressed


def _event_message(event: PlannedStep | PlannedPart | Ended, session: Session) -> bytes:
    """Serialize one event as a PlanEvents message."""
    if isinstance(event, PlannedStep):
        return _plan_message(event, session)
    if isinstance(event, PlannedPart):
        if event.message[0] != event.lease:
            location = sessions_pb2.PartLocation(
                ticket=event.ticket, lease=event.lease, endpoint=event.endpoint, left_out=event.agreed.left_out
            )
            event.message = event.lease, _written(sessions_pb2.PlanEvent(location=location))
        return event.message[1]
    return _written(sessions_pb2.PlanEvent(ended=sessions_pb2.JobEnded(message=event.message)))


def _written(event: sessions_pb2.PlanEvent) -> bytes:
    written: bytes = sessions_pb2.PlanEvents(events=[event]).SerializeToString()
    return written


def _plan_message(step: PlannedStep, session: Session) -> bytes:
    """Serialize a plan for a session; what all ranks share, and what the session's lane shares, is serialized only once."""
    if session.lane not in step.messages:
        step.messages[session.lane] = _rank_plan(step, session).SerializeToString()
    plan = step.messages[session.lane]
    if session.replicas:
        plan += message_codec.field_bytes(sessions_pb2.RankPlan.WHOLE_FIELD_NUMBER, step.whole)
    event = message_codec.field_bytes(sessions_pb2.PlanEvent.PLAN_FIELD_NUMBER, plan)
    return message_codec.field_bytes(sessions_pb2.PlanEvents.EVENTS_FIELD_NUMBER, event)


def _rank_plan(step: PlannedStep, session: Session) -> sessions_pb2.RankPlan:
    """Build the session's share of a step's plan, without the whole plan that some sessions need as well.

    It has the microbatches of the replicas that the session takes, and those others in which the LLM has samples of its unit.
    """
    foretold = step.foretold
    assert foretold is not None, "the step is cut"
    replicas = [replica for replica in session.replicas_of(len(step.sizes)) if replica < len(step.sizes)]
    named = session.replicas is not None
    at = {replica: step.parts_at.get((session.unit, replica), ()) for replica in replicas}
    # A loader of whole samples, which names no replicas, has each of them once, also where others would share it.
    needed = {part.ticket: part for r, parts in at.items() for part in parts if named or part.replica == r}
    parts: dict[tuple[int, int], list[PlannedPart]] = {(k, r): [] for r in replicas for k in range(len(step.sizes[r]))}
    for part in needed.values():
        parts.setdefault((part.microbatch, part.replica), []).append(part)
    microbatches = [
        sessions_pb2.RankMicrobatch(
            replica=r,
            index=k,
            tickets=[part.ticket for part in of_microbatch],
            num_samples=step.sizes[r][k],
            parts=[_part_samples(part) for part in of_microbatch] if named else (),
            packs=[sessions_pb2.Pack(sample_ids=samples) for samples in step.packs_in(r, k)],
            sources=() if named else _by_source(of_microbatch),
        )
        for (k, r), of_microbatch in sorted(parts.items(), key=lambda item: item[0])
    ]
    return sessions_pb2.RankPlan(
        step=step.index,
        microbatches=microbatches,
        num_samples=len(step.probes),
        content=step.content,
        formation=step.formation.generation if step.formation is not None else 0,
        seconds=step.seconds if step.formation is not None else (),
        num_targets=foretold.num_targets,
        target_weight=foretold.target_weight,
        max_tokens=foretold.max_tokens,
        most_microbatches=None if named else foretold.most_microbatches(session.num_ranks),
    )


def _part_samples(part: PlannedPart) -> sessions_pb2.PartSamples:
    return sessions_pb2.PartSamples(sample_ids=[ref.sample_id for ref in part.samples])


def _by_source(parts: Iterable[PlannedPart]) -> list[sessions_pb2.SourceSamples]:
    samples: dict[int, list[int]] = {}
    for part in parts:
        for ref, source in zip(part.samples, part.sources, strict=False):  # of a job with one source no part has any
            samples.setdefault(source, []).append(ref.sample_id)
    return [sessions_pb2.SourceSamples(source=source, sample_ids=of_source) for source, of_source in samples.items()]
