"""Encoders and an LLM on the same ranks, each sharded by FSDP2, with one all-to-all behind each encoder.

A microbatch runs in phases, in the same order on all ranks: every encoder and the exchange behind it, the LLM forward and
backward, and then every encoder's exchange and backward in reverse. The graph of autograd is cut behind the exchanges, so that
this order depends on no rank's samples. A rank without a sample runs a filler (`filler_samples`), none of whose rows leave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headrace.block_distribution import BLOCK
from headrace.errors import HeadraceError, UserError
from headrace.manifest import Vocabulary
from headrace.plan import LLM
from headrace.schedule import Kind
from headrace.spec import JobSpec
from headrace.trainer.context.rank_groups import RankGroups
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.models.fused_linear import parts_of
from headrace.trainer.models.loss import StepLoss
from headrace.trainer.orchestrated.filler_samples import filler
from headrace.trainer.orchestrated.orchestrated_loader import OrchestratedMicrobatch
from headrace.trainer.orchestrated.row_exchange import ExchangedBytes, Splits, exchange_rows, rows_to_send
from headrace.trainer.orchestrated.sequence_cargo import SequenceCargoMaker, check_shares, joined
from headrace.trainer.orchestrated.unit_roots import OwnEncoder, OwnLlm, StageRoot, UnitRoot
from headrace.trainer.pipeline.agreement import check_alike
from headrace.trainer.pipeline.cargo import CargoMaker, Prepare
from headrace.trainer.pipeline.chunk import Chunk, Inputs
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.train_step import StepResult


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """What an encoder has sent in a microbatch, for the way back."""

    rows: Tensor
    """As they left the exchange, in the graph of the encoder."""
    arrived: Tensor
    """The same, in the graph of the LLM."""


class OrchestratedModel(nn.Module):
    """Maps microbatches of an `OrchestratedLoader` to gradients of their summed loss, on all ranks of a mesh together.

    for step in loader.steps(model):
        for microbatch in step:
            model.accumulate(microbatch)
        result = model.average(max_grad_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        loader.commit(step, loss=result.loss)
    """

    def __init__(
        self,
        encoders: Mapping[str, nn.Module],
        llm: nn.Module,
        *,
        mesh: DeviceMesh,
        spec: JobSpec,
        vocabulary: Vocabulary,
        mp_policy: MixedPrecisionPolicy | None = None,
        dtype: torch.dtype = torch.float32,
        block: int = BLOCK,
    ) -> None:
        """encoders: "vision" and "audio", one or both: `module(data)` returns the rows (t, the LLM's width) of all images, or
        recordings, of a microbatch (`PackedMicrobatch`), those of a sample together. llm: `module(data, tokens)` returns the
        summed loss, a scalar; `tokens` has each encoder's rows, in the order of their placeholders. Layers that are to be
        gathered one by one are wrapped before, by `fully_shard(layer, mesh=mesh)`. A `UnitRoot` is taken as it is.

        mesh: of all ranks, with one dimension or, to shard within groups, two: (replicate, shard). spec, vocabulary: the
        loader's. mp_policy: of FSDP. dtype: that of torch.autocast. block: tokens of the blocks by which ranks share sequences.
        Every rank makes the model with the same weights, and keeps its shard of its own.

        Raises UserError where the encoders are not the job's, nothing learns, the ranks differ in what learns, and where ranks
        are to share sequences that the LLM takes whole, or there are other processes besides these ranks.
        """
        super().__init__()
        wanted = [unit for unit in spec.topology.stages if unit != LLM]
        if sorted(encoders) != sorted(wanted):
            raise UserError(
                f"the encoders are {', '.join(sorted(encoders)) or 'none'}, and the job is planned for "
                f"{', '.join(sorted(wanted))} (topology.stages): give the same ones"
            )
        roots = {
            unit: module if isinstance(module := encoders[unit], UnitRoot) else OwnEncoder(module, unit, spec) for unit in wanted
        }
        self.encoders = nn.ModuleDict(roots)
        self.llm: UnitRoot = llm if isinstance(llm, UnitRoot) else OwnLlm(llm, vocabulary)
        self.group, self.num_ranks = _group(mesh), mesh.size()
        self._shares, self._block = spec.execution.cp != 1, block
        if self._shares:
            check_shares(self.llm)
            self._groups = RankGroups(self.group)
        self.mesh = mesh
        self.device = torch.device(mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.learns = {unit: any(p.requires_grad for p in root.parameters()) for unit, root in self.units.items()}
        """Which units learn: only an encoder that does gets gradients, by the exchange's transpose."""
        if not any(self.learns.values()):
            raise UserError("every parameter of encoders and LLM is frozen: let one of them learn (requires_grad, frozen: false)")
        check_alike({"frozen units": self.learns}, self.group, self.device)
        for root in self.units.values():
            outside = root.outside_shards()
            for part in (*root.shards, root):
                ignored = None if part is root else outside
                fully_shard(part, mesh=mesh, mp_policy=mp_policy or MixedPrecisionPolicy(), ignored_params=ignored)
        self.sharded = {
            parameter: [part._replace(name=root.whole_name(part.name)) for part in fused]
            for root in self.units.values()
            for parameter, fused in parts_of(root)
        }
        """The parameters, sharded, each with the names that it has in a checkpoint of any trainer."""
        self.exchanged = ExchangedBytes()
        """Bytes sent to other ranks by exchanges, and those planned."""
        self._fillers = {unit: self._filler(unit, spec, vocabulary) for unit in self.units}
        self._dtype = dtype
        self.discard()

    @property
    def units(self) -> dict[str, UnitRoot]:
        """The units by name, in the order of their phases."""
        return {**{unit: cast(UnitRoot, root) for unit, root in self.encoders.items()}, LLM: self.llm}

    def prepare(self, topology: PipelineTopology, rank: int) -> Sequence[Prepare]:
        """Return what makes the cargo of each place of a rank, in the order of the units."""
        return [self._maker(topology, place) for place in topology.places(rank)]

    def _maker(self, topology: PipelineTopology, place: Place) -> CargoMaker:
        root = self.units[place.unit]
        if self._shares and place.unit == LLM:
            return SequenceCargoMaker(topology, place, cast(StageRoot, root), block=self._block)
        return CargoMaker(topology, place, [cast(Chunk, root)])

    def accumulate(self, microbatch: OrchestratedMicrobatch) -> None:
        """Add the loss and the gradients of one microbatch. A collective call.

        Raises HeadraceError where a module makes another number of rows than its samples have placeholders, or a loss that does
        not depend on its weights and `tokens`.
        """
        with self._autocast():
            sent = {unit: self._encode(unit, microbatch) for unit in self.encoders}
            loss = self._loss(microbatch, {unit: one.arrived for unit, one in sent.items()})
        if not loss.loss_sum.requires_grad:
            raise HeadraceError(
                "the loss does not depend on what learns, so that other ranks would wait for this one's backward: let the LLM's "
                "module use `tokens` also where there are none, as index_copy does, and its weights where there is no target"
            )
        with microbatch.timed(LLM, Kind.BACKWARD):
            torch.autograd.backward(loss.loss_sum)
        for unit in reversed(sent):
            if self.learns[unit]:
                rows, arrived = sent[unit].rows, sent[unit].arrived
                with microbatch.timed(unit, Kind.BACKWARD):
                    torch.autograd.backward(rows, torch.zeros_like(rows) if arrived.grad is None else arrived.grad)
        self._loss_sum += loss.loss_sum.detach()
        self._target_weight += loss.target_weight

    @torch.no_grad()
    def evaluate(self, microbatch: OrchestratedMicrobatch) -> StepLoss:
        """Return this rank's loss of one microbatch. A collective call."""
        with self._autocast():
            sent = {unit: self._encode(unit, microbatch) for unit in self.encoders}
            loss = self._loss(microbatch, {unit: one.arrived for unit, one in sent.items()})
        _end_forward(self.llm)
        return loss

    def average(self, max_grad_norm: float = math.inf) -> StepResult:
        """Divide the gradients by the targets of the whole global batch, clip them by their norm, and return loss and norm.

        The loss accumulated on all ranks is begun anew. Without any target the loss is NaN, and there are no gradients. Nor has
        an encoder any of which no rank had a sample, as in one process: with zeros an optimizer would still move its weights.
        """
        numbers = self._loss_sum.new_tensor([self._target_weight, *self._num_encoded.values()])
        loss_sum, target_weight, *num_encoded = self._summed(torch.cat([self._loss_sum[None], numbers])).tolist()
        for unit, count in zip(self.encoders, num_encoded, strict=True):
            if not count:
                self.encoders[unit].zero_grad(set_to_none=True)
        self._begin()
        gradients = [_local(p.grad) for p in self.sharded if p.grad is not None]
        if not target_weight:
            self.discard()
            return StepResult(loss=math.nan, target_weight=0.0, grad_norm=0.0)
        for gradient in gradients:
            gradient.mul_(self.num_ranks / target_weight)  # FSDP has averaged over the ranks
        squares = torch.nn.utils.get_total_norm(gradients).to(self.device).double().square()
        replicates = self.mesh.size(0) if self.mesh.ndim == 2 else 1
        norm = (self._summed(squares) / replicates).sqrt()
        scale = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
        return StepResult(loss=loss_sum / target_weight, target_weight=target_weight, grad_norm=float(norm))

    def discard(self) -> None:
        """Drop the accumulated loss and gradients."""
        self.zero_grad(set_to_none=True)
        self._begin()

    def _encode(self, unit: str, microbatch: OrchestratedMicrobatch) -> _Sent:
        """Run an encoder on this rank's samples, and send what it makes to the ranks that have them in the LLM."""
        cargo, of_llm = microbatch.cargo[unit], microbatch.cargo[LLM]
        is_empty = cargo is None or not cargo.num_rows
        inputs = self._fillers[unit] if is_empty or cargo is None else cargo.inputs[0]
        splits = Splits.of(unit, cargo, of_llm, self.num_ranks)
        backward = self.learns[unit] and torch.is_grad_enabled()
        self._num_encoded[unit] += backward and not is_empty
        with torch.set_grad_enabled(backward):
            with microbatch.timed(unit, Kind.FORWARD):
                rows = self.encoders[unit](inputs, {})
            if not is_empty and cargo is not None and len(rows) != cargo.num_made:
                raise HeadraceError(
                    f"the {unit} encoder makes {len(rows)} rows of samples that have {cargo.num_made} placeholders: it has to "
                    "make one of each token"
                )
            leaving = rows[rows_to_send(cargo, self.device)]
            self.exchanged.planned += (
                splits.to_others(dist.get_rank(self.group), backward=backward) * rows.shape[1] * rows.element_size()
            )
            sent = exchange_rows(leaving, splits, self.group, self.exchanged)
        if not backward:
            _end_forward(self.encoders[unit])
        return _Sent(sent, sent.detach().requires_grad_(backward))

    def _loss(self, microbatch: OrchestratedMicrobatch, arrived: Mapping[str, Tensor]) -> StepLoss:
        cargo = microbatch.cargo[LLM]
        groups = self._groups.of_sets(microbatch.shared_by) if microbatch.shared_by else {}
        if cargo is None or not cargo.num_rows:
            return StepLoss(loss_sum=self.llm(self._fillers[LLM], arrived), target_weight=0.0)
        orders = {unit: join.order for unit, join in cargo.joins.items()}
        in_order = {unit: rows if (order := orders.get(unit)) is None else rows[order] for unit, rows in arrived.items()}
        inputs = joined(cargo.inputs[0], groups) if groups else cargo.inputs[0]
        with microbatch.timed(LLM, Kind.FORWARD):
            loss_sum = self.llm(inputs, in_order)
        return StepLoss(loss_sum=loss_sum, target_weight=self.llm.target_weight(inputs))

    def _filler(self, unit: str, spec: JobSpec, vocabulary: Vocabulary) -> Inputs:
        inputs: Inputs = to_device(self.units[unit].prepare(filler(unit, spec, vocabulary)), self.device)
        return inputs

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32)

    def _summed(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers, group=self.group)
        return numbers

    def _begin(self) -> None:
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._target_weight = 0.0
        self._num_encoded = dict.fromkeys(self.encoders, 0)
        """Of each encoder that learns, the microbatches in which this rank had samples of it."""


def _group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh, in its order. Raises UserError for another mesh than those of FSDP ranks."""
    ranks = mesh.mesh.flatten().tolist()
    if mesh.ndim not in (1, 2) or ranks != sorted(ranks):
        raise UserError(
            f"the mesh has {mesh.ndim} dimensions and the ranks {ranks}: give one of all ranks in order, with one dimension, or "
            "two (replicate, shard)"
        )
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        group = dist.group.WORLD
        assert group is not None, "a mesh was made"
        return group
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made


def _end_forward(root: nn.Module) -> None:
    """Have FSDP forget a forward that no backward follows, behind which it would give up what it has gathered."""
    end = root.reset_iter_state if hasattr(root, "reset_iter_state") else root.reshard  # the former from torch 2.13 on
    end()  # type: ignore[operator]


def _local(gradient: Tensor) -> Tensor:
    """Return this rank's shard of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
