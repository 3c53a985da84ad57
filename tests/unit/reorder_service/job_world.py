"""A reorder service in the test's own event loop, a preprocessor that answers at once, and a trainer that only commits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container
from dataclasses import dataclass, field
from typing import Any

from headrace.reorder_service.fleet.member import Member
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.planned_step import PlannedPart, PlannedStep, RankCommit
from headrace.reorder_service.jobs.sessions import Ended, Session
from headrace.reorder_service.service import ReorderService
from headrace.spec import parse_spec
from headrace.v1 import common_pb2, fleet_pb2

ROWS = 24


@dataclass(kw_only=True)
class Preprocessor:
    """A member of the fleet that answers every order in the next turn of the loop. In each source: one shard."""

    service: ReorderService
    name: str = "p"
    answers: bool = True
    rows: int = ROWS
    """Of each shard. Without any, it is refused when it is counted."""
    bad_rows: Container[int] = ()
    """Of each shard, refused when they are probed."""
    decoded: list[str] = field(default_factory=list)

    def join(self) -> Member:
        def introduce(job: str) -> fleet_pb2.FleetOrder:
            return fleet_pb2.FleetOrder(job_opened=fleet_pb2.JobOpened(job=job))

        self.member = Member(
            name=self.name,
            endpoint=f"{self.name}:1",
            slots=4,
            send=self._hear,
            introduce=introduce,
            dismiss=lambda: None,
            heartbeat_s=60.0,  # it sends none, however slow the machine is
        )
        self.service.fleet.join(self.member)
        return self.member

    def _hear(self, order: fleet_pb2.FleetOrder) -> None:
        kind = order.WhichOneof("order")
        body = getattr(order, kind)
        if self.answers and kind in ("list_shards", "index_shard", "probe_samples", "decode_part"):
            asyncio.get_running_loop().call_soon(self.service.fleet.finish, self.member, body.lease, self._result(kind, body))

    def _result(self, kind: str, body: Any) -> Any:
        match kind:
            case "list_shards":
                sources = self.service.find(body.job).spec.sources
                shards = [common_pb2.Shard(source=n, number=n, url="/d/a.tar", name=f"{s.name}/a") for n, s in enumerate(sources)]
                return fleet_pb2.ShardsListed(shards=shards, vocabulary=common_pb2.Vocabulary(size=9))
            case "index_shard":
                refused = common_pb2.Rejection(name=body.shard.name, reason="archive_truncated", detail="cut off")
                return fleet_pb2.ShardIndexed(num_samples=self.rows, rejections=[] if self.rows else [refused])
            case "probe_samples":
                names = [source.name for source in self.service.find(body.job).spec.sources]
                probes = [
                    common_pb2.Probe(sample_id=s.sample_id, name=f"{names[s.shard]}/a/{s.row}", num_tokens=4, num_targets=2)
                    for s in body.samples
                    if s.row not in self.bad_rows
                ]
                rejections = [
                    common_pb2.Rejection(
                        sample_id=s.sample_id, name=f"{names[s.shard]}/a/{s.row}", reason="corrupt_media", row=s.row
                    )
                    for s in body.samples
                    if s.row in self.bad_rows
                ]
                return fleet_pb2.SamplesProbed(probes=probes, rejections=rejections)
            case _:
                self.decoded.append(body.ticket)
                return fleet_pb2.PartDecoded()


Start = Callable[[], Awaitable[ReorderService]]


async def end(service: ReorderService) -> None:
    await service.stop()
    await service.store.close()


async def submit(service: ReorderService, *, replicas: int = 2, join: bool = True, **fields: Any) -> JobRun:
    document: dict[str, Any] = {
        "name": "job",
        "sources": [{"path": "/d"}],
        "global_batch": 4,
        "topology": {"replicas": replicas, "microbatches": 1},
        "window": 2,
    }
    if join:
        Preprocessor(service=service).join()
    run = await service.submit(parse_spec(document | fields).to_json())
    if join:
        await run.wait_ready()
    return run


def commit(loss: float = math.nan) -> RankCommit:
    return RankCommit(rejected=(), loss=loss, step_s=1.0, data_wait_s=0.0)


async def names(run: JobRun) -> list[tuple[str, ...]]:
    return [record.samples async for record in run._store.steps(run.name)]


async def consume(run: JobRun, session: Session, stop: int | None = None) -> list[int]:
    """Commit each step once it is told, in order, up to `stop`; the steps committed."""
    done: list[int] = []
    told: set[int] = set()
    async for event in told_by(session):
        if isinstance(event, PlannedStep):
            told.add(event.index)
        while run.cursor.committed in told and run.cursor.committed != stop:
            done.append(run.cursor.committed)
            await run.commit(session, run.cursor.committed, commit(float(run.cursor.committed)))
        if run.cursor.committed == stop:
            break
    return done


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else in the loop go on until `condition` holds."""
    while not condition():  # noqa: ASYNC110 - the test's own view of others' turns
        await asyncio.sleep(0)


async def told_by(session: Session) -> AsyncIterator[PlannedStep | PlannedPart | Ended]:
    """One by one."""
    async for told in session.event_batches():
        for event in (event for one in told for event in one.events):
            yield event


async def told_step(session: Session, index: int) -> PlannedStep:
    return (await told_steps(session, {index}))[index]


async def told_steps(session: Session, indices: Collection[int]) -> dict[int, PlannedStep]:
    """All of them. Others that are told meanwhile are lost."""
    told: dict[int, PlannedStep] = {}
    async for event in told_by(session):
        if isinstance(event, PlannedStep) and event.index in indices:
            told[event.index] = event
        if len(told) == len(indices):
            return told
    raise AssertionError(f"only {sorted(told)} of {sorted(indices)} were told")
