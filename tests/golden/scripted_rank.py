"""A script's trainer rank: it opens sessions, reads plans and commits, all when the script says so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.v1 import sessions_pb2
from tests.golden.scripted_preprocessor import part_name
from tests.golden.world import Call, RefusedError, World

if TYPE_CHECKING:
    from tests.golden.scripted_host import Host


@dataclass(kw_only=True, eq=False)
class Rank:
    """One rank of a job, with the latest session that it has opened and what it was told there."""

    world: World
    rank: int
    host: Host | None = None
    """The host over whose stream the rank reads and commits; None: it has a stream of its own."""
    session: str = ""
    places: dict[str, list[sessions_pb2.PartLocation]] = field(default_factory=dict)
    """Name of a part -> where it was, the newest place last."""
    news: list[str] = field(default_factory=list)
    """What the rank was told, in words, since it was last asked for."""
    messages: list[bytes] = field(default_factory=list)
    """The bytes that it was told this by."""

    @property
    def who(self) -> str:
        """The rank in words."""
        return f"rank {self.rank}"

    async def open(self, request: sessions_pb2.OpenRequest) -> str:
        """Open a session and read its plans from then on; return where the rank stands, or what it waits for."""
        reply = await self.world.sessions.Open(request, Call())
        if reply.waiting:
            return f"waits: {reply.waiting}"
        self.session, self.messages = reply.session, []
        if self.host is not None:
            self.host.listen(self)
        else:
            self._stream = asyncio.create_task(self._read(reply.session))
        return f"opened at step {reply.next_step} in generation {reply.generation}"

    def disconnect(self) -> None:
        """End the stream of plans, as a process that dies does. The session stays."""
        self._stream.cancel()

    async def commit(self, request: sessions_pb2.CommitRequest) -> str:
        """Commit a step; return whether it is in the ledger, or which ranks are missing."""
        request.session = self.session
        if self.host is not None:
            return await self.host.commit(request)
        return commit_answer(request.step, await self.world.sessions.Commit(request, Call()))

    async def report_lost(self, part: str, endpoint: str) -> str:
        """Report that a part cannot be fetched from an endpoint; empty: from where the rank was told last that it is."""
        told = [place for place in self.places[part] if endpoint in ("", place.endpoint)][-1]
        request = sessions_pb2.ReportLostRequest(session=self.session, ticket=told.ticket, lease=told.lease)
        await self.world.sessions.ReportLost(request, Call())
        return ""

    async def close(self) -> str:
        """Close the session."""
        await self.world.sessions.Close(sessions_pb2.CloseRequest(session=self.session), Call())
        return ""

    def hear(self, message: bytes) -> list[str]:
        """Take in what the rank is told; return it in words."""
        self.messages.append(bytes(message))
        told = [self._said(event) for event in sessions_pb2.PlanEvents.FromString(message).events]
        self.news += told
        return told

    async def _read(self, session: str) -> None:
        try:
            async for message in self.world.sessions.Plans(sessions_pb2.PlansRequest(session=session), Call()):
                self.hear(message)
        except RefusedError as err:
            if self.session == session:
                self.news.append(str(err))

    def _said(self, event: sessions_pb2.PlanEvent) -> str:
        match event.WhichOneof("event"):
            case "plan":
                samples = " ".join(f"{m.replica}/{m.index}={m.num_samples}" for m in event.plan.microbatches)
                formation = f" for the pipelines of generation {event.plan.formation}" if event.plan.formation else ""
                return f"step {event.plan.step}{formation}, samples of its microbatches {samples}"
            case "location":
                name = part_name(event.location.ticket)
                self.places.setdefault(name, []).append(event.location)
                left_out = "".join(f" without sample {sample}" for sample in event.location.left_out)
                return f"part {name} at {event.location.endpoint}{left_out}"
            case _:
                return f"no step follows: {event.ended.message or 'all are committed'}"


def commit_answer(step: int, reply: sessions_pb2.CommitReply) -> str:
    """Return the answer to a commit in words."""
    missing = f", rank {', '.join(map(str, reply.missing))} missing" if reply.missing else ""
    return f"step {step} {'is in the ledger' if reply.committed else 'noted'}{missing}"
