"""Attention over packed sequences: a token sees its own segment only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Boundaries of the segments (samples, images, recordings) of a packed sequence, made once per microbatch for all layers."""

    lengths: tuple[int, ...]
    """Length of each segment, on the host: the dense kernel is called for runs of them."""
    longest: int
    """Length of the longest segment, 0 without any. It is all that the flash kernel takes of the lengths: a compiled layer is not
    compiled anew for others."""
    cu_seqlens: Tensor
    """(n + 1,) int32 offsets of the segments, on the device of the sequence."""
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """What attends in place of `packed_attention`'s kernels, of q, k and v as it takes them: where these are a rank's share of a
    sequence (`headrace.trainer.context`). The other fields are then of the whole sequence."""

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Self:
        """Make segments from (n + 1,) offsets on the host; `to_device` brings them to a sequence on another device."""
        lengths = tuple(cu_seqlens.diff().tolist())
        return cls(lengths=lengths, longest=max(lengths, default=0), cu_seqlens=cu_seqlens)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool, keys: Segments | None = None
) -> Tensor:
    """Return scaled dot-product attention inside every segment.

    q: (T, H, D); k, v: (T, H_kv, D) with H a multiple of H_kv (grouped queries: Ainslie et al. 2023, section 2.2).
    keys: the segments of k and v where they are not those of q, as many and none of them empty. Returns (T, H, D).

    Half precision on a GPU takes one variable-length flash kernel (Dao 2023, section 3); everything else takes one call of the
    dense kernel for every run of equally long segments. `segments.attend`, if there is one, does instead what it does.
    """
    if segments.attend is not None:
        return segments.attend(q, k, v)
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and segments.longest:
        return _flash(q, k, v, segments, keys or segments, causal)
    outputs = [
        _dense(q[rows], k[of_keys], v[of_keys], count, causal)
        for rows, of_keys, count in _equal_runs(segments.lengths, (keys or segments).lengths)
        if rows.stop > rows.start
    ]
    return torch.cat(outputs) if outputs else torch.empty_like(q)


def _flash(q: Tensor, k: Tensor, v: Tensor, segments: Segments, keys: Segments, causal: bool) -> Tensor:
    from headrace.trainer.models.varlen_attention import grouped_varlen_attn  # imports the compiler: 1.5 s, which CPUs are spared

    window = (-1, 0) if causal else (-1, -1)
    offsets, of_keys = segments.cu_seqlens, keys.cu_seqlens
    output = grouped_varlen_attn(q, k, v, offsets, of_keys, segments.longest, keys.longest, window_size=window)
    if not isinstance(output, Tensor):
        raise TypeError("varlen_attn returned auxiliary outputs that were not asked for")
    return output


def _dense(q: Tensor, k: Tensor, v: Tensor, count: int, causal: bool) -> Tensor:
    """Attend inside `count` segments of equal length as one batch: (count * L, H, D) -> (count * L, H, D)."""
    q, k, v = (x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1)


def _equal_runs(lengths: Sequence[int], of_keys: Sequence[int]) -> Iterable[tuple[slice, slice, int]]:
    """Yield the queries, the keys and the number of segments of every run of consecutive segments of equal lengths."""
    start = of_key = 0
    for (length, key_length), run in groupby(zip(lengths, of_keys, strict=True)):
        count = sum(1 for _ in run)
        rows, keys = slice(start, start + count * length), slice(of_key, of_key + count * key_length)
        yield rows, keys, count
        start, of_key = rows.stop, keys.stop
