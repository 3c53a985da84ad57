"""A node's part of the model: its stage and the stage's optimizer state, by the names of the whole model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from headrace.trainer.models.fused_linear import parts
from headrace.trainer.models.multimodal import MultimodalModel
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.checkpoint_files import WEIGHT, Checkpoint, TensorKey
from headrace.trainer.pipeline.huge_pages import empty_in_huge_pages
from headrace.trainer.pipeline.stage import ENCODERS, PROJECTORS, TRUNKS, Stage
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import ENCODER, PipelineTopology
from headrace.trainer.recovery.layout import Layout
from headrace.trainer.train_step import DEFAULTS, embedding_parameters, make_optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


class Holding:
    """A stage on one node, and AdamW for its parameters.

    Every node that has a parameter also has its moments. So with f + 1 or more pipelines there are as many copies of them, all
    equal bit for bit, as all see the same gradients.
    """

    def __init__(self, stage: Stage, layers: tuple[str, int, int], settings: OptimizerSpec = DEFAULTS) -> None:
        """layers: unit, first layer, and last layer + 1."""
        self.stage, self._layers = stage, layers
        self.parameters: dict[str, nn.Parameter] = dict(stage.model.named_parameters())
        self._parts = {name: parts(name, stage.model.get_submodule(name.rpartition(".")[0])) for name in self.parameters}
        self.learning = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self._adamw = make_optimizer(self.learning.values(), settings, embeddings=embedding_parameters(stage))

    def covers(self, unit: str, first: int, end: int) -> bool:
        """Whether the stage has exactly the layers `first` to `end` - 1 of this unit."""
        return self._layers == (unit, first, end)

    def update(self, learning_rate: float) -> None:
        """Take an AdamW step, which updates every parameter that has a gradient."""
        for options in self._adamw.param_groups:
            options["lr"] = learning_rate
        self._adamw.step()

    def discard(self) -> None:
        """Drop the gradients of all trainable parameters, and what a backward that ended midway has put off."""
        for parameter in self.learning.values():
            parameter.grad = None
        self.stage.drop_weight_gradients()

    def tensors(self, name: str) -> dict[TensorKey, Tensor]:
        """Return a parameter's weight and optimizer state as a checkpoint has them: float32, on the host."""
        parameter = self.parameters[name]
        found = {WEIGHT: parameter, **self._adamw.state.get(parameter, {})}
        return {
            TensorKey(name=part.name, kind=kind): (tensor if kind == _STEP else part.of(tensor)).detach().float().cpu()
            for part in self._parts[name]
            for kind, tensor in found.items()
        }

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        """Load weights and optimizer state from a checkpoint. Raises UserError if the checkpoint is of another model."""
        for name, parameter in self.parameters.items():
            self._read(checkpoint, name, WEIGHT, parameter)
            step = TensorKey(name=self._parts[name][0].name, kind=_STEP)
            if name in self.learning and step in checkpoint:
                moments = {kind: torch.empty_like(parameter) for kind in MOMENTS}
                for kind, moment in moments.items():
                    self._read(checkpoint, name, kind, moment)
                self._adamw.state[parameter] = {_STEP: checkpoint.read(step, ()).to(parameter.device), **moments}

    def _read(self, checkpoint: Checkpoint, name: str, kind: str, into: Tensor) -> None:
        for part in self._parts[name]:
            of_part = part.of(into)
            of_part.copy_(checkpoint.read(TensorKey(name=part.name, kind=kind), of_part.shape))

    def state(self, name: str) -> list[Tensor]:
        """Return a parameter's state for a transfer, as flat float32 tensors that share its memory where possible.

        They are the weight, and for a trainable parameter both moments and the number of updates, of shape (1,).
        """
        parameter = self.parameters[name]
        weight = parameter.detach().float().flatten()
        if name not in self.learning:
            return [weight]
        state = self._adamw.state.get(parameter)
        if state is None:
            return [weight, torch.zeros_like(weight), torch.zeros_like(weight), weight.new_zeros(1)]
        return [weight, *(state[kind].flatten() for kind in MOMENTS), state[_STEP].reshape(1).to(weight)]

    @torch.no_grad()
    def set_state(self, name: str, state: Sequence[Tensor]) -> None:
        """Set a parameter's weight and optimizer state to what `state` returned for it, also on another node.

        Parameter and optimizer keep and change the tensors that are on the parameter's device, and of its dtype, where they are.
        """
        parameter = self.parameters[name]
        weight, *rest = state
        parameter.data = weight.view_as(parameter).to(parameter)
        if rest and rest[-1]:
            *moments, step = (some.to(parameter.device) for some in rest)
            by_kind = zip(MOMENTS, (some.view_as(parameter) for some in moments), strict=True)
            self._adamw.state[parameter] = {_STEP: step.reshape(()), **dict(by_kind)}


def copies_of(state: Sequence[Tensor]) -> list[Tensor]:
    """Return a copy of a parameter's state, for another holding."""
    return [empty_in_huge_pages(len(part), part.device).copy_(part) for part in state]


def state_lengths(model: MultimodalModel, topology: PipelineTopology) -> dict[str, Sequence[int]]:
    """Return the elements of each tensor of `Holding.state`, by parameter in the model's order, for all units of the topology."""
    is_frozen: dict[str, bool] = {}  # by the first component of the parameters' names
    for unit, size in topology.units.items():
        for stack in ENCODERS if unit == ENCODER else (unit,):
            is_frozen[TRUNKS[stack]] = size.frozen
            is_frozen |= {PROJECTORS[stack]: size.frozen_projector} if stack in PROJECTORS else {}
    lengths: dict[str, Sequence[int]] = {}
    for name, parameter in model.named_parameters():
        frozen = is_frozen.get(name.split(".")[0])
        if frozen is not None:
            length = parameter.numel()
            lengths[name] = (length,) if frozen else (length, length, length, 1)
    return lengths


def make_holding(
    layout: Layout, make_model: Callable[[], MultimodalModel], settings: OptimizerSpec, *, device: torch.device
) -> Holding:
    """Build the holding for a node's place in its pipeline, with memory for the weights but without their values."""
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
