"""Decide which preprocessors are slow and which leases are late, from when members reported.

A member may be silent for a multiple of the time that usually passes between two reports: its own, or the median over members
if that is shorter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping

from headrace.reorder_service.fleet.member import Member, Work

LATE = 4.0  # usual gaps without a report after which a member is late; parts of one job mostly differ by less
LEAST_LATE_S = 0.25  # a shorter silence is never late: any busy machine pauses for so long
START_S = 1.0  # the same for a member whose gap is not known yet: it imports modules and opens shards
LEAST_SHARE = 3  # even the slowest member may fill 1 / LEAST_SHARE of its decoding slots, which are about as many as its threads


Patience = Mapping[Member, float]
"""Seconds that a member may be silent while it has work of a kind; nothing is known of those that are missing."""


def assess(members: Collection[Member], now_s: float, patience_s: Mapping[bool, Patience]) -> list[Member]:
    """Set how many decoding slots each member may fill, and whether it is silent. If all are silent, none counts as silent.

    `patience_s`: by `Work.keep`, see `patience`. Returns the members of which that has changed.
    """
    rates = {m: rate / m.slots for m in members if (rate := m.paces[True].rate(now_s)) is not None}
    usual = statistics.median(rates.values()) if rates else 0.0
    silent = {
        m
        for keep, of_kind in patience_s.items()
        for m in members
        if m.paces[keep].num_open and m.paces[keep].silence_s(now_s) > of_kind.get(m, math.inf) and not m.is_full
    }
    changed = []
    for member in members:
        slower = min(1.0, rates[member] / usual) if member in rates and usual else 1.0
        allowed = max(1, member.slots // LEAST_SHARE, math.ceil(member.slots * slower))
        is_silent = member in silent and len(silent) < len(members)
        if member.allowed != allowed or member.silent != is_silent:
            member.allowed, member.silent = allowed, is_silent
            changed.append(member)
    return changed


def late_leases(
    members: Collection[Member], now_s: float, patience_s: Patience, *, keep: bool
) -> Iterator[tuple[Member, str, Work]]:
    """Yield (member, lease, work) of the late leases whose results are needed, by priority.

    Results of work that is not `keep` are always needed, those of other work only while it is urgent.
    """
    late = []
    for member in members:
        for lease, work in member.leases.items():
            if work.keep != keep or not work.is_timed or (keep and not work.urgent()):
                continue
            if work.needed_s is None:
                work.needed_s = now_s
            limit_s = patience_s.get(member, math.inf) * 2 ** len(work.avoid)
            silence_s = now_s - max(work.needed_s, member.paces[keep].since_s)
            if silence_s > limit_s or now_s - work.needed_s > limit_s * member.slots:
                late.append((work.priority, lease, member, work))
    for _, lease, member, work in sorted(late, key=lambda entry: entry[:2]):
        yield member, lease, work


def patience(members: Collection[Member], *, keep: bool) -> Patience:
    """Return for how long each member may be silent while it has work of this kind.

    Empty while no usual gap is known, and while nobody has such work: then nobody is late.
    """
    if not any(m.paces[keep].num_open for m in members):
        return {}
    gaps_s = {m: gap_s for m in members if (gap_s := m.paces[keep].gap_s) is not None}
    if not gaps_s:
        return {}
    usual_s = statistics.median(gaps_s.values())
    return {m: max(LEAST_LATE_S if m in gaps_s else START_S, LATE * min(usual_s, gaps_s.get(m, usual_s))) for m in members}
