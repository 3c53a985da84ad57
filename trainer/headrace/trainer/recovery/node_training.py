"""The training of one node of a recoverable job: its part of the model, and its steps under each layout."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from headrace.errors import UnrecoverableError, UserError
from headrace.measured import MeasuredWork
from headrace.message_codec import measured_message, measured_value, rejection_message, rejection_value
from headrace.observability.logs import pairs
from headrace.quarantine import Rejected
from headrace.trainer.loading.commit_thread import CommitThread
from headrace.trainer.models.whole_model import WholeModel
from headrace.trainer.pipeline.agreement import training_record, warn_differences
from headrace.trainer.pipeline.checkpoint_files import TRAINING_RECORD, Checkpoint, TensorKey, attempt_folder, publish, write
from headrace.trainer.recovery.held_layers import Holding, copies_of, make_holding, state_lengths
from headrace.trainer.recovery.layer_transfer import Agreement, Standing, agree, move, named
from headrace.trainer.recovery.layout import Layout
from headrace.trainer.recovery.mesh import Mesh, MeshCutError
from headrace.trainer.recovery.node_evaluation import NodeEvaluations
from headrace.trainer.recovery.node_feed import NodeLoader
from headrace.trainer.recovery.nodes_spec import RecoverySpec
from headrace.trainer.recovery.recoverable_step import RecoverableStep, Share, apply
from headrace.trainer.starting import check_fresh
from headrace.trainer.train_step import SkipPolicy, StepResult, log_step, make_optimizer
from headrace.v1 import sessions_pb2

log = logging.getLogger(__name__)


class Training:
    """The training of one node, through all generations of the job's nodes."""

    def __init__(
        self,
        loader: NodeLoader,
        spec: RecoverySpec,
        model: WholeModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        checkpoint: Path | None = None,
        resume: Path | None = None,
        fresh_weights: bool = False,
        evaluations: NodeEvaluations,
    ) -> None:
        """`device`: where the model is. `dtype`: torch.autocast dtype. `checkpoint`, `resume`, `fresh_weights`: as in
        `headrace.trainer.recovery.node.train_recoverable`.
        """
        self.spec, self.job = spec, loader.spec.name
        self._evaluations = evaluations
        self._loader, self._device, self._dtype = loader, device, dtype
        self._settings = spec.optimizer.resolved(model.name, model.pretrained)
        self._skip_policy = SkipPolicy(self._settings)
        self._training_record = training_record(model.name, dtype, spec.units)
        self._model = model
        make_optimizer(nn.Linear(1, 1).parameters())  # the first optimizer imports for seconds, while others would wait
        self._lengths = state_lengths(model.make(), spec.pipeline(dict.fromkeys(spec.units, (0, 1))))
        self._sizes = {name: 4 * sum(lengths) for name, lengths in self._lengths.items()}  # in bytes
        self._standing = Standing()
        self._held: list[Holding] = []  # the present holding, and after an interrupted move also the one before
        self._report = b""  # what all nodes have to say of the last step in its commit, encoded
        self._share: Share | None = None  # what is done of the next step; its gradients are in the present holding
        self._loss = math.nan  # loss of the last step that this node has asked for the vote on
        self._commits = CommitThread()
        self._checkpoint, self._resume, self._fresh_weights = checkpoint, resume, fresh_weights
        self._holders: Mapping[str, Sequence[int]] = {}
        self._layout: Layout
        self._mesh: Mesh
        self._step: RecoverableStep

    @property
    def next_step(self) -> int:
        """Index of the next step: the number of steps applied to the weights, or -1 if the node has no weights."""
        return self._standing.applied

    @property
    def first_own_step(self) -> int:
        """The first step that is to be planned for the layout's pipelines: the next one, unless it is resumed."""
        return self.next_step + (self._layout.resumed is not None)

    @property
    def is_over(self) -> bool:
        """Whether all steps of the job are committed."""
        return self._loader.is_over

    @property
    def is_done(self) -> bool:
        """Whether this node has nothing left to do: the job is over, and there is no checkpoint to save."""
        return self.is_over and self._checkpoint is None

    def forget(self) -> None:
        """Drop weights, optimizer state and share: without a place in a pipeline, what the node has will soon be out of date."""
        self._held, self._standing, self._share = [], Standing(), None
        self._loader.unassign()

    def close(self) -> None:
        """Wait until the last commit is answered, and end the thread that commits."""
        self._commits.close()

    def prepare(self, layout: Layout, mesh: Mesh) -> Mapping[str, float]:
        """Meet the other nodes, agree with them, and get the layers of the layout. Return the seconds of each phase by name.

        Raises MeshCutError, and UnrecoverableError if no node has some layer any more; before that, the rest of the model is
        saved if there is a folder for checkpoints.
        """
        began_s = time.monotonic()
        seconds: dict[str, float] = {}

        def ended(phase: str) -> None:
            seconds[phase] = time.monotonic() - began_s - sum(seconds.values())

        target = self._target(layout)  # before meeting: others may still compute, which can't be cut
        mesh.connect()
        ended("connect")
        has = {name for held in self._held for name in held.parameters}
        share = self._share if self._share is not None and target is self._held[0] else Share()
        try:
            agreement = agree(
                mesh,
                self._sizes,
                self._standing,
                has,
                target.parameters,
                self._report,
                done=share.numbers,
                formation=share.formation,
                num_microbatches=sum(layout.shares),
            )
        except UnrecoverableError as err:  # raised on all nodes
            if self._checkpoint is not None:
                self._save_what_is_left(self._checkpoint, mesh, layout.generation, why=str(err))
            raise
        layout = layout.resume(agreement.standing.applied, agreement.formation, agreement.done)
        if not layout.keeps_share:
            self._share = None
        ended("agree")
        if agreement.standing.applied < 0:
            self._begin(target, layout)
        else:
            self._continue(target, mesh, agreement)
        mesh.barrier()
        self._held = [target]  # now that every node has what it needs
        target.stage.hold_frozen(self._dtype)  # only now, as weights are initialised and transferred in float32
        ended("state")
        self._layout, self._mesh, self._holders = layout, mesh, agreement.holders
        self._step = RecoverableStep(layout, mesh, self._held[0], agreement.holders, self._skip_policy, dtype=self._dtype)
        if agreement.standing.applied < 0:
            self._step.check_replicas()
        if layout.rank == 0 and agreement.standing.applied > 0:
            self._commit(self.next_step - 1)  # the former first node may have been lost before it committed
        self._loader.assign(layout, self.next_step)
        if layout.resumed is not None:
            counts = "+".join(str(len(numbers)) for numbers in layout.resumed.done)  # "2+2+0": microbatches of each pipeline
            log.info("step resumed %s", pairs(step=self.next_step, generation=layout.generation, done=counts))
        ended("groups")
        return seconds

    def run(self, known: Callable[[], int]) -> bool:
        """Train until the job is over, or until all nodes know a newer snapshot than the layout's. Return whether it is over.

        known: returns the generation of the newest snapshot that this node knows. Raises MeshCutError.
        """
        self._between_steps()
        began_s = time.monotonic()
        while (plan := self._loader.next_plan(self._mesh.check)) is not None:
            plan_wait_s = time.monotonic() - began_s
            share, self._share = self._share or Share(formation=self._layout.formation_of(plan.step)), None
            step, numbers, feed = self._loader.begin(plan, self._step.prepare)
            share = self._share = self._step.compute(share, numbers, feed)
            step.data_wait_s = plan_wait_s + share.data_wait_s
            result = self._step.meet(share)
            self._share = None
            self._step.sum_gradients(result)
            speaks = self._layout.rank == self._layout.ranks[0]
            self._standing = replace(self._standing, vote_pending_generation=self._layout.generation)
            self._loss = result.recorded_loss
            self._commits.settle()
            is_whole = self._layout.formation_of(plan.step) == self._layout.generation  # and not the rest of a resumed step
            said = _report(share.rejected if speaks else (), self._step.measured() if is_whole else ())
            outcome = self._step.vote(result, known(), said, step.data_wait_s)
            result = self._apply(outcome.result, plan.step)
            self._standing = Standing(applied=plan.step + 1, generation=self._layout.generation, grad_norm=result.grad_norm)
            self._report = b"".join(outcome.said)  # concatenated protobuf messages merge into one
            self._loader.finish(step)
            log_step(self.job, step, result, self._step.non_finite_samples)
            all_applied = self._arrive()
            if self._layout.rank == 0 and all_applied is not None:
                all_have_applied = partial(self._mesh.all_arrive, all_applied)
                self._commit(plan.step, time.monotonic() - began_s, outcome.data_wait_s, all_have_applied=all_have_applied)
            if outcome.generation > self._layout.generation:
                if all_applied is not None:
                    with self._mesh.interruptible():
                        self._mesh.wait(all_applied)
                return False
            self._between_steps()
            began_s = time.monotonic()
        self._between_steps(is_last=True)
        return True

    def _between_steps(self, *, is_last: bool = False) -> None:
        """Do what is due between two steps. Where a node is lost meanwhile, the next generation does it."""
        if self.next_step and self._settings.checks_replicas(self.next_step - 1):
            self._step.check_replicas(self.next_step - 1)
        self._evaluations.meet(self.next_step, self._layout, self._mesh, self._step, is_last=is_last)

    def save(self) -> None:
        """Save the model after the last step, if there is a folder for it.

        Raises MeshCutError if a node was lost before all had saved.
        """
        if self._checkpoint is not None:
            self._save(self._checkpoint, self._mesh, self._layout.generation)

    def rescue(self, mesh: Mesh, generation: int) -> str:
        """Save what the remaining nodes have of the model, and return a sentence about it; "" before training has begun.

        mesh: connects the remaining nodes. Raises UnrecoverableError if they do not have the whole model, once their part is
        saved, and MeshCutError if another node is lost.
        """
        if self._checkpoint is None:
            return "nothing was saved, as no --checkpoint was given"
        mesh.connect()
        return self._save_what_is_left(self._checkpoint, mesh, generation)

    def _save_what_is_left(self, folder: Path, mesh: Mesh, generation: int, *, why: str = "") -> str:
        has = {name for held in self._held for name in held.parameters}
        agreement = agree(mesh, self._sizes, self._standing, has, (), self._report)
        if agreement.standing.applied < 0:
            return ""
        if agreement.catches_up:
            self._catch_up(agreement)
        if not agreement.is_current:
            self._held = []
        self._stand_as(agreement)
        self._holders = agreement.sources
        if mesh.rank == 0 and self.next_step > 0:
            self._commit(self.next_step - 1)
        lacking = [name for name, ranks in agreement.sources.items() if not ranks]
        if lacking:
            rest = folder / "partial"
            self._save(rest, mesh, generation)
            saved = f"what is left after {self.next_step} steps was saved in {rest}"
            raise UnrecoverableError(f"{why}; {saved}" if why else f"{saved}, without {named(lacking)}")
        self._save(folder, mesh, generation)
        return f"the model after {self.next_step} steps was saved in {folder}: `--resume {folder}` goes on"

    def _save(self, folder: Path, mesh: Mesh, generation: int) -> None:
        """Write a checkpoint, each parameter by the first node that has it. No node returns before all of it is on disk.

        Raises MeshCutError if a node is lost meanwhile, or the other nodes have saved without this one.
        """
        tensors: dict[TensorKey, torch.Tensor] = {}
        for held in self._held:
            for name in held.parameters:
                if self._holders[name][0] == mesh.rank:
                    tensors |= held.tensors(name)
        applied = self._standing.applied
        state = self._loader.state_dict_at(applied) | {TRAINING_RECORD: self._training_record}
        try:
            write(attempt_folder(folder, generation), applied, mesh.rank, mesh.num_ranks, state, tensors)
            mesh.barrier()
            if mesh.rank == 0:
                publish(folder, generation, applied)
        except FileNotFoundError as err:
            raise MeshCutError(f"the other nodes have saved without this one: {err}") from err
        mesh.barrier()
        log.info("checkpoint written %s", pairs(step=applied, folder=folder, tensors=len(tensors)))

    def _target(self, layout: Layout) -> Holding:
        """Return the holding for a layout: the present one if it has exactly these layers, else a new one without weights."""
        unit, stage = layout.place.unit, layout.place.stage
        first, end = layout.bounds[unit][stage : stage + 2]
        if self._held and self._held[0].covers(unit, first, end):
            return self._held[0]
        return make_holding(layout, self._model.make, self._settings, device=self._device)

    def _begin(self, target: Holding, layout: Layout) -> None:
        """Begin training with fresh weights, which every node initialises by itself, or with those of a checkpoint.

        Raises UserError if the checkpoint is not of the job's next step, or if fresh weights are not allowed there.
        """
        next_step = self._loader.next_step
        if self._resume is not None:
            checkpoint = Checkpoint.newest(self._resume)
            if checkpoint.step > next_step:
                raise UserError(
                    f"{self._resume} has a checkpoint after {checkpoint.step} steps, but only {next_step} are committed, as the "
                    f"job's store has lost the others: name a folder whose newest checkpoint is after {next_step} steps or fewer"
                )
            if checkpoint.step != next_step:
                raise UserError(
                    f"{self._resume} has a checkpoint after {checkpoint.step} steps, but {next_step} are committed: "
                    f"`headrace job reset {self.job} --step {checkpoint.step}` first"
                )
            target.load(checkpoint)
            warn_differences(checkpoint.loader.get(TRAINING_RECORD, {}), self._training_record)
        else:
            check_fresh(self.job, next_step, allowed=self._fresh_weights)
            self._model.initialise(target.stage.model, self._loader.spec.seed)
        self._held = [target]
        self._standing = Standing(applied=next_step, generation=layout.generation)

    def _continue(self, target: Holding, mesh: Mesh, agreement: Agreement) -> None:
        """Continue training from an agreement: catch up if necessary, and receive the parameters that this node lacks."""
        if agreement.catches_up:
            self._catch_up(agreement)
            self._stand_as(agreement)
        if self._share is None:
            for held in self._held:
                held.discard()
        received = move(mesh, self._lengths, agreement.transfers, self._state, device=self._device)
        for name in target.parameters:
            if name in received:
                target.set_state(name, received[name])
            elif target not in self._held:
                target.set_state(name, copies_of(self._state(name)))  # an interrupted change may need the others
        former = [held for held in self._held if held is not target] if agreement.is_current else []
        self._held = [target, *former]
        self._stand_as(agreement)

    def _apply(self, voted: StepResult, step: int) -> StepResult:
        """Update the weights by a step that was voted for, unless its gradient norm is not finite.

        Return the result with the number of updates skipped in a row.
        """
        apply(self._held[0], voted.grad_norm, self._settings.rate(step), self._settings.max_grad_norm)
        if voted.target_weight:
            self._skip_policy.record(skipped=not math.isfinite(voted.grad_norm))
        return replace(voted, skipped=self._skip_policy.in_row if voted.target_weight else 0)

    def _catch_up(self, agreement: Agreement) -> None:
        """Apply the step whose gradients this node has, and whose outcome only other nodes have seen."""
        voted = StepResult(loss=math.nan, target_weight=1.0, grad_norm=agreement.standing.grad_norm)
        self._apply(voted, self._standing.applied)

    def _stand_as(self, agreement: Agreement) -> None:
        self._standing, self._report = replace(agreement.standing, vote_pending_generation=-1), agreement.report

    def _state(self, name: str) -> Sequence[torch.Tensor]:
        return next(held for held in self._held if name in held.parameters).state(name)

    def _commit(
        self, step: int, step_s: float = 0.0, data_wait_s: float = 0.0, *, all_have_applied: Callable[[], bool] = lambda: True
    ) -> None:
        """Commit a step for all nodes in a thread, beside the next step; before that step's vote this node waits for it.

        all_have_applied: waits for that, and returns False if a node was lost before; then nothing is committed.
        """
        report = sessions_pb2.CommitRequest.FromString(self._report)
        rejected, measured = map(rejection_value, report.rejections), map(measured_value, report.measured)
        commit = partial(
            self._loader.commit_for_all,
            step,
            list(rejected),
            loss=self._loss,
            step_s=step_s,
            data_wait_s=data_wait_s,
            measured=list(measured),
        )
        self._commits.begin(partial(_commit_when_applied, all_have_applied, commit))

    def _arrive(self) -> dist.Work | None:
        """Announce that this node has applied the step; return work that is done once all have, or None if a node is lost.

        In that case the nodes of this pipeline may go on with the next step, as some may have begun it. Raises MeshCutError if
        this pipeline is cut too.
        """
        try:
            return self._mesh.arrive()
        except MeshCutError:
            self._mesh.check(in_pipeline=True)
            return None


def _commit_when_applied(all_have_applied: Callable[[], bool], commit: Callable[[], None]) -> None:
    """Commit a step once all nodes have applied it, since nodes that repeat it need its data, which a commit frees.

    If a node is lost before that, the next generation commits the step.
    """
    if all_have_applied():
        commit()


def _report(rejected: Sequence[Rejected], measured: Sequence[MeasuredWork]) -> bytes:
    message = sessions_pb2.CommitRequest(rejections=map(rejection_message, rejected), measured=map(measured_message, measured))
    return bytes(message.SerializeToString())
