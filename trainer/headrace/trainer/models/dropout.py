"""Dropout that is drawn by sample: on what attention and MLP of each layer add to the residual stream (Vaswani et al. 2017, 5.4).

What is dropped follows from the job's seed, the sample's id, the token's place in its sample, the layer and the channel alone, in
integer arithmetic: it is the same to the bit when a step is repeated, moved to another replica, stage or device, divided into
other microbatches, or run again in the backward by activation checkpointing. Ids of samples differ from epoch to epoch.
A slice of a layer holds, of all rows, a part of the sum that is added: what is dropped of a sum is dropped of all its parts.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.noise import numbers

_BRANCH_ENDS = ("attention.out", "mlp.out", "self_attn.o_proj", "mlp.down_proj")
"""Name endings of the matrices whose output is added to the residual stream, in this repository's decoder and `transformers`."""
_LANES = 4  # values drawn from one random number of 64 bits
_STEPS = 2**16  # into which the values of a lane divide the range from 0 to 1


class ResidualDropout:
    """Drops values in the layers of a decoder, while gradients are recorded and not in an evaluation."""

    def __init__(self, layers: nn.ModuleList, rate: float, seed: int) -> None:
        """`rate`: the probability of each value to be dropped, in steps of 1 / 65,536. `seed`: the job's."""
        self.rate, self._seed = rate, seed
        self._keys: Tensor | None = None
        for index, layer in enumerate(layers):
            for name, module in layer.named_modules():
                if f".{name}".endswith(tuple(f".{ending}" for ending in _BRANCH_ENDS)):
                    module.register_forward_hook(partial(self._drop, zlib.crc32(f"{index}.{name}".encode())))

    def keys(self, microbatch: PackedMicrobatch) -> Tensor:
        """Return the (T,) int64 keys of a microbatch's tokens, on the host as it is. Padding has those of no sample."""
        of_segment = torch.zeros(len(microbatch.cu_seqlens) - 1, dtype=torch.int64)
        samples = [self._key(sample) for sample in microbatch.sample_ids.tolist()]
        of_segment[microbatch.sample_segments.long()] = torch.tensor(samples, dtype=torch.int64)
        of_token = torch.repeat_interleave(of_segment, microbatch.cu_seqlens.diff())
        return numbers(of_token[microbatch.rows] if len(microbatch.rows) else of_token, microbatch.position_ids)

    def with_keys(self, layer: Callable[..., Tensor], keys: Tensor | None) -> Callable[..., Tensor]:
        """Return a layer as a function for the tokens with these keys, on its device, which may also run in its backward."""
        return partial(self._run, layer, keys)

    def _run(self, layer: Callable[..., Tensor], keys: Tensor | None, *args: Any) -> Tensor:
        self._keys = keys
        output = layer(*args)
        self._keys = None
        return output

    def _drop(self, salt: int, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the output (..., T, width) of a branch with some values 0 and the others enlarged to make up for them."""
        if self._keys is None or not torch.is_grad_enabled():
            return output
        kept = kept_values(self._keys ^ salt, output.shape[-1], self.rate).view(output.shape)
        return torch.where(kept, output * (1 / (1 - self.rate)), 0.0)

    def _key(self, sample: int) -> int:
        digest = hashlib.blake2b(f"dropout/{self._seed}/{sample}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, signed=True)


def kept_values(keys: Tensor, width: int, rate: float) -> Tensor:
    """Return which of (T, width) values are kept, bool, by the (T,) int64 keys of their rows."""
    drawn = numbers(keys[:, None], torch.arange(-(-width // _LANES), device=keys.device))
    lanes = drawn.view(torch.int16)[:, :width]
    return lanes >= round(rate * _STEPS) - _STEPS // 2
