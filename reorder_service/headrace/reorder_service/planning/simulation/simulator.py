"""Simulation of a step's time and memory, by replaying its schedule with the times of a plan's microbatches.

An action starts when its stage is free and its last input has arrived: from the neighbouring stage or, between units, from
every microbatch of any replica that holds one of its samples. If a microbatch is passed on in parts (deferral), its parts need
only arrive as fast as they are needed. A transfer between two stages delays the receiver and keeps no stage busy. Replicas that
exchange no samples meet only at the end of the step, so the slowest one determines the step's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.held_activations import activation_memory
from headrace.plan import Predicted
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.simulation import timed_schedule as actions_of
from headrace.reorder_service.planning.simulation.makespan import slowest_makespan
from headrace.reorder_service.planning.simulation.timed_schedule import replay, schedule_table
from headrace.reorder_service.planning.simulation.whole_step import end_of_step, peaks_of_stages
from headrace.reorder_service.planning.simulation.work import Links, Work

__all__ = ["Timeline", "Work", "peak_memory", "simulate", "timeline"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """All actions of a step, as columns of one entry per action, ordered by replica, then stage, then time."""

    replica: Ints
    stage: Ints
    """Physical stage, 0 .. S - 1."""
    microbatch: Ints
    """Index of the action's microbatch in the plan."""
    kind: Ints
    """What the action does, as the value of a `headrace.schedule.Kind`."""
    chunk: Ints
    start_s: Floats
    end_s: Floats
    critical: NDArray[np.bool_]
    """Whether the action lies on the critical path; if there are several such paths, on one of them.

    That is a chain from the start of the step to its end, without what units exchange there, in which every action starts when
    the one before it ends, or when what that one sent has arrived.
    """
    memory_after: Floats
    """Activations that the stage holds after the action, in the unit of `Batch.memory`."""


def simulate(work: Work) -> Predicted:
    """Simulate a step: return its iteration time, idle share and lower bound.

    `bubble` is the share of the time of all stages of all replicas, up to the end of the slowest one, in which they are idle. For
    `lower_bound_s` see `work.lower_bound`. Raises ValueError if the plan makes its schedule wait for itself.
    """
    iteration = _iteration_s(work)
    busy = float(work.seconds.sum()) * work.execution.chunks
    num_stages = sum(replicas * n for replicas, n in zip(work.unit_replicas, work.topology.stages.values(), strict=True))
    capacity = num_stages * iteration
    bubble = max(0.0, 1.0 - busy / capacity) if capacity > 0 else 0.0
    bound = min(work.lower_bound_s, iteration)  # their sums are rounded in different orders
    return Predicted(iteration_s=iteration, bubble=bubble, lower_bound_s=bound)


def timeline(work: Work) -> Timeline:
    """Simulate a step: return when each of its actions starts and ends, counted from the start of the step.

    Raises ValueError if the plan makes its schedule wait for itself.
    """
    layout = Layout.of(work)
    starts, ends, causes = _replay(work, layout)
    memory_after = _memory_after(work, layout)
    replica, rows = layout.actions()
    order = np.lexsort((rows[:, actions_of.STAGE], replica))
    order = order[replica[order] < np.array(work.unit_replicas)[rows[order, actions_of.UNIT]]]
    slot = layout.slot_at[replica, rows[:, actions_of.POSITION]]
    return Timeline(
        replica=replica[order],
        stage=rows[order, actions_of.STAGE],
        microbatch=slot[order] % work.topology.microbatches,
        kind=rows[order, actions_of.KIND],
        chunk=rows[order, actions_of.CHUNK],
        start_s=starts[order],
        end_s=ends[order],
        critical=_critical(_over(work, ends, rows), causes)[order],
        memory_after=memory_after[order],
    )


def peak_memory(work: Work) -> Floats:
    """Return the (D, S) most activations that each stage holds at any time, in the unit of `Batch.memory`.

    Each chunk takes its share when its forward starts and releases it when its backward ends. A deferred sample's share is
    released when its own backward ends, and if weight gradients are put off (`held_activations`), when those are done. A unit
    without a backward keeps nothing. A stage does one thing at a time, so what it holds depends only on the order of its
    actions, not on their times.
    """
    layout = Layout.of(work)
    until = np.array([work.execution.freed_by(unit) for unit in work.topology.stages], np.int64)
    return peaks_of_stages(
        layout.tables,
        layout.first_row,
        np.diff(layout.first_action),
        layout.slot_at,
        replicas_of_stages(work),
        work.memory,
        until,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Index arrays with which the kernels find each replica's actions; see `timed_schedule.replay`."""

    tables: Ints
    first_row: Ints
    first_action: Ints
    slot_at: Ints

    @classmethod
    def of(cls, work: Work) -> Layout:
        """Return those of a step's work."""
        return cls.of_tables(work, lambda count: schedule_table(work.topology.stages, work.execution, count))

    @classmethod
    def of_tables(cls, work: Work, table_of: Callable[[int], Ints]) -> Layout:
        """Return those of a step's work whose replicas follow the tables of `table_of`, by their number of microbatches."""
        num_replicas, num_microbatches = work.occupied.shape
        counts, which = np.unique(work.occupied.sum(axis=1), return_inverse=True)
        tables = [table_of(count) for count in counts.tolist()]
        lengths = np.array([len(table) for table in tables])
        order = np.argsort(~work.occupied, axis=1, kind="stable")
        return cls(
            tables=np.concatenate(tables),
            first_row=(np.cumsum(lengths) - lengths)[which],
            first_action=np.concatenate(([0], np.cumsum(lengths[which]))),
            slot_at=order + num_microbatches * np.arange(num_replicas)[:, None],
        )

    def actions(self) -> tuple[Ints, Ints]:
        """Return (A,) the replica and (A, columns) the table's row of each action."""
        num_actions = np.diff(self.first_action)
        replica = np.repeat(np.arange(num_actions.size), num_actions)
        return replica, self.tables[np.arange(replica.size) + np.repeat(self.first_row - self.first_action[:-1], num_actions)]


def _iteration_s(work: Work) -> float:
    holes = (work.occupied[:, 1:] > work.occupied[:, :-1]).any()
    if work.links is not None or holes or work.execution.exchange_s:
        return _linked_s(work)
    counts = work.occupied.sum(axis=1)
    return max(
        slowest_makespan(
            work.seconds,
            np.flatnonzero(counts == count),
            schedule_table(work.topology.stages, work.execution, count),
        )
        for count in np.unique(counts).tolist()
    )


def _linked_s(work: Work) -> float:
    """Return when a step is over in which transfers, exchanges or samples of other microbatches are waited for.

    Raises ValueError if the schedule waits for itself.
    """
    layout, links = Layout.of(work), links_of(work)
    first_s, last_s = exchanges_of(work)
    replicas = replicas_of_stages(work) if work.links is not None else np.full(work.topology.num_stages, layout.first_row.size)
    seconds = end_of_step(
        layout.tables,
        layout.first_row,
        np.diff(layout.first_action),
        layout.slot_at,
        replicas,
        work.seconds.reshape(-1, *work.seconds.shape[2:]),
        links.hop_s,
        links.offsets,
        links.slots,
        links.delay_s,
        work.replicas_coupled,
        first_s,
        last_s,
    )
    if seconds < 0:
        raise never_ends(work)
    return seconds


def replicas_of_stages(work: Work) -> Ints:
    """Return (S,) the number of replicas of each stage."""
    found: Ints = np.repeat(work.unit_replicas, list(work.topology.stages.values()))
    return found


def exchanges_of(work: Work) -> tuple[Floats, Floats]:
    """Return (S,) the seconds that each stage's unit exchanges weights at first, and gradients at last."""
    of_units = [work.execution.exchange_s.get(unit, (0.0, 0.0)) for unit in work.topology.stages]
    first, last = np.repeat(np.array(of_units), list(work.topology.stages.values()), axis=0).T
    return np.ascontiguousarray(first), last


def links_of(work: Work) -> Links:
    """Return the links of a step's work; where it has none, such that say nothing."""
    num_slots = work.occupied.size
    return work.links or Links(
        hop_s=np.zeros((2, num_slots, len(work.topology.stages))),
        offsets=np.zeros((2, 0, num_slots + 1), np.int64),
        slots=np.zeros((2, 0, 0), np.int64),
        delay_s=np.zeros((2, 0, 0)),
    )


def never_ends(work: Work) -> ValueError:
    """Return the error of a plan that makes its schedule wait for itself."""
    return ValueError(
        f"the plan makes schedule {work.execution.schedule!r} wait for itself: a unit's backward needs that of a microbatch "
        "that has not gone forth yet; split the backward, defer less, or let more microbatches be in flight"
    )


def _over(work: Work, ends: Floats, rows: Ints) -> Floats:
    """Return (A,) when each action is over, with its unit's last exchange. rows: (A, columns) of the actions in their table."""
    return ends + exchanges_of(work)[1][rows[:, actions_of.STAGE]] if work.execution.exchange_s else ends


def _replay(work: Work, layout: Layout) -> tuple[Floats, Floats, Ints]:
    """Return the (A,) starts, ends and causes of all actions. Raises ValueError if the schedule waits for itself."""
    num_slots = work.occupied.size
    links = links_of(work)
    starts, ends, causes = replay(
        layout.tables,
        layout.first_row,
        layout.first_action,
        layout.slot_at,
        work.seconds.reshape(num_slots, *work.seconds.shape[2:]),
        links.hop_s,
        links.offsets,
        links.slots,
        links.delay_s,
        work.replicas_coupled,
        exchanges_of(work)[0],
    )
    if (ends < 0).any():
        raise never_ends(work)
    return starts, ends, causes


def _critical(over: Floats, causes: Ints) -> NDArray[np.bool_]:
    """Mark the (A,) actions on the critical path: the last one, its cause, the cause of that, and so on.

    over: (A,) when an action is over, with the exchange behind it.
    """
    critical = np.zeros(over.size, np.bool_)
    action = int(over.argmax()) if over.size else -1
    while action >= 0:
        critical[action] = True
        action = int(causes[action])
    return critical


def _memory_after(work: Work, layout: Layout) -> Floats:
    """Return (A,) what its stage holds after each action."""
    until = [work.execution.freed_by(unit) for unit in work.topology.stages]
    after = np.zeros(layout.first_action[-1])
    num_actions = np.diff(layout.first_action)
    for count in np.unique(num_actions):
        replicas = np.flatnonzero(num_actions == count)
        table = layout.tables[layout.first_row[replicas[0]] :][:count]
        for stage in range(work.topology.num_stages):
            places = np.flatnonzero(table[:, actions_of.STAGE] == stage)
            if places.size:
                rows = table[places]
                unit, slots = rows[0, actions_of.UNIT], layout.slot_at[replicas][:, rows[:, actions_of.POSITION]]
                takes, gives = work.memory[:, slots, unit]
                holds = activation_memory(rows[:, actions_of.KIND], takes, gives, until[unit])
                after[layout.first_action[replicas][:, None] + places] = holds
    return after
