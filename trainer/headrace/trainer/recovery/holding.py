"""What a node has of the model: its stage and the optimizer's state of it, by the names of the whole model's parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headrace.trainer.models.multimodal import MultimodalModel
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.checkpoint_files import WEIGHT, Checkpoint, TensorKey
from headrace.trainer.pipeline.stage import ENCODERS, PROJECTORS, TRUNKS, Stage
from headrace.trainer.pipeline.stages import build_stages
from headrace.trainer.pipeline.topology import ENCODER, PipelineTopology
from headrace.trainer.recovery.layout import Layout
from headrace.trainer.train_step import DEFAULTS, embeddings_of, make_optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


class Holding:
    """A stage, and AdamW of its parameters.

    Every holder of a parameter has its moments: with f + 1 pipelines or more there are as many copies of them, and all are
    equal bit for bit, as all see the same gradients.
    """

    def __init__(self, stage: Stage, layers: tuple[str, int, int], settings: OptimizerSpec = DEFAULTS) -> None:
        """layers: unit, first layer, and the one behind the last."""
        self.stage, self._layers = stage, layers
        self.parameters: dict[str, nn.Parameter] = dict(stage.model.named_parameters())
        self.learning = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self._adamw = make_optimizer(self.learning.values(), settings, embeddings=embeddings_of(stage))

    def covers(self, unit: str, first: int, end: int) -> bool:
        """Whether these are its layers."""
        return self._layers == (unit, first, end)

    def update(self, learning_rate: float) -> None:
        """Every parameter that has a gradient."""
        for options in self._adamw.param_groups:
            options["lr"] = learning_rate
        self._adamw.step()

    def discard(self) -> None:
        """Forget the gradients."""
        for parameter in self.learning.values():
            parameter.grad = None

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What a checkpoint has of a parameter, by kind, on the host."""
        parameter = self.parameters[name]
        state = self._adamw.state.get(parameter, {})
        return {kind: tensor.detach().float().cpu() for kind, tensor in {WEIGHT: parameter, **state}.items()}

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        """Weights and the optimizer's state. Raises UserError where the model is another one."""
        for name, parameter in self.parameters.items():
            parameter.copy_(checkpoint.read(TensorKey(name=name, kind=WEIGHT), parameter.shape))
            if name in self.learning and TensorKey(name=name, kind=_STEP) in checkpoint:
                shapes = {_STEP: torch.Size(), **dict.fromkeys(MOMENTS, parameter.shape)}
                self._adamw.state[parameter] = {
                    kind: checkpoint.read(TensorKey(name=name, kind=kind), shape).to(parameter.device)
                    for kind, shape in shapes.items()
                }

    def state(self, name: str) -> Tensor:
        """Of a parameter, flat and float32: the weight, and of what learns both moments and the number of updates."""
        parameter = self.parameters[name]
        weight = parameter.detach().float().flatten()
        if name not in self.learning:
            return weight
        state = self._adamw.state.get(parameter)
        if state is None:
            return torch.cat([weight, weight.new_zeros(2 * len(weight) + 1)])
        return torch.cat([weight, *(state[kind].flatten() for kind in MOMENTS), state[_STEP].reshape(1).to(weight)])

    @torch.no_grad()
    def set_state(self, name: str, state: Tensor) -> None:
        """As `state` gave it, of another holding."""
        parameter = self.parameters[name]
        size = parameter.numel()
        parameter.copy_(state[:size].view_as(parameter))
        if name in self.learning and state[-1]:
            moments = [some.view_as(parameter).to(parameter.device, copy=True) for some in torch.split(state[size:-1], size)]
            step = state[-1].to(parameter.device, copy=True)
            self._adamw.state[parameter] = {_STEP: step, **dict(zip(MOMENTS, moments, strict=True))}


def state_sizes(model: MultimodalModel, topology: PipelineTopology) -> dict[str, int]:
    """Bytes of `Holding.state` of every parameter of the whole model that any unit of the topology has, in their order."""
    is_frozen: dict[str, bool] = {}  # by the first part of the parameters' names
    for unit, size in topology.units.items():
        for stack in ENCODERS if unit == ENCODER else (unit,):
            is_frozen[TRUNKS[stack]] = size.frozen
            is_frozen |= {PROJECTORS[stack]: size.frozen_projector} if stack in PROJECTORS else {}
    sizes = {}
    for name, parameter in model.named_parameters():
        frozen = is_frozen.get(name.split(".")[0])
        if frozen is not None:
            sizes[name] = 4 * (parameter.numel() if frozen else 3 * parameter.numel() + 1)
    return sizes


def make_holding(
    layout: Layout, make_model: Callable[[], MultimodalModel], settings: OptimizerSpec, *, device: torch.device
) -> Holding:
    """Of the node's place, without weights."""
    place = layout.place
    first, end = layout.bounds[place.unit][place.stage : place.stage + 2]
    (stage,) = build_stages(
        make_model,
        layout.topology,
        place,
        layout.bounds[place.unit],
        seed=0,
        device=device,
        slices=None,
        initialise=lambda _, __: None,
    )
    return Holding(stage, (place.unit, first, end), settings)
