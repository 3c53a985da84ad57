"""Headrace's recovery on an availability trace, and what all policies share: the job, assumed times, the bound on throughput.

The policies of rivals are in `rivals.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.errors import UserError
from headrace.reorder_service.recovery.forecast.availability import Trace
from headrace.reorder_service.recovery.forecast.availability_replay import Activity, Recovery, Run, Span, Throughput, Undone
from headrace.reorder_service.recovery.instantiation import instantiate
from headrace.reorder_service.recovery.pipeline_templates import ModelProfile, Templates, plan_templates
from headrace.reorder_service.recovery.reconfiguration import Pipeline
from headrace.reorder_service.recovery.recovery_choice import Circumstances, OnLoss, choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions(Circumstances):
    """Times and rates that all policies assume, because templates do not contain them.

    The defaults were measured or published; where one had to be chosen, it favours the rivals.
    """

    detect_s: float = 1.0
    """Seconds from a loss until all nodes know of it, for all policies but torchft: Headrace's lease, within which a node that
    hangs is detected. A killed node is detected in 0.02 s, by the end of its stream."""
    restart_s: float = 2.53
    """Seconds to restart all processes, until they load a checkpoint. Measured: torchrun on one machine."""
    link_bytes_per_s: float = 25e9
    """Rate of a node's link, each way. Nothing else slows the rivals' copies. 200 Gbit/s, as in Oobleck's evaluation."""
    storage_bytes_per_s: float = 25e9
    """Rate of the checkpoint storage for all nodes together: six NVMe drives, as in Oobleck's evaluation."""
    save_every: int = 10
    """Steps between checkpoints, as in Oobleck's evaluation of Varuna."""
    torchft_s: float = 5.07
    """Seconds from a kill to the next commit with torchft. Measured with its default heartbeat; 0.49 s with the tuned one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForecastJob:
    """The training job to forecast. Raises UserError if the global batch is not a multiple of the microbatch."""

    profile: ModelProfile
    templates: Templates
    global_batch: int
    microbatch: int
    """Samples per microbatch."""

    def __post_init__(self) -> None:
        if self.global_batch % self.microbatch:
            nearest = max(1, round(self.global_batch / self.microbatch)) * self.microbatch
            raise UserError(f"{self.global_batch} samples are no whole microbatches of {self.microbatch}: {nearest} would be")

    @classmethod
    def of(
        cls, profile: ModelProfile, num_nodes: int, max_failures: int, *, global_batch: int, microbatch: int = 1
    ) -> ForecastJob:
        """Create a job and plan its templates. Raises UserError as `plan_templates` does, too."""
        templates = plan_templates(profile, num_nodes, max_failures)
        return cls(profile=profile, templates=templates, global_batch=global_batch, microbatch=microbatch)

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // self.microbatch

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole model's state."""
        return int(self.templates.layer_bytes.sum())


def failure_free(job: ForecastJob, trace: Trace) -> Run:
    """Return the upper bound: the throughput of the nodes present at each moment, without failures, be it one replica.

    It takes the best of all sets of pipelines on as many or fewer nodes, and changes between sets cost no time.
    """
    specification = replace(job.templates.specification, max_failures=0)
    templates = replace(job.templates, specification=specification)
    best = {0: 0.0}

    def rate(num_nodes: int) -> float:
        for count in range(len(best), num_nodes + 1):
            best[count] = best[count - 1]
            if count >= specification.smallest and specification.usable(count) == count:
                step_s = instantiate(templates, count, job.global_batch, job.microbatch).iteration_time
                best[count] = max(best[count], job.global_batch / step_s)
        return best[num_nodes]

    spans = []
    for start_s, end_s, count in trace.counts():
        if end_s > start_s:
            samples_per_s = rate(count)
            activity = Activity.TRAINS if samples_per_s else Activity.WAITS
            spans.append(Span(start_s=start_s, end_s=end_s, activity=activity, samples_per_s=samples_per_s))
    return Run(name="failure-free", spans=spans)


class Headrace:
    """Recovery without checkpoints: other pipelines are formed, and nodes copy the layers they lack from nodes that have them.

    The interrupted step is repeated or, if that is faster, its lost microbatches are rerouted. `recovery.choice` decides on this
    and on the pipelines, as it does for the service. The rest of a step whose microbatches are rerouted is counted at the
    throughput of the new pipelines. Like a live job, it stops where its guarantee ends.
    """

    name = "headrace"

    def __init__(self, job: ForecastJob, assumed: Assumptions) -> None:
        self._job = job
        self._assumed = assumed
        self._pipelines: tuple[Pipeline, ...] = ()
        self._idle: tuple[str, ...] = ()

    def start(self, nodes: Sequence[str]) -> Throughput:
        job = self._job
        chosen = instantiate(job.templates, len(nodes), job.global_batch, job.microbatch)
        names = iter(nodes)
        self._pipelines = tuple(
            Pipeline(template=template, nodes=tuple(next(names) for _ in range(template.num_nodes)))
            for template in chosen.templates
        )
        return Throughput(step_s=chosen.iteration_time, samples=job.global_batch)

    def change(self, lost: Sequence[str], joined: Sequence[str], *, announced: bool) -> Recovery | None:
        job, before = self._job, self._pipelines
        cut_off = not announced and any(node in lost for pipeline in before for node in pipeline.nodes)
        choice = choose(
            job.templates,
            before,
            self._assumed,
            lost=lost,
            joined=(*self._idle, *joined),
            num_microbatches=job.num_microbatches,
            on_loss=OnLoss.AUTO if cut_off else OnLoss.REBUILD,
        )
        after = choice.option.after
        self._pipelines, self._idle = after.pipelines, after.idle
        if after.pipelines == before:
            return None
        return Recovery(
            throughput=Throughput(step_s=choice.option.step_s, samples=job.global_batch),
            pause_s=choice.pause_s + (choice.rerouting_s or 0.0) + (self._assumed.detect_s if cut_off else 0.0),
            undone=Undone.STEP if choice.rerouting_s is None else Undone.NOTHING,
        )
