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
from headrace.reorder_service.jobs.left_out import Agreement
from headrace.reorder_service.planning import sample_costs
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.packing import pack_batch, plan_of_samples
from headrace.reorder_service.planning.strategies import plan_of
from headrace.reorder_service.store.progress import Amounts, Delivered, StepRecord, added
from headrace.sample import Probe, SampleRef, decoded_bytes
from headrace.spec import JobSpec, TopologySpec
from headrace.ticket import part_of


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """What one ticket stands for: some samples of one microbatch, decoded together."""

    ticket: str
    replica: int
    microbatch: int
    samples: tuple[SampleRef, ...]
    shards: Mapping[int, int]
    """Shard -> how many of the samples it has."""
    probed_by: Mapping[str, int] = field(default_factory=dict)
    """Preprocessor -> how many of the samples it has probed."""
    agreed: Agreement = field(default_factory=Agreement)
    """Which of the samples no copy of it has."""
    work: Work | None = None
    lease: str = ""
    endpoint: str = ""
    message: tuple[str, bytes] = ("", b"")
    """A lease, and what ranks are told of it: written once for all of them."""

    @property
    def name(self) -> str:
        """What logs say of it: its ticket without the signature."""
        return part_of(self.ticket)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommit:
    """What one rank says of a step: samples that arrived as rejected, its loss (NaN: unknown) and times in seconds."""

    rejected: tuple[Rejected, ...]
    loss: float
    step_s: float
    data_wait_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """A step of the window. Filled from top to bottom: refs, then probes, then plan and parts, then commits."""

    index: int
    refs: list[SampleRef]
    trace: str = ""
    """JOB/UID/GENERATION/STEP, with which its tickets begin (headrace.observability.tracing)."""
    began_s: float = field(default_factory=time.perf_counter)
    probes: dict[int, Probe] = field(default_factory=dict)
    probed_by: dict[int, str] = field(default_factory=dict)
    """Sample -> preprocessor, as far as that is known."""
    rejected: list[Rejected] = field(default_factory=list)
    substitutes: dict[int, SampleRef] = field(default_factory=dict)
    """By place: what stands in for a refused sample."""
    sample_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    costs: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    packs: dict[int, int] = field(default_factory=dict)
    """Sample -> pack that it is in, where the job packs; else empty."""
    num_bytes: int | None = None
    """Of all parts once they are decoded, about; None until the samples are probed."""
    plan: StepPlan | None = None
    _whole: bytes = b""
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    """Of each replica, how many samples each of its microbatches has."""
    seconds: list[tuple[float, ...]] = field(default_factory=list)
    """Of each replica, what its microbatches take in all units together, as far as their samples' costs are known."""
    parts: dict[str, Part] = field(default_factory=dict)
    """By ticket."""
    tickets: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """(replica, microbatch) -> of its parts, in order; none for one without samples."""
    commits: dict[int, RankCommit] = field(default_factory=dict)
    messages: WeakKeyDictionary[object, bytes] = field(default_factory=WeakKeyDictionary)
    """What ranks are told of it, by the lane that they are of: written once for each."""

    def cut(self, plan: StepPlan, *, part_samples: int, ticket: Callable[[str], str]) -> None:
        """Take the plan and cut its microbatches into parts of at most `part_samples` samples, which lie in few shards each.
        Samples of a pack stay together: they stand one behind the other in the parts of their microbatch.

        `ticket`: of the part with that name, which is unique in the job.

        Raises ValueError for a plan that is none (headrace.plan.StepPlan.check).
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
                    part = Part(
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
        """The samples of a microbatch, pack by pack, as its parts have them; none where the job does not pack."""
        parts = (self.parts[ticket] for ticket in self.tickets.get((replica, microbatch), ()))
        samples = [ref.sample_id for part in parts for ref in part.samples] if self.packs else []
        return [list(of_pack) for _, of_pack in groupby(samples, self.packs.__getitem__)]

    @property
    def whole(self) -> bytes:
        """The plan as a message, for ranks that need all of it; written once for all of them."""
        if self.plan is not None and not self._whole:
            self._whole = message_codec.plan_message(self.plan).SerializeToString()
        return self._whole

    def make_plan(self, spec: JobSpec, topology_spec: TopologySpec, *, vocab: int, generation: int) -> StepPlan:
        """The plan of the step's good samples, after filling `costs`, `packs` and `num_bytes`. Pure otherwise: runs in a worker
        thread.

        vocab: size of the job's vocabulary, 0 if it is not known.
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
        self.costs = sample_costs(probes, shape, image=spec.image, audio=spec.audio, vocab=vocab, units=units)
        batch = make_batch(self.sample_ids, self.costs, topology, seed)
        speeds = np.array(topology_spec.speeds, np.float64) if topology_spec.speeds else None
        if spec.pack_tokens is None:
            return plan_of(spec.strategy, batch, generation, speeds)
        tokens = np.array([probe.num_tokens for probe in probes], np.int64)
        of_packs, packs = pack_batch(batch, tokens, spec.pack_tokens)
        self.packs = dict(zip(self.sample_ids.tolist(), packs.tolist(), strict=True))
        return plan_of_samples(plan_of(spec.strategy, of_packs, generation, speeds), batch, packs)

    def record(self, source_of: Callable[[int], str]) -> tuple[StepRecord, list[Rejected]]:
        """What the ledger and the quarantine get, once every rank has committed. `source_of`: a shard's source."""
        late = {item.sample_id: item for commit in self.commits.values() for item in commit.rejected}
        # A substitute that fails late is quarantined at its own place.
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
