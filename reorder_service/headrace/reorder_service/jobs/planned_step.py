"""One global batch on its way from the global order to the ledger."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from headrace import message_codec
from headrace.model_shape import MODEL_SHAPES
from headrace.plan import Microbatch, StepPlan
from headrace.quarantine import Rejected
from headrace.reorder_service.fleet.member import Work
from headrace.reorder_service.jobs.job_execution import execution_of, measured_costs
from headrace.reorder_service.jobs.left_out import Agreement
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.cost_model.cost import estimate
from headrace.reorder_service.planning.packing import pack_batch, plan_of_samples
from headrace.reorder_service.planning.strategies import plan_of
from headrace.reorder_service.store.progress import Amounts, Delivered, StepRecord, added
from headrace.sample import Probe, SampleRef, decoded_bytes
from headrace.spec import JobSpec, TopologySpec
from headrace.ticket import part_of


@dataclass(slots=True, kw_only=True, eq=False)
class PlannedPart:
    """Some samples of one microbatch, which are decoded, held and fetched together under one ticket."""

    ticket: str
    replica: int
    microbatch: int
    samples: tuple[SampleRef, ...]
    shards: Mapping[int, int]
    """Shard -> how many samples of the part it has."""
    probed_by: Mapping[str, int] = field(default_factory=dict)
    """Preprocessor -> how many samples of the part it has probed."""
    agreed: Agreement = field(default_factory=Agreement)
    """Agreement on the samples that every copy of the part leaves out."""
    work: Work | None = None
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


@dataclass(slots=True, kw_only=True, eq=False)
class PlannedStep:
    """One global batch in the job's window. It is filled step by step: refs, then probes, then plan and parts, then commits."""

    index: int
    refs: list[SampleRef]
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
    costs: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    packs: dict[int, int] = field(default_factory=dict)
    """Sample -> number of its pack; empty where the job does not pack."""
    num_bytes: int | None = None
    """Estimated bytes of all parts once they are decoded; None until the samples are probed."""
    plan: StepPlan | None = None
    _whole: bytes = b""
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    """Number of samples in each microbatch of each replica."""
    seconds: list[tuple[float, ...]] = field(default_factory=list)
    """Predicted seconds of each microbatch of each replica, summed over all units, as far as its samples' costs are known."""
    parts: dict[str, PlannedPart] = field(default_factory=dict)
    """Ticket -> part of the step."""
    tickets: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """(replica, microbatch) -> tickets of its parts, in order. A microbatch without samples has no entry."""
    commits: dict[int, RankCommit] = field(default_factory=dict)
    messages: WeakKeyDictionary[object, bytes] = field(default_factory=WeakKeyDictionary)
    """Lane -> serialized plan of the step for its ranks, serialized once for each lane."""

    def cut(self, plan: StepPlan, *, part_samples: int, ticket: Callable[[str], str]) -> None:
        """Take the plan, and cut its microbatches into parts of at most `part_samples` samples from few shards each.

        The samples of a pack stay together: they follow each other in the parts of their microbatch. `ticket`: makes a part's
        ticket from its name, which is unique in the job.

        Raises ValueError for an invalid plan (headrace.plan.StepPlan.check).
        """
        plan.check()
        refs = {ref.sample_id: ref for ref in self.refs} | self.substitutes
        of_units = [self.costs[unit] for unit in self.costs]
        costs = dict(zip(self.sample_ids.tolist(), np.sum(of_units, axis=0).tolist(), strict=True)) if of_units else {}
        for r, replica in enumerate(plan.replicas):
            self.sizes.append(tuple(len(microbatch.sample_ids) for microbatch in replica))
            self.seconds.append(tuple(sum(costs.get(i, 0.0) for i in microbatch.sample_ids) for microbatch in replica))
            for k, microbatch in enumerate(replica):
                samples = sorted((refs[i] for i in microbatch.sample_ids), key=self._place_in_microbatch)
                for n, start in enumerate(range(0, len(samples), part_samples)):
                    of_part = samples[start : start + part_samples]
                    part = PlannedPart(
                        ticket=ticket(f"{self.index}/{r}/{k}/{n}"),
                        replica=r,
                        microbatch=k,
                        samples=tuple(of_part),
                        shards=Counter(ref.shard for ref in of_part),
                        probed_by=Counter(self.probed_by[i] for ref in of_part if (i := ref.sample_id) in self.probed_by),
                    )
                    self.parts[part.ticket] = part
                    self.tickets.setdefault((r, k), []).append(part.ticket)
        self.plan = plan

    def _place_in_microbatch(self, ref: SampleRef) -> tuple[int, int, int]:
        return self.packs.get(ref.sample_id, 0), ref.shard, ref.row

    def packs_in(self, replica: int, microbatch: int) -> list[list[int]]:
        """Return the sample ids of a microbatch by pack, in the order of its parts; empty where the job does not pack."""
        parts = (self.parts[ticket] for ticket in self.tickets.get((replica, microbatch), ()))
        samples = [ref.sample_id for part in parts for ref in part.samples] if self.packs else []
        return [list(of_pack) for _, of_pack in groupby(samples, self.packs.__getitem__)]

    @property
    def whole(self) -> bytes:
        """The whole plan, for ranks that need all of it: serialized once for all of them, empty before the step is planned."""
        if self.plan is not None and not self._whole:
            self._whole = message_codec.plan_message(self.plan).SerializeToString()
        return self._whole

    def make_plan(self, spec: JobSpec, topology_spec: TopologySpec, *, vocab: int, generation: int) -> StepPlan:
        """Return a plan for the step's good samples, and fill `costs`, `packs` and `num_bytes`.

        Changes nothing else, so it may run in a worker thread. vocab: size of the job's vocabulary, 0 if it is not known.
        """
        topology, seed = topology_spec.topology(), spec.seed + self.index
        self.num_bytes = sum(
            decoded_bytes(probe, patch=spec.image.patch, mel_bins=spec.audio.mel_bins) for probe in self.probes.values()
        )
        if not self.probes:
            nothing = (Microbatch(units=dict.fromkeys(topology.stages, ())),) * topology.microbatches
            replicas = (nothing,) * topology.replicas
            return StepPlan(strategy=spec.strategy, seed=seed, topology=topology, replicas=replicas, generation=generation)
        probes = [self.probes[int(i)] for i in self.sample_ids]
        shape, units = MODEL_SHAPES[spec.model], tuple(topology.stages)
        tokens = np.array([probe.num_tokens for probe in probes], np.int64)
        execution, costs = execution_of(spec, topology), measured_costs(spec.execution)
        estimated = estimate(
            probes,
            shape,
            image=spec.image,
            audio=spec.audio,
            vocab=vocab,
            units=units,
            measured=None if costs is None else costs.coefficients,
            checkpointing=spec.execution.of_units("checkpointing"),
            backward_factors=execution.backward_factors,
        )
        self.costs = estimated.seconds
        batch = make_batch(
            self.sample_ids,
            self.costs,
            topology,
            seed,
            execution=execution,
            memory=estimated.memory_bytes,
            transfer_bytes=estimated.transfer_bytes,
            tokens=tokens,
        )
        speeds = np.array(topology_spec.speeds, np.float64) if topology_spec.speeds else None
        if spec.pack_tokens is None:
            return plan_of(spec.strategy, batch, generation, speeds)
        of_packs, packs = pack_batch(batch, tokens, spec.pack_tokens, padded=spec.pad_to_max_length)
        self.packs = dict(zip(self.sample_ids.tolist(), packs.tolist(), strict=True))
        return plan_of_samples(plan_of(spec.strategy, of_packs, generation, speeds), batch, packs)

    def record(self, source_of: Callable[[int], str]) -> tuple[StepRecord, list[Rejected]]:
        """Return the entries for ledger and quarantine once every rank has committed. `source_of`: returns a shard's source."""
        late = {item.sample_id: item for commit in self.commits.values() for item in commit.rejected}
        # A substitute that fails late is quarantined at its own place in the global order, not here.
        rejected = [*self.rejected, *(item for place, item in late.items() if place not in self.substitutes)]
        shards = {ref.sample_id: ref.shard for ref in self.refs}
        good = {sample_id: probe for sample_id, probe in self.probes.items() if sample_id not in late}
        delivered: Delivered = {}
        for sample_id, probe in good.items():
            amounts = Amounts(1, probe.num_tokens, sum(probe.image_patches), sum(probe.mel_frames))
            delivered = added(delivered, {source_of(shards[sample_id]): amounts})
        for sample_id in (shards.keys() - good.keys()) | self.substitutes.keys():
            delivered = added(delivered, {source_of(shards[sample_id]): Amounts(refused=1)})
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
