"""Lease work to preprocessors, and place it again when they leave or fall behind.

This is bookkeeping in one event loop: which members are connected, which work waits, and who holds which lease. When a member
leaves, for whatever reason, its work is placed again. Work that a member is late with is leased to another one as well, and the
first result counts. The fleet does not know what the work is; jobs create it and servers deliver it.

An event costs some microseconds, whether the fleet has four members or hundreds, and however much work waits.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import ConflictError
from headrace.observability import metrics
from headrace.observability.logs import pairs
from headrace.reorder_service.fleet.fair_queue import FairQueue
from headrace.reorder_service.fleet.lateness import assess, late_leases, patience
from headrace.reorder_service.fleet.member import Member, Order, Work
from headrace.reorder_service.fleet.roster import Roster
from headrace.reorder_service.fleet.trials import GONE_S, Trials
from headrace.reorder_service.fleet.waiting import WaitingWork

log = logging.getLogger(__name__)

LOOK_S = 0.1
OVER = 1.0  # urgent works beyond its slots, over these, that a member gets while others may still come
AHEAD = 8  # waiting works that the only member with a free slot may choose from: trainers need the ones behind them later
_NEAR, _NEW = metrics.SAMPLES_PLACED.labels("near"), metrics.SAMPLES_PLACED.labels("new")


class Fleet:
    """The connected preprocessors, their leases, and the work that waits for a slot. Call all methods from one event loop."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic, settle_s: float = 0.0) -> None:
        """`now_s`: a clock that leaves this process's own pauses out, by which members are silent. `settle_s`: how long after
        the first member others may come, as to a new leader: until then none gets more urgent work than OVER times its slots.
        """
        self.members: dict[str, Member] = {}
        self._now_s = now_s
        self._settle_s = settle_s
        self._settled_s = math.inf  # when all members are here that come at once
        self._roster = Roster()
        self._by_row: dict[int, Member] = {}
        self._holders: dict[str, Member] = {}
        """The member that holds each lease, whether the lease is at work, kept or overdue."""
        self._waiting = WaitingWork()
        self._trials = Trials(self.submit, self._withdraw, self._back, now_s)
        self._died: dict[str, tuple[float, list[Work]]] = {}
        """Members that left without a goodbye, by name: the time, and their unfinished work. Forgotten after GONE_S."""
        self._leases = itertools.count(1)
        self._incarnation = uuid.uuid4().hex[:8]  # tells our leases from those that the service gave before it restarted

    def join(self, member: Member) -> None:
        """Add a member. It replaces a former one of the same name and process, whose stream broke unnoticed.

        Raises ConflictError if another process has the name.
        """
        if (former := self.members.get(member.name)) is not None:
            if not hmac.compare_digest(former.instance.encode(), member.instance.encode()):
                raise ConflictError(
                    f"the name {member.name!r} is that of a preprocessor that is here: take another, or wait until it has left"
                )
            member.shards = former.shards
            self.leave(former, "reconnected")
        self._settled_s = min(self._settled_s, self._now_s() + self._settle_s)
        self.members[member.name] = member
        self.hear(member)
        member.row = self._roster.add(member.name, member.slots)
        self._by_row[member.row] = member
        self._roster.note(member.row, member.shards)
        for work in self._died.pop(member.name, (0.0, []))[1]:
            work.deaths = max(0, work.deaths - 1)  # only its stream broke; 0 if the work was done meanwhile
        self._trials.is_back(member.name)
        self._count_all_free(member)
        log.info("joined %s", pairs(preprocessor=member.name, endpoint=member.endpoint, slots=member.slots))
        self._dispatch()

    def leave(self, member: Member, why: str, *, died: bool = False) -> None:
        """Remove a member and place its work elsewhere. `died`: it left without a goodbye, perhaps killed by that work."""
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
        member.leases, member.kept, member.overdue = {}, {}, {}  # results that its stream still delivers are ignored
        log.info("left %s", pairs(preprocessor=member.name, why=why, work_to_redo=len(orphans)))
        for work in orphans:
            suspected = died and work in at_work  # kept work was finished, so it did not kill the member
            if not (self._trials.orphan(work, member.name, died=died) or (suspected and self._trials.suspect(work))):
                self._wait_again(work)
        self._dispatch()

    @property
    def stores_bytes(self) -> int:
        """Capacity of all members' stores together, in bytes, as far as they have reported it."""
        return sum(member.store_budget_bytes for member in self.members.values())

    def hear(self, member: Member) -> None:
        """Note that `member` has just sent a message, so that it does not count as gone."""
        member.heard_s = self._now_s()

    def dismiss_all(self) -> None:
        """End every member's stream, so that it looks for another reorder service. Nobody has died, no work moves."""
        dismissed, self.members = self.members, {}
        for member in dismissed.values():
            log.info("left %s", pairs(preprocessor=member.name, why="this service ends"))
            member.dismiss()

    def submit(self, work: Work) -> None:
        """Place `work` as soon as a member has a free slot, or at once if it is urgent."""
        if not (self.members and work.urgent() and self._place(work)):
            self._wait_again(work)
            self._fill_slots()

    @property
    def _has_settled(self) -> bool:
        """Whether there are members, and not only the first of many."""
        return bool(self.members) and self._now_s() >= self._settled_s

    def at_work(self, member: Member, lease: str) -> Work | None:
        """Return the unfinished work that `member` has under `lease`; None if the lease has ended or is not the member's."""
        return member.leases.get(lease) or member.overdue.get(lease)

    def has_given(self, member: Member, lease: str) -> bool:
        """Whether this process of the service gave `lease` to `member`, however long ago."""
        return lease.startswith(self._prefix(member))

    def _prefix(self, member: Member) -> str:
        return f"{member.name}-{self._incarnation}-"

    def finish(self, member: Member, lease: str, result: Any) -> None:
        """Accept the result that `member` reports for `lease`. Ignored if the lease has ended or no longer counts."""
        if (work := self.at_work(member, lease)) is None:
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
        """Note that `member` cannot carry out `lease`, perhaps for lack of a mount. The work fails only once all were asked.

        `damaged`: the items of the work that the member considers damaged, if that is why. `Work.on_damaged` then tells whether
        enough members were asked.
        """
        if (work := self.at_work(member, lease)) is None:
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
        if work.break_up is not None:
            self._break_up(work)
        elif enough or work.avoid >= self.members.keys():
            work.avoid.clear()
            work.lease = None
            if not work.is_disputed:
                work.late = dict.fromkeys(work.late, False)
            work.on_failed(error)
        else:
            self._wait_again(work)
        self._dispatch()

    def lost(self, lease: str) -> None:
        """Place a work again, elsewhere if possible, since a trainer could not fetch its result under `lease`, or not in time."""
        member = self._holders.get(lease)
        if member is None or lease in member.overdue:
            return
        work = member.leases.get(lease) or member.kept[lease]
        work.avoid.add(member.name)
        if lease in member.leases and not work.avoid >= self.members.keys():
            self._mark_overdue(lease, counts=False)
        else:
            self._end(lease)
        self._wait_again(work)
        self._dispatch()

    def release(self, works: list[Work]) -> None:
        """Drop works that nobody needs any more, whether they wait, are leased or are kept."""
        released = set(works)
        self._trials.forget(lambda work: work not in released)
        for work in works:
            self._withdraw(work)
        self._dispatch()

    def close_job(self, job: str, order: Order) -> None:
        """Drop all work of a job, and send `order` to the members that know the job."""
        self._waiting.forget(job)
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
        """Dismiss members that are gone, assess how fast the others are and duplicate late work. Call it every LOOK_S seconds."""
        now_s, members = self._now_s(), self.members.values()
        self._trials.look()
        self._died = {name: died for name, died in self._died.items() if now_s - died[0] < GONE_S}
        for member in [member for member in members if now_s - member.heard_s > member.silence_s]:
            self.leave(member, f"silent for {member.silence_s:g} s")
            member.dismiss()
        patience_s = {keep: patience(members, keep=keep) for keep in self._waiting.queues}
        for member in assess(members, now_s, patience_s):
            self._count_all_free(member)
        for keep, waiting in self._waiting.queues.items():
            for member, lease, work in list(late_leases(members, now_s, patience_s[keep], keep=keep)):
                if not keep and (waiting or not self._roster.has_free(keep=keep)):
                    break  # no member would idle without the late probe
                if work.avoid | {member.name} >= self.members.keys():
                    continue
                late = {"decode" if keep else "probe": work.num_samples}
                log.info("late %s", pairs(preprocessor=member.name, job=work.job, **late))
                work.avoid.add(member.name)
                self._mark_overdue(lease, counts=True)
                self.submit(work)
        self._dispatch()

    def _withdraw(self, work: Work) -> None:
        self._waiting.remove(work)
        for lease in filter(None, [work.lease, *work.late]):
            if lease in self._holders:
                self._end(lease)
        work.lease = None

    def _back(self, work: Work) -> None:
        """Submit a work again after its samples were tried one by one, unless a late member has finished it meanwhile."""
        if work.lease is None:
            self.submit(work)

    def _wait_again(self, work: Work) -> None:
        work.lease = None
        self._waiting.add(work)

    def _break_up(self, work: Work) -> list[Work]:
        """Have the works that `work` consists of wait in its place, and return them."""
        assert work.break_up is not None, "the work consists of others"
        works = work.break_up()
        for single in works:
            single.deaths = work.deaths
            self._wait_again(single)  # before `work` is removed, so that its job never leaves the fair queue
        self._withdraw(work)
        return works

    def _mark_overdue(self, lease: str, *, counts: bool) -> None:
        """Mark a lease as overdue, so that its work can go to another member. `counts`: whether its result is still accepted."""
        member = self._holders[lease]
        work = member.overdue[lease] = member.leases.pop(lease)
        work.late[lease] = counts

    def _recall(self, work: Work) -> None:
        """Stop what is left of a work that is done: it no longer waits, and the result of its current lease is ignored."""
        self._waiting.remove(work)
        if work.lease is not None:
            self._mark_overdue(work.lease, counts=False)

    def _end(self, lease: str) -> None:
        """Remove a lease from its member and, unless the result was only kept, free its slot."""
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
        """Fill the free slots, then place urgent work even where no slot is free, so that no other waiting work holds it up."""
        self._fill_slots()
        if self._has_settled:
            for work in self._waiting.urgent():
                self._place(work)
        else:  # very much of it may wait
            while self.members and (first := self._waiting.first_urgent()) is not None and self._place(first):
                pass

    def _fill_slots(self) -> None:
        for keep, waiting in self._waiting.queues.items():
            while self._roster.has_free(keep=keep) and (work := self._next(waiting, keep=keep)) is not None and self._place(work):
                pass

    def _next(self, waiting: FairQueue[Work], *, keep: bool) -> Work | None:
        """Return the work to place next: the first, or of the first few the one nearest to the only member with a free slot.

        The latter is for kept work. When all members are busy, slots become free at one member after the other, and each would
        otherwise get the work whose shards the next one has at hand. Members that have just come have read nothing yet.
        """
        row = self._roster.only_free(keep=keep) if keep and len(self.members) > 1 and self._has_settled else None
        if row is None:
            return waiting.first()
        name = self._by_row[row].name

        def suits(work: Work) -> float:
            return -1.0 if name in work.avoid else self._roster.nearness(row, work.reading(self.members))

        return max(waiting.first_few(AHEAD), key=suits, default=None)

    def _place(self, work: Work) -> bool:
        """Lease `work`, or a first piece of it if it can be cut, to the best member; return whether there was one."""
        if (member := self._choose(work)) is None:
            return False
        if work.break_up is not None and not member.takes_lots:
            return self._place(self._break_up(work)[0])
        now_s, pace = self._now_s(), member.paces[work.keep]
        piece, rest = (work, None) if work.cut is None else work.cut(pace.lease_samples(now_s))
        piece.avoid, piece.deaths = work.avoid.copy(), work.deaths
        if rest is not None:
            rest.avoid, rest.deaths = work.avoid.copy(), work.deaths
            self._wait_again(rest)  # before `work` is removed, so that its job never leaves the fair queue
        self._waiting.remove(work)
        work = piece
        lease = f"{self._prefix(member)}{next(self._leases)}"
        work.lease, work.needed_s = lease, None
        member.leases[lease] = work
        member.taken[work.keep] += 1
        self._holders[lease] = member
        if work.is_timed:
            pace.begin(now_s)
        self._count_free(member, keep=work.keep)
        self._waiting.queues[work.keep].served(work)
        self._roster.served(member.row, keep=work.keep)
        num_samples, num_near = sum(work.shards.values()), member.num_near(work)
        _NEAR.inc(num_near)
        _NEW.inc(num_samples - num_near)
        self._roster.note(member.row, ((work.job, shard) for shard in work.shards))
        self._roster.forget(member.row, member.will_read(work, len(self.members)))
        if work.job not in member.jobs:
            member.jobs.add(work.job)
            member.send(member.introduce(work.job))
        member.send(work.order(lease))
        work.on_placed(lease, member.endpoint)
        return True

    def _choose(self, work: Work) -> Member | None:
        """Return the member with the most free slots, where shards it read count as slots; for urgent work also one without any.

        Members in `work.avoid` are passed over unless there are no others. None if no member qualifies.
        """
        avoid = {self.members[name].row for name in work.avoid & self.members.keys()}
        if len(avoid) == len(self.members):
            avoid = set()
        over = 0.0 if not work.urgent() else math.inf if self._has_settled else OVER
        row = self._roster.choose(work.reading(self.members), avoid, keep=work.keep, most_over=over)
        return self._by_row[row] if row is not None else None
