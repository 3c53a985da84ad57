"""A case in a pipeline and in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from headrace.plan import GENERATOR, StepPlan, Topology
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.packing import pack_batch, plan_of_samples
from headrace.reorder_service.planning.strategies import plan as make_plan
from headrace.reorder_service.planning.strategies import plan_of
from headrace.spec import parse
from headrace.trainer.models.multimodal import MultimodalModel, initialise
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.stage import ENCODERS, PROJECTORS, TRUNKS
from headrace.trainer.pipeline.tensor_parallel import cut_dimension
from headrace.trainer.pipeline.topology import ENCODER, PipelineTopology
from headrace.trainer.train_step import StepResult, TrainStep, make_optimizer
from tests.matrices import gradients_of, weights_of
from tests.verify.batches import GENERATING, SHAPE, costs_of, enlarge, make_row, packed, whole_model
from tests.verify.cases import CLIPPING, HALF_RESIDUAL, Case, frozen_in
from tests.verify.processes import SEED, Answer, Order, Processes

MICROBATCHES, SAMPLES, STEPS = 4, 18, 2
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding may make of the same computation."""

    result: float
    """Of a loss and of a norm."""
    gradient: float
    """Of every element of a gradient, relative to the largest of its tensor."""
    weight: float
    """Of a tensor of weights, on average, relative to its mean. Adam divides by the size of a gradient: where that may be nothing
    but rounding, a step moves the weight by up to a learning rate in either direction. Such elements are left out."""
    noise: float
    """Of a weight, on average, besides: the next steps' gradients are not known here, and may be rounding as well."""


TOLERANCES = {
    "float32": Tolerance(result=1e-5, gradient=1e-5, weight=1e-5, noise=1e-3 * LEARNING_RATE),
    "bfloat16": Tolerance(result=2e-2, gradient=0.2, weight=1e-5, noise=STEPS * LEARNING_RATE),
    HALF_RESIDUAL: Tolerance(result=2e-2, gradient=0.3, weight=1e-5, noise=STEPS * LEARNING_RATE),
}
"""By precision. The one process keeps its residual stream in float32: beside it the gradient of a norm's bias was off by 0.24
where the pipeline's stream is in bfloat16. Where it is not, that of a key's bias, the smallest of its layer, is off by 0.152
in one case, which in float32 is equal."""
ENTRIES = {"vision": ("embed",), "audio": ("conv1", "conv2"), "llm": ("embed",), "generator": ("embed", "time")}
"""The modules in front of a unit's layers."""


def differences(
    processes: Processes,
    case: Case,
    *,
    expected: str | None = None,
    pack_tokens: int = 0,
    transports: Sequence[str] = ("gloo",),
) -> list[str]:
    """What is not the same, in words; nothing where all is well.

    `expected`: what is frozen in the one process. None: the same. `pack_tokens`: the pipeline, and not the one process, gets the
    samples in packs that are padded to this length. 0: not packed. `transports`: of `TRANSPORTS`, it runs on one after the other.
    """
    topology = parse(PipelineTopology, case.topology, "topology")
    packs: dict[int, int] = {}
    plans = [plan_of_step(case, topology, step, pack_tokens, packs) for step in range(STEPS)]
    order = Order(
        case.topology,
        [plan.to_json() for plan in plans],
        case.has_audio,
        LEARNING_RATE,
        dtype=case.dtype,
        max_grad_norm=CLIPPING[case.clipping],
        tied=case.head == "tied",
        packs=packs,
        pack_tokens=pack_tokens,
    )
    whole = reference(case.units, expected or case.frozen, case.clipping, case.head, case.dtype, topology.dropout)
    found = []
    for transport in transports:
        try:
            answers = processes.run(replace(order, transport=transport, is_first=transport == transports[0]))
        except RuntimeError as err:
            raise RuntimeError(f"{transport}: {err}") from err
        found += [f"{transport}: {line}" for line in compare(answers, *whole, TOLERANCES[case.precision])]
    return found


def compare(
    answers: list[Answer],
    results: list[StepResult],
    gradients: dict[str, np.ndarray],
    weights: dict[str, np.ndarray],
    tolerance: Tolerance,
) -> list[str]:
    """The pipeline's answers beside what one process computed."""
    found = []
    for rank, answer in enumerate(answers):
        for number, (result, expected) in enumerate(zip(answer.results, results, strict=True)):
            for name, most in (("loss", tolerance.result), ("grad_norm", tolerance.result), ("target_weight", 0.0)):
                one, other = getattr(result, name), getattr(expected, name)
                if not np.isclose(one, other, rtol=most, atol=0):
                    found.append(f"rank {rank}, result {number}: {name} {one}, not {other}")
        found += [f"rank {rank}: would wait for a GPU {count} times in {place}" for place, count in answer.waits.items()]
        for name, gradient in answer.gradients.items():
            if name not in gradients:
                found.append(f"rank {rank}: gradient of {name}, which one process has not")
                continue
            error, size = np.abs(gradient - _slice(gradients, name, answer)).max(), np.abs(gradients[name]).max()
            if error > tolerance.gradient * size:
                found.append(f"rank {rank}: gradient of {name} is off by {error:.3g} of {size:.3g}")
        for name, weight in answer.weights.items():
            error, size = np.abs(weight - _slice(weights, name, answer)), np.abs(weights[name]).mean()
            if name in gradients:
                rounding = tolerance.gradient * np.abs(gradients[name]).max()
                error = decided(error, _slice(gradients, name, answer), rounding)
            if error.size and error.mean() > tolerance.weight * size + tolerance.noise:
                found.append(f"rank {rank}: weight of {name} is off by {error.mean():.3g} of {size:.3g}")
    seen = {name for answer in answers for name in answer.gradients}
    found += [f"nobody has the gradient of {name}" for name in gradients.keys() - seen]
    return found


def decided(errors: np.ndarray, gradient: np.ndarray, rounding: float) -> np.ndarray:
    """The errors of those weights whose gradient is more than rounding makes of it, or 0."""
    kept: np.ndarray = errors[(gradient == 0) | (np.abs(gradient) > rounding)]
    return kept


def _slice(tensors: dict[str, np.ndarray], name: str, answer: Answer) -> np.ndarray:
    """What the process has of a whole parameter."""
    dimension = cut_dimension(name)
    return tensors[name] if dimension is None else np.array_split(tensors[name], answer.num_slices, dimension)[answer.slice]


@lru_cache(maxsize=256)
def reference(
    units: tuple[str, ...], frozen: str, clipping: str, head: str, precision: str, dropout: float
) -> tuple[list[StepResult], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Results, gradients of the first step, weights after the last: of one process, each global batch as one microbatch."""
    torch.set_num_threads(1)
    shape, dtype = GENERATING if GENERATOR in units else SHAPE, getattr(torch, precision)
    model = whole_model(shape, tied=head == "tied", dropout=dropout)
    model.to_empty(device="cpu")
    initialise(model, SEED)
    enlarge(model)
    _freeze(model, units, frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = OptimizerSpec(max_grad_norm=CLIPPING[clipping])
    train_step = TrainStep(model, make_optimizer(model.parameters()), settings=settings, dtype=dtype)
    results, gradients = [], {}
    for step in range(STEPS):
        batch = packed(_rows(step, bool({"audio", "encoder"} & set(units))))
        if step == 0:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = model(batch)
            (loss.loss_sum / loss.target_weight).backward()
            norm = float(torch.nn.utils.clip_grad_norm_(trained, settings.max_grad_norm))
            assert (norm > settings.max_grad_norm) == (clipping == "clipped"), f"the gradient's norm is {norm}"
            gradients = {name: gradient.numpy().copy() for name, gradient in gradients_of(model).items()}
            mean = float(loss.loss_sum.detach()) / loss.target_weight
            results.append(StepResult(loss=mean, target_weight=loss.target_weight, grad_norm=norm))
            train_step.discard()
        train_step.accumulate(batch)
        results.append(train_step.finish(LEARNING_RATE))
    return results, gradients, {name: weight.numpy().copy() for name, weight in weights_of(model).items()}


def _freeze(model: MultimodalModel, units: tuple[str, ...], frozen: str) -> None:
    for unit, flags in frozen_in(units, frozen).items():
        for part in ENCODERS if unit == ENCODER else (unit,):
            trunk = model.get_submodule(TRUNKS[part])
            trunk.requires_grad_(not flags.get("frozen", False))
            if count := flags.get("frozen_layers", 0):
                layers = list(trunk.get_submodule("layers").children())
                for module in (*(getattr(trunk, name) for name in ENTRIES[part]), *layers[:count]):
                    module.requires_grad_(False)
            if unit != units[-1]:
                model.get_submodule(PROJECTORS[part]).requires_grad_(not flags.get("frozen_projector", False))


def _rows(step: int, audio: bool) -> list[dict[str, Any]]:
    return [make_row(1000 * step + number, audio=audio) for number in range(SAMPLES)]


def plan_of_step(case: Case, topology: PipelineTopology, step: int, pack_tokens: int, packs: dict[int, int]) -> StepPlan:
    """The plan of a step, whose packs, if there are any, are added to `packs`, numbered apart from those of other steps."""
    rows = _rows(step, case.has_audio)
    ids = np.array([row["sample_id"] for row in rows])
    planned = Topology(replicas=topology.units["llm"].dp, microbatches=MICROBATCHES, stages=topology.stages)
    own = {unit: dp for unit, dp in topology.replicas.items() if unit != "llm"}
    execution = Execution(may_cross_replicas=True, unit_replicas=own)
    if not pack_tokens:
        return make_plan(case.strategy, ids, costs_of(rows, topology.stages), planned, seed=step, execution=execution)
    batch = make_batch(ids, costs_of(rows, topology.stages), planned, step, execution=execution)
    of_packs, pack_of = pack_batch(batch, np.array([len(row["input_ids"]) for row in rows]), pack_tokens, padded=True)
    packs.update(zip(ids.tolist(), (len(packs) + pack_of).tolist(), strict=True))
    return plan_of_samples(plan_of(case.strategy, of_packs, 1, None), batch, pack_of)
