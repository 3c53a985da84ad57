"""Simulation of a step in which encoders run on the ranks of the LLM, beside its stages.

Such a unit, a guest, has as many ranks as the LLM (dp x tp x pp), and its places lie on the LLM's ranks in their order. Every
rank takes one action at a time. Under `colocated` it takes all forwards of its guests first, unit by unit, then the LLM's
actions, then what is left of the guests. Under `nested` each unit keeps to the order of the schedule, and whose turn it is comes
from a list schedule, in which of all actions that could run the one that can begin first does: the LLM's before a guest's
backward, and that before a guest's forward. The trainers find these turns before a step begins, from the samples' costs alone,
and keep to them whatever actions take; so do we, and then time them with all that they take. Guests that are cut as the schedule
cuts them hold no more microbatches than as stages of their own, so that `nested` bounds their activations; `colocated` holds
those of the whole step. Passes of a guest may be cut into pieces, each an action of some of its layers (`Sharing.pieces`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.sharing import Sharing
from headrace.reorder_service.planning.simulation.cut_schedule import in_pieces
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.list_schedule import (
    CELL,
    KIND,
    REPLICA,
    ROW,
    SLOT,
    STAGE,
    UNIT,
    WIDTH,
    edges_of,
    lists_of_cells,
    nested_turns,
    place_actions,
    run_lists,
    sums_of_cells,
)
from headrace.reorder_service.planning.simulation.simulator import Layout, Timeline, exchanges_of, links_of, never_ends
from headrace.reorder_service.planning.simulation.timed_schedule import CHUNK, schedule_table
from headrace.reorder_service.planning.simulation.work import Work, backward_slots, longest_way
from headrace.schedule import Kind

_GRADIENTS = 2.0  # that a backward computes, of inputs and of weights: what it takes by the trainers' assumption, in forwards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedStep:
    """A simulated step, with its actions replica by replica, without those of replicas that a unit does not have."""

    sharing: Sharing
    step_s: float
    peak_memory: Floats
    """(D, S) the most activations that the ranks of a stage hold, of all units on them, in the unit of `Batch.memory`; stages of
    guests repeat what is said of the LLM's."""
    cells: Ints
    """(S, 3) the cells of all stages, as `place_actions` takes them."""
    actions: Ints
    """(a, 8) with the columns of `list_schedule`; stages that share no ranks have a cell of their own each."""
    chunk: Ints
    """Chunk of the unit, or piece of its pass, that an action is of."""
    turn: Ints
    """Place in an order that every cell keeps to."""
    start_s: Floats
    end_s: Floats
    cause: Ints
    """Place in these columns of what an action waits for last, on its ranks or to arrive; -1 for none."""
    last: int
    """Place of the action with which the step ends, but for exchanges behind it; -1 if there is no action."""

    @property
    def peaks(self) -> Floats:
        """(S,) the most that any replica of a stage holds."""
        peaks: Floats = self.peak_memory.max(axis=0)
        return peaks

    def timeline(self, num_microbatches: int) -> Timeline:
        """Return the actions as a timeline, in their own order; what stages hold after each of them is left out, as 0."""
        critical = np.zeros(len(self.actions), np.bool_)
        action = self.last
        while action >= 0:
            critical[action] = True
            action = int(self.cause[action])
        return Timeline(
            replica=self.actions[:, REPLICA],
            stage=self.actions[:, STAGE],
            microbatch=self.actions[:, SLOT] % num_microbatches,
            kind=self.actions[:, KIND],
            chunk=self.chunk,
            start_s=self.start_s,
            end_s=self.end_s,
            critical=critical,
            memory_after=np.zeros(len(self.actions)),
        )


def simulate_shared(batch: Batch, slots: Slots, sharing: Sharing) -> SharedStep:
    """Simulate the step of a plan, given by its (U, n) slots, with the guests on the LLM's ranks.

    The exchange of guests comes behind that of the LLM on their ranks. Raises ValueError if the plan makes its schedule wait for
    itself, or if a guest has not as many ranks as the LLM.
    """
    work, layout = _work_of(batch, slots, sharing)
    links, units = links_of(work), list(work.topology.stages)
    unit_of_stage = np.repeat(np.arange(len(units)), list(work.topology.stages.values()))
    cells, num_cells = cells_of(work, sharing)
    replicas = np.array(work.unit_replicas)[unit_of_stage]
    actions = place_actions(layout.tables, layout.first_row, layout.first_action, layout.slot_at, replicas, cells)
    first, targets, delays, waits = edges_of(
        layout.tables, layout.first_row, layout.first_action, actions, links.hop_s, links.offsets, links.slots, links.delay_s
    )
    there = np.flatnonzero(actions[:, ROW] >= 0)
    columns = actions[there]
    is_guest = np.array([unit in sharing.guests for unit in units])
    if sharing.order == "nested":
        assumed_s, precedence = np.zeros(len(actions)), np.zeros(len(actions), np.int64)
        assumed_s[there] = _assumed_s(batch, slots, sharing, columns)
        precedence[there] = _precedence(units, columns)
        turns = nested_turns(
            layout.tables, layout.first_action, actions, first, targets, waits, assumed_s, precedence, num_cells
        )[there]
        if turns.min(initial=0) < 0:
            raise never_ends(work)
    else:
        turns = _turns_of_phases(is_guest, columns)
    order = np.empty_like(there)
    order[turns] = there
    begins, lists = lists_of_cells(actions, order, num_cells)
    first_s, last_s = exchanges_of(work)
    seconds, not_before = np.zeros(len(actions)), np.zeros(len(actions))
    seconds[there] = work.seconds.reshape(-1, *work.seconds.shape[2:])[columns[:, SLOT], columns[:, STAGE], columns[:, KIND]]
    not_before[there] = first_s[columns[:, STAGE]]
    starts, ends, causes = run_lists(actions, first, targets, delays, waits, begins, lists, seconds, not_before)
    if ends[there].min(initial=0.0) < 0:
        raise never_ends(work)
    until = np.array([work.execution.freed_by(unit) for unit in units], np.int64)
    of_units = last_s[np.searchsorted(unit_of_stage, np.arange(len(units)))]
    peaks, over = sums_of_cells(actions, begins, lists, ends, work.memory, until, is_guest.astype(np.int64), of_units)
    place = np.full(len(actions) + 1, -1)
    place[there] = np.arange(there.size)
    behind_s = np.where(is_guest[columns[:, UNIT]], 0.0, last_s[columns[:, STAGE]])
    return SharedStep(
        sharing=sharing,
        step_s=float(over.max(initial=0.0)),
        peak_memory=_by_stage(peaks, cells, replicas),
        cells=cells,
        actions=columns,
        chunk=layout.tables[columns[:, ROW], CHUNK],
        turn=turns,
        start_s=starts[there],
        end_s=ends[there],
        cause=place[causes[there]],
        last=_last_of(columns, ends[there] + behind_s, over),
    )


def least_shared_s(batch: Batch, sharing: Sharing) -> float:
    """Return the seconds that no plan and no order beats: the work of all ranks of the LLM spread evenly, or the longest
    sample."""
    seconds, ranks = 0.0, 0
    for u, (unit, replicas) in enumerate(zip(batch.units, batch.unit_replicas, strict=True)):
        if unit in sharing.slices:
            seconds += sharing.slices[unit] * float(batch.costs[u].sum()) * batch.execution.step_factor(unit)
            ranks = max(ranks, sharing.slices[unit] * replicas * batch.topology.stages[unit])
    return max(seconds / ranks, longest_way(batch))


def cells_of(work: Work, sharing: Sharing) -> tuple[Ints, int]:
    """Return (S, 3) the cells of all stages, as `place_actions` takes them, and the number of cells.

    Raises ValueError if a guest has not as many ranks as the LLM.
    """
    ranks = {
        unit: replicas * sharing.slices[unit] * stages
        for (unit, stages), replicas in zip(work.topology.stages.items(), work.unit_replicas, strict=True)
        if unit in sharing.slices
    }
    if wrong := [unit for unit, number in ranks.items() if number != ranks[LLM]]:
        raise ValueError(f"unit {wrong[0]!r} on the LLM's ranks has {ranks[wrong[0]]} of them, but there are {ranks[LLM]}")
    found, total = [], ranks[LLM] // sharing.cell
    for (unit, stages), replicas in zip(work.topology.stages.items(), work.unit_replicas, strict=True):
        shares = unit in sharing.slices
        width = sharing.slices[unit] // sharing.cell if shares else 1
        begin = 0 if shares else total
        found += [(begin + stage * width, stages * width, width) for stage in range(stages)]
        total += 0 if shares else replicas * stages
    return np.array(found, np.int64), total


def _work_of(batch: Batch, slots: Slots, sharing: Sharing) -> tuple[Work, Layout]:
    """Return the work of a plan and its schedule, with guests' passes in pieces."""
    work = planned_work(batch, slots)
    if max(sharing.pieces.values(), default=1) == 1:
        return work, Layout.of(work)
    pieces = np.array([sharing.pieces.get(unit, 1) for unit in batch.units])
    execution = work.execution
    work = replace(Work.of(batch, slots, sharing.pieces), execution=execution)
    return work, Layout.of_tables(work, lambda count: in_pieces(schedule_table(work.topology.stages, execution, count), pieces))


def _last_of(columns: Ints, over_s: Floats, over_of_cells: Floats) -> int:
    """Return the place of the action that is over last of those of the cell that is done last; -1 if there is none."""
    if not over_s.size:
        return -1
    cell = int(over_of_cells.argmax())
    there = (columns[:, CELL] <= cell) & (cell < columns[:, CELL] + columns[:, WIDTH])
    return int(np.where(there, over_s, -1.0).argmax())


def _assumed_s(batch: Batch, slots: Slots, sharing: Sharing, columns: Ints) -> Floats:
    """Return what trainers assume that actions take: even stages, and gradients of inputs and of weights a forward's time
    each."""
    back, size = backward_slots(batch, slots), batch.num_slots
    costs = np.stack(
        [
            [np.bincount(of_unit, weights=cost, minlength=size) for of_unit, cost in zip(way, batch.costs, strict=True)]
            for way in (slots, back, back)
        ]
    )
    factors = np.array([batch.execution.factors(unit) for unit in batch.units])
    factors[:, Kind.BACKWARD] = np.minimum(factors.sum(axis=1) - 1, _GRADIENTS) - (factors[:, Kind.WEIGHT] > 0)
    factors[:, Kind.WEIGHT] = factors[:, Kind.WEIGHT] > 0
    parts = np.array([n * batch.execution.chunks * sharing.pieces.get(unit, 1) for unit, n in batch.topology.stages.items()])
    unit, kind = columns[:, UNIT], columns[:, KIND]
    assumed: Floats = factors[unit, kind] * costs[kind, unit, columns[:, SLOT]] / parts[unit]
    return np.maximum(assumed, 0.0)


def _precedence(units: list[str], columns: Ints) -> Ints:
    """Return who comes first of actions that can begin at the same time: the LLM's and the generator's, then backwards of
    encoders, then by name and place."""
    is_encoder = np.array([unit not in (LLM, GENERATOR) for unit in units])
    unit, num_stages = columns[:, UNIT], int(columns[:, STAGE].max(initial=0)) + 1
    rank = np.where(is_encoder[unit], np.where(columns[:, KIND] == Kind.BACKWARD, 1, 2), 0)
    name = np.argsort(np.argsort(np.array(units)))[unit]
    num_replicas = int(columns[:, REPLICA].max(initial=0)) + 1
    found: Ints = ((rank * len(units) + name) * num_replicas + columns[:, REPLICA]) * num_stages + columns[:, STAGE]
    return found


def _turns_of_phases(is_guest: NDArray[np.bool_], columns: Ints) -> Ints:
    """Return turns in which cells take their guests' forwards, unit by unit, then their own actions, then the rest of guests."""
    unit = columns[:, UNIT]
    phase = np.where(is_guest[unit], np.where(columns[:, KIND] == Kind.FORWARD, 0, 2), 1)
    order = np.argsort((phase * is_guest.size + unit).astype(np.int16), kind="stable")
    turns = np.empty_like(order)
    turns[order] = np.arange(order.size)
    return turns


def _by_stage(of_cells: Floats, cells: Ints, replicas: Ints) -> Floats:
    """Return (D, S) the most of any cell of a stage of a replica; 0 for replicas that a unit does not have."""
    peaks = np.zeros((replicas.max(), len(cells)))
    for stage, (begin, between, width) in enumerate(cells.tolist()):
        of_stage = begin + np.arange(replicas[stage])[:, None] * between + np.arange(width)
        peaks[: replicas[stage], stage] = of_cells[of_stage].max(axis=1)
    return peaks
