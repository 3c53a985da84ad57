"""Sessions of trainer ranks: what each rank is to be told, in order and never more than a window's worth."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headrace.errors import ConflictError, UserError
from reorder_service.step import Part, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """No step follows. `message` is empty where all are committed, else says why."""

    message: str


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One rank's view of a job. Rank r of n serves the replicas r, r + n, r + 2n, ..."""

    id: str
    job: str
    rank: int
    num_ranks: int
    streaming: bool = False
    superseded: bool = False
    _steps: deque[Step] = field(default_factory=deque)
    _places: dict[str, Part] = field(default_factory=dict)  # a part that moves twice is told once
    _ended: Ended | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def serves(self, part: Part) -> bool:
        """Whether the part is of one of this rank's replicas."""
        return part.replica % self.num_ranks == self.rank

    def tell_step(self, step: Step) -> None:
        """A step is planned. Its parts' places follow by `tell_place`."""
        self._steps.append(step)
        self._wake.set()

    def tell_place(self, part: Part) -> None:
        """A preprocessor has taken the part (again)."""
        if self.serves(part):
            self._places[part.ticket] = part
            self._wake.set()

    def tell_end(self, message: str) -> None:
        """No step follows."""
        self._ended = Ended(message=message)
        self._wake.set()

    def supersede(self) -> None:
        """Another session took this one's place."""
        self.superseded = True
        self._wake.set()

    async def events(self) -> AsyncIterator[Step | Part | Ended]:
        """Planned steps, then places of their parts, as they come; ends after Ended or when superseded."""
        while not self.superseded:
            self._wake.clear()
            while self._steps or self._places:
                if self._steps:
                    yield self._steps.popleft()
                else:
                    yield self._places.pop(next(iter(self._places)))
            if self._ended is not None:
                yield self._ended
                return
            await self._wake.wait()


class Sessions:
    """The ranks of one job."""

    def __init__(self, job: str, replicas: int) -> None:
        self._job = job
        self._replicas = replicas
        self.by_rank: dict[int, Session] = {}
        self.num_ranks = 1
        """Ranks whose commits make a step: what the latest session said."""

    def open(self, rank: int, num_ranks: int) -> Session:
        """A new session for `rank`. Raises UserError or ConflictError where it does not fit."""
        if not 0 <= rank < num_ranks:
            raise UserError(f"rank {rank} is not in 0 .. {num_ranks - 1}")
        if num_ranks > self._replicas:
            raise UserError(
                f"job {self._job!r} has {self._replicas} replica(s) for {num_ranks} ranks: "
                f"use at most {self._replicas}, or submit it with topology.replicas={num_ranks}"
            )
        others = [s for s in self.by_rank.values() if s.num_ranks != num_ranks]
        streaming = [s.rank for s in others if s.streaming]
        if streaming:
            raise ConflictError(
                f"rank {rank} asks for {num_ranks} ranks, but rank {streaming[0]} of {others[0].num_ranks} is connected: "
                "stop it first"
            )
        for session in [*others, *filter(None, [self.by_rank.get(rank)])]:
            session.supersede()
            self.by_rank.pop(session.rank, None)
        session = Session(id=f"{self._job}/{rank}/{uuid.uuid4().hex[:12]}", job=self._job, rank=rank, num_ranks=num_ranks)
        self.by_rank[rank] = session
        self.num_ranks = num_ranks
        return session

    def supersede_all(self) -> None:
        """Every rank must open again."""
        for session in self.by_rank.values():
            session.supersede()
        self.by_rank.clear()
