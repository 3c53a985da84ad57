"""The step loader of a pipeline process: each step's whole plan, and the part of the data that this process needs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import pyarrow as pa
import torch

from headrace import message_codec
from headrace.errors import UserError
from headrace.measured import MeasuredWork
from headrace.plan import GENERATOR, LLM, StepPlan
from headrace.quarantine import Rejected
from headrace.sample import UNIT_COLUMNS
from headrace.trainer.loading.columns import MEDIA
from headrace.trainer.loading.commit_thread import CommitThread
from headrace.trainer.loading.connecting import PREFETCH_BYTES, PREFETCH_PARTS, THREADS
from headrace.trainer.loading.device_copy import DeviceCopy, PendingCopy
from headrace.trainer.loading.hedging import HEDGE_S
from headrace.trainer.loading.loader import SessionLoader
from headrace.trainer.loading.pack_ahead import PackAhead
from headrace.trainer.loading.part_client import FetchedPart
from headrace.trainer.loading.steps import Step
from headrace.trainer.pipeline.cargo import Cargo, Prepare
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.transport.base import TRANSPORTS
from headrace.v1 import sessions_pb2

COMMIT_GRACE_S = 2.0  # how long a process that ends by an error waits for its last commit, which may wait for a lost process


@dataclass(frozen=True, slots=True)
class RowRef:
    """The location of a sample: a record batch and the row in it."""

    batch: pa.RecordBatch
    row: int


class Parts(Protocol):
    """Protocol of a source of parts, such as `headrace.trainer.loading.fetch.PartFetcher`."""

    def have_arrived(self, tickets: Sequence[str]) -> bool: ...
    def take(self, ticket: str) -> FetchedPart: ...


@dataclass(slots=True, eq=False)
class StepFeed:
    """The data of one step for one process: called with a portion, it returns the portion's cargo.

    While the stage computes a portion, the next one is packed from parts that were fetched ahead, and prepared for the stage.
    """

    routes: Routes
    _place: Place
    _samples: Mapping[str, Sequence[int]]
    """The samples of each part that this process needs, by ticket."""
    _packs: Mapping[int, int]
    """Sample -> number of its pack; empty if the job does not pack."""
    _parts: Parts
    _packing: PackAhead[tuple[StepFeed, Portion], PendingCopy[Cargo]]
    prepare: Prepare
    """Makes the cargo of a packed portion."""
    rejected: list[Rejected] = field(default_factory=list)
    data_wait_s: float = 0.0
    """Seconds that the stage waited for portions that were not packed yet when it asked for them."""
    _portions: Iterator[Portion] = field(init=False)
    """Portions still to be announced for packing, in the order in which the stage asks for them."""
    _row_refs: dict[int, RowRef] = field(default_factory=dict)
    _to_come: dict[int, str] = field(init=False)
    """Ticket of the part of each sample whose part was not taken yet."""

    def __post_init__(self) -> None:
        self._portions = iter(self.routes.portions(self._place.unit, self._place.replica))
        self._to_come = {sample: ticket for ticket, samples in self._samples.items() for sample in samples}

    def __call__(self, portion: Portion) -> Cargo:
        """Return the portion's cargo, on the device, without samples that could not be decoded."""
        began_s = time.perf_counter()
        cargo = self._packing.take((self, portion)).wait()
        self.data_wait_s += time.perf_counter() - began_s
        self.announce()
        return cargo

    def announce(self) -> None:
        """Have the next portion packed in the background."""
        following = next(self._portions, None)
        if following is not None:
            self._packing.announce((self, following))

    def has_arrived(self, portion: Portion) -> bool:
        """Whether the portion's parts have all come, so that `rows` would not wait."""
        return self._parts.have_arrived(self._tickets(portion))

    def rows(self, portion: Portion) -> list[pa.RecordBatch]:
        """Return the rows of the portion's samples, in its order, without samples that could not be decoded.

        Waits for the parts that hold them. Not for concurrent calls.
        """
        for ticket in self._tickets(portion):
            part = self._parts.take(ticket)
            for sample in self._samples[ticket]:
                del self._to_come[sample]
            self._note(part)
        return list(_runs(self._row_refs[sample] for sample in portion.samples if sample in self._row_refs))

    def packs(self, portion: Portion) -> list[list[int]]:
        """Return the samples of the LLM's portion by pack, in its order; empty in other units, and if the job does not pack.

        A plan tears no pack apart.
        """
        samples = portion.samples if self._packs and portion.unit == LLM else ()
        return [list(of_pack) for _, of_pack in groupby(samples, self._packs.__getitem__)]

    def _tickets(self, portion: Portion) -> list[str]:
        """Return the tickets of the portion's parts that were not taken yet."""
        return list(dict.fromkeys(self._to_come[sample] for sample in portion.samples if sample in self._to_come))

    def _note(self, part: FetchedPart) -> None:
        self.rejected.extend(part.rejected)
        for batch in part.batches:
            for row, sample in enumerate(batch.column("sample_id").to_pylist()):
                self._row_refs[sample] = RowRef(batch, row)


class PortionLoader(SessionLoader):
    """A step loader that packs portions of microbatches, each while the stage computes the one before."""

    def __init__(self, endpoint: str, *, device: torch.device, **options: Any) -> None:
        """`device`: where packed portions are copied to. `options`: further arguments of SessionLoader."""
        self._copy = DeviceCopy(device)
        self._portions = PackAhead(self._pack_portion, lambda announced: announced[0].has_arrived(announced[1]))
        super().__init__(
            endpoint,
            prefetch_parts=PREFETCH_PARTS,
            prefetch_bytes=PREFETCH_BYTES,
            threads=THREADS,
            hedge_s=HEDGE_S,
            **options,
        )

    def close(self) -> None:
        """Stop packing ahead, and close the loader (`StepLoader.close`)."""
        self._portions.close()
        super().close()

    def _on_part_arrived(self) -> None:
        self._portions.start_if_ready()

    def _pack_portion(self, what: tuple[StepFeed, Portion]) -> PendingCopy[Cargo]:
        feed, portion = what
        data = self._collate(feed.rows(portion), feed.packs(portion))
        return self._copy.begin(feed.prepare(feed.routes, portion, data))


class PipelineLoader(PortionLoader):
    """A step loader for one place of a pipeline: yields steps with the routes of their whole plans.

    All places have to commit each step, which they do while their processes train the next one.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        job: str,
        topology: PipelineTopology,
        place: Place,
        device: torch.device,
        transports: Sequence[str] = TRANSPORTS,
    ) -> None:
        """`place`: what this loader loads for; to the service it is a rank of its own. `device`: where packed portions are copied
        to. `transports`: as in `headrace.trainer.connect`.
        """
        self._topology, self._place = topology, place
        self._needed: dict[int, tuple[Routes, dict[str, list[int]], dict[int, int]]] = {}  # by step
        self._commits = CommitThread()
        super().__init__(
            endpoint,
            job=job,
            rank=topology.number(place),
            num_ranks=topology.num_places,
            device=device,
            transports=transports,
            columns=columns_of(topology, self._place),
            unit=self._place.unit,
            replicas=replicas_of(topology, self._place, topology.units[LLM].dp),
            of_job=lambda job: PipelineLoader(
                endpoint, job=job, topology=topology, place=place, device=device, transports=transports
            ),
        )

    def _tickets_of(self, plan: sessions_pb2.RankPlan) -> list[str]:
        """Return the tickets of the parts that this process needs, in the order in which it needs them."""
        if plan.step not in self._needed:
            whole = message_codec.plan_value(plan.whole)
            _check_replicas(plan.step, whole, self._topology)
            routes = Routes(whole, self._topology.replicas)
            self._needed[plan.step] = routes, tickets_of(plan, routes, self._place), packs_of(plan)
        return list(self._needed[plan.step][1])

    def _drop_plans(self) -> None:
        super()._drop_plans()
        self._needed.clear()

    def steps(self, prepare: Prepare) -> Iterator[tuple[Step, StepFeed]]:
        """Yield the steps until the job's end, each with its data. Commit each one by `commit_fed`.

        `prepare`: of this process's executor, makes the cargo of a portion.
        """
        for step in self:
            routes, samples, packs = self._needed.pop(step.index)
            feed = StepFeed(routes, self._place, samples, packs, self._parts, self._portions, prepare)
            feed.announce()
            yield step, feed

    def commit(self, step: Step, *, loss: float = math.nan) -> None:
        """Commit a step (`StepLoader.commit`) whose data were consumed; a step of `steps` is committed by `commit_fed`."""
        super().commit(step, loss=loss)
        self._needed.pop(step.index, None)  # present if the step is committed again without being handed out

    def commit_fed(self, step: Step, feed: StepFeed, *, loss: float, measured: Sequence[MeasuredWork]) -> None:
        """Begin to commit a step that this process has applied, once the commit of the step before has ended.

        The commit has the rejected samples and the waiting time of the step's feed. `measured`: as `Step.measured`. Raises what
        the commit before raised.
        """
        step.rejected, step.consumed = feed.rejected, True
        step.data_wait_s += feed.data_wait_s
        step.measured = measured
        self.settle()
        self._passed_on = step.index + 1
        self._commits.begin(partial(self._commit_beside, step, loss))

    def settle(self) -> None:
        """Wait until the last step passed to `commit_fed` is in the ledger. Only then may a checkpoint be saved after it.

        Raises what its commit raised.
        """
        self._commits.settle()

    def _commit_beside(self, step: Step, loss: float) -> None:
        try:
            self.commit(step, loss=loss)
        except BaseException as err:
            with self._changed:  # whoever waits for the next plan would wait for ever
                self._error = err
                self._changed.notify_all()
            raise

    def close(self) -> None:
        """Close the loader (`StepLoader.close`), after giving a commit in progress COMMIT_GRACE_S to end."""
        self._commits.close(COMMIT_GRACE_S)
        super().close()


def columns_of(topology: PipelineTopology, place: Place) -> tuple[str, ...]:
    """Return the columns that a process fetches: those of its unit, with the media (patches, mel) only where they are read.

    Media are read on the first stage of a unit and on the generator's last one, which compares with them.
    """
    ends = (0, topology.units[GENERATOR].pp - 1) if place.unit == GENERATOR else (0,)
    return tuple(name for name in UNIT_COLUMNS[place.unit] if place.stage in ends or name not in MEDIA)


def replicas_of(topology: PipelineTopology, place: Place, replicas: int) -> list[int]:
    """Return the replicas that the plan gives to a process's unit and whose samples may reach the process: those of its lane.

    See `headrace.trainer.pipeline.routes` for lanes. replicas: number of replicas in the plan.
    """
    lanes = math.gcd(topology.units[place.unit].dp, replicas)
    lane = place.replica * lanes // topology.units[place.unit].dp
    return list(range(lane * replicas // lanes, (lane + 1) * replicas // lanes))


def tickets_of(message: sessions_pb2.RankPlan, routes: Routes, place: Place) -> dict[str, list[int]]:
    """Return the samples of each part that this process needs, by ticket, in the order in which it needs the parts."""
    part_samples = {
        ticket: list(part.sample_ids)
        for microbatch in message.microbatches
        for ticket, part in zip(microbatch.tickets, microbatch.parts, strict=True)
    }
    part_of = {sample: ticket for ticket, samples in part_samples.items() for sample in samples}
    needed = [sample for portion in routes.portions(place.unit, place.replica) for sample in portion.samples]
    return {ticket: part_samples[ticket] for ticket in dict.fromkeys(part_of[sample] for sample in needed)}


def packs_of(message: sessions_pb2.RankPlan) -> dict[int, int]:
    """Return the number of each sample's pack; empty if the job does not pack."""
    packs = [pack for microbatch in message.microbatches for pack in microbatch.packs]
    return {sample: number for number, pack in enumerate(packs) for sample in pack.sample_ids}


def _check_replicas(step: int, plan: StepPlan, topology: PipelineTopology) -> None:
    if plan.topology.replicas != topology.units[LLM].dp:
        raise UserError(
            f"step {step} is planned for {plan.topology.replicas} replicas, and the llm has dp {topology.units[LLM].dp}: "
            "change dp, or the replicas of the job with `headrace job topology`"
        )


def _runs(refs: Iterable[RowRef]) -> Iterator[pa.RecordBatch]:
    """Yield the rows that these refer to in order, consecutive rows of a batch as one slice."""
    current: list[Any] = []  # batch, first row, number of rows
    for ref in refs:
        if current and current[0] is ref.batch and current[1] + current[2] == ref.row:
            current[2] += 1
            continue
        if current:
            yield current[0].slice(current[1], current[2])
        current = [ref.batch, ref.row, 1]
    if current:
        yield current[0].slice(current[1], current[2])
