"""Rival policies for lost nodes in the manner of Varuna, Bamboo and torchft, on the same templates and traces as Headrace.

These are models of published designs, not measurements of those systems. In doubt they favour the rival: all have Headrace's
templates, its way to detect a loss unless theirs is known to be slower, storage that gives one checkpoint all of its bandwidth,
and nodes that are ready to work as soon as they are back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.errors import UserError
from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.recovery.forecast.availability_replay import Policy, Recovery, Throughput, Undone
from headrace.reorder_service.recovery.forecast.policies import Assumptions, ForecastJob
from headrace.reorder_service.recovery.pipeline_templates import Template, Templates, plan_templates
from headrace.reorder_service.recovery.stage_mapping import iteration_time

FORWARD_SHARE = 1 / 3
"""Share of the forward in a layer's forward plus backward time: the backward takes twice as long."""
TUNED_S = 0.49
"""Seconds of `Assumptions.torchft_s` with heartbeats tuned for it; measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGrid:
    """Equal pipelines that share the global batch as evenly as possible."""

    template: Template
    pipelines: int
    microbatches: int
    """Number of microbatches of the pipeline that has the most."""

    @property
    def step_s(self) -> float:
        return self.template.iteration_time(self.microbatches)

    @property
    def num_nodes(self) -> int:
        return self.pipelines * self.template.num_nodes


def best_grid(templates: Templates, num_nodes: int, num_microbatches: int, *, fewest: int = 1) -> ProcessGrid | None:
    """Return the fastest grid of `fewest` pipelines or more on at most `num_nodes` nodes; None if there is none."""
    grids = []
    for size, template in templates.of_size.items():
        pipelines = min(num_nodes // size, num_microbatches)
        if pipelines >= fewest:
            grids.append(ProcessGrid(template=template, pipelines=pipelines, microbatches=-(-num_microbatches // pipelines)))
    return min(grids, key=lambda grid: grid.step_s, default=None)


class Varuna:
    """Checkpoint and restart: after a loss, all nodes start again from the last checkpoint, on the best grid of the nodes left.

    They also restart, after saving a checkpoint, when a loss is announced or when nodes are back that make a faster grid.
    Training stops while a checkpoint is written, as in Oobleck's evaluation. Losing a node outside of the grid costs nothing.
    """

    def __init__(self, job: ForecastJob, assumed: Assumptions, *, name: str = "varuna-like") -> None:
        self.name = name
        self._job = job
        self._assumed = assumed
        self._grid: ProcessGrid | None = None
        self._used: list[str] = []
        self._spare: list[str] = []

    def start(self, nodes: Sequence[str]) -> Throughput:
        throughput = self._restart(list(nodes))
        if throughput is None:
            raise _too_few(len(nodes))
        return throughput

    def change(self, lost: Sequence[str], joined: Sequence[str], *, announced: bool) -> Recovery | None:
        hit = any(node in lost for node in self._used)
        left = [node for node in (*self._used, *self._spare, *joined) if node not in lost]
        better = best_grid(self._job.templates, len(left), self._job.num_microbatches)
        if not hit and (better is None or (self._grid is not None and better.step_s >= self._grid.step_s)):
            self._spare = [node for node in left if node not in self._used]
            return None
        saves = announced and self._grid is not None
        assumed, moved_s = self._assumed, self._job.state_bytes / self._assumed.storage_bytes_per_s
        return Recovery(
            throughput=self._restart(left),
            pause_s=(moved_s if saves else 0.0) + (0.0 if announced else assumed.detect_s) + assumed.restart_s + moved_s,
            undone=Undone.NOTHING if announced else Undone.UNSAVED,
            saved=saves,
        )

    def _restart(self, nodes: list[str]) -> Throughput | None:
        job, assumed = self._job, self._assumed
        self._grid = best_grid(job.templates, len(nodes), job.num_microbatches)
        count = self._grid.num_nodes if self._grid else 0
        self._used, self._spare = nodes[:count], nodes[count:]
        if self._grid is None:
            return None
        save_s = job.state_bytes / assumed.storage_bytes_per_s
        return Throughput(step_s=self._grid.step_s, samples=job.global_batch, save_every=assumed.save_every, save_s=save_s)


class Bamboo:
    """Redundant computation: each node of a pipeline also holds the layers of the next node and computes their forward.

    The last node does so for the first one. When a node is lost, the one before it takes its place; when both are lost, all
    start again from the last checkpoint. Nodes that are back fill gaps, and make new pipelines if there are enough of them.

    So layers take a third more time and twice the memory, all the time. Not modelled: redundant work hidden in pipeline bubbles
    (even so, Oobleck measured an overhead of more than half, section 2.7.4), backwards that are computed again after a loss, and
    the cost of checkpoints.
    """

    name = "bamboo-like"

    def __init__(self, job: ForecastJob, assumed: Assumptions) -> None:
        profile = replace(job.profile, seconds=job.profile.seconds * (1 + FORWARD_SHARE), gpu_bytes=job.profile.gpu_bytes * 2)
        self._templates = plan_templates(profile, job.templates.specification.num_nodes, 0)
        self._job = job
        self._assumed = assumed
        self._template: Template | None = None
        self._pipelines: list[list[str]] = []  # "" for a gap
        self._spare: list[str] = []

    def start(self, nodes: Sequence[str]) -> Throughput:
        throughput = self._restart(list(nodes))
        if throughput is None:
            raise _too_few(len(nodes))
        return throughput

    def change(self, lost: Sequence[str], joined: Sequence[str], *, announced: bool) -> Recovery | None:
        assumed = self._assumed
        self._spare = [node for node in (*self._spare, *joined) if node not in lost]
        hit = any(node in lost for nodes in self._pipelines for node in nodes)
        self._pipelines = [["" if node in lost else node for node in nodes] for nodes in self._pipelines]
        detect_s = assumed.detect_s if hit and not announced else 0.0
        if self._template is None or any(
            not node and not nodes[i - 1] for nodes in self._pipelines for i, node in enumerate(nodes)
        ):
            left = [node for nodes in self._pipelines for node in nodes if node] + self._spare
            undone = Undone.UNSAVED if self._template else Undone.NOTHING
            load_s = self._job.state_bytes / assumed.storage_bytes_per_s
            return Recovery(throughput=self._restart(left), pause_s=detect_s + assumed.restart_s + load_s, undone=undone)
        num_bytes = self._fill(self._template)
        if not hit and not num_bytes:
            return None
        copy_s = num_bytes / assumed.link_bytes_per_s
        return Recovery(throughput=self._throughput(self._template), pause_s=detect_s + assumed.rebuild_s + copy_s)

    def _restart(self, nodes: list[str]) -> Throughput | None:
        grid = best_grid(self._templates, len(nodes), self._job.num_microbatches)
        self._template = grid.template if grid else None
        size = grid.template.num_nodes if grid else 1
        count = grid.num_nodes if grid else 0
        self._pipelines = [nodes[first : first + size] for first in range(0, count, size)]
        self._spare = nodes[count:]
        return self._throughput(grid.template) if grid else None

    def _fill(self, template: Template) -> int:
        """Put spare nodes into gaps and new pipelines; return the most bytes that one of them copies."""
        num_bytes = [int(self._templates.layer_bytes[list(template.layers_of(i))].sum()) for i in range(template.num_nodes)]
        copied = [0]
        for nodes in self._pipelines:
            for i, node in enumerate(nodes):
                if not node and self._spare:
                    nodes[i] = self._spare.pop(0)
                    copied.append(num_bytes[i])
        while len(self._spare) >= template.num_nodes and len(self._pipelines) < self._job.num_microbatches:
            self._pipelines.append([self._spare.pop(0) for _ in num_bytes])
            copied += num_bytes
        return max(copied)

    def _throughput(self, template: Template) -> Throughput:
        microbatches = -(-self._job.num_microbatches // len(self._pipelines))
        gaps = {tuple(i for i, node in enumerate(nodes) if not node) for nodes in self._pipelines}
        step_s = max(iteration_time(_with_gaps(template, of_one), microbatches) for of_one in gaps)
        return Throughput(step_s=step_s, samples=self._job.global_batch, save_every=self._assumed.save_every)


class Torchft:
    """Equal replica groups: one that lost a node sits out, and its share of the batch with it, until that is back or replaced.

    If no group is whole, the first that becomes so starts again from the last checkpoint. Not modelled: what it costs a group to
    come back, which fetches the model while the others train, and what checkpoints cost.
    """

    def __init__(self, job: ForecastJob, assumed: Assumptions, *, name: str = "torchft-like") -> None:
        self.name = name
        self._job = job
        self._assumed = assumed
        self._grid: ProcessGrid | None = None
        self._groups: list[list[str]] = []
        self._spare: list[str] = []

    def start(self, nodes: Sequence[str]) -> Throughput:
        grid = best_grid(self._job.templates, len(nodes), self._job.num_microbatches, fewest=2)
        if grid is None:
            raise _too_few(len(nodes))
        size = grid.template.num_nodes
        self._grid = grid
        self._groups = [list(nodes[first : first + size]) for first in range(0, grid.num_nodes, size)]
        self._spare = list(nodes[grid.num_nodes :])
        return self._throughput(grid)

    def change(self, lost: Sequence[str], joined: Sequence[str], *, announced: bool) -> Recovery | None:
        assert self._grid is not None
        whole = self._whole()
        hit = any(node in lost for nodes in self._groups if all(nodes) for node in nodes)
        self._spare = [node for node in (*self._spare, *joined) if node not in lost]
        self._groups = [["" if node in lost else node for node in nodes] for nodes in self._groups]
        if whole and not self._whole():
            return Recovery(throughput=None, pause_s=0.0, undone=Undone.UNSAVED)
        for nodes in sorted(self._groups, key=lambda nodes: nodes.count("")):
            for i, node in enumerate(nodes):
                if not node and self._spare:
                    nodes[i] = self._spare.pop(0)
        if not hit and self._whole() == whole:
            return None
        if not whole:
            load_s = self._job.state_bytes / self._assumed.storage_bytes_per_s
            return Recovery(throughput=self._throughput(self._grid), pause_s=self._assumed.restart_s + load_s)
        surprise = hit and not announced
        return Recovery(
            throughput=self._throughput(self._grid),
            pause_s=self._assumed.torchft_s if surprise else 0.0,
            undone=Undone.STEP if surprise else Undone.NOTHING,
        )

    def _whole(self) -> int:
        return sum(all(nodes) for nodes in self._groups)

    def _throughput(self, grid: ProcessGrid) -> Throughput:
        samples = self._job.global_batch * self._whole() / grid.pipelines
        return Throughput(step_s=grid.step_s, samples=samples, save_every=self._assumed.save_every)


def _varuna_tuned(job: ForecastJob, assumed: Assumptions) -> Varuna:
    return Varuna(job, replace(assumed, save_every=1), name="varuna-like, tuned")


def _torchft_tuned(job: ForecastJob, assumed: Assumptions) -> Torchft:
    return Torchft(job, replace(assumed, torchft_s=TUNED_S), name="torchft-like, tuned")


RIVALS: Mapping[str, Callable[[ForecastJob, Assumptions], Policy]] = {
    "varuna-like": Varuna,
    "varuna-like, tuned": _varuna_tuned,
    "bamboo-like": Bamboo,
    "torchft-like": Torchft,
    "torchft-like, tuned": _torchft_tuned,
}
"""Policies by name; tuned: a checkpoint after every step, or `TUNED_S`. For a job that they cannot run they raise UserError, when
created or when started."""


def _with_gaps(template: Template, gaps: Sequence[int]) -> Floats:
    """Return (S,) the seconds of the remaining stages, where the node before each gap does the gap's work as well as its own."""
    work = [
        sum(stage.seconds * stage.gpus for stage in template.stages if stage.node == node) for node in range(template.num_nodes)
    ]
    slower = {(gap - 1) % template.num_nodes: 1 + work[gap] / work[gap - 1] for gap in gaps}
    return np.array([stage.seconds * slower.get(stage.node, 1.0) for stage in template.stages if stage.node not in gaps])


def _too_few(num_nodes: int) -> UserError:
    return UserError(f"{num_nodes} nodes are too few for the model: give more of them, or more memory")
