"""The forms of OrchMLLM's appendix A as a unit of Headrace's runs them: what is balanced is what is computed.

Rows of a microbatch are packed. Under "fourth" attention alone is padded: each image, recording or sample is a row of a batch
that is as wide as the longest of them. Under "padded" all layers run on such rows, and only what stands in front of them and
behind them is packed. "no_padding" and "third" differ in what is balanced, with attention or without, and run packed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.trainer.loading.collate import places
from headrace.trainer.models.attention import Segments
from headrace.trainer.pipeline.chunk import Inputs
from headrace.trainer.pipeline.layer_inputs import mapped

PADDED, FOURTH = "padded", "fourth"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedAttention:
    """What attends in a microbatch as one padded batch: in place of `packed_attention`'s kernels, as `Segments.attend`."""

    cells: Tensor
    """(R,) int64: the place of each packed row in the b x L cells of the batch."""
    inside: Tensor
    """(b, L) bool: which cells are of a segment. Each of the b segments begins a row of the batch."""
    causal: bool
    is_spread: bool
    """Whether queries, keys and values are cells already; else they are packed rows, as is then what is returned."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], *, causal: bool, is_spread: bool) -> Self:
        """Make it for packed segments of these lengths, on the host. Empty ones get no row of the batch."""
        rows = torch.tensor([length for length in lengths if length], dtype=torch.int64)
        longest = int(rows.max()) if len(rows) else 0
        cells = torch.repeat_interleave(torch.arange(len(rows)) * longest, rows) + places(rows)
        return cls(cells=cells, inside=torch.arange(longest) < rows[:, None], causal=causal, is_spread=is_spread)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend inside each row of the batch: q (R or b x L, H, D) and k, v with H_kv heads, H a multiple of it."""
        if not self.is_spread:
            q, k, v = self.spread(q), self.spread(k), self.spread(v)
        q, k, v = (x.unflatten(0, self.inside.shape).transpose(1, 2) for x in (q, k, v))  # type: ignore[no-untyped-call]
        # Under a causal mask no token sees the padding, which is behind all of them.
        seen = None if self.causal else self.inside[:, None, None, :]
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=self.causal, enable_gqa=True)
        mixed = mixed.transpose(1, 2).flatten(0, 1)
        return mixed if self.is_spread else self.collect(mixed)

    def spread(self, rows: Tensor) -> Tensor:
        """Return packed rows (R, ...) as cells (b x L, ...), with zeros between them."""
        return rows.new_zeros(self.inside.numel(), *rows.shape[1:]).index_copy(0, self.cells, rows)

    def collect(self, cells: Tensor) -> Tensor:
        """Return the packed rows of cells."""
        return cells.index_select(0, self.cells)


def with_form(inputs: Inputs, form: str, *, causal: bool) -> Inputs:
    """Return a unit's inputs, on the host, so that its layers run under a form; `run_spread` is to be called for "padded" before.

    causal: whether the unit is the LLM.
    """
    if form not in (PADDED, FOURTH) or not inputs.num_rows:
        return inputs
    attends: list[PaddedAttention] = []

    def changed(segments: Segments) -> Segments:
        attends.append(PaddedAttention.of(segments.lengths, causal=causal, is_spread=form == PADDED))
        return replace(segments, attend=attends[-1])

    layers = mapped(inputs.layers, Segments, changed)
    if form == FOURTH:
        return replace(inputs, layers=layers)
    [attend] = attends
    keys = inputs.dropout_keys
    return replace(
        inputs, layers=mapped(layers, Tensor, attend.spread), dropout_keys=None if keys is None else attend.spread(keys)
    )


def run_spread(layers: list[nn.Module]) -> None:
    """Have the first of a compact unit's layers spread its rows, and the last one collect them, where their inputs say so."""
    layers[0].register_forward_pre_hook(_spread)
    layers[-1].register_forward_hook(_collect)


def _spread(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = args
    return (others[-1].attend.spread(x), *others)


def _collect(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    collected: Tensor = args[-1].attend.collect(output)
    return collected
