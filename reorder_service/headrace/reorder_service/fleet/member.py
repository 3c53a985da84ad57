"""A preprocessor as the fleet sees it, and the work that it is given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.reorder_service.fleet.pace import Pace
from headrace.reorder_service.fleet.roster import Reading, ShardKey

MOST_REMEMBERED = 1 << 18  # shards read most recently that are remembered, for all members together
REMEMBERED_SHARDS = 64, 4096  # and for each member: at least, at most
HEARTBEAT_S = 1.0  # from one heartbeat of a member to the next, in a small fleet
HEARTBEATS_PER_S = 500  # of all members together: they lengthen their pauses in a larger fleet
SILENT_HEARTBEATS = 3  # that are missed by a member that counts as gone
FULL = 0.9  # share of its budget from which a member's store counts as full

Order = Any  # a FleetOrder, which the fleet passes on without looking into it


def never() -> bool:
    """Return False: the `Work.urgent` of work that nobody ever waits for."""
    return False


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """A task for one preprocessor, which the fleet places until `on_done` or `on_failed` is called or the job ends.

    `priority`: order among the job's own tasks, lower first. `keep`: the result (a decoded part) stays with the member until
    `Fleet.release`, and is redone elsewhere if the member leaves before.
    """

    job: str
    priority: tuple[int, ...]
    order: Callable[[str], Order]
    """Returns the order to send under a given lease."""
    on_done: Callable[[Any, str], None]
    """Called with the result and the member's name, once. For work that can be `cut` it may be called again after
    its pieces were done."""
    on_failed: Callable[[str], None]
    """Called with an error sentence if no member could carry out the order. The fleet does not try it again."""
    on_damaged: Callable[[Any, str], bool] = lambda _damaged, _name: False
    """Called with the items that a member considers damaged, and the member's name, before others are asked. Returns whether
    enough members were asked; the work then fails as if no member could do it."""
    on_placed: Callable[[str, str], None] = lambda _lease, _endpoint: None
    """Called with the lease and the member's endpoint each time a member takes the work."""
    keep: bool = False
    urgent: Callable[[], bool] = never
    """Whether somebody waits for the result now, so that the work is placed even if no slot is free. Works that become urgent
    together share one function, because it is called whenever they may have."""
    cut: Callable[[int], tuple[Work, Work | None]] | None = None
    """Splits the work into its first samples, at most the given number, and the others, if any. None: it cannot be split."""
    break_up: Callable[[], list[Work]] | None = None
    """Returns works that are this one together, so that each is done by itself, and the failure of one holds up no other. None:
    it is one already."""
    lease: str | None = None
    shards: Mapping[int, int] = field(default_factory=dict)
    """Shard of the job -> how many of its samples the work reads. Of work that can be cut: of its first samples."""
    probed_by: Mapping[str, int] = field(default_factory=dict)
    """Member name -> how many of the samples it has probed, and may not have to read again."""
    share: float = 1.0
    """Weight of the job in the fair queue, relative to other jobs."""
    avoid: set[str] = field(default_factory=set)
    """Names of members that failed to deliver the work or are late with it; they get it again only if there is no other."""
    needed_s: float | None = None
    """Time at which somebody was first found to wait for the current lease, by the fleet's clock; None: not yet."""
    answer_kind: str = ""
    """The kind of report that ends the work, named as in the protocol; empty: any."""
    deaths: int = 0
    """Number of members that died while they had the work."""
    trials: Callable[[Work], list[Trial]] | None = None
    """Returns trials of this work's samples, one by one, to find the sample that kills members; None: they cannot be tried."""
    is_disputed: bool = False
    """Whether a member considered part of the work damaged; a late result then counts even though other members have failed."""
    late: dict[str, bool] = field(default_factory=dict)
    """Leases of members that still do the work though it goes to another member as well -> whether their result counts."""

    @property
    def num_samples(self) -> int:
        """Number of samples that the work reads; 1 if it reads none."""
        return max(1, sum(self.shards.values()))

    def reading(self, members: Mapping[str, Member]) -> Reading:
        """Return what the work reads, and what the members have probed of it. `members`: those that are connected, by name."""
        return Reading(
            self.num_samples,
            {(self.job, shard): number for shard, number in self.shards.items()},
            {members[name].row: number for name, number in self.probed_by.items() if name in members},
        )

    @property
    def is_timed(self) -> bool:
        """Whether the time it takes tells how fast a member is, because all work of its kind is alike."""
        return self.keep or self.cut is not None


class Trial(NamedTuple):
    """One sample of a work that members died with, tried by itself (headrace.reorder_service.fleet.trials)."""

    work: Work
    """The order for this sample alone; its result does not matter."""
    on_guilty: Callable[[int], None]
    """Called with the number of members that died, if the sample turns out to be what they died of."""


def heartbeat_s(num_members: int) -> float:
    """Return the seconds from one heartbeat to the next of each of so many members."""
    return max(HEARTBEAT_S, num_members / HEARTBEATS_PER_S)


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A connected preprocessor. `send` never blocks; what it queues is bounded by the slots and the urgent work.

    A member has `slots` for decoding and `other_slots` for all other work, so that a store full of one job's parts holds up no
    other job.
    """

    name: str
    endpoint: str
    slots: int
    send: Callable[[Order], None]
    introduce: Callable[[str], Order]
    """Returns the order that makes a job known to the member; it is sent before the job's first work."""
    dismiss: Callable[[], None]
    """Ends the member's stream."""
    instance: str = ""
    """Identifies the member's process: only the same process may take over the name while the member is connected."""
    other_slots: int = 0
    """0: as many as `slots`."""
    release: str = ""
    """The release that the member says it is of; empty: it does not say."""
    clock_ahead_s: float | None = None
    """Its clock less that of this process when it connected; None: it does not say."""
    takes_lots: bool = False
    """Whether it takes works that can be broken up as a whole; one of an older release does not."""
    leases: dict[str, Work] = field(default_factory=dict)
    kept: dict[str, Work] = field(default_factory=dict)
    overdue: dict[str, Work] = field(default_factory=dict)
    """Leases that others have now, while this member still works on them or hangs; they occupy its slots."""
    taken: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    """Number of slots that `leases` and `overdue` occupy, by `Work.keep`."""
    paces: dict[bool, Pace] = field(default_factory=lambda: {False: Pace(), True: Pace()})
    allowed: int | None = None
    """How many of its decoding slots a member that is slower than others may fill; None: all."""
    heartbeat_s: float = HEARTBEAT_S
    """From one heartbeat to the next, as the member was told."""
    heard_s: float = 0.0
    """Time of the member's latest message, by the fleet's clock."""
    silent: bool = False
    """Whether the member has had work for long without a report; others are then asked first."""
    shards: OrderedDict[ShardKey, None] = field(default_factory=OrderedDict)
    """The shards that the member read last, the latest at the end; it may have them open or cached."""
    row: int = -1
    """The member's row in the fleet's `Roster`."""
    jobs: set[str] = field(default_factory=set)
    samples_decoded: int = 0
    bytes_decoded: int = 0
    store_bytes: int = 0
    store_budget_bytes: int = 0
    occupancy: Any = None
    """The Occupancy message of the member's latest heartbeat; None before the first."""

    def free(self, *, keep: bool) -> int:
        """Slots left for work of this kind. Negative for a silent member, so that it is chosen after any with a normal load."""
        if self.silent:
            return -self.slots - self.taken[keep]
        if not keep:
            return (self.other_slots or self.slots) - self.taken[keep]
        return (self.slots if self.allowed is None else self.allowed) - self.taken[keep]

    @property
    def silence_s(self) -> float:
        """How long a member is not heard that is gone."""
        return SILENT_HEARTBEATS * self.heartbeat_s

    @property
    def is_full(self) -> bool:
        """Whether decoded parts may have to wait for room in the store, so that reports do not tell how fast the member is."""
        return self.store_bytes > FULL * self.store_budget_bytes > 0

    def num_near(self, work: Work) -> int:
        """Number of the work's samples that lie in shards the member read recently."""
        return sum(samples for shard, samples in work.shards.items() if (work.job, shard) in self.shards)

    def will_read(self, work: Work, num_members: int) -> list[ShardKey]:
        """Note the shards of a work that the member takes; return the shards that are forgotten to make room for them.

        `num_members`: among which the memory for all shards is shared.
        """
        least, most = REMEMBERED_SHARDS
        kept = max(least, min(most, MOST_REMEMBERED // num_members))
        for shard in work.shards:
            self.shards[work.job, shard] = None
            self.shards.move_to_end((work.job, shard))
        return [self.shards.popitem(last=False)[0] for _ in range(len(self.shards) - kept)]
