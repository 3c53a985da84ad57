"""The loader of one FSDP rank: of each microbatch and unit the samples that this rank has, straight from the preprocessors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist

from headrace.jobs_client import JobsClient
from headrace.manifest import Vocabulary
from headrace.measured import MeasuredWork, Ran
from headrace.schedule import Kind
from headrace.spec import JobSpec
from headrace.trainer.devices import local_device
from headrace.trainer.loading.steps import Step
from headrace.trainer.loading.stopwatch import Stopwatch, clock_origin_s, uses_gpu
from headrace.trainer.orchestrated.fsdp_ranks import check_planned, check_undeferred, topology_of
from headrace.trainer.pipeline.cargo import Cargo, Prepare
from headrace.trainer.pipeline.feed import PipelineLoader, StepFeed
from headrace.trainer.pipeline.places_loader import PlacesLoader
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.transport.base import TRANSPORTS

Phase = tuple[str, Kind, int]
"""What a rank computes at a time: a unit, forward or backward, of a microbatch."""


class Preparing(Protocol):
    """Protocol of a model that makes the cargo of its units: an `OrchestratedModel`."""

    def prepare(self, topology: PipelineTopology, rank: int) -> Sequence[Prepare]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrchestratedMicrobatch:
    """One microbatch of the step of all ranks, as one of them has it."""

    index: int
    cargo: Mapping[str, Cargo | None]
    """What this rank has of each unit, on the device; None: no sample."""
    laps: Stopwatch[Phase]
    """Those of its step."""
    shared_by: Sequence[tuple[int, ...]] = ()
    """The ranks that share any sample's sequence in the LLM, each set of them once."""

    @contextmanager
    def timed(self, unit: str, kind: Kind) -> Iterator[None]:
        """Time the block as a phase of this rank, if it has samples of the unit."""
        cargo = self.cargo[unit]
        if cargo is None or not cargo.num_rows:
            yield
            return
        self.laps.start()
        yield
        self.laps.stop((unit, kind, self.index))


@dataclass(slots=True, eq=False)
class OrchestratedStep:
    """One step, as one rank has it. Iterate over it once: all ranks have as many microbatches, some of them empty."""

    index: int
    steps: Sequence[Step]
    """Of each of the rank's places."""
    feeds: Sequence[StepFeed]
    _topology: PipelineTopology
    _rank: int
    _laps: Stopwatch[Phase] = field(default_factory=lambda: Stopwatch(on_gpu=uses_gpu()))

    def __iter__(self) -> Iterator[OrchestratedMicrobatch]:
        feeds = dict(zip(self._topology.units, self.feeds, strict=True))
        yield from microbatches(self.feeds[0].routes, self._topology, self._rank, feeds, self._laps)

    @property
    def data_wait_s(self) -> float:
        """Seconds that this rank has waited for plan and data."""
        return max(step.data_wait_s for step in self.steps) + sum(feed.data_wait_s for feed in self.feeds)

    def work(self) -> Sequence[Sequence[MeasuredWork]]:
        """Return what was measured of the step, of each of the rank's places. On a GPU this waits for its phases.

        Ranks wait for each other within their phases, so that these are no costs of theirs alone.
        """
        ran: dict[str, dict[Kind, list[Ran]]] = {unit: {} for unit in self._topology.units}
        for (unit, kind, index), begin_s, end_s in self._laps.laps():
            ran[unit].setdefault(kind, []).append(Ran(index, 0, begin_s, end_s - begin_s))
        clock_unix_s = clock_origin_s()
        return [
            [
                MeasuredWork.of(of_kind, clock_unix_s, unit=unit, replica=self._rank, stage=0, kind=kind)
                for kind, of_kind in kinds.items()
            ]
            for unit, kinds in ran.items()
        ]


def microbatches(
    routes: Routes, topology: PipelineTopology, rank: int, feeds: Mapping[str, Any], laps: Stopwatch[Phase]
) -> Iterator[OrchestratedMicrobatch]:
    """Yield the microbatches of a step, as many on every rank. feeds: by unit, what returns the cargo of a portion. laps: takes
    their phases."""
    portions = {unit: {portion.forward: portion for portion in routes.portions(unit, rank)} for unit in topology.units}
    for index in routes.occupied(rank, in_step=True):
        of_units = {unit: portions[unit].get(index) for unit in topology.units}
        cargo = {unit: None if one is None else feeds[unit](one) for unit, one in of_units.items()}
        yield OrchestratedMicrobatch(index=index, cargo=cargo, shared_by=routes.shared_by(index), laps=laps)


@dataclass(slots=True, eq=False)
class OrchestratedLoader:
    """Iterates over the steps of a job as one FSDP rank has them; each must be passed to `commit`."""

    topology: PipelineTopology
    _places: PlacesLoader
    _rank: int
    _num_ranks: int

    def __enter__(self) -> Self:
        self._places.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._places.__exit__(kind, error, trace)

    @property
    def spec(self) -> JobSpec:
        """The job's spec. Raises UserError where it is not planned for these ranks, as it may have been planned anew."""
        spec = self._places.spec
        check_planned(spec, self._num_ranks)
        return spec

    @property
    def vocabulary(self) -> Vocabulary:
        """The job's vocabulary."""
        return self._places.vocabulary

    @property
    def next_step(self) -> int:
        """Index of the next step."""
        return self._places.next_step

    def has_next(self) -> bool:
        """Return whether a step is left, after waiting until it is planned."""
        return self._places.has_next()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the job, for a checkpoint, which any number of ranks can load. Call `settle` before."""
        return self._places.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a checkpoint's step: later commits are undone. Must be called before the first step is handed out."""
        self._places.load_state_dict(state)

    def evaluation(self, spec: JobSpec) -> OrchestratedLoader:
        """Return a loader like this one, not open yet, of an evaluation (`StepLoader.evaluation`)."""
        return OrchestratedLoader(self.topology, self._places.evaluation(spec), self._rank, self._num_ranks)

    def steps(self, model: Preparing) -> Iterator[OrchestratedStep]:
        """Yield the steps until the job's end. Raises UserError for a plan that FSDP ranks cannot run, on all of them alike."""
        for steps, feeds in self._places.steps(model.prepare(self.topology, self._rank)):
            check_undeferred(steps[0].index, feeds[0].routes, self.topology)
            yield OrchestratedStep(steps[0].index, steps, feeds, self.topology, self._rank)

    def commit(self, step: OrchestratedStep, *, loss: float = math.nan) -> None:
        """Begin to commit a step that this rank has applied, once the commit of the step before has ended.

        On a GPU this waits for the step's last phase (`OrchestratedStep.work`). loss: that of the whole step, if this rank knows
        it. Raises what the commit before raised.
        """
        self._places.commit_fed(step.steps, step.feeds, loss=loss, measured=step.work())

    def settle(self) -> None:
        """Wait until the last step passed to `commit` is in the ledger. Raises what its commit raised."""
        self._places.settle()


def connect(
    endpoint: str,
    *,
    job: str,
    rank: int | None = None,
    num_ranks: int | None = None,
    topology: PipelineTopology | None = None,
    device: torch.device | None = None,
    transports: Sequence[str] = TRANSPORTS,
) -> OrchestratedLoader:
    """Return the loader of one FSDP rank; as a context it is closed behind it. Its session is opened by its first use.

    rank, num_ranks: None: those of torch.distributed. topology: None: that of the job. device: where samples are copied to; None:
    this rank's GPU, or the CPU if there is none. transports: as in `headrace.trainer.connect`.

    Raises UserError for a job that is not planned for so many FSDP ranks, and EndpointError or NotFoundError without one.
    """
    rank = dist.get_rank() if rank is None else rank
    num_ranks = dist.get_world_size() if num_ranks is None else num_ranks
    if topology is None:
        with JobsClient(endpoint) as client:
            topology = topology_of(client.spec(job), num_ranks)
    device = device or local_device()
    places = [
        PipelineLoader(endpoint, job=job, topology=topology, place=place, device=device, transports=transports)
        for place in topology.places(rank)
    ]
    return OrchestratedLoader(topology, PlacesLoader(places), rank, num_ranks)
