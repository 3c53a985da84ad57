"""One matrix in place of several that take the same rows, so that all their products are one (as in Megatron-LM and vLLM).

Its rows are those of the first part, then of the second, and so on: queries, keys and values of an attention, gate and up of an
MLP. Checkpoints keep each part as a matrix of its own, initial weights are drawn by part, and a tensor-parallel slice has its
share of each: `parts_of` knows the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class FusedLinear(nn.Linear):
    """(T, in) -> (T, sum of the parts' outputs)."""

    def __init__(self, width: int, parts: Mapping[str, int], *, bias: bool) -> None:
        """`width`: of the input. `parts`: the outputs of each matrix, by the name of the module that it would be alone."""
        super().__init__(width, sum(parts.values()), bias=bias)
        self.parts = dict(parts)


class Part(NamedTuple):
    """Consecutive rows of a parameter that are a tensor of their own in checkpoints, or all of it."""

    name: str
    """Name in the whole model."""
    begin: int
    rows: int | None
    """Number of rows from `begin` on; None: the tensor is all of the parameter, which may have no rows."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part's view of a tensor that has the shape of the parameter."""
        return tensor if self.rows is None else tensor[self.begin : self.begin + self.rows]

    def of_rows(self, tensor: Tensor, first: int) -> Tensor:
        """Return the part's view of some consecutive rows of the parameter, of which `first` is the first; it may have no row."""
        return tensor if self.rows is None else tensor[max(0, self.begin - first) : max(0, self.begin + self.rows - first)]


def parts(name: str, owner: nn.Module) -> Sequence[Part]:
    """Return the parts of the parameter `name`, all names in the whole model, of the module `owner`: one if it is not fused."""
    if not isinstance(owner, FusedLinear):
        return [Part(name, 0, None)]
    *path, _, kind = name.split(".")
    ends = accumulate(owner.parts.values())
    return [
        Part(".".join([*path, part, kind]), end - rows, rows) for (part, rows), end in zip(owner.parts.items(), ends, strict=True)
    ]


def parts_of(module: nn.Module) -> Iterator[tuple[nn.Parameter, Sequence[Part]]]:
    """Yield each parameter of a module, in the order of `named_parameters`, with its parts."""
    for name, parameter in module.named_parameters():
        yield parameter, parts(name, module.get_submodule(name.rpartition(".")[0]))


def takes_parts(module: nn.Module) -> None:
    """Have a module with a `FusedLinear` also load state dicts in which the parts are modules, as before they were fused."""
    module.register_load_state_dict_pre_hook(_fuse)  # type: ignore[no-untyped-call]


def _fuse(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, _parameter in module.named_parameters(prefix.removesuffix(".")):
        names = [part.name for part in parts(name, module.get_submodule(name.removeprefix(prefix).rpartition(".")[0]))]
        if len(names) > 1 and all(part in state for part in names):
            state[name] = torch.cat([state.pop(part) for part in names])
