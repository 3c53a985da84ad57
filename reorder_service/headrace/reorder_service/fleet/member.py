"""A preprocessor as the fleet sees it, and the work that it is given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.reorder_service.fleet.pace import Pace
from headrace.reorder_service.fleet.roster import ShardKey

REMEMBERED_SHARDS = 4096  # of a member
FULL = 0.9  # of a member's store

Order = Any  # a FleetOrder without its lease; the fleet only passes it on


def never() -> bool:
    """Of work that nobody ever waits for."""
    return False


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
    on_done: Callable[[Any, str], None]
    """Called with the result and the member's name: once, but of work that can be `cut` perhaps once more, after its pieces were
    done."""
    on_failed: Callable[[str], None]
    """Called with a sentence where no member could carry out the order. It is not tried again."""
    on_damaged: Callable[[Any, str], bool] = lambda _damaged, _name: False
    """Told what of the work a member takes for damaged, and the member's name, before others are asked. Whether enough have been:
    then it counts as work that no member could do."""
    on_placed: Callable[[str, str], None] = lambda _lease, _endpoint: None
    """Called with lease and endpoint each time that a member takes the work."""
    keep: bool = False
    urgent: Callable[[], bool] = never
    """Whether somebody waits for it now: then it is placed even where no slot is free. One function for all that becomes
    urgent together, for it is asked whenever that may be."""
    cut: Callable[[int], tuple[Work, Work | None]] | None = None
    """Into a work of the first so many samples at most, and one of all others. None: it cannot be."""
    lease: str | None = None
    shards: Mapping[int, int] = field(default_factory=dict)
    """Shard of the job -> how many of its samples the work reads; of work to be cut, for the first lease or more."""
    probed_by: Mapping[str, int] = field(default_factory=dict)
    """Member -> how many of the samples it has probed, and may not have to read again."""
    share: float = 1.0
    """Of the job, beside those of others."""
    avoid: set[str] = field(default_factory=set)
    """Members that failed to deliver it, or are late: taken again only where there is no other."""
    needed_s: float | None = None
    """When it was first found that somebody waits for its present lease."""
    answer: str = ""
    """The kind of report that ends it, as the protocol calls it; empty: any."""
    deaths: int = 0
    """Members that died while they had it."""
    alone: Callable[[], list[Trial]] | None = None
    """How to try each of its samples by itself, to find the one that members die of; None: it cannot be."""
    is_disputed: bool = False
    """Whether some member took something of it for damaged: then an answer that comes late counts, though others have failed."""
    late: dict[str, bool] = field(default_factory=dict)
    """Leases of members that still work on it, while another one has it or is to have it; whether their result counts."""

    @property
    def num_samples(self) -> int:
        """That it reads; 1 where it reads none."""
        return max(1, sum(self.shards.values()))

    @property
    def is_timed(self) -> bool:
        """Whether it tells how fast a member is: works of its kind are alike."""
        return self.keep or self.cut is not None


class Trial(NamedTuple):
    """One sample of a work that members died with, tried by itself (headrace.reorder_service.fleet.trials)."""

    work: Work
    """Its result does not matter."""
    on_guilty: Callable[[int], None]
    """Called with the number of members that died where the sample is what they died of."""


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
    instance: str = ""
    """Of its process: only who says the same may take its name while it is there."""
    leases: dict[str, Work] = field(default_factory=dict)
    kept: dict[str, Work] = field(default_factory=dict)
    overdue: dict[str, Work] = field(default_factory=dict)
    """Leases that others have now, while this member still works on them, or hangs: they take up its slots."""
    taken: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    """Slots of `leases` and `overdue`, by `keep`."""
    paces: dict[bool, Pace] = field(default_factory=lambda: {False: Pace(), True: Pace()})
    allowed: int | None = None
    """Of its slots for decoding, where it is slower than others. None: all."""
    heard_s: float = 0.0
    """When it said something last, by the fleet's clock."""
    silent: bool = False
    """It has had work for long without a report: others are asked first."""
    shards: OrderedDict[ShardKey, None] = field(default_factory=OrderedDict)
    """Those that it read last, the latest at the end: it may have them open or cached."""
    row: int = -1
    """Of the fleet's roster."""
    jobs: set[str] = field(default_factory=set)
    samples_decoded: int = 0
    bytes_decoded: int = 0
    store_bytes: int = 0
    store_budget_bytes: int = 0
    occupancy: Any = None
    """The message of its latest heartbeat."""

    def free(self, *, keep: bool) -> int:
        """Slots left for work of this kind; of a silent member none, and fewer than of any other that has its share."""
        if self.silent:
            return -self.slots - self.taken[keep]
        return (self.allowed if keep and self.allowed is not None else self.slots) - self.taken[keep]

    @property
    def is_full(self) -> bool:
        """Whether what it decodes may have to wait for room: that says nothing of how fast it is."""
        return self.store_bytes > FULL * self.store_budget_bytes > 0

    def num_near(self, work: Work) -> int:
        """How many of the work's samples lie in shards that it read of late."""
        return sum(samples for shard, samples in work.shards.items() if (work.job, shard) in self.shards)

    def has_read(self, work: Work) -> float:
        """The same as a share of all the work's samples."""
        return self.num_near(work) / max(1, sum(work.shards.values()))

    def will_read(self, work: Work) -> list[ShardKey]:
        """Note the shards of work that it takes; those that are forgotten for them."""
        for shard in work.shards:
            self.shards[work.job, shard] = None
            self.shards.move_to_end((work.job, shard))
        return [self.shards.popitem(last=False)[0] for _ in range(len(self.shards) - REMEMBERED_SHARDS)]
