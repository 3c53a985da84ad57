"""The preprocessors and the work that they hold.

Pure bookkeeping in one event loop: who is there, which work waits, who has which lease. A member that leaves, however it
leaves, gives its work back. Nothing here knows what the work is; jobs make it and servers carry it.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace import metrics
from headrace.telemetry import pairs
from reorder_service.fair_queue import FairQueue

log = logging.getLogger(__name__)

REMEMBERED_SHARDS = 4096  # of a member
NEARNESS = 0.5  # of a member's slots: so much less free it may be than another one that would have to fetch all shards

Order = Any  # a FleetOrder without its lease; the fleet only passes it on


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """One thing to do, until `on_done` or the job's end.

    `priority`: among the job's own, the lower, the sooner. `keep`: the result stays with the member (a decoded part) until
    `Fleet.release`, and is redone elsewhere if the member leaves before.
    """

    job: str
    priority: tuple[int, ...]
    order: Callable[[str], Order]
    """The order to send, given the lease."""
    on_done: Callable[[Any], None]
    on_failed: Callable[[str], None]
    """Called with a sentence where no member could carry out the order. It is not tried again."""
    on_placed: Callable[[str, str], None] = lambda _lease, _endpoint: None
    """Called with lease and endpoint each time that a member takes the work."""
    keep: bool = False
    urgent: Callable[[], bool] = lambda: False
    """Whether somebody waits for it now: then it is placed even where no slot is free."""
    lease: str | None = None
    shards: Mapping[int, int] = field(default_factory=dict)
    """Shard of the job -> how many of its samples the work reads."""
    share: float = 1.0
    """Of the job, beside those of others."""
    avoid: set[str] = field(default_factory=set)
    """Members that failed to deliver it: taken again only where there is no other."""

    @property
    def num_samples(self) -> int:
        """That it reads; 1 where it reads none."""
        return max(1, sum(self.shards.values()))


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One preprocessor's stream. `send` never blocks; what it queues is bounded by the slots and the urgent work.

    `slots` are for decoding and, once more as many, for all else: a store full of one job's parts holds up no other job.
    """

    name: str
    endpoint: str
    slots: int
    send: Callable[[Order], None]
    introduce: Callable[[str], Order]
    """The order that makes a job known, sent before the job's first work."""
    dismiss: Callable[[], None]
    """Ends its stream."""
    leases: dict[str, Work] = field(default_factory=dict)
    kept: dict[str, Work] = field(default_factory=dict)
    overdue: dict[str, Work] = field(default_factory=dict)
    """Leases that others have now, while this member still works on them, or hangs: they take up its slots."""
    shards: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)
    """(job, shard) that it read last, the latest at the end: it may have them open or cached."""
    jobs: set[str] = field(default_factory=set)
    samples_decoded: int = 0
    bytes_decoded: int = 0
    store_bytes: int = 0
    store_budget_bytes: int = 0
    occupancy: Any = None
    """The message of its latest heartbeat."""

    def free(self, *, keep: bool) -> int:
        """Slots left for work of this kind."""
        return self.slots - sum(work.keep == keep for work in (*self.leases.values(), *self.overdue.values()))

    def num_near(self, work: Work) -> int:
        """How many of the work's samples lie in shards that it read of late."""
        return sum(samples for shard, samples in work.shards.items() if (work.job, shard) in self.shards)

    def has_read(self, work: Work) -> float:
        """The same as a share of all the work's samples."""
        return self.num_near(work) / max(1, sum(work.shards.values()))

    def will_read(self, work: Work) -> None:
        """Note the shards of work that it takes."""
        for shard in work.shards:
            self.shards[work.job, shard] = None
            self.shards.move_to_end((work.job, shard))
        while len(self.shards) > REMEMBERED_SHARDS:
            self.shards.popitem(last=False)


class Fleet:
    """Members and work. All methods are to be called from one event loop."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._waiting: dict[bool, FairQueue[Work]] = {False: FairQueue(), True: FairQueue()}  # by `keep`
        self._leases = itertools.count(1)
        self._life = uuid.uuid4().hex[:8]  # a lease of a former life of this service must not be taken for one of ours

    def join(self, member: Member) -> None:
        """Add a member. A member of the same name (a stream that broke without our noticing) leaves first."""
        former = self.members.get(member.name)
        if former is not None:
            member.shards = former.shards
            self.leave(former, "reconnected")
        self.members[member.name] = member
        log.info("joined %s", pairs(preprocessor=member.name, endpoint=member.endpoint, slots=member.slots))
        self._dispatch()

    def leave(self, member: Member, why: str) -> None:
        """Remove a member and place its work elsewhere."""
        if self.members.get(member.name) is not member:
            return
        del self.members[member.name]
        orphans = [*member.leases.values(), *member.kept.values()]
        member.leases, member.kept = {}, {}  # its stream may still bring results: they are void
        log.info("left %s", pairs(preprocessor=member.name, why=why, work_to_redo=len(orphans)))
        for work in orphans:
            self._wait_again(work)
        self._dispatch()

    def dismiss_all(self) -> None:
        """Every member is to look for another reorder service."""
        for member in list(self.members.values()):
            member.dismiss()

    def submit(self, work: Work) -> None:
        """Place `work` as soon as a member has a free slot."""
        if not (self.members and work.urgent() and self._place(work)):
            self._wait_again(work)
            self._fill_slots()

    def finish(self, member: Member, lease: str, result: Any) -> None:
        """`member` reports the result of `lease`. A lease that was given up meanwhile is ignored."""
        work = member.leases.pop(lease, None)
        if work is not None:
            if work.keep:
                member.kept[lease] = work
            work.on_done(result)
        if work is not None or member.overdue.pop(lease, None) is not None:
            self._fill_slots()

    def fail(self, member: Member, lease: str, error: str) -> None:
        """`member` cannot carry out `lease` (it may lack a mount, say): every other one is asked before the work has failed."""
        work = member.leases.pop(lease, None)
        if work is None:
            if member.overdue.pop(lease, None) is not None:
                self._fill_slots()
            return
        log.warning("order failed %s", pairs(preprocessor=member.name, job=work.job, error=error))
        work.avoid.add(member.name)
        if work.avoid >= self.members.keys():
            work.avoid.clear()
            work.lease = None
            work.on_failed(error)
        else:
            self._wait_again(work)
        self._dispatch()

    def lost(self, lease: str) -> None:
        """A trainer could not get what `lease` stands for, or not in time: place it again, elsewhere if possible."""
        for member in self.members.values():
            unfinished = member.leases.pop(lease, None)
            work = unfinished or member.kept.pop(lease, None)
            if work is not None:
                work.avoid.add(member.name)
                if unfinished is not None and not work.avoid >= self.members.keys():
                    member.overdue[lease] = unfinished
                self._wait_again(work)
                self._dispatch()
                return

    def release(self, works: list[Work]) -> None:
        """Forget works that nobody needs any more, wherever they are."""
        leases = {work.lease for work in works if work.lease is not None}
        for member in self.members.values():
            for lease in leases & member.leases.keys():
                del member.leases[lease]
            for lease in leases & member.kept.keys():
                del member.kept[lease]
        gone = set(map(id, works))
        for member in self.members.values():
            member.overdue = {lease: work for lease, work in member.overdue.items() if id(work) not in gone}
        for waiting in self._waiting.values():
            waiting.keep(lambda work: id(work) not in gone)
        self._dispatch()

    def close_job(self, job: str, order: Order) -> None:
        """Drop all work of a job and tell the members that know it."""
        for waiting in self._waiting.values():
            waiting.forget(job)
        for member in self.members.values():
            member.leases = {lease: work for lease, work in member.leases.items() if work.job != job}
            member.kept = {lease: work for lease, work in member.kept.items() if work.job != job}
            member.overdue = {lease: work for lease, work in member.overdue.items() if work.job != job}
            if job in member.jobs:
                member.jobs.discard(job)
                member.send(order)
        self._dispatch()

    def broadcast(self, job: str, order: Order) -> None:
        """Send an order to every member that knows the job."""
        for member in self.members.values():
            if job in member.jobs:
                member.send(order)

    def forget_introductions(self, job: str) -> None:
        """The job's description changed: introduce it again before its next work."""
        for member in self.members.values():
            member.jobs.discard(job)

    def _wait_again(self, work: Work) -> None:
        work.lease = None
        self._waiting[work.keep].push(work)

    def _dispatch(self) -> None:
        """Fill the free slots; then place what has become urgent, which no other waiting work may hold up."""
        self._fill_slots()
        if self.members:
            for waiting in self._waiting.values():
                waiting.keep(lambda work: not (work.urgent() and self._place(work)))

    def _fill_slots(self) -> None:
        for waiting in self._waiting.values():
            while self.members and (work := waiting.first()) is not None and self._place(work):
                waiting.pop(work)

    def _place(self, work: Work) -> bool:
        """Give `work` to the best member, if there is one for it."""
        member = self._choose(work)
        if member is not None:
            lease = f"{member.name}-{self._life}-{next(self._leases)}"
            work.lease = lease
            member.leases[lease] = work
            self._waiting[work.keep].served(work)
            num_samples, num_near = sum(work.shards.values()), member.num_near(work)
            metrics.SAMPLES_PLACED.labels("near").inc(num_near)
            metrics.SAMPLES_PLACED.labels("new").inc(num_samples - num_near)
            member.will_read(work)
            if work.job not in member.jobs:
                member.jobs.add(work.job)
                member.send(member.introduce(work.job))
            member.send(work.order(lease))
            work.on_placed(lease, member.endpoint)
        return member is not None

    def _choose(self, work: Work) -> Member | None:
        """The member with most free slots, where its shards count as slots; one without any only for urgent work."""
        candidates = [m for m in self.members.values() if m.name not in work.avoid] or list(self.members.values())
        free = [m for m in candidates if m.free(keep=work.keep) > 0]
        if not free and not work.urgent():
            return None
        return max(free or candidates, key=lambda m: (m.free(keep=work.keep) + NEARNESS * m.slots * m.has_read(work), m.name))
