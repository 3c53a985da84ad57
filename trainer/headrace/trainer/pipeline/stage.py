"""Some consecutive layers of one unit of the model, as one process of a pipeline has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.plan import GENERATOR, LLM
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.multimodal import MultimodalModel
from headrace.trainer.pipeline.executor import Output
from headrace.trainer.pipeline.weight_gradients import WeightGradients

TRUNKS = {"vision": "vision", "audio": "audio", LLM: "decoder", GENERATOR: "generator"}
"""The module of the whole model that has a unit's layers."""
PROJECTORS = {"vision": "vision_projector", "audio": "audio_projector", LLM: "generator_projector"}
"""What stands at a unit's end and leads to the one behind."""
ENCODERS = ("vision", "audio")


class Stage(nn.Module, ABC):
    """Layers `first` to `last` of a unit; with the first one what comes before it, with the last one what comes behind.

    Its parameters have the names and, for a seed, the weights that they have in the whole model.
    """

    def __init__(self, model: MultimodalModel, unit: str, first: int, last: int, *, checkpointing: bool = False) -> None:
        """`model`: the whole one, of which only this stage's modules are kept; on the meta device it costs nothing."""
        super().__init__()
        trunk = model.get_submodule(TRUNKS[unit])
        layers = trunk.layers
        assert isinstance(layers, nn.ModuleList)
        self.unit = unit
        self.is_first, self.is_last = first == 0, last == len(layers)
        self.is_tied = unit == LLM and model.decoder.head is None
        """Whether embedding and head are one matrix, which the first and the last stage both have."""
        self.checkpointing = checkpointing
        self.width = int(trunk.width)  # type: ignore[arg-type]
        """Of hidden states between stages."""
        behind = model.generator if unit == LLM else model.decoder
        self.token_width = 0 if behind is None else behind.width
        """Of tokens for the unit behind."""
        self.model = model
        kept = {f"{TRUNKS[unit]}.layers.{index}" for index in range(first, last)}
        kept |= {f"{TRUNKS[unit]}.{name}" for name in self._ends()}
        if self.is_last and unit in PROJECTORS:
            kept.add(PROJECTORS[unit])
        prune(model, kept)

    @abstractmethod
    def _ends(self) -> Sequence[str]:
        """The trunk's modules, besides layers, that this stage needs."""

    @abstractmethod
    def num_rows(self, data: PackedMicrobatch) -> int:
        """Of the hidden states of a portion. 0: the unit has nothing to do in it."""

    def tokens(self, _: PackedMicrobatch) -> Tensor:
        """(n,) tokens for the unit behind that the last stage makes of each sample, on the host."""
        raise AssertionError(f"nothing is behind {self.unit}")

    def tokens_of(self, unit: str, _: PackedMicrobatch) -> Tensor:
        """(n,) tokens of the unit in front that each sample takes, on the host."""
        raise AssertionError(f"{unit} is not in front of {self.unit}")

    @abstractmethod
    def _enter(self, data: PackedMicrobatch, arrived: Mapping[str, Tensor]) -> Tensor: ...

    @abstractmethod
    def _surroundings(self, data: PackedMicrobatch) -> tuple[Any, ...]: ...

    @abstractmethod
    def _leave(self, x: Tensor, data: PackedMicrobatch) -> Output: ...

    def forward(self, data: PackedMicrobatch, hidden: Tensor | None, arrived: Mapping[str, Tensor]) -> Output:
        """Hidden states for the next stage; on the last one tokens for the unit behind, and the unit's loss.

        data: this unit's columns of a portion, on the device. hidden: (rows, width) from the stage before, None on the first one.
        arrived: on a first stage the tokens (t, width) of each unit in front, in the order of the portion's samples.
        """
        x = self._enter(data, arrived) if hidden is None else hidden.float()
        surroundings = self._surroundings(data)
        for layer in self.layers:
            x = checkpoint(layer, x, *surroundings, use_reentrant=False) if self.checkpointing else layer(x, *surroundings)
        return self._leave(x, data) if self.is_last else Output(rows=x)

    def put_off_weights(self) -> None:
        """Have backwards leave the gradients of weights to `put_off`. What is frozen is frozen before."""
        self._weight_gradients = WeightGradients(self.model)

    def put_off(self) -> Callable[[], None]:
        """See `headrace.trainer.pipeline.executor.Chunk`."""
        return self._weight_gradients.take()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def layers(self) -> list[nn.Module]:
        trunk = self.model.get_submodule(TRUNKS[self.unit])
        return [layer for layer in trunk.layers if layer is not None]  # type: ignore[union-attr]

    def freeze(self, *, trunk: bool, projector: bool) -> None:
        """Have these parameters not learn."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not (projector if name.split(".")[0] in PROJECTORS.values() else trunk))

    def hold_frozen(self, dtype: torch.dtype) -> None:
        """Keep frozen matrices in the dtype of the products. Autocast casts a weight that learns once for all microbatches, but a
        frozen one for each of them anew, whose graph then keeps the cast until its backward.

        What enters a unit has no graph, so its matrices stay as they are; norms and biases are small.
        """
        for name, module in self.model.named_modules():
            inside = ".layers." in name or name.endswith(".head") or name.split(".")[0] in PROJECTORS.values()
            if (inside and isinstance(module, nn.Linear)) or name == f"{TRUNKS[LLM]}.embed":
                weight = module.get_parameter("weight")
                if not weight.requires_grad:
                    weight.data = weight.data.to(dtype)


def prune(module: nn.Module, kept: Collection[str], prefix: str = "") -> None:
    """Take out every module that is neither kept nor around one that is; indices of lists stay."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in kept:
            continue
        if any(other.startswith(f"{path}.") for other in kept):
            prune(child, kept, f"{path}.")
        else:
            module.register_module(name, None)
