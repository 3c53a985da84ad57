"""The demand of a model on real samples: what each of its units takes of every sample, at every tensor-parallel width.

Seconds are those of the cost model, counted at the cluster's rate or measured, and what the slices of a layer exchange. For every
layer and position they gather its rows in front of attention and MLP and scatter sums behind them: two all-gathers and two
reduce-scatters of (t - 1) / t of a row in bfloat16, over the links of a node. The backward exchanges as much, and so does a
forward that runs again. As a unit's backward is a multiple of its forward, what both exchange is spread over them in that ratio:
the sum is exact. Each collective's latency counts once a sample, as if it were a microbatch by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.backward_factors import backward_factors
from headrace.model_shape import ModelShape, TransformerShape, projector_weights
from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.planning.cost_model.coefficients import AUDIO, TARGETS, VISION, LayerCost, total
from headrace.reorder_service.planning.cost_model.cost import DEVICE_FLOPS_PER_S, estimate, nominal_coefficients
from headrace.reorder_service.planning.cost_model.measured_costs import MeasuredCosts
from headrace.reorder_service.planning.orchestration.cluster import Cluster
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand

if TYPE_CHECKING:
    from headrace.sample import Probe
    from headrace.spec import AudioSpec, ImageSpec

WIDTHS = (1, 2, 4, 8)
"""Tensor-parallel widths that units may have."""
_COLLECTIVES = 4  # of a layer in one direction
_ROW_BYTES = 2  # of a channel, in bfloat16
_AUDIO_STRIDE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What of a model is trained, in which global batches, and how."""

    global_batch: int
    frozen: Collection[str] = ()
    """Units whose weights are frozen; their projectors learn."""
    checkpointing: Collection[str] = ()
    """Units with activation checkpointing."""
    schedule: str = "1f1b"
    chunks: int = 1


def units_of(shape: ModelShape, probes: Sequence[Probe]) -> tuple[str, ...]:
    """Return the units of a model, in pipeline order, that have work to do on at least one of the samples."""
    images, recordings = any(probe.image_patches for probe in probes), any(probe.mel_frames for probe in probes)
    found = []
    if shape.vision.layers and images:
        found.append(VISION)
    if shape.audio.layers and recordings:
        found.append(AUDIO)
    found.append(LLM)
    if shape.generator is not None and images:
        found.append(GENERATOR)
    return tuple(found)


def widths_of(shape: TransformerShape, gpus_per_node: int) -> tuple[int, ...]:
    """Return the tensor-parallel widths with which the trainer can slice a stack's heads and inner channels within a node."""
    divided = (shape.heads, shape.kv_heads, shape.mlp)
    return tuple(tp for tp in WIDTHS if tp <= gpus_per_node and not any(number % tp for number in divided))


def demand_of(
    probes: Sequence[Probe],
    shape: ModelShape,
    cluster: Cluster,
    training: Training,
    *,
    image: ImageSpec,
    audio: AudioSpec,
    vocab: int = 0,
    measured: Mapping[int, MeasuredCosts] | None = None,
) -> Demand:
    """Return what a model asks of a cluster on these samples, at least one.

    vocab: size of the job's vocabulary, 0 for the published one. measured: costs by tensor-parallel width, in place of counted
    operations; a unit has the widths that were measured only. Raises ValueError for options that name no unit, for samples with
    media that the model has no unit or no measurement for, and for a unit that can have no width.
    """
    units = units_of(shape, probes)
    whole = None if measured is None else next(iter(measured.values()))
    behind = None if whole is None else whole.backward_times(units)
    factors = backward_factors(units, frozen=training.frozen, checkpointing=training.checkpointing, measured=behind)
    fixed = {} if whole is None else whole.microbatch_s(units, factors)
    widths = {
        unit: tuple(tp for tp in widths_of(shape.units[unit], cluster.gpus_per_node) if measured is None or tp in measured)
        for unit in units
    }
    if lacking := [unit for unit in units if not widths[unit]]:
        raise ValueError(f"the coefficients have no tensor-parallel width that unit {lacking[0]!r} can have: measure width 1")
    rate = 1.0 if measured is not None else DEVICE_FLOPS_PER_S / (cluster.flops_per_s * cluster.efficiency)
    own = {unit: _Weights.of(shape, unit, image, audio, vocab) for unit in units}
    seconds: dict[str, dict[int, Floats]] = {unit: {} for unit in units}
    kept: dict[str, dict[int, Floats]] = {unit: {} for unit in units}
    sent: dict[str, Floats] = {}
    end_layers = {unit: of_unit.end_products / shape.units[unit].layer_weights for unit, of_unit in own.items()}
    reruns = factors[LLM] if LLM in training.checkpointing else 0.0
    for tp in sorted({tp for of_unit in widths.values() for tp in of_unit}):
        having = [unit for unit in units if tp in widths[unit]]
        slices = dict.fromkeys(having, tp)
        layers = measured[tp].coefficients if measured is not None else nominal_coefficients(
            shape, image=image, audio=audio, vocab=vocab, tp=slices, reruns=reruns
        )  # fmt: skip
        costs = estimate(
            probes, shape, image=image, audio=audio, vocab=vocab, units=units,
            measured=layers, tp=slices,
            checkpointing=training.checkpointing, frozen=training.frozen, backward_factors=factors,
        )  # fmt: skip
        for unit in having:
            sent[unit] = costs.transfer_bytes[unit]
            passes = 1 + (factors[unit] > 0) + (factors[unit] > 0 and unit in training.checkpointing)
            exchanged = exchange_s(shape.units[unit], sent[unit], tp, cluster) * passes / (1 + factors[unit])
            seconds[unit][tp] = costs.seconds[unit] * rate + exchanged
            kept[unit][tp] = costs.memory_bytes[unit]
        if LLM in having and TARGETS in layers:
            end_layers[LLM] = _head_layers(probes, shape.llm, total(layers[TARGETS]), float(costs.seconds[LLM].sum()))
    return Demand(
        units=tuple(
            UnitDemand(
                name=unit,
                layers=shape.units[unit].layers,
                parameters=own[unit].total,
                trained_share=own[unit].projector / own[unit].total if unit in training.frozen else 1.0,
                backward_factor=factors[unit],
                forward_s=seconds[unit],
                kept_bytes=kept[unit],
                sent_bytes=sent[unit],
                end_layers=end_layers[unit],
                front_parameters=own[unit].front,
                back_parameters=own[unit].back + own[unit].projector,
                microbatch_s=fixed.get(unit, (0.0, 0.0)),
                step_s=(0.0, 0.0) if whole is None else whole.step_s(unit),
            )
            for unit in units
        ),
        cluster=cluster,
        global_batch=training.global_batch,
        schedule=training.schedule,
        chunks=training.chunks,
    )


def _head_layers(probes: Sequence[Probe], shape: TransformerShape, head: LayerCost, llm_s: float) -> float:
    """Return what the LLM's head takes on these samples, in times of a layer. llm_s: seconds of layers and head together."""
    head_s = sum(head.seconds(probe.num_targets) for probe in probes if probe.num_targets)
    return head_s / (llm_s - head_s) * shape.layers


def exchange_s(shape: TransformerShape, sent_bytes: Floats, tp: int, cluster: Cluster) -> Floats:
    """Return (n,) seconds in which `tp` slices of a stack exchange rows in a sample's forward; sent_bytes: (n,) of its rows."""
    share = (tp - 1) / tp
    seconds: Floats = sent_bytes * (share / cluster.intra_node_bytes_per_s)
    if tp > 1:
        seconds += cluster.latency_s * (sent_bytes > 0)
    return shape.layers * _COLLECTIVES * seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Numbers of weights of a unit, by where they stand.

    The LLM's embedding and its head count as two matrices, though small models have one for both.
    """

    layers: float
    front: float
    """In front of the first layer."""
    back: float
    """Behind the last one, without the projector to the next unit."""
    projector: float
    end_products: float
    """Of those behind the last layer, how many every position is multiplied with on average. In the LLM they are those of the
    head, which only tokens that carry loss are multiplied with."""

    @property
    def total(self) -> float:
        return self.layers + self.front + self.back + self.projector

    @classmethod
    def of(cls, shape: ModelShape, unit: str, image: ImageSpec, audio: AudioSpec, vocab: int) -> _Weights:
        stack, front, projector = shape.units[unit], 0.0, 0.0
        if unit in (VISION, AUDIO):
            joined = image.merge**2 if unit == VISION else max(1, audio.frames_per_token // _AUDIO_STRIDE)
            products = float(projector_weights(stack.width, joined, shape.llm.width))
            projector = joined * products
        elif unit == LLM:
            front = products = float(stack.width * (vocab or stack.vocab))
            projector = 0.0 if shape.generator is None else float(projector_weights(stack.width, 1, shape.generator.width))
        else:
            front = products = float(stack.width * 3 * (image.merge * image.patch) ** 2)
        return cls(
            layers=float(stack.layers * stack.layer_weights), front=front, back=front, projector=projector, end_products=products
        )
