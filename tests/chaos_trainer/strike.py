"""The node's side: the product's functions, wrapped so that they say what happens, and strike this process at a place."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from headrace.trainer.pipeline.cargo import Prepare
from headrace.trainer.pipeline.channels import Channel
from headrace.trainer.pipeline.feed import StepFeed
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.step_run import StepRun
from headrace.trainer.recovery import node_training
from headrace.trainer.recovery import recoverable_step as recovery_step
from headrace.trainer.recovery.layout import Layout
from headrace.trainer.recovery.membership_client import MembershipClient
from headrace.trainer.recovery.mesh import Mesh, MeshCutError
from headrace.trainer.recovery.node_evaluation import NodeEvaluations
from headrace.trainer.recovery.node_feed import NodeLoader
from headrace.trainer.recovery.node_training import Training
from headrace.trainer.recovery.recoverable_step import RecoverableStep
from headrace.v1 import membership_pb2, sessions_pb2
from tests.chaos_trainer import memory
from tests.chaos_trainer.faults import OUTSIDE, Fault, Kind, Place

TOGETHER_S = 5.0  # how long a fault waits for another one of the same moment
OTHERS_KNOW_S = 0.3  # what this node does not see: by then all others have


class Strikes:
    """Where this node is, and what strikes it there."""

    def __init__(self, node: str, faults: Sequence[Fault], folder: Path, leader: int) -> None:
        """folder: of the case, for what nodes tell and for which faults have struck. leader: its process."""
        self._node, self._faults, self._folder, self._leader = node, faults, folder, leader
        self._events: TextIO | None = None
        self._layout: Layout | None = None
        """The last one: afterwards it may have another rank, among those that save what they have."""
        self._mesh: Mesh | None = None
        self._training: Training | None = None
        self._generation = self._rank = 0
        self._step = -1
        self._counts = [0] * len(faults)
        self.newest = 0
        """Generation that this node knows."""

    def tell(self, **event: Any) -> None:
        """To whoever runs the case."""
        if self._events is None:  # by the process itself, and not by the one that has forked it
            self._events = (self._folder / f"{self._node}.{os.environ.get('LOCAL_RANK', '0')}.events").open("a", buffering=1)
        self._events.write(json.dumps({"pid": os.getpid(), **event}) + "\n")

    def prepares(self, training: Training, layout: Layout, mesh: Mesh) -> None:
        """A recovery, or the beginning."""
        self._training, self._layout, self._mesh = training, layout, mesh
        self._step, self._counts = -1, [0] * len(self._faults)
        self._generation, self._rank = layout.generation, layout.rank

    def ends(self, generation: int, rank: int) -> None:
        """It only saves what it has, with those that are left."""
        self._generation, self._rank, self._counts = generation, rank, [0] * len(self._faults)

    def begins(self, step: int) -> None:
        """An attempt at a step."""
        self._step, self._counts = step, [0] * len(self._faults)
        self.tell(attempt=step, generation=self._generation)

    def computes(self, feed: StepFeed) -> None:
        """Forth and back, this node's portions of an attempt."""
        assert self._layout is not None
        portions = feed.routes.portions(self._layout.place.unit, self._layout.place.replica)
        self.tell(computes=[sample for portion in portions for sample in portion.samples], step=self._step)

    def evaluated(self, loss: float) -> None:
        """The validation set, to the end."""
        assert self._training is not None
        self.tell(evaluated_after=self._training.next_step, loss=loss)

    def reach(self, place: Place, step: int | None = None) -> None:
        """This node is at a place. step: where it is not that of the last attempt."""
        layout = self._layout
        if layout is None:
            return
        at = layout.place.unit, layout.place.stage, len(layout.bounds[layout.place.unit]) - 1
        for number, fault in enumerate(self._faults):
            if fault.place != place or self._generation < fault.generation:
                continue
            if place not in OUTSIDE and fault.step not in (None, self._step if step is None else step):
                continue
            if not fault.where.is_at(self._node, self._rank, layout.pipeline, *at):
                continue
            self._counts[number] += 1
            if self._counts[number] == fault.occurrence and self._is_first(number):
                self._await_others(fault)
                self._strike(number, fault)

    def _is_first(self, number: int) -> bool:
        try:
            (self._folder / f"{number}.struck").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _await_others(self, fault: Fault) -> None:
        """Faults of one moment strike together: what the first one cuts off would not come to its place any more."""
        moment = fault.place, fault.step, fault.generation
        others = [k for k, other in enumerate(self._faults) if (other.place, other.step, other.generation) == moment]
        deadline = time.monotonic() + TOGETHER_S
        while not all((self._folder / f"{k}.struck").exists() for k in others) and time.monotonic() < deadline:
            time.sleep(0.005)  # another process comes there

    def _strike(self, number: int, fault: Fault) -> None:
        self.tell(struck=number)
        if fault.leader:
            os.kill(self._leader, signal.SIGKILL)
        match fault.kind:
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(0)  # it takes effect before this thread goes on
            case Kind.CUT:
                assert self._mesh is not None
                self._mesh.cut()
                self._mesh._cut_s = self._mesh._pipelines_cut_s = math.inf  # it does not know of it
            case Kind.DRIFT:
                assert self._training is not None
                weight = next(iter(self._training._held[0].parameters.values()))
                weight.detach().view(torch.int32).flatten()[0] ^= 1
            case Kind.LEAVE:  # of several processes, the one that has started them is told
                os.kill(os.getppid() if "LOCAL_RANK" in os.environ else os.getpid(), signal.SIGTERM)
            case Kind.HOLD:
                while self.newest <= fault.generation:
                    time.sleep(0.01)  # another thread hears of it
            case Kind.MISS:
                time.sleep(OTHERS_KNOW_S)
                raise MeshCutError(str(fault))


class _Voting:
    """Everybody, until this node's vote is under way."""

    def __init__(self, group: Any, reach: Callable[[], None]) -> None:
        self._group, self._reach = group, reach

    def allgather(self, *arguments: Any) -> Any:
        work = self._group.allgather(*arguments)
        self._reach()
        return work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def install(strikes: Strikes) -> None:
    """Wrap what leads to each place, for the rest of this process."""
    reach = strikes.reach

    def before(owner: Any, name: str, place: Place) -> None:
        _wrap(owner, name, lambda run, *a, **k: (reach(place), run(*a, **k))[1])

    def behind(owner: Any, name: str, place: Place) -> None:
        _wrap(owner, name, lambda run, *a, **k: (run(*a, **k), reach(place))[0])

    before(Stage, "forward", Place.FORWARD)
    before(torch.autograd, "backward", Place.BACKWARD)
    before(Wire, "receive", Place.RECEIVE)
    before(StepRun, "_send", Place.BROKER)
    before(recovery_step, "_sum_gradients", Place.GRADIENTS)
    before(RecoverableStep, "vote", Place.VOTE)
    before(node_training, "apply", Place.UPDATE)
    behind(node_training, "apply", Place.UPDATED)
    before(RecoverableStep, "check_replicas", Place.COMPARE)
    before(RecoverableStep, "evaluate", Place.EVALUATE)
    before(Mesh, "connect", Place.CONNECT)
    before(Mesh, "group", Place.GROUPS)
    before(Mesh, "barrier", Place.BARRIER)
    before(node_training, "agree", Place.AGREE)
    before(node_training, "move", Place.MOVE)
    before(node_training, "write", Place.SAVE)
    behind(node_training, "write", Place.SAVED)
    before(node_training, "publish", Place.PUBLISH)

    def send(run: Any, wire: Wire, tensor: torch.Tensor, channel: Channel, number: int) -> None:
        if not wire.channels.are_within(channel):
            reach(Place.SEND)
        run(wire, tensor, channel, number)

    def vote(run: Any, step: RecoverableStep, *arguments: Any) -> Any:
        mesh, everybody = step._mesh, step._mesh.everybody
        mesh.everybody = _Voting(everybody, lambda: reach(Place.VOTING))  # type: ignore[assignment]
        try:
            outcome = run(step, *arguments)
        finally:
            mesh.everybody = everybody
        try:
            reach(Place.VOTED)
        except MeshCutError:
            mesh.cut()
            raise
        return outcome

    def move(
        run: Any, mesh: Mesh, lengths: Any, transfers: Any, state: Callable[[str], Sequence[torch.Tensor]], **where: Any
    ) -> Any:
        first_left = False

        def reaching(name: str) -> Sequence[torch.Tensor]:
            nonlocal first_left
            if first_left:
                reach(Place.MOVING)
            first_left = True
            return state(name)

        return run(mesh, lengths, transfers, reaching, **where)

    def prepare(run: Any, self: Training, layout: Layout, mesh: Mesh) -> Any:
        strikes.prepares(self, layout, mesh)
        phases = run(self, layout, mesh)
        waits = sum(thread.name == "wait" for thread in threading.enumerate())
        abandoned = waits - (mesh._waiter is not None)
        footprint = {"memory_kib": memory.in_use_kib(), "abandoned": abandoned}
        strikes.tell(prepared=layout.generation, step=self.next_step, phases=phases, **footprint)
        return phases

    def rescue(run: Any, self: Training, mesh: Mesh, generation: int) -> str:
        strikes.ends(generation, mesh.rank)
        return str(run(self, mesh, generation))

    def begin(run: Any, loader: NodeLoader, plan: sessions_pb2.RankPlan, prepare: Prepare) -> Any:
        assert loader._layout is not None
        if not loader._layout.evaluates:
            strikes.begins(plan.step)
            reach(Place.BEGIN)
        return run(loader, plan, prepare)

    def evaluate(run: Any, evaluations: NodeEvaluations, *arguments: Any) -> tuple[float, float]:
        loss_sum, targets = run(evaluations, *arguments)
        strikes.evaluated(loss_sum / targets)
        return loss_sum, targets

    def compute(run: Any, step: RecoverableStep, share: Any, numbers: Any, feed: StepFeed) -> Any:
        strikes.computes(feed)
        return run(step, share, numbers, feed)

    def take(run: Any, membership: MembershipClient, snapshot: membership_pb2.Snapshot) -> None:
        run(membership, snapshot)
        strikes.newest = max(strikes.newest, snapshot.generation)

    def commit_for_all(run: Any, loader: NodeLoader, step: int, *arguments: Any, **options: Any) -> None:
        reach(Place.COMMIT, step)
        run(loader, step, *arguments, **options)
        reach(Place.COMMITTED, step)

    def log_step(run: Any, job: str, step: Any, result: Any, *rest: Any) -> None:
        strikes.tell(applied=step.index, loss=result.loss)
        run(job, step, result, *rest)

    _wrap(Wire, "send", send)
    _wrap(RecoverableStep, "compute", compute)
    _wrap(RecoverableStep, "vote", vote)
    _wrap(node_training, "move", move)
    _wrap(Training, "prepare", prepare)
    _wrap(Training, "rescue", rescue)
    _wrap(NodeLoader, "begin", begin)
    _wrap(NodeEvaluations, "_evaluate", evaluate)
    _wrap(MembershipClient, "_take", take)
    _wrap(NodeLoader, "commit_for_all", commit_for_all)
    _wrap(node_training, "log_step", log_step)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """`owner.name(...)` becomes `around(owner.name, ...)`."""
    run = getattr(owner, name)

    @functools.wraps(run)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return around(run, *arguments, **options)

    setattr(owner, name, wrapped)
