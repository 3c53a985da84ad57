"""Tensor parallelism: every layer of a stage cut into slices, one per process (Megatron-LM, Shoeybi et al. 2019, section 3).

Attention is cut by heads and the MLP by its inner channels: the input matrices are column-parallel, the output matrix is
row-parallel. So a block has two all-reduces in the forward, after attention and MLP, and two in the backward, before them.
Norms, embeddings, head and projector are replicated on every slice, with the same computation on each: hidden states between
layers, and the gradients of replicated parameters, are complete everywhere. The same holds for layers of `transformers`. Their
norms of queries or keys are replicated too, but see only the heads of their slice, so their gradients are summed. An attention
that stores its number of heads gets the number in its slice.

DTensor is used only for these sums. Torch's own parallel styles also make DTensors of the weights, so that every operation of a
linear layer is planned anew for every length of a microbatch; here a slice of a weight is a plain parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from headrace.errors import UserError

_ENTRIES = ("attention", "self_attn", "attn", "mlp", "layer.fc1")
"""Name endings of modules whose input goes to column-parallel matrices, in this repository's blocks and `transformers` layers.

Whisper's layers have no module for their MLP, so its first matrix stands for it.
"""
_COLUMNS = (
    *("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.fc1", "layer.fc1"),
    *("attn.qkv.query", "attn.qkv.key", "attn.qkv.value"),
)
_ROWS = (
    *("attention.out", "mlp.out"),
    *("self_attn.o_proj", "self_attn.out_proj", "attn.proj", "mlp.down_proj", "mlp.fc2", "layer.fc2"),
)
_SHARED_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_ATTENTIONS = ("self_attn", "attn")


def shard(layers: Sequence[nn.Module], group: dist.ProcessGroup, device_type: str) -> None:
    """Cut the matrices of these layers down to this process's slice, and add the sums over the slices.

    Every process of the group must have the same whole weights; nothing is sent. Raises UserError for a layer with a matrix that
    this module does not know how to cut.
    """
    for layer in layers:
        _check_matrices(layer)
    mesh = DeviceMesh.from_group(group, device_type)
    styles = {_ENTRIES: _Entry(), _COLUMNS: _Columns(), _ROWS: _Rows(), _SHARED_NORMS: _SharedNorm(), _ATTENTIONS: _HeadCount()}
    for layer in layers:
        for names, style in styles.items():
            present = [name for name, _ in layer.named_modules() if f".{name}".endswith(tuple(f".{end}" for end in names))]
            parallelize_module(layer, mesh, dict.fromkeys(present, style))


def cut_to_first_slice(layer: nn.Module, slices: int) -> None:
    """Cut the matrices of a layer down to the first of `slices` slices, without the sums over slices.

    The layer then computes what one process of the unit computes, for timing; its outputs mean nothing. Raises UserError as
    `shard` does.
    """
    _check_matrices(layer)
    for name, parameter in list(layer.named_parameters()):
        dim = cut_dimension(name)
        if dim is not None:
            owner, _, kind = name.rpartition(".")
            part = parameter.detach().narrow(dim, 0, parameter.shape[dim] // slices).clone()
            layer.get_submodule(owner).register_parameter(kind, nn.Parameter(part))
    for name, module in layer.named_modules():
        if f".{name}".endswith(tuple(f".{end}" for end in _ATTENTIONS)):
            _share_heads(module, slices)


def _check_matrices(layer: nn.Module) -> None:
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith((*_COLUMNS, *_ROWS)):
            raise UserError(
                f"a layer has the matrix {name or type(layer).__name__!r}, of which it is not known how slices have it: "
                "set the unit's tp to 1"
            )


def _share_heads(attention: nn.Module, slices: int) -> None:
    heads = getattr(attention, "num_heads", None)
    if heads is not None:
        attention.num_heads = heads // slices


def cut_dimension(name: str) -> int | None:
    """Return the dimension along which a parameter is sliced; None if it is whole on every slice, or exists on the first only.

    Only on the first slice is the bias of a row-parallel layer, since it is added once, after the sum over the slices.
    """
    layer, _, kind = name.rpartition(".")
    if layer.endswith(_COLUMNS):
        return 0
    return 1 if layer.endswith(_ROWS) and kind == "weight" else None


class _Entry(ParallelStyle):
    """Style of a module whose column-parallel matrices share one input: sums the input's gradient over the slices."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (split(args[0]), *args[1:]), named
            return args, {**named, "hidden_states": split(named["hidden_states"])}

        def split(x: Tensor) -> Tensor:
            whole = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            return whole.to_local(grad_placements=[Partial()])

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class _Columns(ParallelStyle):
    """Style of a column-parallel linear layer: each slice has some of its outputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters():
            module.register_parameter(name, _slice(parameter, 0, device_mesh))
        return module


class _Rows(ParallelStyle):
    """Style of a row-parallel linear layer: each slice has some of its inputs, and the outputs of all slices are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def leave(_: nn.Module, __: tuple[Tensor, ...], y: Tensor) -> Tensor:
            return _sum(y, device_mesh)

        module.register_parameter("weight", _slice(module.get_parameter("weight"), 1, device_mesh))
        if device_mesh.get_local_rank() > 0:
            module.register_parameter("bias", None)
        module.register_forward_hook(leave)
        return module


class _SharedNorm(ParallelStyle):
    """Style of a norm shared by all heads: sums its gradient over the slices, each of which sees its own heads only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: _sum(gradient, device_mesh))  # type: ignore[no-untyped-call]
        return module


class _HeadCount(ParallelStyle):
    """Style of an attention of `transformers`: sets `num_heads`, if it has that attribute, to the heads of the slice."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _share_heads(module, device_mesh.size())
        return module


def _sum(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of a tensor over the slices (all-reduce)."""
    return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


def _slice(parameter: nn.Parameter, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None).to_local()
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
