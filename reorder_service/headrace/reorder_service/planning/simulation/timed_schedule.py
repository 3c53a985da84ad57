"""The table form of a pipeline schedule, and the kernels that run such tables with times.

A table is an int64 array with one row per action of a replica, in an order in which every action comes after all that it
waits for, provided that microbatches wait only for equal ones. Its columns are STAGE, KIND, POSITION (of the microbatch among
those that run), CHUNK, UNIT, EXIT (1 if the result leaves the unit), BEFORE (the row of the stage's previous action) and, from
WAITS on, the rows whose results it needs; -1 stands for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.execution import Execution
from headrace.schedule import Action, Kind, Schedule, Stage, build, inputs, stage_graph

STAGE, KIND, POSITION, CHUNK, UNIT, EXIT, BEFORE, WAITS = range(8)
_NOT_YET = -1.0


def schedule_table(stages: Mapping[str, int], execution: Execution, num_microbatches: int) -> Ints:
    """Return the (A, 7 + W) table of the execution's schedule for one replica; it is read-only and cached.

    stages: stage count of each unit in pipeline order. Raises ValueError where `headrace.schedule.build` does.
    """
    return _table(execution.schedule, tuple(stages.items()), execution.chunks, execution.in_flight, num_microbatches)


@lru_cache(maxsize=256)
def _table(name: str, stages: tuple[tuple[str, int], ...], chunks: int, in_flight: int | None, num_microbatches: int) -> Ints:
    graph = stage_graph(dict(stages))
    schedule = build(name, dict(stages), range(num_microbatches), chunks=chunks, in_flight=in_flight)
    row_of = _executable_order(graph, chunks, schedule)
    width = max(1, *(len(stage.before) for stage in graph))
    units = [unit for unit, _ in stages]
    table = np.full((len(row_of), WAITS + width), -1, np.int64)
    for (s, action), row in row_of.items():
        here = graph[s]
        forward = action.kind == Kind.FORWARD
        ends_unit = here.index == (here.size - 1 if forward else 0) and action.chunk == (chunks - 1 if forward else 0)
        leaves = ends_unit and action.kind != Kind.WEIGHT
        table[row, :BEFORE] = s, action.kind, action.microbatch, action.chunk, units.index(here.unit), leaves
        waits = [row_of[needed] for needed in inputs(graph, chunks, s, action)]
        table[row, WAITS : WAITS + len(waits)] = waits
    for s, actions in enumerate(schedule):
        rows = [row_of[s, action] for action in actions]
        table[rows[1:], BEFORE] = rows[:-1]
    table.flags.writeable = False
    return table


def _executable_order(graph: Sequence[Stage], chunks: int, schedule: Schedule) -> dict[tuple[int, Action], int]:
    """Number all (stage, action) pairs in an executable order: in turn, each stage runs its actions until an input is missing."""
    row_of: dict[tuple[int, Action], int] = {}
    left = [list(reversed(actions)) for actions in schedule]
    while any(left):
        before = len(row_of)
        for s, actions in enumerate(left):
            while actions and all(needed in row_of for needed in inputs(graph, chunks, s, actions[-1])):
                row_of[s, actions.pop()] = len(row_of)
        assert len(row_of) > before, "a schedule never waits for itself"
    return row_of


@kernel
def replay(
    tables: Ints,
    first_row: Ints,
    first_action: Ints,
    slot_at: Ints,
    seconds: Floats,
    hop_s: Floats,
    link_offsets: Ints,
    link_slots: Ints,
    link_delay_s: Floats,
    replicas_coupled: bool,
    first_s: Floats,
) -> tuple[Floats, Floats, Ints]:
    """Run the schedules of D replicas with times: return the start, end and cause of every action.

    tables: several tables (see the module docstring), one after another. first_row: (D,) where the table of a replica begins.
    first_action: (D + 1,) where its actions begin in the result. slot_at: (D, K) slot of the microbatch at a position. seconds:
    (D * K, S, kinds) of one action. hop_s: (2, D * K, U) seconds from a stage of the unit to the next one, negative if they
    overlap. An action of kind k that enters a unit over link l (between unit l and the unit behind it) with slot i needs what the
    slots from link_offsets[k, l, i] to link_offsets[k, l, i + 1] in link_slots[k, l], of the unit on the other side, send it in
    link_delay_s[k, l] seconds. Without links, it needs the equal microbatch. replicas_coupled: whether replicas wait for each
    other (then all have the same table); otherwise each is run by itself. first_s: (S,) seconds before which a stage does
    nothing.

    The cause of an action is the action that it waited for last, -1 if it did not wait. An action that never gets its inputs
    keeps the end -1.
    """
    starts = np.zeros(first_action[-1])
    ends = np.full(first_action[-1], _NOT_YET)
    causes = np.full(first_action[-1], -1)
    exits = np.full((2, hop_s.shape[2], hop_s.shape[1]), -1)
    size = first_row.size if replicas_coupled else 1
    for first in range(0, first_row.size, size):
        last = first + size
        left = first_action[last] - first_action[first]
        ran = 1
        while left > 0 and ran > 0:
            ran = _run_once(
                tables, first_row[first:last], first_action[first : last + 1], slot_at[first:last], seconds, hop_s,
                link_offsets, link_slots, link_delay_s, first_s, starts, ends, causes, exits,
            )  # fmt: skip
            left -= ran
    return starts, ends, causes


@kernel
def _run_once(
    tables: Ints,
    first_row: Ints,
    first_action: Ints,
    slot_at: Ints,
    seconds: Floats,
    hop_s: Floats,
    link_offsets: Ints,
    link_slots: Ints,
    link_delay_s: Floats,
    first_s: Floats,
    starts: Floats,
    ends: Floats,
    causes: Ints,
    exits: Ints,
) -> int:
    """Go once through the table that the given replicas share, run every action that can run, and return how many did.

    One pass is enough unless microbatches wait for later ones.
    """
    ran = 0
    linked = link_offsets.shape[1] > 0
    for place in range(first_action[1] - first_action[0]):
        row = first_row[0] + place
        kind, unit, stage = tables[row, KIND], tables[row, UNIT], tables[row, STAGE]
        for r in range(first_row.size):
            action = first_action[r] + place
            if ends[action] != _NOT_YET:
                continue
            slot = slot_at[r, tables[row, POSITION]]
            cause = first_action[r] + tables[row, BEFORE] if tables[row, BEFORE] >= 0 else -1
            start = ends[cause] if cause >= 0 else first_s[stage]
            for w in range(WAITS, tables.shape[1]):
                if tables[row, w] < 0 or start == _NOT_YET:
                    break
                wait = first_row[r] + tables[row, w]
                other = tables[wait, UNIT]
                if linked and other != unit:
                    link = min(unit, other)
                    begin, end = link_offsets[kind, link, slot], link_offsets[kind, link, slot + 1]
                    there, sender = _sent(
                        ends, exits[kind, other], link_slots[kind, link, begin:end], link_delay_s[kind, link, begin:end]
                    )
                else:
                    sender = first_action[r] + tables[row, w]
                    there = ends[sender]
                    if there != _NOT_YET and tables[wait, STAGE] != stage:
                        there += hop_s[kind, slot, unit]
                if there == _NOT_YET:
                    start = _NOT_YET
                elif there > start:
                    start, cause = there, sender
            if start == _NOT_YET:
                continue
            starts[action], causes[action] = start, cause
            ends[action] = start + seconds[slot, stage, kind]
            if tables[row, EXIT] == 1:
                exits[kind, unit, slot] = action
            ran += 1
    return ran


@kernel
def _sent(ends: Floats, exits: Ints, slots: Ints, seconds: Floats) -> tuple[float, int]:
    """Return when everything that the slots send has arrived, and the action that sent the last of it.

    If one of the slots has not run yet, the time is _NOT_YET and the action -1; it is also -1 if there is nothing to wait for.
    """
    there, sender = 0.0, -1
    for i in range(slots.size):
        action = exits[slots[i]]
        if action < 0:
            return _NOT_YET, -1
        if ends[action] + seconds[i] > there:
            there, sender = ends[action] + seconds[i], action
    return there, sender
