"""What must hold at every moment of a run and at its end. A checker notes a violation; it changes nothing.

On every request that the store carries out: one leader writes; the job moves by one step or goes back, and never because of a
copy of a command; a step in the ledger is the one that an undisturbed run has, and every rank has had its samples. Again and
again: one leader serves; every lease has one holder; who is silent is a member no more; queues are bounded. At the end: the
ledger, the quarantine and what the ranks have learnt are those of an undisturbed run, and nothing was answered by an internal
error.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.ledger_pages import LedgerPage
from tests.simulation.simulated_redis import SimulatedRedis, SortedSet
from tests.simulation.store_link import Request
from tests.simulation.trainers import Delivered, Trainers
from tests.simulation.virtual_loop import Process
from tests.simulation.world import World

MOST_EVENTS_A_STEP = 64  # of a session's queue, for each step of the window: a plan, and its parts as often as they move

HERD_S, HERD_RANKS = 0.01, 12  # an instant, and the fewest ranks of which it means something that most come in it
MOST_SILENT_S = 1.0  # beyond `Member.silence_s`, until a member that is not heard has to be gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an undisturbed run of the same job has."""

    ledger: tuple[str, ...]
    """(samples, substitutes, loss) of each step, as JSON."""
    quarantine: frozenset[str]
    ids: tuple[frozenset[int], ...]
    """The samples that the ranks have had in each step."""


def ledger_of(redis: SimulatedRedis, job: str) -> list[str]:
    """(samples, substitutes, loss) of each committed step, as JSON: those in pages, and those behind them."""
    pages: Any = redis.data.get(f"headrace:{{{job}}}:pages", SortedSet())
    records = [record for text in pages.between("-inf", "+inf") for record in LedgerPage.read(text).records]
    paged = [json.dumps([record.samples, record.substitutes, record.loss]) for record in records]
    return [*paged, *map(_entry, redis.data.get(f"headrace:{{{job}}}:ledger", ()))]


def _entry(text: str) -> str:
    entry = json.loads(text)
    return json.dumps([entry["samples"], entry["substitutes"], entry["loss"]])


class Checkers:
    """The checkers of one run of one job."""

    def __init__(self, world: World, trainers: Trainers, job: str, expected: Expected, is_clock_true: Callable[[], bool]) -> None:
        """`is_clock_true`: whether leases last as long as they should, which they do not where the store's clock jumped."""
        self.violations: list[str] = []
        self.digest = 0
        """Digest of all changes of the job, and of when they happened: the same for every run of a seed."""
        self._world, self._trainers = world, trainers
        self._expected = expected
        self._is_clock_true = is_clock_true
        self._key, self._ledger = f"headrace:{{{job}}}:job", f"headrace:{{{job}}}:ledger"
        self._owners: dict[str, Process] = {}
        """Token of a term -> the process that the store gave it to."""
        self._num_changes = 0
        self.cursor = 0
        """The job's committed steps."""
        self.num_commits = 0
        """Steps that were committed, those among them that a reset or an older store took back, and that were committed again."""
        self._forgotten: list[tuple[int, Delivered]] = []
        """(changes of the store, what ranks had had) of each time that the job went back."""
        self._first_leader: ReorderService | None = None
        self._silent: dict[ReorderService, set[str]] = {}
        """The service that led when it was last looked at -> members that it had not heard for long."""
        world.store.on_request = self._look_at_store

    def _violated(self, what: str) -> None:
        self.violations.append(f"{self._world.loop.time():.3f} s: {what}")

    # -- the store ----------------------------------------------------------------------------------------------------

    def put_back(self) -> None:
        """Begin again from what the store has now: it has become older, and may have lost that the job has gone back."""
        self._num_changes = self._world.store.redis.num_changes
        while self._forgotten and self._forgotten[-1][0] > self._num_changes:
            self._trainers.recall_delivered(self._forgotten.pop()[1])
        self.cursor = self._stored_cursor()

    def is_job_done(self) -> bool:
        """Whether the store has the job as done."""
        job: Any = self._world.store.redis.data.get(self._key, {})
        return job.get("state") == "DONE"

    def _stored_cursor(self) -> int:
        job: Any = self._world.store.redis.data.get(self._key, {})
        return int(job.get("cursor", 0))

    def _look_at_store(self, request: Request, redis: SimulatedRedis) -> None:
        if redis.num_changes == self._num_changes:
            return
        changed = redis.keys_changed_since(self._num_changes)
        self._num_changes = redis.num_changes
        if not changed:
            return
        token = str(redis.data.get("headrace:term", ""))
        if "headrace:term" in changed:
            self._owners[token] = request.client
        if (owner := self._owners.get(token)) is not request.client and changed != {"headrace:format"}:
            self._violated(f"{request.client.name} writes {sorted(changed)} while {owner.name if owner else 'nobody'} leads")
        cursor = self._stored_cursor()
        if not changed & {self._key, self._ledger}:
            return
        self.digest = zlib.crc32(f"{self._world.loop.time():.6f} {request.client.name} {cursor}".encode(), self.digest)
        if request.done > 1:
            self._violated(f"a copy of a command of {request.client.name} changed the job again, to step {cursor}")
        ledger, job = redis.data.get(self._ledger, []), redis.data.get(self._key, {})
        paged = int(job.get("paged", 0))
        if paged + len(ledger) != cursor:
            self._violated(f"the ledger has {paged} steps in pages and {len(ledger)} behind them, and the job {cursor}")
        if cursor > self.cursor:
            self.num_commits += cursor - self.cursor
            for step in range(self.cursor, cursor):
                self._look_at_commit(step, _entry(ledger[step - paged]))
            if cursor > self.cursor + 1:
                self._violated(f"the job went from step {self.cursor} to step {cursor} at once")
        if cursor < self.cursor:
            self._forgotten.append((self._num_changes, self._trainers.forget_delivered(cursor)))
        self.cursor = cursor

    def _look_at_commit(self, step: int, entry: str) -> None:
        if entry != self._expected.ledger[step]:
            self._violated(f"step {step} is not that of an undisturbed run: {entry}")
        delivered = [self._trainers.delivered.get((rank, step)) for rank in range(self._trainers.num_ranks)]
        if None in delivered:
            self._violated(f"step {step} is committed before rank {delivered.index(None)} has its samples")
        elif sorted(i for ids in delivered if ids for i in ids) != sorted(self._expected.ids[step]):
            self._violated(f"the ranks had other samples than those of step {step}: {delivered}")

    # -- the services -------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Look at all reorder services; call it again and again."""
        leading = []
        for actor in self._world.services:
            service = self._world.serving(actor)
            if service is not None:
                leading.append(actor.name)
                self._first_leader = self._first_leader or service
                self._look_at_fleet(service)
                self._look_at_sessions(service)
                if service is not self._first_leader:  # to the first one they come at once, when the job begins
                    self._look_for_herd(service)
        if len(leading) > 1 and self._is_clock_true():
            self._violated(f"{' and '.join(leading)} lead at once")

    def _look_at_fleet(self, service: ReorderService) -> None:
        fleet, holders = service.fleet, dict[int, str]()
        silent = {
            name for name, member in fleet.members.items() if fleet._now_s() - member.heard_s > member.silence_s + MOST_SILENT_S
        }
        for name in silent & self._silent.get(service, set()):
            self._violated(f"{name} has been silent for so long, and is still a member")
        self._silent = {service: silent}
        for member in fleet.members.values():
            for lease, work in [*member.leases.items(), *member.kept.items()]:
                if (other := holders.setdefault(id(work), member.name)) != member.name:
                    self._violated(f"{other} and {member.name} hold the same work, under {work.lease} and {lease}")
                if work.lease != lease or fleet._holders.get(lease) is not member:
                    self._violated(f"lease {lease} of {member.name} is not the one of its work, {work.lease}")
            most = 4 * member.slots + self._trainers.num_ranks * MOST_EVENTS_A_STEP
            if len(member.leases) + len(member.overdue) > most:
                self._violated(f"{member.name} has {len(member.leases) + len(member.overdue)} orders, more than {most}")

    def _look_at_sessions(self, service: ReorderService) -> None:
        for run in service.jobs.values():
            most = run.spec.window * MOST_EVENTS_A_STEP
            for session in run.sessions.by_rank.values():
                if (num_events := sum(len(batch.events) for batch in session._batches)) > most:
                    self._violated(f"{num_events} events wait for rank {session.rank}, more than {most}")

    def _look_for_herd(self, service: ReorderService) -> None:
        """Look whether most ranks have come to a new leader in one instant, if there are enough to tell."""
        most = self._trainers.num_ranks // 2
        for run in service.jobs.values() if self._trainers.num_ranks >= HERD_RANKS else ():
            opened_s = sorted(session.opened_s for session in run.sessions.by_rank.values())
            if any(last - first < HERD_S for first, last in zip(opened_s, opened_s[most:], strict=False)):
                self._violated(f"more than {most} ranks opened their sessions within {HERD_S} s")

    # -- the end ------------------------------------------------------------------------------------------------------

    def look_at_end(self, job: str) -> None:
        """Look at what is left once the job has ended."""
        redis = self._world.store.redis
        if ledger_of(redis, job) != list(self._expected.ledger):
            self._violated("the ledger is not that of an undisturbed run")
        quarantine: Any = redis.data.get(f"headrace:{{{job}}}:quarantine", {})
        if quarantine.keys() != self._expected.quarantine:
            self._violated(f"the quarantine is another one: {sorted(quarantine.keys() ^ self._expected.quarantine)}")
        if self._trainers.together:
            for step, ids in enumerate(self._expected.ids):
                learnt = [i for model in self._trainers.models.values() for i in model.get(step, ())]
                if sorted(learnt) != sorted(ids):
                    self._violated(f"the models have not learnt step {step} once: {len(learnt)} samples of {len(ids)}")

    def look_at_errors(self) -> None:
        """Look for exceptions that nobody has caught, and for processes that ended without being told to."""
        for message, err in self._world.loop.errors:
            self._violated(f"an exception that nobody caught: {message}: {err!r}")
        for server in self._world.servers:
            for error in server.errors:
                self._violated(f"a call was answered by an internal error: {error}")
        for actor in (*self._world.services, *self._world.preprocessors):
            for why in actor.ended:
                if not why.startswith("UserError: no Redis server answers"):
                    self._violated(f"{actor.name} ended by itself: {why}")
