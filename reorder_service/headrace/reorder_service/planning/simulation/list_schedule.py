"""Kernels that time the actions of units which share ranks, and find in which order a rank takes them.

Actions are those of schedule tables (`timed_schedule`), numbered replica by replica. A cell is a group of ranks that always act
together; an action takes one cell or several neighbouring ones, and a cell does one thing at a time. Edges lead from an action to
those that wait for its result.
"""

from __future__ import annotations

import heapq

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.schedule import Kind

_STAGE, _KIND, _POSITION, _UNIT, _EXIT, _BEFORE, _WAITS = 0, 1, 2, 4, 5, 6, 7  # columns of a schedule's table
ROW, SLOT, CELL, WIDTH, REPLICA, STAGE, KIND, UNIT = range(8)
"""Columns of the actions that `place_actions` returns."""
_FORWARD = int(Kind.FORWARD)
_NOT_YET = -1.0


@kernel
def place_actions(tables: Ints, first_row: Ints, first_action: Ints, slot_at: Ints, replicas: Ints, cells: Ints) -> Ints:
    """Return (A, 8) for each action its row in the tables, slot, first cell, number of cells, replica, stage, kind and unit.

    tables, first_row, first_action, slot_at: as for `timed_schedule.replay`. replicas: (S,) of each stage; the row of an action
    of a replica that the stage does not have is -1. cells: (S, 3) first cell of a stage's first replica, cells from one replica
    to the next, and cells of a stage.
    """
    actions = np.full((first_action[-1], 8), -1)
    for r in range(first_row.size):
        for place in range(first_action[r + 1] - first_action[r]):
            row = first_row[r] + place
            stage = tables[row, _STAGE]
            if r < replicas[stage]:
                action = first_action[r] + place
                actions[action, ROW] = row
                actions[action, SLOT] = slot_at[r, tables[row, _POSITION]]
                actions[action, CELL] = cells[stage, 0] + r * cells[stage, 1]
                actions[action, WIDTH] = cells[stage, 2]
                actions[action, REPLICA] = r
                actions[action, STAGE] = stage
                actions[action, KIND] = tables[row, _KIND]
                actions[action, UNIT] = tables[row, _UNIT]
    return actions


@kernel
def edges_of(
    tables: Ints,
    first_row: Ints,
    first_action: Ints,
    actions: Ints,
    hop_s: Floats,
    link_offsets: Ints,
    link_slots: Ints,
    link_delay_s: Floats,
) -> tuple[Ints, Ints, Floats, Ints]:
    """Return where the edges of each action begin, (A + 1,), their targets and delays, (E,), and (A,) how many lead to each
    action.

    actions: of `place_actions`; the other arguments are those of `timed_schedule.replay`. An action that needs what is never sent
    counts an edge that does not exist. What stays on a rank takes no time.
    """
    num_actions = actions.shape[0]
    exits = np.full((2, hop_s.shape[2], hop_s.shape[1]), -1)
    for a in range(num_actions):
        row = actions[a, ROW]
        if row >= 0 and tables[row, _EXIT] == 1:
            exits[actions[a, KIND], actions[a, UNIT], actions[a, SLOT]] = a
    linked = link_offsets.shape[1] > 0
    first, waits = np.zeros(num_actions + 1, np.int64), np.zeros(num_actions, np.int64)
    targets, delays = np.empty(0, np.int64), np.empty(0)
    place = first
    for fill in range(2):
        for r in range(first_row.size):
            for a in range(first_action[r], first_action[r + 1]):
                row = actions[a, ROW]
                if row < 0:
                    continue
                kind, unit, stage, slot = actions[a, KIND], actions[a, UNIT], actions[a, STAGE], actions[a, SLOT]
                for w in range(_WAITS, tables.shape[1]):
                    if tables[row, w] < 0:
                        break
                    wait = first_row[r] + tables[row, w]
                    other = tables[wait, _UNIT]
                    if linked and other != unit:
                        link = min(unit, other)
                        begin, end = link_offsets[kind, link, slot], link_offsets[kind, link, slot + 1]
                    else:
                        link, begin, end = -1, 0, 1
                    for i in range(begin, end):
                        if link >= 0:
                            source, delay = exits[kind, other, link_slots[kind, link, i]], link_delay_s[kind, link, i]
                        else:
                            source = first_action[r] + tables[row, w]
                            delay = hop_s[kind, slot, unit] if tables[wait, _STAGE] != stage else 0.0
                        if fill == 0:
                            waits[a] += 1
                            if source >= 0:
                                first[source + 1] += 1
                        elif source >= 0:
                            here, there = actions[a, CELL], actions[source, CELL]
                            if here < there + actions[source, WIDTH] and there < here + actions[a, WIDTH]:
                                delay = min(delay, 0.0)
                            targets[place[source]], delays[place[source]] = a, delay
                            place[source] += 1
        if fill == 0:
            first = np.cumsum(first)
            targets, delays = np.empty(first[-1], np.int64), np.empty(first[-1])
            place = first.copy()
    return first, targets, delays, waits


@kernel
def nested_turns(
    tables: Ints,
    first_action: Ints,
    actions: Ints,
    first: Ints,
    targets: Ints,
    waits: Ints,
    assumed_s: Floats,
    precedence: Ints,
    num_cells: int,
) -> Ints:
    """Return (A,) the turns in which actions are taken by a list schedule: of all that could run, the one that can begin first.

    Every stage keeps to its own order. first, targets, waits: of `edges_of`, whose delays do not count here. assumed_s: (A,)
    duration of each action. precedence: (A,) who comes first of those that can begin at the same time; all differ. An action that
    never can run has the turn -1.
    """
    turns, left, ready = np.full(actions.shape[0], -1), waits.copy(), np.zeros(actions.shape[0])
    after = np.full(actions.shape[0], -1)
    for r in range(first_action.size - 1):
        for a in range(first_action[r], first_action[r + 1]):
            if actions[a, ROW] >= 0 and tables[actions[a, ROW], _BEFORE] >= 0:
                after[first_action[r] + tables[actions[a, ROW], _BEFORE]] = a
                left[a] += 1
    heap = [(0.0, precedence[a], a) for a in range(actions.shape[0]) if actions[a, ROW] >= 0 and left[a] == 0]
    heapq.heapify(heap)  # earliest begin, precedence and number of actions whose inputs are there
    free = np.zeros(num_cells)
    count = 0
    while len(heap) > 0:
        begin, rank, a = heapq.heappop(heap)
        here = actions[a, CELL]
        can_begin = ready[a]
        for cell in range(here, here + actions[a, WIDTH]):
            can_begin = max(can_begin, free[cell])
        if can_begin > begin:
            heapq.heappush(heap, (can_begin, rank, a))
            continue
        end = begin + assumed_s[a]
        for cell in range(here, here + actions[a, WIDTH]):
            free[cell] = end
        turns[a] = count
        count += 1
        for e in range(first[a], first[a + 1]):
            target = targets[e]
            ready[target] = max(ready[target], end)
            left[target] -= 1
            if left[target] == 0:
                heapq.heappush(heap, (ready[target], precedence[target], target))
        following = after[a]
        if following >= 0:
            left[following] -= 1
            if left[following] == 0:
                heapq.heappush(heap, (max(ready[following], end), precedence[following], following))
    return turns


@kernel
def lists_of_cells(actions: Ints, order: Ints, num_cells: int) -> tuple[Ints, Ints]:
    """Return where the list of each cell begins, (cells + 1,), and the lists: its actions in the given order of all, (n,)."""
    begins = np.zeros(num_cells + 1, np.int64)
    for a in order:
        for cell in range(actions[a, CELL], actions[a, CELL] + actions[a, WIDTH]):
            begins[cell + 1] += 1
    begins = np.cumsum(begins)
    lists, place = np.empty(begins[-1], np.int64), begins.copy()
    for a in order:
        for cell in range(actions[a, CELL], actions[a, CELL] + actions[a, WIDTH]):
            lists[place[cell]] = a
            place[cell] += 1
    return begins, lists


@kernel
def run_lists(
    actions: Ints,
    first: Ints,
    targets: Ints,
    delays: Floats,
    waits: Ints,
    begins: Ints,
    lists: Ints,
    seconds: Floats,
    first_s: Floats,
) -> tuple[Floats, Floats, Ints]:
    """Return (A,) the starts, ends and causes of all actions, where every cell takes its list in order and waits for what is not
    there.

    first, targets, delays, waits: of `edges_of`. begins, lists: of `lists_of_cells`. seconds: (A,) of each action. first_s: (A,)
    before which it does not start. The cause is the action, in front of it in a list or that sends it something, that it waits
    for last; -1 for none. An action that never can run has the end -1.
    """
    starts, ends, left = first_s.copy(), np.full(actions.shape[0], _NOT_YET), waits + actions[:, WIDTH]
    causes = np.full(actions.shape[0], -1)
    following = begins[:-1].copy()
    runnable = [np.int64(0)]
    runnable.pop()
    for cell in range(following.size):
        if following[cell] < begins[cell + 1]:
            a = lists[following[cell]]
            left[a] -= 1
            if left[a] == 0:
                runnable.append(a)
    while len(runnable) > 0:
        a = runnable.pop()
        end = starts[a] + seconds[a]
        ends[a] = end
        for cell in range(actions[a, CELL], actions[a, CELL] + actions[a, WIDTH]):
            following[cell] += 1
            if following[cell] < begins[cell + 1]:
                b = lists[following[cell]]
                if end > starts[b]:
                    starts[b], causes[b] = end, a
                left[b] -= 1
                if left[b] == 0:
                    runnable.append(b)
        for e in range(first[a], first[a + 1]):
            b = targets[e]
            if end + delays[e] > starts[b]:
                starts[b], causes[b] = end + delays[e], a
            left[b] -= 1
            if left[b] == 0:
                runnable.append(b)
    return starts, ends, causes


@kernel
def sums_of_cells(
    actions: Ints,
    begins: Ints,
    lists: Ints,
    ends: Floats,
    memory: Floats,
    until: Ints,
    is_guest: Ints,
    last_s: Floats,
) -> tuple[Floats, Floats]:
    """Return (cells,) the most activations that each cell holds at any time, and when it is done with its last exchange.

    memory: (2, slots, U) what a forward takes and what is given back. until: (U,) the kind of action after which it is. is_guest:
    (U,) 1 for units on the ranks of another. last_s: (U,) seconds of each unit's exchange behind its last action: that of guests
    begins when that of their host is over.
    """
    num_cells = begins.size - 1
    peaks, over = np.zeros(num_cells), np.zeros(num_cells)
    for cell in range(num_cells):
        held, of_host, of_guests = 0.0, 0.0, 0.0
        behind = np.zeros(is_guest.size)
        for a in lists[begins[cell] : begins[cell + 1]]:
            unit, kind = actions[a, UNIT], actions[a, KIND]
            if kind == _FORWARD:
                held += memory[0, actions[a, SLOT], unit]
                peaks[cell] = max(peaks[cell], held)
            elif kind == until[unit]:
                held -= memory[1, actions[a, SLOT], unit]
            if is_guest[unit] == 1:
                of_guests = max(of_guests, ends[a])
                behind[unit] = last_s[unit]
            else:
                of_host = max(of_host, ends[a] + last_s[unit])
        over[cell] = max(of_host, of_guests) + behind.sum()
    return peaks, over
