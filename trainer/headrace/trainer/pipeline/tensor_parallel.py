"""Tensor parallelism: every layer of a stage cut into slices, one per process (Megatron-LM, Shoeybi et al. 2019, section 3).

Attention is cut by heads and the MLP by its inner channels: the input matrices are column-parallel, the output matrix is
row-parallel. A slice of a fused matrix has its share of each part (`FusedLinear`). Norms and residual additions are cut by rows
(sequence parallelism, Korthikanti et al. 2022, section 4.2.2): between layers each slice has its share of the rows. So a layer
gathers the rows before attention and before the MLP, and the sums over the slices behind them give each slice its share. Weights
of norms are whole on every slice, but see only its rows, or in norms of queries and keys only its heads: their gradients are
summed over the slices once a step.

In front of a unit's first layer and behind its last one, the rows are whole on every slice, with the same computation on each,
and so are the gradients of embeddings, last norms and projectors. Between stages each slice sends its share to the same slice
of the next stage, so that a row crosses once. Embedding table and head of an LLM are cut by the vocabulary (see
`headrace.trainer.pipeline.vocabulary_parallel`). The same holds for layers of `transformers`, except that what one stage sends
another is whole. An attention that stores its number of heads gets the number in its slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.block import Block, cast_once
from headrace.trainer.models.fused_linear import FusedLinear, Part, parts
from headrace.trainer.models.rotary import Rotation
from headrace.trainer.pipeline.slice_collectives import gather_rows, join_rows, join_sum, split_rows, sum_to_share
from headrace.trainer.pipeline.slice_products import add_summed_product, gathered_product
from headrace.trainer.pipeline.slice_rows import SliceRows

_ENTRIES = ("attention", "self_attn", "attn", "mlp", "layer.fc1")
"""Name endings of modules whose input goes to column-parallel matrices, in this repository's blocks and `transformers` layers.

Whisper's layers have no module for their MLP, so its first matrix stands for it.
"""
_COLUMNS = (
    *("attention.qkv", "mlp.gate_up"),
    *("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"),  # where they are fused, parts of these
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.fc1", "layer.fc1"),
    *("attn.qkv.query", "attn.qkv.key", "attn.qkv.value"),
)
_ROWS = (
    *("attention.out", "mlp.out"),
    *("self_attn.o_proj", "self_attn.out_proj", "attn.proj", "mlp.down_proj", "mlp.fc2", "layer.fc2"),
)
_VOCABULARY = ("decoder.embed", "decoder.head")
_ATTENTIONS = ("self_attn", "attn")


class Slices:
    """The slices of one stage, seen from one of them: which rows it has, and its sums with the others."""

    def __init__(self, group: dist.ProcessGroup, pieces: int = 1) -> None:
        """pieces: in how many the layers exchange a microbatch's rows, each while another is computed with; see `SliceRows`."""
        self.group = group
        self.partial: list[nn.Parameter] = []
        """Parameters whose gradients are parts of a sum over the slices, which is due once a step."""
        self._pieces = pieces
        self._rows = SliceRows(0, group)
        self._sends_shares = False

    def shard(self, layers: Sequence[nn.Module], *, is_first: bool = True, is_last: bool = True) -> None:
        """Cut the matrices of a stage's consecutive layers down to this slice, and make the layers exchange rows.

        Every process of the group must have the same whole weights; nothing is sent. The layers must be called as `with_rows`
        returns them. is_first, is_last: whether the unit has no layers in front of them, or behind them. Raises UserError for a
        layer with a matrix of which it is not known how to cut it, and for one that cannot exchange its rows in pieces.
        """
        for layer in layers:
            _check_matrices(layer)
            self.partial += _row_wise(layer)
            _cut(layer, self.group.rank(), self.group.size())
        self._sends_shares = all(isinstance(layer, Block) for layer in layers)
        if self._pieces > 1 and not self._sends_shares:
            raise UserError("layers of transformers exchange all rows of a microbatch at once: set the unit's tp_overlap to 1")
        for index, layer in enumerate(layers):
            splits = index == 0 and (is_first or not self._sends_shares)
            joins = index == len(layers) - 1 and (is_last or not self._sends_shares)
            if isinstance(layer, Block):
                layer.forward = self._sliced(layer, splits, joins)  # type: ignore[method-assign]
            else:
                self._hook(layer, splits, joins)

    def _sliced(self, block: Block, splits: bool, joins: bool) -> Callable[..., Tensor]:
        """Return what `Block.forward` does, on this slice's share of the rows between the matrices."""
        attention, mlp = block.attention, block.mlp  # once, as torch looks up a module's attributes in Python
        attention_norm, qkv, attention_out = block.attention_norm, attention.qkv, attention.out
        mlp_norm, mlp_entry, mlp_out = block.mlp_norm, mlp.entry, mlp.out

        def forward(x: Tensor, rotation: Rotation, segments: Segments) -> Tensor:
            rows = self._rows
            if splits:
                x = split_rows(x, rows)
            product = gathered_product(attention_norm(x), rows, qkv)
            x = add_summed_product(x, attention.mix(product, rotation, segments), rows, attention_out)
            inner = mlp.activate(gathered_product(mlp_norm(x), rows, mlp_entry))
            return join_sum(x, mlp_out(inner), rows) if joins else add_summed_product(x, inner, rows, mlp_out)

        return forward

    def _hook(self, layer: nn.Module, splits: bool, joins: bool) -> None:
        """Make a layer that is no `Block` exchange rows. Hooks cost the host more than the calls of `_sliced`."""
        for module in _named_like(layer, _ENTRIES):
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
        for module in _named_like(layer, _ROWS):
            module.register_forward_hook(self._leave)
        if splits:
            _inner(layer).register_forward_pre_hook(self._split)
        if joins:
            _inner(layer).register_forward_hook(self._join)

    def rows_between_stages(self, num_rows: int) -> int:
        """Return how many rows this slice sends another stage of a microbatch of `num_rows`, padding included."""
        return SliceRows(num_rows, self.group, self._pieces).num_own if self._sends_shares else num_rows

    def with_rows(self, layer: nn.Module, num_rows: int) -> Callable[..., Tensor]:
        """Return a layer as a function for a microbatch of `num_rows` rows, which may also run again in its backward."""
        return partial(self._run, layer, num_rows)

    def _run(self, layer: nn.Module, num_rows: int, x: Tensor, *args: Any) -> Tensor:
        if num_rows != self._rows.num_rows:
            self._rows = SliceRows(num_rows, self.group, self._pieces)
        output: Tensor = layer(x, *args)
        return output

    def _enter(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        share = args[0] if args else named["hidden_states"]
        x = gather_rows(cast_once(share), self._rows)
        return ((x, *args[1:]), named) if args else (args, {**named, "hidden_states": x})

    def _leave(self, _: nn.Module, __: tuple[Tensor, ...], part: Tensor) -> Tensor:
        return sum_to_share(part, self._rows)

    def _split(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (split_rows(args[0], self._rows), *args[1:])

    def _join(self, _: nn.Module, __: tuple[Any, ...], share: Tensor) -> Tensor:
        return join_rows(share, self._rows)


def cut_to_first_slice(layer: nn.Module, slices: int) -> None:
    """Cut the matrices of a layer down to the first of `slices` slices, without the sums over slices.

    The layer then computes what one process of the unit computes, for timing; its outputs mean nothing. Raises UserError as
    `Slices.shard` does.
    """
    _check_matrices(layer)
    _cut(layer, 0, slices)


def cut_dimension(name: str) -> int | None:
    """Return the dimension along which a parameter is sliced; None if it is whole on every slice, or exists on the first only.

    Only on the first slice is the bias of a row-parallel layer, since it is added once, in the sum over the slices.
    """
    layer, _, kind = name.rpartition(".")
    if layer.endswith((*_COLUMNS, *_VOCABULARY)):
        return 0
    return 1 if layer.endswith(_ROWS) and kind == "weight" else None


def slice_of(parameter: Tensor, dim: int, index: int, count: int, fused: Sequence[Part] = ()) -> nn.Parameter:
    """Return one of `count` slices of a parameter along `dim`, with storage of its own; of each of its parts if they are `fused`.

    If they cannot be equal, the first slices have one row or column more.
    """
    wholes = [part.of(parameter.detach()) for part in fused] or [parameter.detach()]
    slices = [whole.tensor_split(count, dim)[index] for whole in wholes]
    return nn.Parameter(torch.cat(slices), requires_grad=parameter.requires_grad)


def _check_matrices(layer: nn.Module) -> None:
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith((*_COLUMNS, *_ROWS)):
            raise UserError(
                f"a layer has the matrix {name or type(layer).__name__!r}, of which it is not known how slices have it: "
                "set the unit's tp to 1"
            )


def _cut(layer: nn.Module, index: int, count: int) -> None:
    """Replace the parameters of a layer by those of one of `count` slices, and its numbers of heads by the slice's."""
    for name, parameter in list(layer.named_parameters()):
        owner, _, kind = name.rpartition(".")
        module, dim = layer.get_submodule(owner), cut_dimension(name)
        if dim is not None:
            module.register_parameter(kind, slice_of(parameter, dim, index, count, parts(name, module)))
        elif owner.endswith(_ROWS) and index > 0:
            module.register_parameter(kind, None)
    for module in layer.modules():
        if isinstance(module, FusedLinear):
            module.parts = {name: rows // count + (index < rows % count) for name, rows in module.parts.items()}
    for attention in _named_like(layer, _ATTENTIONS):
        heads = getattr(attention, "num_heads", None)
        if heads is not None:
            attention.num_heads = heads // count


def _row_wise(layer: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a layer that stay whole but see one slice's rows or heads only: those of norms."""
    inside = set(_inner(layer).parameters())
    return [
        parameter
        for name, parameter in layer.named_parameters()
        if parameter in inside and cut_dimension(name) is None and not name.rpartition(".")[0].endswith(_ROWS)
    ]


def _inner(layer: nn.Module) -> nn.Module:
    """Return the layer itself, or the layer of `transformers` in it: around that one, rows come in other orders and numbers."""
    inner: nn.Module = getattr(layer, "layer", layer)
    return inner


def _named_like(layer: nn.Module, endings: Sequence[str]) -> Iterator[nn.Module]:
    dotted = tuple(f".{ending}" for ending in endings)
    return (module for name, module in layer.named_modules() if f".{name}".endswith(dotted))
