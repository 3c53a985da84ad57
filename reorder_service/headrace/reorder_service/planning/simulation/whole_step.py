"""Kernels that run the schedules of a step for one figure only: when it is over, or the most that its stages hold.

They do what `timed_schedule.replay` and a sum over its actions do, but keep nothing of an action except its end, and leave out
replicas that a unit does not have. So a search, which looks at hundreds of steps, takes a fraction of the time.
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.schedule import Kind

_STAGE, _KIND, _POSITION, _UNIT, _EXIT, _BEFORE, _WAITS = 0, 1, 2, 4, 5, 6, 7  # columns of a schedule's table
_FORWARD = int(Kind.FORWARD)
_NOT_YET = -1.0


@kernel
def end_of_step(
    tables: Ints,
    first_row: Ints,
    lengths: Ints,
    slot_at: Ints,
    replicas: Ints,
    seconds: Floats,
    hop_s: Floats,
    link_offsets: Ints,
    link_slots: Ints,
    link_delay_s: Floats,
    replicas_coupled: bool,
    first_s: Floats,
    last_s: Floats,
) -> float:
    """Return when a step is over, with the (S,) seconds `last_s` that a stage takes behind its last action; -1 if it never is.

    lengths: (D,) number of a replica's actions. replicas: (S,) of each stage; actions of others are left out, on which nothing
    may wait. The other arguments are those of `timed_schedule.replay`.
    """
    size = first_row.size if replicas_coupled else 1
    sent = np.full((2, hop_s.shape[2], hop_s.shape[1]), _NOT_YET)  # by kind, unit and slot: when it leaves the unit
    ends = np.empty((lengths.max(), size))
    last = 0.0
    for first in range(0, first_row.size, size):
        begin, length = first_row[first], lengths[first]
        ends[:length] = _NOT_YET
        left = 0
        for place in range(length):
            left += min(size, max(0, replicas[tables[begin + place, _STAGE]] - first))
        ran = 1
        while left > 0 and ran > 0:
            ran = _run_once(
                tables, begin, length, slot_at, replicas, first, seconds, hop_s, link_offsets, link_slots, link_delay_s, first_s,
                ends, sent,
            )  # fmt: skip
            left -= ran
        if left > 0:
            return _NOT_YET
        for place in range(length):
            behind_s = last_s[tables[begin + place, _STAGE]]
            for r in range(size):
                if ends[place, r] != _NOT_YET:
                    last = max(last, ends[place, r] + behind_s)
    return last


@kernel
def _run_once(
    tables: Ints,
    begin: int,
    length: int,
    slot_at: Ints,
    replicas: Ints,
    first: int,
    seconds: Floats,
    hop_s: Floats,
    link_offsets: Ints,
    link_slots: Ints,
    link_delay_s: Floats,
    first_s: Floats,
    ends: Floats,
    sent: Floats,
) -> int:
    """Go once through the table of the replicas from `first` on, run every action that can run, and return how many did."""
    ran = 0
    linked = link_offsets.shape[1] > 0
    for place in range(length):
        row = begin + place
        kind, unit, stage, position = tables[row, _KIND], tables[row, _UNIT], tables[row, _STAGE], tables[row, _POSITION]
        before, leaves = tables[row, _BEFORE], tables[row, _EXIT] == 1
        for r in range(min(ends.shape[1], replicas[stage] - first)):
            if ends[place, r] != _NOT_YET:
                continue
            slot = slot_at[first + r, position]
            start = ends[before, r] if before >= 0 else first_s[stage]
            for w in range(_WAITS, tables.shape[1]):
                wait = tables[row, w]
                if wait < 0 or start == _NOT_YET:
                    break
                other = tables[begin + wait, _UNIT]
                there = 0.0
                if linked and other != unit:
                    link = min(unit, other)
                    for i in range(link_offsets[kind, link, slot], link_offsets[kind, link, slot + 1]):
                        left_s = sent[kind, other, link_slots[kind, link, i]]
                        if left_s == _NOT_YET:
                            there = _NOT_YET
                            break
                        there = max(there, left_s + link_delay_s[kind, link, i])
                else:
                    there = ends[wait, r]
                    if there != _NOT_YET and tables[begin + wait, _STAGE] != stage:
                        there += hop_s[kind, slot, unit]
                start = _NOT_YET if there == _NOT_YET else max(start, there)
            if start == _NOT_YET:
                continue
            ends[place, r] = start + seconds[slot, stage, kind]
            if leaves:
                sent[kind, unit, slot] = ends[place, r]
            ran += 1
    return ran


@kernel
def peaks_of_stages(
    tables: Ints, first_row: Ints, lengths: Ints, slot_at: Ints, replicas: Ints, memory: Floats, until: Ints
) -> Floats:
    """Return (D, S) the most that each stage holds at any time; 0 on replicas that its unit does not have.

    memory: (2, slots, U) what a forward takes and what is given back. until: (U,) the kind of action after which it is. The other
    arguments are those of `end_of_step`.
    """
    peaks, held = np.zeros((first_row.size, replicas.size)), np.zeros(replicas.size)
    for r in range(first_row.size):
        held[:] = 0.0
        for row in range(first_row[r], first_row[r] + lengths[r]):
            stage, kind, unit = tables[row, _STAGE], tables[row, _KIND], tables[row, _UNIT]
            if r >= replicas[stage]:
                continue
            if kind == _FORWARD:
                held[stage] += memory[0, slot_at[r, tables[row, _POSITION]], unit]
                peaks[r, stage] = max(peaks[r, stage], held[stage])
            elif kind == until[unit]:
                held[stage] -= memory[1, slot_at[r, tables[row, _POSITION]], unit]
    return peaks
