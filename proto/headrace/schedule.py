"""Pipeline schedules as data: the simulator times them, and the trainer executes them.

A schedule lists the actions of every pipeline stage of one replica. A stage takes its actions strictly in order and waits for the
inputs of each (`inputs`). Schedules know neither times nor samples.

The stages form a graph: the stages of one unit are a chain, the last stage of every encoder feeds the first stage of the LLM, and
the last stage of the LLM feeds the first stage of the generator. Encoders do not wait for each other. With {"vision": 2,
"audio": 1, "llm": 5} the stages are 0-1, 2 and 3-7, and both stage 1 and stage 2 have five stages behind them.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.plan import Topology

GPIPE = "gpipe"
EAGER = "eager"
ZERO_BUBBLE = "zero-bubble"
SCHEDULES = ("1f1b", "interleaved", GPIPE, EAGER, ZERO_BUBBLE)
"""Names of the pipeline schedules that `build` knows."""


class Kind(enum.IntEnum):
    """The kind of work that an action does on a microbatch. The values index arrays of the simulator."""

    FORWARD = 0
    BACKWARD = 1
    """The backward pass: gradients of inputs and weights; under `zero-bubble` only those of the inputs."""
    WEIGHT = 2
    """The weight-gradient pass that a backward under `zero-bubble`, and under no other schedule, leaves for later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One unit of work of a pipeline stage: the forward, backward or weight pass of one microbatch through one chunk."""

    kind: Kind
    microbatch: int
    chunk: int = 0
    """The stage's model chunk (virtual stage) that runs; always 0 unless the schedule is interleaved."""

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} of microbatch {self.microbatch}, chunk {self.chunk}"


Schedule = tuple[tuple[Action, ...], ...]
"""The schedule of one replica: `schedule[stage]` holds the actions of that stage, in execution order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The position of a physical pipeline stage in the graph of units. Stages are numbered in pipeline order over all units."""

    unit: str
    index: int
    """Index of the stage within its unit."""
    size: int
    """Number of stages of its unit."""
    before: tuple[int, ...]
    """Numbers of the last stages of the units that feed this stage's unit, if it is its unit's first stage; otherwise empty."""
    behind: int | None
    """Number of the first stage of the unit that this one feeds, if this is its unit's last stage; otherwise None."""
    num_behind: int
    """Number of stages that a microbatch still has to pass after this one."""


def stage_graph(stages: Mapping[str, int]) -> tuple[Stage, ...]:
    """Return all physical stages in pipeline order. `stages`: stage count of each unit, in pipeline order.

    Raises ValueError, like `headrace.plan.Topology`, for no LLM, a unit without a stage, or units out of order.
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
    """Return the units that a sample passes after `unit`, in order."""
    return [feeds[unit], *_path(feeds[unit], feeds)] if unit in feeds else []


def inputs(graph: Sequence[Stage], chunks: int, stage: int, action: Action) -> tuple[tuple[int, Action], ...]:
    """Return the (stage, action) pairs whose results an action of `stage` needs; none for the first forward of an encoder.

    A forward needs the forward of the stage before it. On a unit's first stage it needs that of the previous chunk on the unit's
    last stage, and in the first chunk the last forwards of the units that feed it. A backward mirrors this, and on the last stage
    and chunk of the pipeline needs its own forward; a weight action needs its own backward. All pairs are of the same microbatch
    index: which samples these are where samples are deferred to another microbatch, the plan says.
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
    """Return the pipeline schedule `name` of one replica. On every stage the forwards of a chunk, and its backwards, run in the
    order of `microbatches`.

    `1f1b` (PipeDream-Flush): a stage with b stages behind it opens with b forwards, alternates forward and backward, and
    drains. `gpipe`: all forwards, then all backwards. `eager` (Entrain, section 4.5.3): 1F1B that opens with more forwards, as
    many as leave no stage with more than `in_flight` microbatches at a time: the stages farthest from the end of the pipeline
    reach the limit, and the others hold proportionally fewer, because stages that open with equally many forwards would keep
    waiting for each other's backwards. A limit below the b + 1 that 1F1B holds is kept too, at the price of time. With
    `in_flight` None every stage but the last of the pipeline runs all its forwards first. `zero-bubble`: 1F1B that delays the
    gradients of weights, see `_with_weights`. `interleaved`: 1F1B over several chunks per stage, see `_interleaved`.

    stages: stage count of each unit in pipeline order. microbatches: indices of the microbatches that hold samples, in plan
    order. Empty microbatches are left out and so cost neither time nor a message; with none left, no stage has anything to do.
    chunks: model chunks (virtual stages) on each stage, for `interleaved` only. in_flight: for `eager` only.

    Raises ValueError for an unknown name, stages that are no pipeline, a microbatch that stands twice, chunks or in_flight
    below 1, or either with a schedule that has no use for it.
    """
    _check_options(name, chunks, in_flight)
    if len(set(microbatches)) != len(microbatches):
        raise ValueError(f"a microbatch runs once, got {list(microbatches)}")
    if chunks > 1:
        return _interleaved(stage_graph(stages), microbatches, chunks)
    actions = [Action(kind=kind, microbatch=m) for kind in Kind for m in microbatches]
    numbers = numbered_actions(name, stages, len(microbatches), in_flight=in_flight)
    return tuple(tuple(map(actions.__getitem__, of_stage)) for of_stage in numbers)


def numbered_actions(
    name: str, stages: Mapping[str, int], num_microbatches: int, *, in_flight: int | None = None
) -> tuple[Sequence[int], ...]:
    """Return the schedule of `build` without chunks in numbers, which are quicker to make than actions: those of each stage's
    actions, in execution order.

    The number of a microbatch's action is its kind, times `num_microbatches`, plus the place of the microbatch. Raises ValueError
    as `build` does.
    """
    _check_options(name, 1, in_flight)
    graph = stage_graph(stages)
    longest = max(stage.num_behind for stage in graph)
    found = tuple(_alternate(_num_ahead(name, stage, longest, in_flight), num_microbatches) for stage in graph)
    if name != ZERO_BUBBLE:
        return found
    behind = (longest - stage.num_behind for stage in graph)
    return tuple(_with_weights(numbers, later, num_microbatches) for numbers, later in zip(found, behind, strict=True))


def _check_options(name: str, chunks: int, in_flight: int | None) -> None:
    if name not in SCHEDULES:
        raise ValueError(f"no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    if chunks < 1 or (chunks > 1 and name != "interleaved"):
        raise ValueError(f"chunks must be at least 1, and more only with 'interleaved', got {chunks} with {name!r}")
    if in_flight is not None and (in_flight < 1 or name != EAGER):
        raise ValueError(f"in_flight is a limit of at least 1 and only for 'eager', got {in_flight} with {name!r}")


def _num_ahead(name: str, stage: Stage, longest: int, in_flight: int | None) -> float:
    """Return the number of warm-up forwards of a stage, before it alternates. longest: the largest `num_behind` of any stage."""
    if name == GPIPE:
        return math.inf
    if name != EAGER or stage.num_behind == 0:
        return stage.num_behind
    if in_flight is None:
        return math.inf
    return min(stage.num_behind, in_flight - 1) if in_flight <= longest else stage.num_behind * (in_flight - 1) // longest


def _alternate(num_ahead: float, count: int) -> list[int]:
    """Return the numbers of a stage's actions on `count` microbatches; `num_ahead` forwards come before all backwards."""
    forwards, backwards = range(count), range(Kind.BACKWARD * count, (Kind.BACKWARD + 1) * count)
    warm_up = int(min(num_ahead, count))
    steady = count - warm_up
    pairs = itertools.chain.from_iterable(zip(forwards[warm_up:], backwards[:steady], strict=True))
    return [*forwards[:warm_up], *pairs, *backwards[steady:]]


def _with_weights(numbers: Sequence[int], num_later: int, count: int) -> list[int]:
    """Turn a stage's 1F1B actions into ZB-H1 (Qi et al. 2024, Zero Bubble Pipeline Parallelism): the gradients of weights become
    actions of their own, each after `num_later` later backwards.

    The gradient of the inputs then reaches the stage in front earlier, and weight actions fill the time in which a stage would
    wait for it. Since a stage with fewer warm-up forwards delays more weight actions, no stage holds more microbatches than the
    first stage of the longest path does under 1F1B. On p equal stages the idle time is (p - 1)(F + B - W), where F is the time
    of a forward, B of the gradients of the inputs and W of those of the weights: a third of 1F1B's where all three are equal.
    If a frozen stage, which has no weight gradients, takes longer than the others, 1F1B can be faster.
    """
    found: list[int] = []
    put_off: deque[int] = deque()
    for number in numbers:
        found.append(number)
        if number // count == Kind.BACKWARD:
            put_off.append(number + (Kind.WEIGHT - Kind.BACKWARD) * count)
            if len(put_off) > num_later:
                found.append(put_off.popleft())
    return [*found, *put_off]


def _interleaved(graph: Sequence[Stage], microbatches: Sequence[int], chunks: int) -> Schedule:
    """Return the interleaved 1F1B schedule (Megatron-LM), for any number of units and microbatches.

    Within a unit of P stages, groups of P microbatches pass chunk after chunk; the remainder of a division by P joins the last
    group, because a smaller group would have to wait for its own return from the last stage. Megatron-LM's closed form for the
    length of the warm-up holds for one unit only, so the order comes from simulating a pipeline in which a forward takes one tick
    and a backward two. A free stage there never idles while it has something to run, so the schedule cannot deadlock. After its
    first backward a stage alternates where it can. Where one unit has to gather a group in front of the next, running every
    backward as soon as it is ready may be faster, so both variants are simulated and the faster one is returned.

    Equal microbatches on one unit reach the ideal, 1F1B's idle time divided by `chunks`. Several units may lose to 1F1B if the
    number of a unit's stages divides neither the number of microbatches nor that of the next unit's stages: by 6 % at worst in
    630 pipelines of up to 11 stages.
    """
    alternating, backward_first = (_list_schedule(graph, microbatches, chunks, alternate) for alternate in (True, False))
    return backward_first[1] if backward_first[0] < alternating[0] else alternating[1]


_Turns = dict[Kind, list[deque[tuple[int, Action]]]]
"""The actions that a stage still has to run: `turns[kind][chunk]` queues (turn, action) pairs in order, where a turn is the
action's place among those of the kind over all chunks."""


def _list_schedule(graph: Sequence[Stage], microbatches: Sequence[int], chunks: int, alternate: bool) -> tuple[int, Schedule]:
    """Simulate one of the two variants of `_interleaved` and return its length in ticks and its schedule."""
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
    """Yield the queues whose heads a stage may run next: the preferred kind first, and within a kind by turn."""
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
