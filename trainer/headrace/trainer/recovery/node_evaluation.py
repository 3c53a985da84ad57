"""Evaluations of a recoverable job's validation sets, by all nodes that have a place in a pipeline."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from headrace.jobs_client import JobsClient
from headrace.message_codec import rejection_value
from headrace.trainer.evaluation import Evaluations, check_sets
from headrace.trainer.recovery.layout import Layout
from headrace.trainer.recovery.mesh import Mesh
from headrace.trainer.recovery.node_feed import NodeLoader
from headrace.trainer.recovery.recoverable_step import RecoverableStep
from headrace.v1 import sessions_pb2
from headrace.validation_spec import evaluation_of


class NodeEvaluations:
    """Evaluates, as `Evaluations` says when, under whichever layout the nodes have then.

    Where a node is lost meanwhile, the evaluation begins anew under the next layout.
    """

    def __init__(self, endpoint: str, loader: NodeLoader, every: int | None) -> None:
        """`every`: as in `Evaluations`. Raises UserError where the job has no validation set to evaluate."""
        self._endpoint, self._loader, self._every = endpoint, loader, every
        self._evaluated = -1  # steps before the last evaluation that was ended
        check_sets(loader.spec, every)

    def meet(self, steps: int, layout: Layout, mesh: Mesh, step: RecoverableStep, *, is_last: bool = False) -> None:
        """Evaluate after so many steps, if it is time and no node has done so. All nodes call it. Raises MeshCutError.

        `is_last`: no step follows.
        """
        if self._every is None or not (is_last or steps % self._every == 0):
            return
        newest = torch.tensor([self._evaluated])
        with mesh.interruptible():
            mesh.wait(mesh.everybody.allreduce([newest], dist.ReduceOp.MAX))
        if int(newest) != steps:
            Evaluations(self._loader.spec, self._every, lambda name: self._evaluate(name, layout, mesh, step)).begin(steps)
        self._evaluated = steps

    def _evaluate(self, name: str, layout: Layout, mesh: Mesh, step: RecoverableStep) -> tuple[float, float]:
        """Evaluate a set. Return the loss sum and the weight of targets, over all nodes."""
        spec = evaluation_of(self._loader.spec, name)
        if layout.rank == 0:
            with JobsClient(self._endpoint) as jobs:
                jobs.submit(spec)
                jobs.reset(spec.name, 0)
        mesh.barrier()
        loss_sum, target_weight = 0.0, 0.0
        with self._loader.of_job(spec.name) as loader:
            loader.assign(layout.for_evaluation(), 0)
            while (plan := loader.next_plan(mesh.check)) is not None:
                planned, _, feed = loader.begin(plan, step.prepare)
                loss, targets, said = step.evaluate(feed, layout.rank == layout.ranks[0])
                loss_sum, target_weight = loss_sum + loss, target_weight + targets
                loader.finish(planned)
                if layout.rank == 0:
                    report = sessions_pb2.CommitRequest.FromString(b"".join(said))
                    rejected = list(map(rejection_value, report.rejections))
                    loader.commit_for_all(plan.step, rejected, loss=loss / targets if targets else math.nan)
        return loss_sum, target_weight
