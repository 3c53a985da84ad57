"""Known faults, put into the code on purpose: the simulation has to find each of them.

The first four are those of version 0.1 after which leadership and the store's writes were made what they are now, and the last
one is one that the simulation found.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from headrace.errors import ConflictError, UnavailableError
from headrace.reorder_service import service as service_module
from headrace.reorder_service.fleet.fleet import LOOK_S, Fleet
from headrace.reorder_service.jobs.cursor import Cursor
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.resuming import ResumeState, Resuming
from headrace.reorder_service.jobs.sessions import EventBatch, Session
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.store import redis_database, state
from headrace.trainer.loading.session import SessionClient
from tests.simulation.replacing import replaced

Replacement = tuple[Any, str, Any]


def _without(text: str, line: str) -> str:
    assert line in text, f"the script has no line {line!r} any more"
    return text.replace(line, "")


def two_leaders_write() -> list[Replacement]:
    """A fence removed: neither a write nor a renewal asks whether another process has led since."""
    write = _without(redis_database._WRITE, "if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return -1 end")
    renew = _without(redis_database._RENEW, "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end")
    return [(redis_database, "_WRITE", write), (redis_database, "_RENEW", renew)]


def a_late_copy_undoes() -> list[Replacement]:
    """A change of a job is carried out again when a copy of its command arrives late."""

    async def change(
        database: redis_database.Database, _job: str, prepare: Callable[[], Awaitable[Sequence[redis_database.Command]]]
    ) -> None:
        if commands := await prepare():
            await database.write(*commands)

    return [(state, "change_job", change)]


def an_older_store_stops_the_job() -> list[Replacement]:
    """A leader whose store has lost commits goes on from what it remembers, which the store refuses."""

    async def commit_ready(self: JobRun) -> None:
        async with self.cursor.moving:
            while self.cursor.may_advance(self.sessions.num_ranks):
                self._clear_away(await self.cursor.advance(self.manifest.source_of))
                await self.cursor.notify()

    return [(JobRun, "_commit_ready", commit_ready), (redis_database.Database, "_note_write", lambda *_: None)]


def a_checkpoint_ahead_is_refused() -> list[Replacement]:
    """A checkpoint that is ahead of the store can never be used."""
    begin = Resuming.begin

    def refuse(self: Resuming, rank: int, num_ranks: int, states: Sequence[ResumeState]) -> tuple[int, str]:
        if any(state.step > self._cursor.committed for state in states):
            raise ConflictError("the trainer's state is ahead of the job")
        return begin(self, rank, num_ranks, states)

    return [(Resuming, "begin", refuse)]


def a_lease_kept_by_two() -> list[Replacement]:
    """Work that a late preprocessor has goes to another one, and stays with the first."""

    def mark_overdue(self: Fleet, lease: str, *, counts: bool) -> None:
        member = self._holders[lease]
        work = member.overdue[lease] = member.leases[lease]
        work.late[lease] = counts

    return [(Fleet, "_mark_overdue", mark_overdue)]


def a_commit_before_its_samples() -> list[Replacement]:
    """The first rank's commit of a step counts as that of all."""
    may_advance = Cursor.may_advance
    return [(Cursor, "may_advance", lambda self, _num_ranks: may_advance(self, 1))]


def a_thundering_herd() -> list[Replacement]:
    """Ranks that have lost their leader ask for a new one every fifth second of the wall clock, all at once."""
    init = SessionClient.__init__

    def with_one_beat(self: SessionClient, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        ask = self._stub.Open

        def at_the_beat(request: Any, **how: Any) -> Any:
            if request.continues:
                time.sleep(5.0 - time.time() % 5.0)
            return ask(request, **how)

        self._stub.Open = at_the_beat

    return [(SessionClient, "__init__", with_one_beat)]


def a_lost_wake_up() -> list[Replacement]:
    """A session forgets that it was woken while it was sending."""

    async def event_batches(self: Session) -> AsyncIterator[list[EventBatch]]:
        while self.over is None and not self.heard_all:
            if batches := self.take_batches():
                yield batches
            if not self.heard_all:
                self._wake.clear()
                await self._wake.wait()
        if self.over is not None:
            raise self.over

    return [(Session, "event_batches", event_batches)]


def a_watch_that_died() -> list[Replacement]:
    """An error while looking after the preprocessors ends the watch, and one comes when a preprocessor has died."""
    look = Fleet.look

    def fail(self: Fleet) -> None:
        assert not self._died
        look(self)

    async def watch(self: service_module.ReorderService) -> None:
        while True:
            await self._clock.sleep(LOOK_S)
            try:
                self.fleet.look()
            except AssertionError:
                return

    return [(Fleet, "look", fail), (service_module.ReorderService, "_watch_preprocessors", watch)]


def a_leader_beyond_its_lease() -> list[Replacement]:
    """A leader serves until it hears that it was replaced, although its lease may be over."""

    def service(self: Leadership) -> service_module.ReorderService:
        if self.active_service is None:
            raise UnavailableError("this reorder service does not lead")
        return self.active_service

    return [(Leadership, "service", property(service))]


def a_relay_of_the_former_leader() -> list[Replacement]:
    """The stream of a host's relay stays with a service that leads no more, as its process stands by."""
    return [(service_module.ReorderService, "has_stopped", property(lambda _self: False, lambda _self, _value: None))]


SEEDED: tuple[Callable[[], list[Replacement]], ...] = (
    two_leaders_write,
    a_late_copy_undoes,
    an_older_store_stops_the_job,
    a_checkpoint_ahead_is_refused,
    a_lease_kept_by_two,
    a_commit_before_its_samples,
    a_thundering_herd,
    a_lost_wake_up,
    a_watch_that_died,
    a_leader_beyond_its_lease,
    a_relay_of_the_former_leader,
)

NAMES = tuple(seeded.__name__ for seeded in SEEDED)


def putting_in(seeded: Callable[[], list[Replacement]]) -> Callable[[], AbstractContextManager[None]]:
    """A function that puts a seeded fault into the code for a block."""

    @contextmanager
    def block() -> Iterator[None]:
        with ExitStack() as stack:
            for target, name, value in seeded():
                stack.enter_context(replaced(target, name, value))
            yield

    return block
