"""Execution of one process's share of a step: the actions of its places in the schedule's order, and the messages around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from headrace.schedule import Action, Kind
from headrace.trainer.pipeline.action_clock import ActionClock
from headrace.trainer.pipeline.cargo import CargoMaker, Feed
from headrace.trainer.pipeline.chunk import Chunk
from headrace.trainer.pipeline.deadlock import check_order, check_rows
from headrace.trainer.pipeline.memory_forecast import StageMemory
from headrace.trainer.pipeline.message_order import Post
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import LlmStage
from headrace.trainer.pipeline.step_run import Backwards, Move, StepRun, Totals
from headrace.trainer.pipeline.topology import PipelineTopology, Place


class Executor:
    """Runs the steps of one place, which has one stage object for each of the schedule's chunks."""

    def __init__(
        self,
        topology: PipelineTopology,
        place: Place,
        chunks: Sequence[Chunk],
        wire: Wire,
        backwards: Backwards | None = None,
    ) -> None:
        """`wire`: of this process. `backwards`: is told of the last backward of each chunk."""
        self.topology = topology
        self.place = place
        self.chunks = chunks
        self.prepare = _cargo_maker(topology, place, chunks)
        self.wire = wire
        self.backwards = backwards
        self.sharded = [chunk.sharded for chunk in chunks if isinstance(chunk, Stage) and chunk.sharded is not None]
        """What gathers the weights of each chunk; empty if every replica keeps all."""
        self.clock = ActionClock(place, self.wire, chunks[0].device)
        """The clock of the last step."""
        self.memory: StageMemory | None = None
        """Forecasts and limits the memory of each step; None: nobody does."""

    def begin(self, routes: Routes, feed: Feed) -> StepRun:
        """Return a run of all that the plan gives this place.

        Raises UserError if the place would keep more rows than its unit's `max_rows` or take more memory than its
        `device_memory_gib`.
        """
        run = StepRun(
            self.topology,
            self.place,
            self.chunks,
            self.wire,
            routes,
            feed,
            backwards=self.backwards,
            sharded=self.sharded,
        )
        check_rows(self.topology, self.place, run.program.actions, run.num_rows)
        if self.memory is not None:
            self.memory.fit(run.program.actions, run.num_rows)
        return run


def _cargo_maker(topology: PipelineTopology, place: Place, chunks: Sequence[Chunk]) -> CargoMaker:
    stages = [chunk for chunk in chunks if isinstance(chunk, LlmStage) and chunk.context is not None]
    if not stages:
        return CargoMaker(topology, place, chunks)
    from headrace.trainer.pipeline.context_cargo import ContextCargoMaker  # loads numba, which other pipelines do without

    return ContextCargoMaker(topology, place, stages)


def run_step(executors: Sequence[Executor], routes: Routes, feeds: Sequence[Feed]) -> list[Totals]:
    """Run forward and backward of all that the plan gives this process, adding to the gradients of its parameters.

    `executors`: of all places of this process, with the wire that they share; `feeds`: of each. Returns the totals of each.
    Messages may still be on their way until `wire.flush`.

    Raises, before anything is computed, HeadraceError if the plan would deadlock, and UserError as `Executor.begin` does.
    """
    first = executors[0]
    rehearsed = check_order(first.topology, routes, [executor.place for executor in executors])
    first.wire.channels.open_between(routes.pairs)
    runs = [executor.begin(routes, feed) for executor, feed in zip(executors, feeds, strict=True)]
    turns = _in_turn(runs, rehearsed.turns)
    for number, (now, following) in enumerate(zip_longest(turns, turns[1:])):
        with now.run.clock.timing(now.action):
            if number == 0:
                now.run.load(now.moves)
                now.run.post(now.moves)
            # A posted receive is a kernel of NCCL's: if it waited for what this action sends, and something in this action
            # for the whole device, such as the allocator when it gives memory back, neither would end.
            can_come = following is not None and rehearsed.needed[number + 1] <= number
            if following is not None:
                following.run.load(following.moves)
            if can_come:
                following.run.post(following.moves)  # one action ahead
            now.run.take(now.action, now.moves, last_of_chunk=now.last_of_chunk)
            if following is not None and not can_come:
                following.run.post(following.moves)
    for executor, run in zip(executors, runs, strict=True):
        executor.clock = run.clock
    return [run.totals for run in runs]


class _Turn(NamedTuple):
    """An action of one of a process's places."""

    run: StepRun
    action: Action
    moves: Sequence[Move]
    last_of_chunk: bool
    """Whether none of its chunk's actions is left in the step."""


def _in_turn(runs: Sequence[StepRun], posts: Sequence[Post]) -> list[_Turn]:
    """Return all actions of these runs in the order in which the process takes them. posts: whose turn it is."""
    of_post = {run.program.post: _turns(run) for run in runs}
    return [next(of_post[post]) for post in posts]


def _turns(run: StepRun) -> Iterator[_Turn]:
    actions = run.program.actions
    ends = {action.chunk: number for number, action in enumerate(actions) if action.kind != Kind.FORWARD}
    for number, action in enumerate(actions):
        yield _Turn(run, action, run.moves(action), last_of_chunk=ends.get(action.chunk) == number)
