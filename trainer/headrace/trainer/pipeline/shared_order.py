"""The order in which ranks that several units share take their actions: the same on every process, before a step begins.

Every unit's own order stays that of its schedule, and messages do not change; what is found here is whose turn it is. It comes
from a simulation in which a rank never waits while it could run something, so that encoders run in the LLM's bubbles where they
can (Optimus, section 4; their layers are the pieces that are placed where `chunks` cut them). Since a real rank takes its turns
in this order whatever things take, wrong durations cost time and nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from headrace.execution_spec import COLOCATED
from headrace.plan import GENERATOR, LLM
from headrace.schedule import ZERO_BUBBLE, Action, Kind
from headrace.trainer.pipeline.message_order import Message, Post, Program
from headrace.trainer.pipeline.topology import PipelineTopology, Place


def hosts_of(topology: PipelineTopology, post: Post) -> tuple[int, ...]:
    """Return the ranks of a stage: those of its slices, which take its actions together."""
    unit, replica, stage = post
    return tuple(topology.rank(Place(unit, replica, stage, index)) for index in range(topology.units[unit].num_slices))


def shared_order(topology: PipelineTopology, programs: Sequence[Program]) -> Mapping[int, Sequence[Post]]:
    """Return for each rank the posts whose actions it takes, one entry for each action, in the order of its turns.

    programs: of all stages that exchange messages or share ranks with each other. Actions that never get their inputs, which the
    rehearsal finds, are left out.
    """
    return _colocated(topology, programs) if topology.sharing == COLOCATED else _Nesting(topology, programs).run()


def _colocated(topology: PipelineTopology, programs: Sequence[Program]) -> Mapping[int, Sequence[Post]]:
    """All forwards of the encoders on a rank, unit by unit, then the actions of the LLM, then what is left of the encoders."""
    before: dict[int, list[Post]] = {}
    between: dict[int, list[Post]] = {}
    behind: dict[int, list[Post]] = {}
    units = list(topology.units)
    for program in sorted(programs, key=lambda program: units.index(program.post[0])):
        num_forwards = sum(action.kind == Kind.FORWARD for action in program.actions)
        in_front = num_forwards if topology.units[program.post[0]].on else 0
        for rank in hosts_of(topology, program.post):
            before.setdefault(rank, []).extend([program.post] * in_front)
            rest = behind if in_front else between
            rest.setdefault(rank, []).extend([program.post] * (len(program.actions) - in_front))
    ranks = before.keys() | between.keys() | behind.keys()
    return {rank: [*before.get(rank, ()), *between.get(rank, ()), *behind.get(rank, ())] for rank in ranks}


class _Nesting:
    """A list schedule: of all actions whose inputs have arrived, the one that can begin first does."""

    def __init__(self, topology: PipelineTopology, programs: Sequence[Program]) -> None:
        self._puts_weights_off = topology.schedule == ZERO_BUBBLE
        self._parts = {unit: topology.num_parts(unit) for unit in topology.units}
        self._programs = {program.post: program for program in programs}
        self._hosts = {post: hosts_of(topology, post) for post in self._programs}
        self._turns: dict[int, list[Post]] = {rank: [] for hosts in self._hosts.values() for rank in hosts}
        self._free_s = dict.fromkeys(self._turns, 0.0)
        self._next = dict.fromkeys(self._programs, 0)
        self._arrived_s: dict[Message, float] = {}
        self._missing: dict[Post, set[Message]] = {}  # of the next action
        self._ready_s: dict[Post, float] = {}  # when all that has arrived for the next action had
        self._waiting: list[tuple[float, int, Post]] = []  # heap of actions that can run: earliest begin, rank among equals, post

    def run(self) -> Mapping[int, Sequence[Post]]:
        """Simulate until nothing is left that can run, and return the turns of each rank."""
        for post in self._programs:
            self._look_ahead(post)
        while self._waiting:
            begin_s, precedence, post = heapq.heappop(self._waiting)
            can_begin_s = self._can_begin_s(post)
            if can_begin_s > begin_s:
                heapq.heappush(self._waiting, (can_begin_s, precedence, post))
            else:
                self._take(post, begin_s)
        return self._turns

    def _take(self, post: Post, begin_s: float) -> None:
        program = self._programs[post]
        action = program.actions[self._next[post]]
        end_s = begin_s + self._duration_s(program, action)
        for rank in self._hosts[post]:
            self._free_s[rank] = end_s
            self._turns[rank].append(post)
        self._next[post] += 1
        for portion in program.portions_of(action):
            for message in program.sends(action, portion):
                self._arrive(message, end_s)
        self._look_ahead(post)

    def _arrive(self, message: Message, now_s: float) -> None:
        receiver = message.receiver
        missing = self._missing.get(receiver, set())
        if message not in missing:
            self._arrived_s[message] = now_s
            return
        missing.discard(message)
        self._ready_s[receiver] = max(self._ready_s[receiver], now_s)
        if not missing:
            self._offer(receiver)

    def _look_ahead(self, post: Post) -> None:
        """See what the next action of a post waits for."""
        program = self._programs[post]
        if self._next[post] == len(program.actions):
            return
        action = program.actions[self._next[post]]
        needed = {message for portion in program.portions_of(action) for message in program.takes(action, portion)}
        came = needed & self._arrived_s.keys()
        self._ready_s[post] = max((self._arrived_s.pop(message) for message in came), default=0.0)
        self._missing[post] = needed - came
        if not self._missing[post]:
            self._offer(post)

    def _offer(self, post: Post) -> None:
        action = self._programs[post].actions[self._next[post]]
        heapq.heappush(self._waiting, (self._can_begin_s(post), _precedence(post, action), post))

    def _can_begin_s(self, post: Post) -> float:
        return max(self._ready_s[post], *(self._free_s[rank] for rank in self._hosts[post]))

    def _duration_s(self, program: Program, action: Action) -> float:
        forward_s = sum(program.forward_s(portion) for portion in program.portions_of(action))
        return self._of_forward(program, action) * forward_s / self._parts[program.post[0]]

    def _of_forward(self, program: Program, action: Action) -> float:
        """Return the duration of an action as a multiple of its forward: gradients of inputs and of weights take as long each."""
        if action.kind == Kind.FORWARD:
            return 1.0
        position, flow = program.position(action), program.flow
        if action.kind == Kind.WEIGHT:
            return float(flow.has_weights(position))
        with_weights = flow.has_weights(position) and not self._puts_weights_off
        return float(flow.has_backward(position)) + float(with_weights)


def _precedence(post: Post, action: Action) -> int:
    """Return which of two actions that could begin at the same time does: the one with the lower number."""
    if post[0] in (LLM, GENERATOR):
        return 0
    return 1 if action.kind == Kind.BACKWARD else 2
