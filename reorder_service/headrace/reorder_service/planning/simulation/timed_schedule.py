"""The table form of a pipeline schedule, and the kernels that run such tables with times.

A table is an int64 array with one row per action of a replica, in an order in which every action comes after all that it
waits for, provided that microbatches wait only for equal ones. Its columns are STAGE, KIND, POSITION (of the microbatch among
those that run), CHUNK, UNIT, EXIT (1 if the result leaves the unit), BEFORE (the row of the stage's previous action) and, from
WAITS on, the rows whose results it needs; -1 stands for none.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.execution import Execution
from headrace.schedule import Kind, Schedule, Stage, build, inputs, numbered_actions, stage_graph

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
    if chunks == 1:
        numbers = numbered_actions(name, dict(stages), num_microbatches, in_flight=in_flight)
        first = np.cumsum([0, *map(len, numbers)])
        kind, microbatch = np.divmod(_joined(numbers, first), max(1, num_microbatches))
        chunk, stage = np.zeros_like(kind), np.repeat(np.arange(len(graph)), np.diff(first))
        waits = _waits(graph, stage, kind, microbatch)
    else:
        schedule = build(name, dict(stages), range(num_microbatches), chunks=chunks, in_flight=in_flight)
        first = np.cumsum([0, *map(len, schedule)])
        stage = np.repeat(np.arange(len(graph)), np.diff(first))
        fields = ("kind", "microbatch", "chunk")
        kind, microbatch, chunk = (_joined([map(operator.attrgetter(f), of) for of in schedule], first) for f in fields)
        waits = _waits_of_chunks(graph, chunks, schedule)
    row_of = executable_order(waits, first)
    assert row_of.min(initial=0) >= 0, "a schedule never waits for itself"
    index, size = (np.array([getattr(of_stage, field) for of_stage in graph])[stage] for field in ("index", "size"))
    forward = kind == Kind.FORWARD
    ends_unit = np.where(forward, (index == size - 1) & (chunk == chunks - 1), (index == 0) & (chunk == 0))
    units = [unit for unit, _ in stages]
    unit = np.array([units.index(of_stage.unit) for of_stage in graph])[stage]
    before = np.append(-1, row_of)[: stage.size]
    before[first[:-1][np.diff(first) > 0]] = -1
    table = np.empty((stage.size, WAITS + waits.shape[1]), np.int64)
    columns = (stage, kind, microbatch, chunk, unit, ends_unit & (kind != Kind.WEIGHT), before)
    table[row_of, :WAITS] = np.stack(columns, axis=1)
    table[row_of, WAITS:] = np.where(waits >= 0, np.append(row_of, -1)[waits], -1)
    table.flags.writeable = False
    return table


def _joined(numbers: Iterable[Iterable[int]], first: Ints) -> Ints:
    """Return (A,) the numbers of all stages, one after the other. first: (S + 1,) where each stage's begin."""
    return np.fromiter(itertools.chain.from_iterable(numbers), np.int64, int(first[-1]))


def _waits(graph: Sequence[Stage], stage: Ints, kind: Ints, microbatch: Ints) -> Ints:
    """Return (A, W) the actions that each action waits for, as `headrace.schedule.inputs` names them where there are no chunks.

    Actions are numbered stage by stage, in the order of their columns stage, kind and microbatch, (A,) each.
    """
    at = np.full((len(graph), len(Kind), microbatch.max(initial=-1) + 1), -1)
    at[stage, kind, microbatch] = np.arange(stage.size)
    waits = np.full((stage.size, max(1, *(len(of_stage.before) for of_stage in graph))), -1)
    for s, of_stage in enumerate(graph):
        forward, backward, weight = at[s]
        sources = (s - 1,) if of_stage.index > 0 else of_stage.before
        for w, source in enumerate(sources):
            waits[forward, w] = at[source, Kind.FORWARD]
        behind = s + 1 if of_stage.index < of_stage.size - 1 else of_stage.behind
        waits[backward, 0] = forward if behind is None else at[behind, Kind.BACKWARD]
        put_off = weight >= 0
        waits[weight[put_off], 0] = backward[put_off]
    return waits


def _waits_of_chunks(graph: Sequence[Stage], chunks: int, schedule: Schedule) -> Ints:
    """Return the same for a schedule with several chunks on a stage."""
    number = {(s, action): 0 for s, actions in enumerate(schedule) for action in actions}
    number = dict(zip(number, range(len(number)), strict=True))
    waits = np.full((len(number), max(1, *(len(stage.before) for stage in graph))), -1)
    for (s, action), place in number.items():
        needed = [number[source] for source in inputs(graph, chunks, s, action)]
        waits[place, : len(needed)] = needed
    return waits


@kernel
def executable_order(waits: Ints, first: Ints) -> Ints:
    """Number all actions in an executable order: in turn, each stage runs its actions until an input is missing.

    waits: (A, W) the actions that each waits for, -1 for none. first: (S + 1,) where each stage's actions begin. Returns (A,) the
    place of each action, -1 for one that never can run.
    """
    place = np.full(waits.shape[0], -1)
    following = first[:-1].copy()
    count, before = 0, -1
    while count > before:
        before = count
        for s in range(following.size):
            while following[s] < first[s + 1]:
                ready = True
                for wait in waits[following[s]]:
                    if wait >= 0 and place[wait] < 0:
                        ready = False
                if not ready:
                    break
                place[following[s]] = count
                count += 1
                following[s] += 1
    return place


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
