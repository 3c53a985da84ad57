"""Sessions of trainer ranks: what each rank is to be told, in order and never more than a window's worth."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.errors import ConflictError, HeadraceError, NotFoundError, SupersededError, UserError
from headrace.limits import MAX_RANKS, MAX_REPLICAS
from headrace.plan import LLM
from headrace.reorder_service.jobs.planned_step import Place, PlannedPart, PlannedStep

OPENING_S = 5.0  # for a rank to ask for plans after it opened a session: longer than a call may be retried
LOADING_S = 30.0  # for a rank to load its checkpoint's state after it opened a session without one
VACANT_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The event that no step follows. `message` is empty where all steps are committed, else it says why."""

    message: str


@dataclass(slots=True, eq=False)
class EventBatch:
    """A batch of events for the sessions of one lane: steps, then locations of parts, or the end."""

    events: Sequence[PlannedStep | PlannedPart | Ended]
    message: bytes = b""
    """The serialized events; empty until they are first sent to a session."""
    compressed: bytes = b""
    """`message`, compressed by zlib; empty until it is first sent so."""


class Lane:
    """The sessions that take the same replicas of a unit. They are told the same events, serialized once for all of them."""

    def __init__(self, on_empty: Callable[[], None] = lambda: None) -> None:
        """`on_empty` is called when the last session has left."""
        self._on_empty = on_empty
        self._sessions: dict[Session, None] = {}
        self._steps: list[PlannedStep] = []
        self._locations: dict[str, PlannedPart] = {}  # a part that moves twice is told once

    def join(self, session: Session) -> None:
        """Add a session, which is told all events of the lane from now on."""
        self.flush()
        self._sessions[session] = None

    def leave(self, session: Session) -> None:
        """Remove a session, if it is in the lane."""
        if session in self._sessions:
            del self._sessions[session]
            if not self._sessions:
                self._on_empty()

    def tell_step(self, step: PlannedStep) -> None:
        """Tell the sessions that a step is planned. The locations of its parts follow by `tell_location`."""
        if self._wake_sessions():
            self._steps.append(step)

    def tell_location(self, part: PlannedPart) -> None:
        """Tell the sessions where a part is, since a preprocessor has taken it (again)."""
        if self._wake_sessions():
            self._locations[part.ticket] = part

    def _wake_sessions(self) -> bool:
        """Return whether the lane has sessions. The first pending event wakes all of them; they then call `flush`."""
        if not self._steps and not self._locations:
            for session in self._sessions:
                session.wake()
        return bool(self._sessions)

    def flush(self) -> None:
        """Hand all pending events to every session."""
        if self._steps or self._locations:
            batch = EventBatch([*self._steps, *self._locations.values()])
            self._steps.clear()
            self._locations.clear()
            for session in self._sessions:
                session.hear(batch)


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One rank's session with a job. Rank r of n takes the replicas r, r + n, r + 2n, ..., unless it has named its replicas.

    Each of several nodes that commit together serves all replicas, as the only rank.
    """

    id: str
    job: str
    rank: int
    num_ranks: int
    unit: str = LLM
    """The unit of whose replicas the rank takes the samples."""
    replicas: frozenset[int] | None = None
    """The replicas that the rank has named, as a process of a pipeline does, which gets whole plans, too; None: it named none."""
    together: bool = False
    """Whether the rank is one of several nodes that commit together, any number of which may come and go."""
    streaming: bool = False
    opened_s: float = field(default_factory=time.monotonic)
    has_streamed: bool = False
    over: HeadraceError | None = None
    """Error that the session has ended with, raised by every further call of the rank; None while it lasts."""
    heard_all: bool = False
    """Whether `take_batches` has returned the event that no step follows."""
    opened_at_step: int | None = None
    """Step from which a new process has begun with the session; None where the process has opened it again."""
    gave_state: bool = False
    """Whether that process named the state from which it goes on; one that has not may be about to load it."""
    next_step: int = 0
    data_wait_s: float = 0.0
    step_s: float = 0.0
    """`data_wait_s` and `step_s`: seconds that the rank reported of the step before `next_step`."""
    lane: Lane = field(default_factory=Lane)
    _batches: list[EventBatch] = field(default_factory=list)
    _ended: Ended | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def begin_streaming(self, wake: asyncio.Event | None = None) -> None:
        """Note that the rank reads plans from now on. `wake`: set whenever there are some, or the session has ended."""
        self.streaming, self.has_streamed, self.heard_all = True, True, False
        if wake is not None:
            self._wake = wake
            wake.set()

    def is_live(self) -> bool:
        """Return whether a process is connected, or opened the session so recently that it may be about to."""
        return self.streaming or not (self.has_streamed or time.monotonic() > self.opened_s + OPENING_S)

    def replicas_of(self, count: int) -> Sequence[int]:
        """Return the replicas that this rank takes, of as many as its unit has, in rising order."""
        return range(self.rank, count, self.num_ranks) if self.replicas is None else sorted(self.replicas)

    def parts_of(self, step: PlannedStep) -> Collection[PlannedPart]:
        """Return the parts of a planned step of which this rank takes any sample."""
        places = ((self.unit, replica) for replica in self.replicas_of(len(step.sizes)))
        return {part.ticket: part for place in places for part in step.parts_at.get(place, ())}.values()

    def tell_planned(self, steps: Sequence[PlannedStep]) -> None:
        """Tell the session which steps were planned, and where their parts are, before it was opened."""
        if steps:
            self.hear(EventBatch([*steps, *(part for step in steps for part in self.parts_of(step) if part.lease)]))
            self.wake()

    def hear(self, batch: EventBatch) -> None:
        """Queue events for `take_batches`."""
        self._batches.append(batch)

    def wake(self) -> None:
        """Wake whoever calls `take_batches`, since there are events for the session."""
        self._wake.set()

    def tell_end(self, message: str) -> None:
        """Tell the session that no step follows; `message` is empty where all steps are committed, else says why."""
        self._ended = Ended(message=message)
        self._wake.set()

    @property
    def told_all(self) -> bool:
        """Whether the session was told that no step follows."""
        return self._ended is not None

    def end(self, error: HeadraceError) -> None:
        """End the session: its stream of plans and every further call of the rank raise the error."""
        self.over = error
        self.lane.leave(self)
        self._wake.set()

    def take_batches(self) -> list[EventBatch]:
        """Return all pending events in order, the job's end as the last of them; none where there is no news."""
        self.lane.flush()
        batches, self._batches = self._batches, []
        if self._ended is not None and not self.heard_all:
            batches.append(EventBatch([self._ended]))
            self.heard_all = True
        return batches

    async def event_batches(self) -> AsyncIterator[list[EventBatch]]:
        """Yield all pending events whenever there are some, up to the job's end. Raises `over` where the session ends before."""
        while self.over is None and not self.heard_all:
            self._wake.clear()
            if batches := self.take_batches():
                yield batches
            else:
                await self._wake.wait()
        if self.over is not None:
            raise self.over


class Sessions:
    """The sessions of one job, by rank, and the lanes that they share."""

    def __init__(self, job: str) -> None:
        self._job = job
        self.by_rank: dict[int, Session] = {}
        self.num_ranks = 1
        """Number of ranks that must commit a step: what the latest session said."""
        self._lanes: dict[Hashable, Lane] = {}
        self._lanes_at: dict[Place, list[Lane]] = {}  # replica of a unit -> lanes that take it
        self._begun: dict[int, dict[int, Session]] = {}  # step -> rank -> its session, if its process began with the step

    @property
    def share_parts(self) -> bool:
        """Whether several ranks may fetch the same part and must get the same samples, as the processes of one pipeline."""
        return any(session.replicas is not None for session in self.by_rank.values())

    @property
    def has_live(self) -> bool:
        """Whether a process is connected, or has opened a session just now."""
        return any(session.is_live() for session in self.by_rank.values())

    @property
    def has_nodes(self) -> bool:
        """Whether nodes that commit together are connected."""
        return any(session.together and session.streaming for session in self.by_rank.values())

    def tell_step(self, step: PlannedStep) -> None:
        """Tell all sessions that a step is planned. The locations of its parts follow by `tell_location`."""
        for lane in self._lanes.values():
            lane.tell_step(step)

    def tell_location(self, part: PlannedPart) -> None:
        """Tell the sessions that need samples of the part where it is, since a preprocessor has taken it (again)."""
        for lane in {lane: None for place in part.places for lane in self._lanes_at.get(place, ())}:
            lane.tell_location(part)

    def open(
        self, rank: int, num_ranks: int, replicas: int, named: Collection[int] = (), *, unit: str = LLM, together: bool = False
    ) -> Session:
        """Open a session for `rank`, in place of any former one, and return it.

        `replicas`: number of replicas of the job. `named`: those of `unit` that the rank takes; empty: every `num_ranks`-th.
        `together`: the rank is a node of several, one of which commits for all; each takes all replicas, and `rank` only tells
        them apart.

        Raises UserError where the numbers do not fit each other or the job, and ConflictError where ranks of another number or
        kind are connected.
        """
        if not 0 <= rank < (rank + 1 if together else num_ranks):
            raise UserError(f"rank {rank} is not in 0 .. {num_ranks - 1}")
        if together:
            num_ranks, named = 1, range(replicas)
        if num_ranks > MAX_RANKS or len(named) > MAX_REPLICAS:
            raise UserError(
                f"rank {rank} of {num_ranks} takes {len(named)} replicas: at most {MAX_RANKS} ranks are served, and "
                f"{MAX_REPLICAS} replicas for each: give fewer"
            )
        if any(replica < 0 for replica in named):
            raise UserError(f"rank {rank} takes replica {min(named)}: they count from 0")
        if named and max(named) >= replicas:
            raise UserError(
                f"rank {rank} takes replica {max(named)}, but job {self._job!r} has {replicas}: give the llm as many, "
                f"or `headrace job topology {self._job} --replicas {max(named) + 1}`"
            )
        if not named and num_ranks > replicas:
            raise UserError(
                f"job {self._job!r} has {replicas} replica(s) for {num_ranks} ranks: use at most {replicas} (tensor-, context- "
                "and pipeline-parallel ranks share one: give mesh= or parallel= to connect), "
                f"or `headrace job topology {self._job} --replicas {num_ranks}`"
            )
        one = next(iter(self.by_rank.values()), None)  # all sessions are of its kind
        is_other = one is not None and (one.num_ranks, bool(one.replicas), one.together) != (num_ranks, bool(named), together)
        others = list(self.by_rank.values()) if is_other else []
        if (one := next((session for session in others if session.streaming), None)) is not None:
            raise ConflictError(
                f"rank {rank} of {_company(num_ranks, together=together)} cannot open while rank {one.rank} of "
                f"{_company(one.num_ranks, together=one.together)} is connected: stop it first"
            )
        for session in [*others, *filter(None, [self.by_rank.get(rank)])]:
            session.end(SupersededError(f"rank {session.rank} of job {self._job!r} was opened again"))
            self.by_rank.pop(session.rank, None)
        session = Session(
            id=f"{self._job}/{rank}/{uuid.uuid4().hex[:12]}",
            job=self._job,
            rank=rank,
            num_ranks=num_ranks,
            unit=unit,
            replicas=frozenset(named) if named else None,
            together=together,
        )
        self.by_rank[rank] = session
        self.num_ranks = num_ranks
        self._join_lane(session, replicas)
        return session

    async def vacant(self, rank: int, continues: str, patience_s: float) -> None:
        """Wait until no other process is connected as `rank`. `continues`: id of the caller's own former session, if any.

        Raises ConflictError where one still is after `patience_s`. A process that was lost without a word counts as connected for
        some seconds.
        """
        deadline_s = time.monotonic() + patience_s
        while (session := self.by_rank.get(rank)) is not None and session.id != continues and session.is_live():
            if time.monotonic() > deadline_s:
                raise ConflictError(
                    f"another process is connected as rank {rank} of {session.num_ranks} of job {self._job!r}: stop it, or "
                    "give each data-parallel rank its own, `headrace train` by torchrun, connect by rank= and num_ranks= "
                    "(tensor-, context- and pipeline-parallel ranks share one: give mesh= or parallel= to connect)"
                )
            await asyncio.sleep(VACANT_POLL_S)

    def _join_lane(self, session: Session, replicas: int) -> None:
        key = session.unit, session.replicas or session.rank
        if key not in self._lanes:
            places = [(session.unit, replica) for replica in session.replicas_of(replicas)]
            lane = self._lanes[key] = Lane(on_empty=lambda: self._drop_lane(key, places))
            for place in places:
                self._lanes_at.setdefault(place, []).append(lane)
        session.lane = self._lanes[key]
        session.lane.join(session)

    def _drop_lane(self, key: Hashable, places: Iterable[Place]) -> None:
        """Remove a lane that has no sessions left."""
        lane = self._lanes.pop(key)
        for place in places:
            self._lanes_at[place].remove(lane)
            if not self._lanes_at[place]:
                del self._lanes_at[place]

    def note_begun(self, session: Session, step: int, *, gave_state: bool = True) -> None:
        """Note that a new process of a rank begins with a step; `gave_state`: with a state that it has loaded."""
        session.opened_at_step, session.gave_state = step, gave_state
        self._begun.setdefault(step, {})[session.rank] = session

    def begun_elsewhere(self, rank: int, step: int) -> tuple[int, int] | None:
        """Return another connected rank whose process has begun with another step and has not gone on since, and that step.

        None where there is no such rank. Sessions that count no more are forgotten, so that all ranks of a job may ask in turn.
        """
        for at_step, sessions in list(self._begun.items()):
            if at_step == step:
                continue
            for session in list(sessions.values()):
                if self.by_rank.get(session.rank) is not session or session.next_step > at_step:
                    del sessions[session.rank]
                elif session.rank != rank and session.is_live():
                    return session.rank, at_step
            if not sessions:
                del self._begun[at_step]
        return None

    def may_yet_load(self, rank: int) -> bool:
        """Return whether a connected rank's process has begun without a state so recently that it may be about to load one."""
        session = self.by_rank.get(rank)
        if session is None or session.opened_at_step is None or session.gave_state or session.next_step > session.opened_at_step:
            return False
        return session.is_live() and time.monotonic() < session.opened_s + LOADING_S

    def opened_at_step(self) -> dict[int, int | None]:
        """Return the step from which each connected rank's process has begun; None where it has gone on since."""
        return {
            rank: None if session.opened_at_step is None or session.next_step > session.opened_at_step else session.opened_at_step
            for rank, session in self.by_rank.items()
            if session.is_live()
        }

    def leave(self, session: Session) -> None:
        """Note that a rank reads plans no more.

        The session of a node that commits together with others ends then, unless it was told the end: such nodes come and go, and
        events for one that is gone would pile up for ever.
        """
        session.streaming = False
        if session.together and not session.told_all and self.by_rank.get(session.rank) is session:
            del self.by_rank[session.rank]
            session.end(NotFoundError(f"session {session.id!r} ended with its stream; open one"))

    def end_all(self, error: HeadraceError) -> None:
        """End all sessions with `error`: every rank must open a new one, if that error lets it."""
        for session in self.by_rank.values():
            session.end(error)
        self.by_rank.clear()
        self._begun.clear()


def _company(num_ranks: int, *, together: bool) -> str:
    return "nodes that commit together" if together else str(num_ranks)
