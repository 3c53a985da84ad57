"""Every layer of a stage cut into slices, one for each process of a group (Megatron-LM, Shoeybi et al. 2019, section 3).

Attention is cut by heads and the MLP by its inner channels: the matrices in front column by column, the one behind row by row.
So the slices of a block sum tensors twice on the way forth, behind attention and MLP, and twice on the way back, in front of
them. Norms, embeddings, head and projector are whole on every slice, which computes the same with them as all others: hidden
states between layers, and the gradients of what is whole, are complete everywhere.

Only these sums are left to distributed tensors. Torch's own styles make them of the weights too, so that every operation of a
linear layer is planned anew for every length of a microbatch; here what a slice has is a plain parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from headrace.errors import UserError
from trainer.models.block import Block

_COLUMNS = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
_ROWS = ("attention.out", "mlp.out")


def shard(layers: Sequence[nn.Module], group: dist.ProcessGroup, device_type: str) -> None:
    """Keep, of the matrices of these layers, this process's slice.

    Every process of the group has the same whole weights before; nothing is sent. Raises UserError for layers other than Block.
    """
    for layer in layers:
        if not isinstance(layer, Block):
            raise UserError(
                f"layers of {type(layer).__name__} cannot be cut into slices, only those of Block: set the unit's tp to 1"
            )
    mesh = DeviceMesh.from_group(group, device_type)
    styles = {"attention": _Entry(), "mlp": _Entry(), **dict.fromkeys(_COLUMNS, _Columns()), **dict.fromkeys(_ROWS, _Rows())}
    for layer in layers:
        present = {name for name, _ in layer.named_modules()}  # mlp.gate is not everywhere
        parallelize_module(layer, mesh, {name: style for name, style in styles.items() if name in present})


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
        def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x, *rest = args
            whole = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            return whole.to_local(grad_placements=[Partial()]), *rest

        module.register_forward_pre_hook(enter)
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
            part = DTensor.from_local(y, device_mesh, [Partial()], run_check=False)
            return part.redistribute(placements=[Replicate()]).to_local()

        module.register_parameter("weight", _slice(module.get_parameter("weight"), 1, device_mesh))
        if device_mesh.get_local_rank() > 0:
            module.register_parameter("bias", None)
        module.register_forward_hook(leave)
        return module


def _slice(parameter: nn.Parameter, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None).to_local()
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
