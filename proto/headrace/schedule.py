"""Who does what in which order: pipeline schedules as data. The simulator times them, the trainer executes them.

A schedule gives every stage of one replica its list of actions. A stage takes them strictly in order and waits for each
one's inputs (`inputs`). Schedules know neither times nor samples.

The stages stand in a graph: those of one unit form a chain; the last stage of every encoder feeds the first one of the
LLM, and the LLM's last one the generator's first. Encoders do not wait for each other. With {"vision": 2, "audio": 1,
"llm": 5} the stages are 0-1, 2 and 3-7, and both stage 1 and stage 2 have five stages behind them.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.plan import Topology

ZERO_BUBBLE = "zero-bubble"
SCHEDULES = ("1f1b", "interleaved", "gpipe", "eager", ZERO_BUBBLE)
"""Names of the pipeline schedules: see `build`."""


class Kind(enum.IntEnum):
    """What a stage does with a microbatch. The values index arrays of the simulator."""

    FORWARD = 0
    BACKWARD = 1
    """All gradients, or under `zero-bubble` those of what came in."""
    WEIGHT = 2
    """The weights' gradients that the backward left for later: only under `zero-bubble`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One step of one stage."""

    kind: Kind
    microbatch: int
    chunk: int = 0
    """Which of the stage's parts of the model; always 0 unless the schedule is interleaved."""


Schedule = tuple[tuple[Action, ...], ...]
"""`schedule[stage]`: the actions of that stage, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a physical stage stands in the graph of units."""

    unit: str
    index: int
    """Within its unit, of `size` stages."""
    size: int
    before: tuple[int, ...]
    """On the first stage of a unit: the last stages of the units that feed it. Elsewhere empty."""
    behind: int | None
    """On the last stage of a unit: the first stage of the unit that it feeds, if any. Elsewhere None."""
    num_behind: int
    """Stages that a microbatch still has to pass after this one."""


def stage_graph(stages: Mapping[str, int]) -> tuple[Stage, ...]:
    """All physical stages, in order, from the stage count of each unit in pipeline order.

    Raises ValueError where `headrace.plan.Topology` does: no LLM, a unit without a stage, units out of order.
    """
    topology = Topology(replicas=1, microbatches=1, stages=dict(stages))
    first, total = {}, 0
    for unit, size in stages.items():
        first[unit] = total
        total += size
    last = {unit: first[unit] + size - 1 for unit, size in stages.items()}
    feeds = topology.feeds
    num_after = {unit: sum(stages[other] for other in _path(unit, feeds)) for unit in stages}
    return tuple(
        Stage(
            unit=unit,
            index=index,
            size=size,
            before=tuple(last[other] for other in feeds if feeds[other] == unit) if index == 0 else (),
            behind=first[feeds[unit]] if unit in feeds and index == size - 1 else None,
            num_behind=size - 1 - index + num_after[unit],
        )
        for unit, size in stages.items()
        for index in range(size)
    )


def _path(unit: str, feeds: Mapping[str, str]) -> list[str]:
    """The units behind `unit`."""
    return [feeds[unit], *_path(feeds[unit], feeds)] if unit in feeds else []


def inputs(graph: Sequence[Stage], chunks: int, stage: int, action: Action) -> tuple[tuple[int, Action], ...]:
    """The (stage, action) pairs whose results an action needs; none for the first forward of an encoder.

    A forward needs the stage before it, on a unit's first stage the chunk before (on the unit's last stage), and on its
    first chunk the last forwards of the units in front. A backward needs the mirror image, at the very end its own forward;
    a weight action its own backward. All are of the same microbatch: with deferral, which samples of which microbatch, the plan
    says.
    """
    here = graph[stage]
    if action.kind == Kind.WEIGHT:
        return ((stage, Action(kind=Kind.BACKWARD, microbatch=action.microbatch, chunk=action.chunk)),)
    if action.kind == Kind.FORWARD:
        if here.index > 0:
            places = [(stage - 1, action.chunk)]
        elif action.chunk > 0:
            places = [(stage + here.size - 1, action.chunk - 1)]
        else:
            places = [(other, chunks - 1) for other in here.before]
    elif here.index < here.size - 1:
        places = [(stage + 1, action.chunk)]
    elif action.chunk < chunks - 1:
        places = [(stage - here.size + 1, action.chunk + 1)]
    elif here.behind is not None:
        places = [(here.behind, 0)]
    else:
        return ((stage, Action(kind=Kind.FORWARD, microbatch=action.microbatch, chunk=action.chunk)),)
    return tuple((s, Action(kind=action.kind, microbatch=action.microbatch, chunk=chunk)) for s, chunk in places)


def build(
    name: str, stages: Mapping[str, int], microbatches: Sequence[int], *, chunks: int = 1, in_flight: int | None = None
) -> Schedule:
    """The schedule of one replica. On every stage the microbatches of a chunk go forth, and come back, in the given order.

    `1f1b` (PipeDream-Flush): a stage with b stages behind it opens with b forwards, alternates forward and backward, and
    drains. `gpipe`: all forwards, then all backwards. `eager` (Entrain, section 4.5.3): 1F1B that opens with more forwards,
    so that no stage ever holds more than `in_flight` microbatches: the stages farthest from the end of the path fill the
    limit, the others hold fewer in proportion, because stages that open with equally many forwards wait for each other's
    backwards all the time. A limit below the b + 1 that 1F1B holds is kept too, at the price of time. None: every stage but
    the last of the path runs all its forwards first. `zero-bubble`: 1F1B that puts off the gradients of weights, see
    `_with_weights`. `interleaved`: see `_interleaved`.

    stages: stage count of each unit in pipeline order. microbatches: the indices of those that hold samples, in plan order:
    an empty one is left out, so it costs neither time nor a message; with none, every stage has nothing to do. chunks: parts
    of the model on each stage, for `interleaved`.

    Raises ValueError for an unknown name, stages that are no pipeline, a microbatch that stands twice, chunks or in_flight
    below 1, or either with a schedule that has no use for it.
    """
    if name not in SCHEDULES:
        raise ValueError(f"no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    if len(set(microbatches)) != len(microbatches):
        raise ValueError(f"a microbatch runs once, got {list(microbatches)}")
    if chunks < 1 or (chunks > 1 and name != "interleaved"):
        raise ValueError(f"chunks must be at least 1, and more only with 'interleaved', got {chunks} with {name!r}")
    if in_flight is not None and (in_flight < 1 or name != "eager"):
        raise ValueError(f"in_flight is a limit of at least 1 and only for 'eager', got {in_flight} with {name!r}")
    graph = stage_graph(stages)
    if chunks > 1:
        return _interleaved(graph, microbatches, chunks)
    longest = max(stage.num_behind for stage in graph)
    schedule = tuple(_alternate(_num_ahead(name, stage, longest, in_flight), microbatches) for stage in graph)
    if name != ZERO_BUBBLE:
        return schedule
    return tuple(_with_weights(actions, longest - stage.num_behind) for stage, actions in zip(graph, schedule, strict=True))


def _num_ahead(name: str, stage: Stage, longest: int, in_flight: int | None) -> float:
    """Forwards that a stage runs before it begins to alternate. longest: the most stages that any stage has behind it."""
    if name == "gpipe":
        return math.inf
    if name != "eager" or stage.num_behind == 0:
        return stage.num_behind
    if in_flight is None:
        return math.inf
    return min(stage.num_behind, in_flight - 1) if in_flight <= longest else stage.num_behind * (in_flight - 1) // longest


def _alternate(num_ahead: float, microbatches: Sequence[int]) -> tuple[Action, ...]:
    forwards = [Action(kind=Kind.FORWARD, microbatch=m) for m in microbatches]
    backwards = [Action(kind=Kind.BACKWARD, microbatch=m) for m in microbatches]
    warm_up = int(min(num_ahead, len(forwards)))
    steady = len(forwards) - warm_up
    pairs = [action for pair in zip(forwards[warm_up:], backwards[:steady], strict=True) for action in pair]
    return (*forwards[:warm_up], *pairs, *backwards[steady:])


def _with_weights(actions: Sequence[Action], num_later: int) -> tuple[Action, ...]:
    """ZB-H1 (Qi et al. 2024, Zero Bubble Pipeline Parallelism): 1F1B whose backwards leave the gradients of weights to actions
    of their own, each behind `num_later` later backwards.

    A gradient then reaches the stage in front earlier, and weights fill the time in which a stage would wait for it. As a stage
    that opens with fewer forwards puts off more, none holds more microbatches than the first of the longest path does in 1F1B.
    On p equal stages the idle time is (p - 1)(F + B - W), where B is the gradient of the inputs and W that of the weights:
    a third of 1F1B's where all three are equal. Where a frozen stage has no weights and outweighs the others, 1F1B can be faster.
    """
    found: list[Action] = []
    put_off: deque[Action] = deque()
    for action in actions:
        found.append(action)
        if action.kind == Kind.BACKWARD:
            put_off.append(Action(kind=Kind.WEIGHT, microbatch=action.microbatch))
            if len(put_off) > num_later:
                found.append(put_off.popleft())
    return (*found, *put_off)


def _interleaved(graph: Sequence[Stage], microbatches: Sequence[int], chunks: int) -> Schedule:
    """Interleaved 1F1B (Megatron-LM) for any number of units and microbatches.

    Inside a unit of P stages, P microbatches at a time pass chunk after chunk; what is left of a division by P joins the last
    group, because a group of fewer than P would wait for its own way round. Megatron-LM's closed form for the length of the
    warm-up holds for one unit, so the order is read off a pipeline in which a forward takes one tick and a backward two, and
    in which a free stage never waits while it has something to run: it cannot wait for itself. After its first backward a
    stage alternates where it can; where one unit has to gather a group in front of the next, taking every backward as soon
    as it is there may be faster, and the faster of the two counts.

    Equal microbatches on one unit reach the ideal, 1F1B's idle time over `chunks`. Several units may lose to 1F1B where a
    unit's stages divide neither the microbatches nor those of the next unit: 6 % at worst in 630 pipelines of up to 11 stages.
    """
    alternating, backward_first = (_list_schedule(graph, microbatches, chunks, alternate) for alternate in (True, False))
    return backward_first[1] if backward_first[0] < alternating[0] else alternating[1]


_Turns = dict[Kind, list[deque[tuple[int, Action]]]]
"""What a stage still has to run: per kind and chunk its actions in order, each with its turn among those of all chunks."""


def _list_schedule(graph: Sequence[Stage], microbatches: Sequence[int], chunks: int, alternate: bool) -> tuple[int, Schedule]:
    """(ticks, schedule), see `_interleaved`."""
    waiting = [_turns(microbatches, chunks, stage.size) for stage in graph]
    schedule: list[list[Action]] = [[] for _ in graph]
    end: dict[tuple[int, Action], int] = {}
    free = [0] * len(graph)

    def can_run(stage: int, action: Action, now: int) -> bool:
        return all(end.get(needed, now + 1) <= now for needed in inputs(graph, chunks, stage, action))

    now = 0
    while len(end) < 2 * len(graph) * chunks * len(microbatches):
        for stage, actions in enumerate(schedule):
            if free[stage] > now:
                continue
            forward_first = alternate and bool(actions) and actions[-1].kind == Kind.BACKWARD
            for queue in _heads_in_turn(waiting[stage], forward_first):
                action = queue[0][1]
                if can_run(stage, action, now):
                    queue.popleft()
                    actions.append(action)
                    free[stage] = end[stage, action] = now + (1 if action.kind == Kind.FORWARD else 2)
                    break
        now += 1
    return max(free), tuple(tuple(actions) for actions in schedule)


def _heads_in_turn(turns: _Turns, forward_first: bool) -> Iterator[deque[tuple[int, Action]]]:
    """The queues whose heads a stage may run next, best first."""
    for kind in (Kind.FORWARD, Kind.BACKWARD) if forward_first else (Kind.BACKWARD, Kind.FORWARD):
        yield from sorted((queue for queue in turns[kind] if queue), key=lambda queue: queue[0][0])


def _turns(microbatches: Sequence[int], chunks: int, group_size: int) -> _Turns:
    turns: _Turns = {kind: [deque() for _ in range(chunks)] for kind in (Kind.FORWARD, Kind.BACKWARD)}
    num_groups = max(1, len(microbatches) // group_size)
    for kind, queues in turns.items():
        turn = 0
        for group in range(num_groups):
            end = (group + 1) * group_size if group + 1 < num_groups else len(microbatches)
            for chunk in range(chunks) if kind == Kind.FORWARD else reversed(range(chunks)):
                for microbatch in microbatches[group * group_size : end]:
                    queues[chunk].append((turn, Action(kind=kind, microbatch=microbatch, chunk=chunk)))
                    turn += 1
    return turns
