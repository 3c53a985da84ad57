"""The preprocessors and the work that they hold.

Bookkeeping in one event loop: who is there, which work waits, who has which lease. A member that leaves, however it leaves,
gives its work back; what a member is late with, another one is given as well, and whoever is first counts. Nothing here
knows what the work is; jobs make it and servers carry it.

What happens costs some microseconds, whether four members are there or hundreds, and however much waits.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import ConflictError
from headrace.observability import metrics
from headrace.observability.logs import pairs
from headrace.reorder_service.fleet.fair_queue import FairQueue
from headrace.reorder_service.fleet.lateness import assess, late_leases
from headrace.reorder_service.fleet.member import Member, Order, Work, never
from headrace.reorder_service.fleet.roster import Reading, Roster
from headrace.reorder_service.fleet.trials import GONE_S, Trials

log = logging.getLogger(__name__)

LOOK_S = 0.1
AHEAD = 8  # works that the only member with a free slot may choose from: those behind them wait for a trainer less
SILENCE_S = 3.0  # a member that says nothing for so long is gone: three heartbeats, by a clock that leaves our own pauses out
_NEAR, _NEW = metrics.SAMPLES_PLACED.labels("near"), metrics.SAMPLES_PLACED.labels("new")


class Fleet:
    """Members and work. All methods are to be called from one event loop."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.members: dict[str, Member] = {}
        self._now_s = now_s
        self._roster = Roster()
        self._by_row: dict[int, Member] = {}
        self._holders: dict[str, Member] = {}
        """By lease, whether it is at work, kept or overdue."""
        self._waiting: dict[bool, FairQueue[Work]] = {False: FairQueue(), True: FairQueue()}  # by `keep`
        self._by_urgency: dict[Callable[[], bool], set[Work]] = {}  # work that waits, by what may make it urgent
        self._trials = Trials(self.submit, self._withdraw, self._back, now_s)
        self._died: dict[str, tuple[float, list[Work]]] = {}
        """By name, who left without a word of late: when, and with what."""
        self._leases = itertools.count(1)
        self._life = uuid.uuid4().hex[:8]  # a lease of a former life of this service must not be taken for one of ours

    def join(self, member: Member) -> None:
        """Add a member. One of the same process (its stream broke without our noticing) leaves first.

        Raises ConflictError where another process has the name.
        """
        former = self.members.get(member.name)
        if former is not None:
            if not hmac.compare_digest(former.instance.encode(), member.instance.encode()):
                raise ConflictError(
                    f"the name {member.name!r} is that of a preprocessor that is here: take another, or wait until it has left"
                )
            member.shards = former.shards
            self.leave(former, "reconnected")
        self.members[member.name] = member
        self.hear(member)
        member.row = self._roster.add(member.name, member.slots)
        self._by_row[member.row] = member
        self._roster.note(member.row, member.shards)
        for work in self._died.pop(member.name, (0.0, []))[1]:
            work.deaths = max(0, work.deaths - 1)  # only its stream has died; somebody may have done the work meanwhile
        self._trials.is_back(member.name)
        self._count_all_free(member)
        log.info("joined %s", pairs(preprocessor=member.name, endpoint=member.endpoint, slots=member.slots))
        self._dispatch()

    def leave(self, member: Member, why: str, *, died: bool = False) -> None:
        """Remove a member and place its work elsewhere. `died`: as far as can be seen, while it had its work."""
        if self.members.get(member.name) is not member:
            return
        del self.members[member.name], self._by_row[member.row]
        self._roster.remove(member.row, member.shards)
        for lease, work in member.overdue.items():
            work.late.pop(lease, None)
        orphans, at_work = [*member.leases.values(), *member.kept.values()], [*member.leases.values(), *member.overdue.values()]
        if died:
            self._died[member.name] = self._now_s(), at_work
            for work in at_work:
                work.deaths += 1
        for lease in (*member.leases, *member.kept, *member.overdue):
            del self._holders[lease]
        member.leases, member.kept, member.overdue = {}, {}, {}  # its stream may still bring results: they are void
        log.info("left %s", pairs(preprocessor=member.name, why=why, work_to_redo=len(orphans)))
        for work in orphans:
            suspected = died and work in at_work  # it did not die of what it had done already
            if not (self._trials.orphan(work, member.name, died=died) or (suspected and self._trials.suspect(work))):
                self._wait_again(work)
        self._dispatch()

    @property
    def stores_bytes(self) -> int:
        """What the members' stores may hold together, as far as they have said it."""
        return sum(member.store_budget_bytes for member in self.members.values())

    def hear(self, member: Member) -> None:
        """It said something: it is there."""
        member.heard_s = self._now_s()

    def dismiss_all(self) -> None:
        """Every member is to look for another reorder service."""
        for member in list(self.members.values()):
            member.dismiss()

    def submit(self, work: Work) -> None:
        """Place `work` as soon as a member has a free slot."""
        if not (self.members and work.urgent() and self._place(work)):
            self._wait_again(work)
            self._fill_slots()

    def at_work(self, member: Member, lease: str) -> Work | None:
        """The work that `member` has by that lease; None where the lease was given up, or is nobody's."""
        return member.leases.get(lease) or member.overdue.get(lease)

    def has_given(self, member: Member, lease: str) -> bool:
        """Whether `member` got that lease in this life of the service, however long ago."""
        return lease.startswith(self._prefix(member))

    def _prefix(self, member: Member) -> str:
        return f"{member.name}-{self._life}-"

    def finish(self, member: Member, lease: str, result: Any) -> None:
        """`member` reports the result of `lease`. A lease that was given up meanwhile is ignored."""
        work = self.at_work(member, lease)
        if work is None:
            return
        pace = member.paces[work.keep]
        if work.is_timed:
            pace.report(self._now_s(), work.num_samples, held_up=work.keep and member.is_full)
        if member.silent:
            member.silent = False
            self._count_all_free(member)
        counts = lease in member.leases or work.late[lease]
        self._end(lease)
        if counts:
            work.deaths = 0
            if work.lease != lease:
                self._recall(work)
                work.lease = lease
                work.on_placed(lease, member.endpoint)
            work.late = dict.fromkeys(work.late, False)
            if work.keep:
                member.kept[lease] = work
                self._holders[lease] = member
            work.on_done(result, member.name)
        self._fill_slots()

    def fail(self, member: Member, lease: str, error: str, damaged: Sequence[Any] = ()) -> None:
        """`member` cannot carry out `lease` (it may lack a mount, say): every other one is asked before the work has failed.

        `damaged`: what of the work the member takes for damaged, where that is why.
        """
        work = self.at_work(member, lease)
        if work is None:
            return
        is_overdue = lease in member.overdue
        self._end(lease)
        work.is_disputed |= bool(damaged)
        enough = bool(damaged) and work.on_damaged(damaged, member.name)
        if is_overdue:
            self._fill_slots()
            return
        log.warning("order failed %s", pairs(preprocessor=member.name, job=work.job, error=error))
        work.avoid.add(member.name)
        if enough or work.avoid >= self.members.keys():
            work.avoid.clear()
            work.lease = None
            if not work.is_disputed:
                work.late = dict.fromkeys(work.late, False)
            work.on_failed(error)
        else:
            self._wait_again(work)
        self._dispatch()

    def lost(self, lease: str) -> None:
        """A trainer could not get what `lease` stands for, or not in time: place it again, elsewhere if possible."""
        member = self._holders.get(lease)
        if member is None or lease in member.overdue:
            return
        work = member.leases.get(lease) or member.kept[lease]
        work.avoid.add(member.name)
        if lease in member.leases and not work.avoid >= self.members.keys():
            self._give_up(lease, counts=False)
        else:
            self._end(lease)
        self._wait_again(work)
        self._dispatch()

    def release(self, works: list[Work]) -> None:
        """Forget works that nobody needs any more, wherever they are."""
        released = set(works)
        self._trials.forget(lambda work: work not in released)
        for work in works:
            self._withdraw(work)
        self._dispatch()

    def close_job(self, job: str, order: Order) -> None:
        """Drop all work of a job and tell the members that know it."""
        for waiting in self._waiting.values():
            waiting.forget(job)
        self._by_urgency = {
            urgent: rest for urgent, works in self._by_urgency.items() if (rest := {w for w in works if w.job != job})
        }
        for member in self.members.values():
            held = [*member.leases.items(), *member.kept.items(), *member.overdue.items()]
            for lease in [lease for lease, work in held if work.job == job]:
                self._end(lease)
            if job in member.jobs:
                member.jobs.discard(job)
                member.send(order)
        self._trials.forget(lambda work: work.job != job)
        self._dispatch()

    def broadcast(self, job: str, order: Order) -> None:
        """Send an order to every member that knows the job."""
        for member in self.members.values():
            if job in member.jobs:
                member.send(order)

    def look(self) -> None:
        """See how fast members are, and have others do as well what one is late with. To be called every LOOK_S seconds."""
        now_s, members = self._now_s(), self.members.values()
        self._trials.look()
        self._died = {name: died for name, died in self._died.items() if now_s - died[0] < GONE_S}
        for member in [member for member in members if now_s - member.heard_s > SILENCE_S]:
            self.leave(member, f"silent for {SILENCE_S:g} s")
            member.dismiss()
        assess(members, now_s)
        for member in members:
            self._count_all_free(member)
        for keep, waiting in self._waiting.items():
            for member, lease, work in list(late_leases(members, now_s, keep=keep)):
                if not keep and (waiting or not self._roster.has_free(keep=keep)):
                    break  # nobody idles
                if work.avoid | {member.name} >= self.members.keys():
                    continue
                late = {"decode" if keep else "probe": work.num_samples}
                log.info("late %s", pairs(preprocessor=member.name, job=work.job, **late))
                work.avoid.add(member.name)
                self._give_up(lease, counts=True)
                self.submit(work)
        self._dispatch()

    def _withdraw(self, work: Work) -> None:
        self._stop_waiting(work)
        for lease in filter(None, [work.lease, *work.late]):
            if lease in self._holders:
                self._end(lease)
        work.lease = None

    def _back(self, work: Work) -> None:
        """Its samples have been tried: it is given out again, unless somebody else has done it meanwhile."""
        if work.lease is None:
            self.submit(work)

    def _wait_again(self, work: Work) -> None:
        work.lease = None
        self._waiting[work.keep].push(work)
        if work.urgent is not never:
            self._by_urgency.setdefault(work.urgent, set()).add(work)

    def _stop_waiting(self, work: Work) -> None:
        if self._waiting[work.keep].pop(work) and work.urgent is not never:
            self._by_urgency[work.urgent].discard(work)
            if not self._by_urgency[work.urgent]:
                del self._by_urgency[work.urgent]

    def _give_up(self, lease: str, *, counts: bool) -> None:
        """A lease at work is overdue; another one is to have its work. `counts`: the result does still."""
        member = self._holders[lease]
        work = member.overdue[lease] = member.leases.pop(lease)
        work.late[lease] = counts

    def _recall(self, work: Work) -> None:
        """The work is done: nobody need begin it any more, and who has it now is not heard."""
        self._stop_waiting(work)
        if work.lease is not None:
            self._give_up(work.lease, counts=False)

    def _end(self, lease: str) -> None:
        """A member has nothing to do with a lease any more."""
        member = self._holders.pop(lease)
        if member.kept.pop(lease, None) is not None:
            return
        work = member.leases.pop(lease, None) or member.overdue.pop(lease)
        work.late.pop(lease, None)
        if work.is_timed:
            member.paces[work.keep].end()
        member.taken[work.keep] -= 1
        self._count_free(member, keep=work.keep)

    def _count_all_free(self, member: Member) -> None:
        for keep in (False, True):
            self._count_free(member, keep=keep)

    def _count_free(self, member: Member, *, keep: bool) -> None:
        self._roster.set_free(member.row, member.free(keep=keep), keep=keep)

    def _dispatch(self) -> None:
        """Fill the free slots; then place what has become urgent, which no other waiting work may hold up."""
        self._fill_slots()
        if self.members:
            for works in [works for urgent, works in self._by_urgency.items() if urgent()]:
                for work in sorted(works, key=lambda work: work.priority):
                    self._place(work)

    def _fill_slots(self) -> None:
        for keep, waiting in self._waiting.items():
            while self._roster.has_free(keep=keep) and (work := self._next(waiting, keep=keep)) is not None and self._place(work):
                pass

    def _next(self, waiting: FairQueue[Work], *, keep: bool) -> Work | None:
        """What to place now: the first work, or where a single member has a free slot, of the first few the one nearest to it.

        Members that are all busy have a slot free one after the other: each would else get what the next one has at hand.
        """
        row = self._roster.only_free(keep=keep) if keep and len(self.members) > 1 else None
        if row is None:
            return waiting.first()
        name = self._by_row[row].name

        def suits(work: Work) -> float:
            return -1.0 if name in work.avoid else self._roster.nearness(row, self._reading(work))

        return max(waiting.first_few(AHEAD), key=suits, default=None)

    def _place(self, work: Work) -> bool:
        """Give `work`, or the first piece of it, to the best member, if there is one for it."""
        member = self._choose(work)
        if member is None:
            return False
        now_s, pace = self._now_s(), member.paces[work.keep]
        if work.cut is not None:
            piece, rest = work.cut(pace.lease_samples(now_s))
            piece.avoid, piece.deaths = work.avoid.copy(), work.deaths
            if rest is not None:
                rest.avoid, rest.deaths = work.avoid.copy(), work.deaths
                self._wait_again(rest)  # before the other goes: its job waits without a break
            self._stop_waiting(work)
            work = piece
        else:
            self._stop_waiting(work)
        lease = f"{self._prefix(member)}{next(self._leases)}"
        work.lease, work.needed_s = lease, None
        member.leases[lease] = work
        member.taken[work.keep] += 1
        self._holders[lease] = member
        if work.is_timed:
            pace.begin(now_s)
        self._count_free(member, keep=work.keep)
        self._waiting[work.keep].served(work)
        self._roster.served(member.row, keep=work.keep)
        num_samples, num_near = sum(work.shards.values()), member.num_near(work)
        _NEAR.inc(num_near)
        _NEW.inc(num_samples - num_near)
        self._roster.note(member.row, ((work.job, shard) for shard in work.shards))
        self._roster.forget(member.row, member.will_read(work))
        if work.job not in member.jobs:
            member.jobs.add(work.job)
            member.send(member.introduce(work.job))
        member.send(work.order(lease))
        work.on_placed(lease, member.endpoint)
        return True

    def _choose(self, work: Work) -> Member | None:
        """The member with most free slots, where its shards count as slots; one without any only for urgent work."""
        avoid = {self.members[name].row for name in work.avoid & self.members.keys()}
        if len(avoid) == len(self.members):
            avoid = set()
        row = self._roster.choose(self._reading(work), avoid, keep=work.keep, without_slot=work.urgent())
        return self._by_row[row] if row is not None else None

    def _reading(self, work: Work) -> Reading:
        return Reading(
            work.num_samples,
            {(work.job, shard): number for shard, number in work.shards.items()},
            {self.members[name].row: number for name, number in work.probed_by.items() if name in self.members},
        )
