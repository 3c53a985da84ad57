"""Every layer of a stage cut into slices, one for each process of a group (Megatron-LM, Shoeybi et al. 2019, section 3).

Attention is cut by heads and the MLP by its inner channels: the matrices in front column by column, the one behind row by row.
So the slices of a block sum tensors twice on the way forth, behind attention and MLP, and twice on the way back, in front of
them. Norms, embeddings, head and projector are whole on every slice, which computes the same with them as all others: hidden
states between layers, and the gradients of what is whole, are complete everywhere. So it is in layers of `transformers` too,
where a norm of queries or keys is whole as well, but sees the heads of its slice only: its gradients are summed. An attention
that counts its heads is told how many are left.

Only these sums are left to distributed tensors. Torch's own styles make them of the weights too, so that every operation of a
linear layer is planned anew for every length of a microbatch; here what a slice has is a plain parameter.
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
"""Of a block of this repository, and of the layers of `transformers`; Whisper's have no module for their MLP."""
_COLUMNS = (
    *("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.fc1", "layer.fc1"),
    *("attn.qkv.query", "attn.qkv.key", "attn.qkv.value"),
)
_ROWS = (
    *("attention.out", "mlp.out"),
    *("self_attn.o_proj", "self_attn.out_proj", "attn.proj", "mlp.down_proj", "mlp.fc2", "layer.fc2"),
)
_OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
_ATTENTIONS = ("self_attn", "attn")


def shard(layers: Sequence[nn.Module], group: dist.ProcessGroup, device_type: str) -> None:
    """Keep, of the matrices of these layers, this process's slice.

    Every process of the group has the same whole weights before; nothing is sent. Raises UserError for layers with a matrix of
    which it is not known how it is cut.
    """
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith((*_COLUMNS, *_ROWS)):
                raise UserError(
                    f"a layer has the matrix {name or type(layer).__name__!r}, of which it is not known how slices have it: "
                    "set the unit's tp to 1"
                )
    mesh = DeviceMesh.from_group(group, device_type)
    styles = {_ENTRIES: _Entry(), _COLUMNS: _Columns(), _ROWS: _Rows(), _OF_HEADS: _OfHeads(), _ATTENTIONS: _Heads()}
    for layer in layers:
        for names, style in styles.items():
            present = [name for name, _ in layer.named_modules() if f".{name}".endswith(tuple(f".{end}" for end in names))]
            parallelize_module(layer, mesh, dict.fromkeys(present, style))


def cut_dimension(name: str) -> int | None:
    """Along which the slices of a parameter lie; None: it is whole on every slice, or on the first one alone.

    The latter is a bias behind a sum over the slices, which is to be added once.
    """
    layer, _, kind = name.rpartition(".")
    if layer.endswith(_COLUMNS):
        return 0
    return 1 if layer.endswith(_ROWS) and kind == "weight" else None


class _Entry(ParallelStyle):
    """Of a module whose matrices read one input: their gradients of it are summed."""

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
    """Of a linear layer, some of whose outputs a slice has."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters():
            module.register_parameter(name, _slice(parameter, 0, device_mesh))
        return module


class _Rows(ParallelStyle):
    """Of a linear layer, some of whose inputs a slice has: what the slices make of them is summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def leave(_: nn.Module, __: tuple[Tensor, ...], y: Tensor) -> Tensor:
            return _sum(y, device_mesh)

        module.register_parameter("weight", _slice(module.get_parameter("weight"), 1, device_mesh))
        if device_mesh.get_local_rank() > 0:
            module.register_parameter("bias", None)
        module.register_forward_hook(leave)
        return module


class _OfHeads(ParallelStyle):
    """Of a norm that all heads share, whose gradient a slice has of its own heads only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: _sum(gradient, device_mesh))  # type: ignore[no-untyped-call]
        return module


class _Heads(ParallelStyle):
    """Of an attention of `transformers`, of whose heads a slice has some; not all of them count theirs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        heads = getattr(module, "num_heads", None)
        if heads is not None:
            module.num_heads = heads // device_mesh.size()
        return module


def _sum(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Over the slices."""
    return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


def _slice(parameter: nn.Parameter, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None).to_local()
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
