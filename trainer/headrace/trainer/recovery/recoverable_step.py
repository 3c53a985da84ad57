"""One step of a recoverable job: compute in each pipeline, gradient all-reduce layer by layer over all pipelines, and a vote."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from headrace.measured import MeasuredWork
from headrace.message_codec import rejection_message
from headrace.quarantine import Rejected
from headrace.snapshot import NOBODY
from headrace.trainer.gradients import buckets
from headrace.trainer.pipeline.cargo import Prepare
from headrace.trainer.pipeline.channels import ChannelEnd, ChannelRanks, Channels, OpenEnd
from headrace.trainer.pipeline.executor import Executor, run_step
from headrace.trainer.pipeline.feed import StepFeed
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.recovery.held_layers import Holding
from headrace.trainer.recovery.host_staging import from_host, staged, to_host, waiting
from headrace.trainer.recovery.layer_checks import checked
from headrace.trainer.recovery.layout import Layout
from headrace.trainer.recovery.mesh import Mesh, MeshCutError
from headrace.trainer.replica_check import difference, digests, few
from headrace.trainer.train_step import SkipPolicy, StepResult
from headrace.v1 import sessions_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a node's pipeline has done of a step so far.

    The node has the gradients of its layers, not summed with those of other pipelines yet.
    """

    formation: int = 0
    """Generation of the pipelines for which the step's plan was made (`Layout.formation_of`)."""
    numbers: frozenset[int] = frozenset()
    """Numbers of the microbatches done, as `headrace.trainer.recovery.layout.Layout.assigned` counts them."""
    loss_sum: float = 0.0
    target_weight: float = 0.0
    non_finite_samples: tuple[int, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    """Rejected samples that this node found in its parts."""
    data_wait_s: float = 0.0
    """Seconds that this node waited for its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The outcome of a vote on a step, the same on all nodes."""

    result: StepResult
    generation: int
    """Generation of the newest snapshot that every node knows."""
    said: Sequence[bytes]
    """The message that each node attached to its vote, by rank; empty for a node without one."""
    data_wait_s: float
    """Seconds that the node with the longest wait waited for data."""


class RecoverableStep:
    """Runs one node's share of every step of one generation: `compute`, `meet`, `sum_gradients`, `vote`."""

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        holding: Holding,
        holders: Mapping[str, Sequence[int]],
        skip_policy: SkipPolicy,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Create the groups for messages within the pipeline and for sums of gradients. Raises MeshCutError.

        `holders`: ranks that have each parameter. `skip_policy`: this node's count of skipped updates, which votes change.
        `dtype`: torch.autocast dtype.
        """
        self._mesh, self._holding, self._skip_policy = mesh, holding, skip_policy
        stage = holding.stage
        self._autocast = torch.autocast(stage.device.type, dtype, enabled=dtype != torch.float32)
        present = [rank for rank in layout.ranks if rank != NOBODY]
        self._pipeline_index = layout.pipeline
        self._pipeline = mesh.group("pipeline/" + "-".join(map(str, present)), present, is_pipeline=True)
        wait = waiting(partial(mesh.wait_for_message, in_pipeline=True))
        with mesh.interruptible(in_pipeline=True):
            own_rank, open_end = layout.topology.rank(layout.place), _end_of(layout, staged(self._pipeline, stage.device))
            channels = Channels(layout.topology, own_rank, stage.device, open_end, wait)
        self._wire = Wire(channels, stage.device, dtype, wait)
        self._layers = [module for name, module in stage.model.named_modules() if re.search(r"\.layers\.\d+$", name)]
        self._executor = Executor(layout.topology, layout.place, [stage], self._wire)
        self._evaluator = Executor(layout.topology.frozen(), layout.place, [stage], self._wire)
        self._sums: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        sharing: dict[tuple[int, ...], list[str]] = {}
        for name, ranks in holders.items():
            if len(ranks) > 1:
                sharing.setdefault(tuple(ranks), []).append(name)
        for number, (ranks, names) in enumerate(sharing.items()):  # in the same order on all nodes, to avoid a deadlock
            parameters = [holding.learning[name] for name in names if name in holding.learning]
            if mesh.rank in ranks and parameters:
                self._sums.append((mesh.group(f"sum/{number}", ranks), parameters))
        self._counted = [p for name, p in holding.learning.items() if holders[name][0] == mesh.rank]
        self._nodes, self._replicas = layout.nodes, {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        self.non_finite_samples: Sequence[int] = ()
        """Samples of this node's portions of the last step whose loss was not finite."""

    @property
    def prepare(self) -> Prepare:
        """The function that makes the cargo of portions for this node's stage."""
        return self._executor.prepare

    def compute(self, share: Share, numbers: Collection[int], feed: StepFeed) -> Share:
        """Run forward and backward of further microbatches of a step, and return the share with them added.

        Messages to other nodes may still be on their way until `meet`. Raises MeshCutError if a node of this pipeline was lost
        meanwhile, or has turned to something else: then the gradients are to be discarded, as a backward may have ended midway.
        """
        check = partial(self._mesh.check, in_pipeline=True)
        with self._mesh.interruptible(in_pipeline=True), self._autocast, checked(self._layers, check):
            [totals] = run_step([self._executor], feed.routes, [feed])
        loss_sum = float(totals.loss_sum)
        self._executor.clock.mark()
        return Share(
            formation=share.formation,
            numbers=share.numbers.union(numbers),
            loss_sum=share.loss_sum + loss_sum,
            target_weight=share.target_weight + totals.target_weight,
            non_finite_samples=(*share.non_finite_samples, *(() if math.isfinite(loss_sum) else totals.non_finite_samples())),
            rejected=(*share.rejected, *feed.rejected),
            data_wait_s=share.data_wait_s + feed.data_wait_s,
        )

    def meet(self, share: Share) -> StepResult:
        """Wait until all pipelines have done their share, before any gradients are summed. Return the loss of the global batch.

        The gradient norm of the result is nan, as it is not known yet. Raises MeshCutError if a node was lost meanwhile, but not
        before this pipeline has done its share.
        """
        self.non_finite_samples = share.non_finite_samples
        sums = torch.tensor([share.loss_sum, share.target_weight], dtype=torch.float64)
        try:
            with self._mesh.interruptible():
                self._mesh.wait(self._mesh.everybody.allreduce([sums]))
                self._wire.flush()  # the receivers are here, so they have taken their messages
        except MeshCutError:
            with suppress(MeshCutError), self._mesh.interruptible(in_pipeline=True):
                self._mesh.wait(self._pipeline.barrier(), in_pipeline=True)  # others in it may still need this node's messages
            raise
        loss_sum, target_weight = sums.tolist()
        return StepResult(loss=loss_sum / (target_weight or math.nan), target_weight=target_weight, grad_norm=math.nan)

    def evaluate(self, feed: StepFeed, speaks: bool) -> tuple[float, float, Sequence[bytes]]:
        """Run forward only. Return the loss sum and the weight of targets over all nodes, and the encoded CommitRequest of each
        node that `speaks`, with the rejected samples of its pipeline. Raises MeshCutError."""
        with self._mesh.interruptible(in_pipeline=True), torch.no_grad(), self._autocast:
            [totals] = run_step([self._evaluator], feed.routes, [feed])
        rejected = feed.rejected if speaks else ()
        said = sessions_pb2.CommitRequest(rejections=map(rejection_message, rejected)).SerializeToString()
        own = torch.tensor([float(totals.loss_sum), totals.target_weight, len(said)], dtype=torch.float64)
        everybody = [torch.empty_like(own) for _ in range(self._mesh.num_ranks)]
        with self._mesh.interruptible():
            self._mesh.wait(self._mesh.everybody.allgather([everybody], [own]))
            self._wire.flush()
            table = torch.stack(everybody)
            messages = self._mesh.gather(said, table[:, 2].long().tolist())
        return float(table[:, 0].sum()), float(table[:, 1].sum()), messages

    def check_replicas(self, step: int | None = None) -> None:
        """Raise an error on all nodes if a weight differs between those that have it: `replica_check.difference`.

        All nodes call it, and each sends the digests of its weights. step: as there. Raises MeshCutError.
        """
        if not self._replicas:
            return
        held = self._holding.parameters
        digest_of = dict(zip(held, digests(held.values()).tolist(), strict=True))
        own = torch.tensor([digest_of.get(name, 0) for name in self._replicas])
        everybody = [torch.empty_like(own) for _ in range(self._mesh.num_ranks)]
        with self._mesh.interruptible():
            self._mesh.wait(self._mesh.everybody.allgather([everybody], [own]))
        for (name, ranks), found in zip(self._replicas.items(), torch.stack(everybody, dim=1).tolist(), strict=True):
            others = dict.fromkeys(self._nodes[rank] for rank in ranks if found[rank] != found[ranks[0]])
            if others:
                with suppress(MeshCutError):  # nobody ends before all have what they need to say the same
                    self._mesh.barrier()
                raise difference(f"nodes {few(list(others))}", f"node {self._nodes[ranks[0]]}", name, step)

    def measured(self) -> Sequence[MeasuredWork]:
        """Return what this node has measured of the last `compute`."""
        return [replace(work, replica=self._pipeline_index) for work in self._executor.clock.work()]

    def sum_gradients(self, result: StepResult) -> None:
        """Sum the gradients over all pipelines and average them, which makes them those of the global batch.

        result: from `meet`. Raises MeshCutError.
        """
        if not result.target_weight:
            return
        reducing = self._executor.clock.reducing() if self._sums else nullcontext()
        with self._mesh.interruptible(), reducing:
            for group, parameters in self._sums:
                _sum_gradients(self._mesh, group, parameters)
        for parameter in self._holding.learning.values():
            if parameter.grad is not None:
                parameter.grad.div_(result.target_weight)

    def vote(self, result: StepResult, generation: int, said: bytes, data_wait_s: float) -> StepOutcome:
        """Vote on a step with all nodes: a node that gets the outcome knows that all nodes have the step's gradients.

        result: from `meet`. generation: of the newest snapshot that this node knows. said: message for all nodes, may be empty.
        data_wait_s: seconds that this node waited for data.

        If loss or gradients are not finite, the outcome's gradient norm is nan and the update is to be skipped, or HeadraceError
        is raised on all nodes, as the settings say. Raises MeshCutError.
        """
        squares = float(nn.utils.get_total_norm([p.grad for p in self._counted if p.grad is not None])) ** 2
        skip_policy = self._skip_policy
        own = torch.tensor(
            [squares, generation, len(said), data_wait_s, skip_policy.in_row, skip_policy.total], dtype=torch.float64
        )
        everybody = [torch.empty_like(own) for _ in range(self._mesh.num_ranks)]
        with self._mesh.interruptible():
            self._mesh.wait(self._mesh.everybody.allgather([everybody], [own]))
            table = torch.stack(everybody)
            messages = self._mesh.gather(said, table[:, 2].long().tolist())
        norm = math.sqrt(float(table[:, 0].sum())) if result.target_weight else 0.0
        skip_policy.in_row, skip_policy.total = (
            int(of_nodes.max()) for of_nodes in table[:, 4:6].T
        )  # a node that just joined has 0
        if result.target_weight and not skip_policy.may_update(result.loss, norm, self.non_finite_samples):
            norm = math.nan
        return StepOutcome(
            result=StepResult(loss=result.loss, target_weight=result.target_weight, grad_norm=norm),
            generation=int(table[:, 1].min()),
            said=messages,
            data_wait_s=float(table[:, 3].max()),
        )


def apply(holding: Holding, grad_norm: float, learning_rate: float, max_grad_norm: float) -> None:
    """Clip the gradients of a step that was voted for, update the weights, and drop the gradients.

    The update is skipped if the gradient norm is not finite. grad_norm: of the global batch, over the whole model.
    """
    parameters = list(holding.learning.values())
    if math.isfinite(grad_norm) and any(parameter.grad is not None for parameter in parameters):
        nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, torch.tensor(grad_norm))
        holding.update(learning_rate)
    holding.discard()


def _end_of(layout: Layout, pipeline: dist.ProcessGroup) -> OpenEnd:
    """Return a function that opens a node's end of a channel in its pipeline's group, where gloo tells channels by tags.

    It knows no step: one would then hold itself, and keep a lost generation's memory until Python collects cycles.
    """
    present = [rank for rank in layout.ranks if rank != NOBODY]

    def open_end(ranks: ChannelRanks) -> ChannelEnd | None:
        ends = [layout.ranks[index] for index in (ranks.sender, ranks.receiver)]
        if layout.rank not in ends or NOBODY in ends:
            return None
        peer = ends[1 - ends.index(layout.rank)]
        return ChannelEnd(pipeline, present.index(peer), ranks.tag)

    return open_end


def _sum_gradients(mesh: Mesh, group: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
    """All-reduce the gradients of these parameters over a group, bucket by bucket.

    Unlike `headrace.trainer.gradients.sum_gradients`, it sends the flags that say which gradients exist in the same messages.
    """
    for bucket in buckets(parameters):
        flags = torch.tensor([float(p.grad is not None) for p in bucket], device=bucket[0].device)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([flags, *(gradient.flatten() for gradient in gradients)])
        host = to_host(flat)
        mesh.wait(group.allreduce([host]))
        summed = torch.split(from_host(host, flat)[len(bucket) :], [p.numel() for p in bucket])
        for parameter, gradient, num_ranks in zip(bucket, summed, host[: len(bucket)].tolist(), strict=True):
            parameter.grad = gradient.view_as(parameter) if num_ranks else None
