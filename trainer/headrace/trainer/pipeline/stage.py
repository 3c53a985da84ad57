"""A pipeline stage: consecutive layers of one unit of the model, on one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.plan import GENERATOR, LLM
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.block import cast_once
from headrace.trainer.models.dropout import ResidualDropout
from headrace.trainer.models.multimodal import MultimodalModel
from headrace.trainer.pipeline.chunk import Inputs, Output
from headrace.trainer.pipeline.sharded_weights import ShardedWeights
from headrace.trainer.pipeline.slice_collectives import gather
from headrace.trainer.pipeline.tensor_parallel import Slices
from headrace.trainer.pipeline.weight_gradients import WeightGradients

TRUNKS = {"vision": "vision", "audio": "audio", LLM: "decoder", GENERATOR: "generator"}
"""Name of the module of the whole model that has a unit's layers, by unit."""
PROJECTORS = {"vision": "vision_projector", "audio": "audio_projector", LLM: "generator_projector"}
"""Name of the projector from a unit's last layer to the downstream unit, by unit."""
ENCODERS = ("vision", "audio")
_BEHIND_LAYERS = ("norm", "head")
"""The modules of a trunk behind its layers; all others are in front of them. A tied head is the embedding, in front."""


class Stage(nn.Module, ABC):
    """Layers `first` up to, but not including, `last` of one unit, as a module of one process.

    With the unit's first layer it has the modules before it, such as an embedding, and with the unit's last layer those after
    it: norm, head and projector. Its parameters have the same names as in the whole model and, for a seed, the same weights.
    """

    _weight_gradients: WeightGradients | None = None

    def __init__(
        self,
        model: MultimodalModel,
        unit: str,
        first: int,
        last: int,
        *,
        checkpointing: bool = False,
        fp32_residual: bool = True,
    ) -> None:
        """`model`: the whole model, from which all modules but this stage's are removed; on the meta device it costs nothing.
        `checkpointing`: whether all layers run again in the backward instead of keeping their activations. `fp32_residual`:
        whether the residual stream is float32; else it has the dtype of matrix products.
        """
        super().__init__()
        trunk = model.get_submodule(TRUNKS[unit])
        layers = trunk.layers
        assert isinstance(layers, nn.ModuleList)
        self.unit = unit
        self.is_first, self.is_last = first == 0, last == len(layers)
        self.is_tied = unit == LLM and model.decoder.head is None
        """Whether this is an LLM whose embedding and head are one matrix, which its first and last stage both have."""
        self.checkpointed: Collection[int] = range(last - first) if checkpointing else ()
        """The layers, as indices of `layers`, that run again in the backward. It may change from step to step."""
        self.fp32_residual = fp32_residual
        self.width = int(trunk.width)  # type: ignore[arg-type]
        """Width of hidden states between stages."""
        self.slices: Slices | None = None
        """The tensor-parallel slices of the stage; None if it is whole."""
        self.sharded: ShardedWeights | None = None
        """What gathers the weights from the replicas, each of which keeps a shard; None if every replica keeps all."""
        behind = model.generator if unit == LLM else model.decoder
        self.token_width = 0 if behind is None else behind.width
        """Width of tokens for the downstream unit; 0 in an LLM without a generator."""
        self.model = model
        kept = {f"{TRUNKS[unit]}.layers.{index}" for index in range(first, last)}
        kept |= {f"{TRUNKS[unit]}.{name}" for name in self._end_modules()}
        if self.is_last and unit in PROJECTORS:
            kept.add(PROJECTORS[unit])
        prune(model, kept)

    @property
    def dropout(self) -> ResidualDropout | None:
        """What drops values in the unit's layers; None: nothing."""
        return None

    @abstractmethod
    def _end_modules(self) -> Sequence[str]:
        """Return the names of the trunk's modules, besides its layers, that this stage keeps."""

    @abstractmethod
    def _num_rows(self, data: PackedMicrobatch) -> int:
        """Return the number of rows of a portion's hidden states; 0 if the unit has nothing to do for the portion."""

    def prepare(self, data: PackedMicrobatch) -> Inputs:
        """Return this stage's inputs, on the host as is `data`: the unit's columns of a portion."""
        num_rows = self._num_rows(data)
        if not num_rows:
            return Inputs(num_rows=0)
        return Inputs(
            num_rows=num_rows,
            entry=self._entry_inputs(data) if self.is_first else None,
            layers=self._layer_inputs(data),
            dropout_keys=self._dropout_keys(data),
            end=self._end_inputs(data) if self.is_last else None,
        )

    def rows_between_stages(self, num_rows: int) -> int:
        """Return how many rows of hidden states come from the stage before for a portion of `num_rows`, and go to the next."""
        return num_rows if self.slices is None else self.slices.rows_between_stages(num_rows)

    def gather_slices(self, share: Tensor) -> Tensor:
        """Return the rows (n S, width) of all n slices of the stage behind each other, from this one's (S, width)."""
        return share if self.slices is None else gather(share, self.slices.group)

    def token_counts(self, _: PackedMicrobatch) -> Tensor:
        """Return the (n,) counts of tokens that the last stage makes of each sample for the downstream unit, on the host."""
        raise AssertionError(f"nothing is behind {self.unit}")

    def input_token_counts(self, unit: str, _: PackedMicrobatch) -> Tensor:
        """Return the (n,) counts of tokens that each sample takes from an upstream unit, on the host."""
        raise AssertionError(f"{unit} is not in front of {self.unit}")

    # What `prepare` puts into `Inputs`, and in the same order what the forward does with it.

    @abstractmethod
    def _entry_inputs(self, data: PackedMicrobatch) -> Any: ...

    @abstractmethod
    def _layer_inputs(self, data: PackedMicrobatch) -> Any: ...

    def _dropout_keys(self, _: PackedMicrobatch) -> Tensor | None:
        return None

    @abstractmethod
    def _end_inputs(self, data: PackedMicrobatch) -> Any: ...

    @abstractmethod
    def _embed_inputs(self, entry: Any, arrived: Mapping[str, Tensor]) -> Tensor: ...

    @abstractmethod
    def _layer_args(self, layers: Any) -> tuple[Any, ...]: ...

    @abstractmethod
    def _make_output(self, x: Tensor, end: Any) -> Output: ...

    def forward(self, inputs: Inputs, hidden: Tensor | None, arrived: Mapping[str, Tensor]) -> Output:
        """Return hidden states for the next stage, or on the last stage tokens for the downstream unit and the unit's loss.

        inputs: of a portion with rows, from `prepare`, on the device. hidden: (`rows_between_stages`, width) from the stage
        before, None on the first stage. arrived: on the first stage, the tokens (t, width) of each upstream unit, in the order of
        the portion's samples.
        """
        before = _nothing if self.sharded is None else self.sharded.before
        x = self._embed_inputs(inputs.entry, arrived) if hidden is None else hidden
        x = x.float() if self.fp32_residual else cast_once(x)
        layer_args = self._layer_args(inputs.layers)
        for index, layer in enumerate(self.layers):
            before(1 + index, x)
            run = layer if self.slices is None else self.slices.with_rows(layer, inputs.num_rows)
            if self.dropout is not None:
                run = self.dropout.with_keys(run, inputs.dropout_keys)
            if index in self.checkpointed:  # no generator's numbers are drawn again: dropout draws by keys
                x = checkpoint(run, x, *layer_args, use_reentrant=False, preserve_rng_state=False)
            else:
                x = run(x, *layer_args)
        before(1 + len(self.layers), x)
        return self._make_output(x, inputs.end) if self.is_last else Output(rows=x)

    def parts(self) -> list[list[nn.Parameter]]:
        """Return the parameters of what stands in front of the layers, of each layer, and of what stands behind them.

        A matrix that is embedding and head is in both. What is used to embed inputs may be used for all layers' arguments too.
        """
        layers = [list(layer.parameters()) for layer in self.layers]
        in_layers = {parameter for layer in layers for parameter in layer}
        front: list[nn.Parameter] = []
        behind: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            if parameter not in in_layers:
                (behind if self._is_behind(name) else front).append(parameter)
        if self.is_tied and self.is_last:
            behind.append(self.model.decoder.embed.get_parameter("weight"))
        return [front if self.is_first else [], *layers, behind]

    def _is_behind(self, name: str) -> bool:
        first, *rest = name.split(".")
        return first in PROJECTORS.values() or rest[0] in _BEHIND_LAYERS

    def defer_weight_gradients(self) -> None:
        """Make backwards leave the weight gradients of linear layers to `take_weight_gradients`. Call it after `freeze`."""
        self._weight_gradients = WeightGradients(self.model)

    def take_weight_gradients(self) -> Callable[[], None]:
        """Return a function that computes the weight gradients that the last backward put off; only under `zero-bubble`."""
        assert self._weight_gradients is not None, "weight gradients are put off after defer_weight_gradients only"
        return self._weight_gradients.take()

    def drop_weight_gradients(self) -> None:
        """Forget the weight gradients that a backward has put off, of which nobody took them as it ended midway."""
        if self._weight_gradients is not None:
            self._weight_gradients.take()

    def compile_layers(self) -> None:
        """Have torch compile each layer when it first runs; hooks, such as one that waits for weights, are left as they are."""
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def layers(self) -> list[nn.Module]:
        trunk = self.model.get_submodule(TRUNKS[self.unit])
        return [layer for layer in trunk.layers if layer is not None]  # type: ignore[union-attr]

    def freeze(self, *, trunk: bool, projector: bool, layers: int = 0) -> None:
        """Freeze the projector if `projector`, and of all other parameters all if `trunk`, else those of the unit's first layers.

        layers: number of these layers, unless 0 with the modules in front of them. What is frozen in the model stays frozen.
        """
        for name, parameter in self.model.named_parameters():
            first, *rest = name.split(".")
            if first in PROJECTORS.values():
                frozen = projector
            elif rest[0] == "layers":
                frozen = trunk or int(rest[1]) < layers
            else:
                frozen = trunk or (layers > 0 and rest[0] not in _BEHIND_LAYERS)
            parameter.requires_grad_(parameter.requires_grad and not frozen)

    def hold_frozen(self, dtype: torch.dtype) -> None:
        """Convert frozen matrices of layers, head and projector, and the LLM's embedding, to `dtype`, that of matrix products.

        Autocast casts a trainable weight once for all microbatches, but a frozen one anew for each, and the graph keeps each cast
        until its backward. The other modules at a unit's entry build no graph, so their matrices stay as they are; norms and
        biases are small.
        """
        for name, module in self.model.named_modules():
            inside = ".layers." in name or name.endswith(".head") or name.split(".")[0] in PROJECTORS.values()
            if (inside and isinstance(module, nn.Linear)) or name == f"{TRUNKS[LLM]}.embed":
                weight = module.get_parameter("weight")
                if not weight.requires_grad:
                    weight.data = weight.data.to(dtype)


def _nothing(_: int, __: Tensor) -> None:
    """No weights are to be gathered."""


def prune(module: nn.Module, kept: Collection[str], prefix: str = "") -> None:
    """Remove every submodule that is neither in `kept` nor contains one that is; indices in module lists stay the same.

    kept: names in the outermost module. prefix: the name of `module` in it, with a dot at the end.
    """
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in kept:
            continue
        if any(other.startswith(f"{path}.") for other in kept):
            prune(child, kept, f"{path}.")
        else:
            module.register_module(name, None)
