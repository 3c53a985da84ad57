"""One global batch on its way from the global order to the ledger."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from headrace import message_codec
from headrace.measured import MeasuredWork
from headrace.plan import LLM, Microbatch, StepPlan, Topology
from headrace.quarantine import Reason, Rejected
from headrace.reorder_service.fleet.member import Work
from headrace.reorder_service.jobs.foretold import Foretold
from headrace.reorder_service.jobs.formation import Formation
from headrace.reorder_service.jobs.job_execution import execution_of, sample_costs_of
from headrace.reorder_service.jobs.left_out import Agreement
from headrace.reorder_service.planning.batch import Batch, make_batch, slots_of
from headrace.reorder_service.planning.cost_model.correction import UNCORRECTED, Correction
from headrace.reorder_service.planning.packing import pack_batch, plan_of_samples
from headrace.reorder_service.planning.simulation.memory_limit import check_memory
from headrace.reorder_service.planning.strategies import plan_of
from headrace.reorder_service.planning.unequal_pipelines import for_pipelines, plan_for_pipelines, shares_of
from headrace.reorder_service.store.progress import Amounts, Delivered, StepRecord
from headrace.sample import Probe, SampleRef, decoded_bytes
from headrace.spec import JobSpec
from headrace.ticket import part_of
from headrace.topology_spec import TopologySpec

_T = TypeVar("_T")

Place = tuple[str, int]
"""A replica of a unit: (unit, replica)."""


@dataclass(slots=True, kw_only=True, eq=False)
class PlannedPart:
    """Some samples of one microbatch, which are decoded, held and fetched together under one ticket."""

    ticket: str
    replica: int
    microbatch: int
    """`replica` and `microbatch`: those that have the samples in the LLM."""
    places: frozenset[Place]
    """The replicas of each unit that have any of the samples."""
    samples: tuple[SampleRef, ...]
    shards: Mapping[int, int]
    """Shard -> how many samples of the part it has."""
    sources: tuple[int, ...] = ()
    """The source of each sample; empty where the job has only one."""
    probed_by: Mapping[str, int] = field(default_factory=dict)
    """Preprocessor -> how many samples of the part it has probed."""
    agreed: Agreement = field(default_factory=Agreement)
    """Agreement on the samples that every copy of the part leaves out."""
    work: Work | None = None
    """Its decoding, which it may share with other parts (headrace.reorder_service.jobs.part_decoding); None: not begun."""
    lease: str = ""
    endpoint: str = ""
    message: tuple[str, bytes] = ("", b"")
    """(lease, message): the serialized location of the part under that lease, serialized once for all ranks."""

    @property
    def name(self) -> str:
        """Name of the part in logs: its ticket without the signature."""
        return part_of(self.ticket)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommit:
    """What one rank reports with a commit: samples that arrived as rejected, its loss (NaN: unknown) and times in seconds."""

    rejected: tuple[Rejected, ...]
    loss: float
    step_s: float
    data_wait_s: float
    measured: tuple[MeasuredWork, ...] = ()
    content: int = 0
    """`PlannedStep.content` as the rank was told it; 0: unknown."""


@dataclass(slots=True, kw_only=True, eq=False)
class PlannedStep:
    """One global batch in the job's window. It is filled step by step: refs, then probes, then plan and parts, then commits."""

    index: int
    refs: list[SampleRef]
    content: int = 0
    """`batches.content_of` the refs."""
    trace: str = ""
    """Id of the step for tracing, JOB/UID/GENERATION/STEP, with which its tickets begin (headrace.observability.tracing)."""
    began_s: float = field(default_factory=time.perf_counter)
    probes: dict[int, Probe] = field(default_factory=dict)
    probed_by: dict[int, str] = field(default_factory=dict)
    """Sample -> preprocessor that has probed it, as far as that is known."""
    rejected: list[Rejected] = field(default_factory=list)
    substitutes: dict[int, SampleRef] = field(default_factory=dict)
    """Place of a refused sample -> the sample that stands in for it."""
    sample_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    estimated: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Estimated forward seconds of each sample by unit, before they are corrected by what trainers have measured."""
    costs: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Forward seconds of each sample by unit, corrected by what trainers have measured; the plan is made from them."""
    transfer_bytes: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Bytes of each sample that a stage of a unit sends to the next; empty where links are taken to be infinitely fast."""
    correction: Correction = UNCORRECTED
    """What the estimated costs are corrected by."""
    forecast_s: float = math.nan
    """The step's time as it was forecast with measured costs; NaN where there were none, or the simulator cannot say."""
    packs: dict[int, int] = field(default_factory=dict)
    """Sample -> number of its pack; empty where the job does not pack."""
    pack_length: int | None = None
    """Tokens that each pack is padded to; None where packs are not padded."""
    num_bytes: int | None = None
    """Estimated bytes of all parts once they are decoded; None until the samples are probed."""
    plan: StepPlan | None = None
    foretold: Foretold | None = None
    """Totals of the first plan, whose parts the step has; None before it is cut."""
    _whole: bytes = b""
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    """Number of samples in each microbatch of each replica."""
    formation: Formation | None = None
    """The pipelines of the job's nodes that `plan` is for; None: the replicas of the job's topology.

    After another plan was made for other pipelines (`adopt`), the parts are still those of the first plan.
    """
    parts: dict[str, PlannedPart] = field(default_factory=dict)
    """Ticket -> part of the step."""
    tickets: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """(replica, microbatch) -> tickets of its parts, in order. A microbatch without samples has no entry."""
    parts_at: dict[Place, list[PlannedPart]] = field(default_factory=dict)
    """Replica of a unit -> the parts that have samples there, in order."""
    commits: dict[int, RankCommit] = field(default_factory=dict)
    messages: WeakKeyDictionary[object, bytes] = field(default_factory=WeakKeyDictionary)
    """Lane -> serialized plan of the step for its ranks, serialized once for each lane."""

    def cut(
        self,
        plan: StepPlan,
        *,
        part_samples: int,
        ticket: Callable[[str], str],
        source_of: Callable[[int], int] | None = None,
    ) -> None:
        """Take the plan, and cut its microbatches into parts of at most `part_samples` samples from few shards each.

        The samples of a pack stay together: they follow each other in the parts of their microbatch. So do those with the same
        replicas in all units, in order that few processes need a part. `ticket`: makes a part's ticket from its name, which is
        unique in the job. `source_of`: returns the number of a shard's source; None: the job has only one.

        Raises ValueError for an invalid plan (headrace.plan.StepPlan.check).
        """
        listed = replace(plan, replicas=tuple(plan.replicas))  # a strategy's plan makes its microbatches anew for each look
        listed.check()
        refs = {ref.sample_id: ref for ref in self.refs} | self.substitutes
        units, replicas_of, packs = tuple(plan.topology.stages), _replicas_of(listed), self.packs
        places_of = {replicas: frozenset(zip(units, replicas, strict=True)) for replicas in set(replicas_of.values())}

        def place_in_microbatch(ref: SampleRef) -> tuple[int, tuple[int, ...], int, int]:
            return packs.get(ref.sample_id, 0), replicas_of[ref.sample_id], ref.shard, ref.row

        for r, replica in enumerate(listed.replicas):
            self.sizes.append(tuple(len(microbatch.sample_ids) for microbatch in replica))
            for k, microbatch in enumerate(replica):
                samples = sorted((refs[i] for i in microbatch.sample_ids), key=place_in_microbatch)
                for n, start in enumerate(range(0, len(samples), part_samples)):
                    of_part = samples[start : start + part_samples]
                    sharers = [(LLM, other) for ref in of_part for other in plan.sharers(ref.sample_id, r)]
                    part = PlannedPart(
                        ticket=ticket(f"{self.index}/{r}/{k}/{n}"),
                        replica=r,
                        microbatch=k,
                        places=frozenset(sharers).union(*[places_of[replicas_of[ref.sample_id]] for ref in of_part]),
                        samples=tuple(of_part),
                        shards=_counted([ref.shard for ref in of_part]),
                        sources=tuple(source_of(ref.shard) for ref in of_part) if source_of is not None else (),
                        probed_by=_counted([by for ref in of_part if (by := self.probed_by.get(ref.sample_id))]),
                    )
                    self.parts[part.ticket] = part
                    self.tickets.setdefault((r, k), []).append(part.ticket)
                    for place in part.places:
                        self.parts_at.setdefault(place, []).append(part)
        self.foretold = Foretold.of(listed, self.probes, packs, self.pack_length)
        self.adopt(plan, None)

    def adopt(self, plan: StepPlan, formation: Formation | None) -> None:
        """Take a checked plan of the step's samples, which replaces any former one. formation: as the attribute."""
        self.plan, self.formation, self._whole = plan, formation, b""
        self.messages.clear()

    def take_works(self) -> list[Work]:
        """Return the works of all parts, which forget them: the fleet is to drop them."""
        works = list(dict.fromkeys(part.work for part in self.parts.values() if part.work is not None))
        for part in self.parts.values():
            part.work = None
        return works

    @property
    def seconds(self) -> list[float]:
        """Predicted seconds of each microbatch of the plan, replica by replica, in all units together."""
        assert self.plan is not None, "the step is planned"
        of_units = list(self.costs.values())
        costs = dict(zip(self.sample_ids.tolist(), np.sum(of_units, axis=0).tolist(), strict=True)) if of_units else {}
        return [
            sum(costs.get(sample, 0.0) for sample in microbatch.sample_ids)
            for replica in self.plan.replicas
            for microbatch in replica
        ]

    def packs_in(self, replica: int, microbatch: int) -> list[list[int]]:
        """Return the sample ids of a microbatch by pack, in the order of its parts; empty where the job does not pack."""
        if not self.packs:
            return []
        parts = (self.parts[ticket] for ticket in self.tickets.get((replica, microbatch), ()))
        samples = [ref.sample_id for part in parts for ref in part.samples]
        return [list(of_pack) for _, of_pack in groupby(samples, self.packs.__getitem__)]

    @property
    def whole(self) -> bytes:
        """The whole plan, for ranks that need all of it: serialized once for all of them, empty before the step is planned."""
        if self.plan is not None and not self._whole:
            self._whole = message_codec.plan_message(self.plan).SerializeToString()
        return self._whole

    def make_plan(
        self,
        spec: JobSpec,
        topology_spec: TopologySpec,
        formation: Formation | None = None,
        *,
        vocab: int,
        generation: int,
    ) -> StepPlan:
        """Return a plan for the step's good samples.

        Fills `estimated`, `costs`, `transfer_bytes`, `packs`, `pack_length`, `forecast_s` and `num_bytes`, and changes nothing
        else, so it may run in a worker thread. formation: the pipelines of nodes to plan for; None: the topology's replicas.
        vocab: size of the job's vocabulary, 0 if it is not known.

        Raises ValueError if the schedule cannot run the plan, or if no plan is found that keeps the memory limit.
        """
        topology, seed, image, audio = topology_spec.topology(), spec.seed + self.index, spec.image, spec.audio
        self.num_bytes = sum(decoded_bytes(probe, patch=image.patch, mel_bins=audio.mel_bins) for probe in self.probes.values())
        if not self.probes:
            nothing = Microbatch(units=dict.fromkeys(topology.stages, ()))
            counts = [pipeline.microbatches for pipeline in formation.pipelines] if formation is not None else None
            replicas = [(nothing,) * count for count in counts or [topology.microbatches] * topology.replicas]
            topology = Topology(replicas=len(replicas), microbatches=max(map(len, replicas)), stages=topology.stages)
            return StepPlan(strategy=spec.strategy, seed=seed, topology=topology, replicas=replicas, generation=generation)
        probes = [self.probes[int(i)] for i in self.sample_ids]
        units, execution = tuple(topology.stages), execution_of(spec, topology)
        tokens = np.array([probe.num_tokens for probe in probes], np.int64)
        estimated = sample_costs_of(spec, probes, units=units, execution=execution, vocab=vocab)
        self.estimated, self.costs = estimated.seconds, self.correction.seconds(estimated.seconds)
        corrected = self.correction.execution(execution)
        corrected = corrected if formation is None else for_pipelines(corrected)
        self.transfer_bytes = estimated.transfer_bytes if execution.bytes_per_s < math.inf else {}
        batch = make_batch(
            self.sample_ids,
            self.costs,
            topology,
            seed,
            execution=corrected,
            memory=estimated.memory_bytes,
            transfer_bytes=estimated.transfer_bytes,
            tokens=tokens,
        )
        speeds = np.array(topology_spec.speeds, np.float64) if topology_spec.speeds else None

        def plan_any(batch: Batch) -> StepPlan:
            if formation is not None:
                plan = plan_for_pipelines(spec.strategy, batch, formation.pipelines, generation)
            else:
                plan = plan_of(spec.strategy, batch, generation, speeds)
            if batch.execution.memory_limit < math.inf:
                self._check_memory(batch, plan, formation)
            return plan

        if spec.pack_tokens is None:
            plan = plan_any(batch)
        else:
            of_packs, packs = pack_batch(batch, tokens, spec.pack_tokens, padded=spec.pad_to_max_length)
            self.packs = dict(zip(self.sample_ids.tolist(), packs.tolist(), strict=True))
            if spec.pad_to_max_length:  # what trainers measure is of padded packs, which all take the same
                self.pack_length = spec.pack_tokens
                of_pack = self.estimated[LLM].sum() * spec.pack_tokens / tokens.sum()
                self.estimated = {**self.estimated, LLM: (of_pack / np.bincount(packs))[packs]}
            plan = plan_of_samples(plan_any(of_packs), batch, packs)
        if spec.execution.of_units("on"):
            ids, of_units = self.sample_ids.tolist(), self.costs.items()
            plan = replace(plan, forward_s={unit: dict(zip(ids, some.tolist(), strict=True)) for unit, some in of_units})
        if self.correction.units and plan.predicted is not None:
            self.forecast_s = max(0.0, plan.predicted.iteration_s + self.correction.unexplained_s)
        return plan

    def _check_memory(self, batch: Batch, plan: StepPlan, formation: Formation | None) -> None:
        """Raise ValueError where the plan exceeds the memory limit, in the pipelines of nodes each by itself."""

        def name(sample_id: int) -> str:
            return self.probes[sample_id].name

        if formation is None:
            check_memory(batch, slots_of(plan, batch.sample_ids), name)
        else:
            for p, (part, slots, _) in enumerate(shares_of(batch, plan, formation.pipelines)):
                check_memory(part, slots, name, first_replica=p)

    @property
    def measured_s(self) -> float:
        """What the step took on its slowest rank, without waiting for data; NaN before a commit, and where nobody measured it."""
        measured_s = max((commit.step_s - commit.data_wait_s for commit in self.commits.values()), default=math.nan)
        return measured_s if measured_s > 0 else math.nan

    @property
    def is_compared(self) -> bool:
        """Whether the step was forecast and measured as a whole: what nodes resume after a loss is not."""
        has_work = any(commit.measured for commit in self.commits.values())
        return has_work and not math.isnan(self.forecast_s) and not math.isnan(self.measured_s)

    def record(self, source_of: Callable[[int], str]) -> tuple[StepRecord, list[Rejected]]:
        """Return the entries for ledger and quarantine once every rank has committed. `source_of`: returns a shard's source."""
        shards = {ref.sample_id: ref.shard for ref in self.refs}
        said = (item for commit in self.commits.values() for item in commit.rejected)
        late = {item.sample_id: item for item in said if item.sample_id in shards}  # not what a rank says of other steps' samples
        # A substitute that fails late is quarantined at its own place in the global order, not here.
        rejected = [*self.rejected, *(item for place, item in late.items() if place not in self.substitutes)]
        good = {sample_id: probe for sample_id, probe in self.probes.items() if sample_id not in late}
        of_source: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(Amounts._fields))
        for sample_id, probe in good.items():
            sums = of_source[source_of(shards[sample_id])]
            sums[0] += 1
            sums[1] += probe.num_tokens
            sums[2] += sum(probe.image_patches)
            sums[3] += sum(probe.mel_frames)
            sums[5] += probe.is_truncated
        filtered = {item.sample_id for item in rejected if item.reason is Reason.FILTERED}
        for sample_id in (shards.keys() - good.keys()) | self.substitutes.keys():
            of_source[source_of(shards[sample_id])][6 if sample_id in filtered else 4] += 1
        delivered: Delivered = {source: Amounts(*sums) for source, sums in of_source.items()}
        losses = [commit.loss for commit in self.commits.values() if not math.isnan(commit.loss)]
        return (
            StepRecord(
                samples=tuple(sorted(probe.name for place, probe in good.items() if place not in self.substitutes)),
                substitutes=tuple(sorted(good[place].name for place in self.substitutes.keys() & good.keys())),
                loss=losses[0] if losses else math.nan,
                step_s=max(commit.step_s for commit in self.commits.values()),
                data_wait_s=max(commit.data_wait_s for commit in self.commits.values()),
                delivered=delivered,
            ),
            rejected,
        )


def _counted(items: Iterable[_T]) -> dict[_T, int]:
    """Return how often each item occurs. A Counter of a handful takes four times as long to make."""
    counts: dict[_T, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


def _replicas_of(plan: StepPlan) -> dict[int, tuple[int, ...]]:
    """Return the replicas of each sample in the units, in the order of the plan's stages.

    A unit with another number of replicas than the LLM shares lanes with it, gcd(both numbers) of them. There it is the first of
    the LLM's replicas in the lane: the processes of a lane name all of these.
    """
    of_units: list[dict[int, int]] = []
    for unit in plan.topology.stages:
        if (dealt := plan.unit_replicas.get(unit)) is None:
            of_slots = ((r, microbatch.units[unit]) for r, replica in enumerate(plan.replicas) for microbatch in replica)
        else:
            lanes = math.gcd(len(dealt), plan.topology.replicas)
            first = [r * lanes // len(dealt) * (plan.topology.replicas // lanes) for r in range(len(dealt))]
            of_slots = ((first[r], samples) for r, replica in enumerate(dealt) for samples in replica)
        of_units.append({sample: r for r, samples in of_slots for sample in samples})
    return {sample: tuple(of_unit[sample] for of_unit in of_units) for sample in of_units[0]}
