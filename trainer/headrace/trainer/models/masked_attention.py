"""Attention under a mask of 64-bit fields (`headrace.attention_mask`): whole, and of only those blocks that queries see.

Of context parallelism this is what one rank does: its own rows are the queries, all tokens are the keys. Blocks of keys that no
query of a block sees cost nothing. It runs on any device, by torch's dense kernel: a call for each run of blocks of queries that
see the same blocks of keys. `headrace.trainer.models.flex_masks` is the same for FlexAttention.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from headrace.attention_mask import PARTLY, WHOLLY, AttentionMask, Ints
from headrace.block_distribution import BLOCK
from headrace.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Queries that follow each other and see keys of the same blocks."""

    rows: slice
    """Their places among the queries."""
    keys: tuple[slice, ...]
    """Ranges of the keys of these blocks: first those that all queries see, then the others."""
    seen: Tensor | None
    """(q, k) bool, for the k last keys: which of them each query sees. None: all keys are seen by all queries."""
    blind: Tensor | None
    """(q,) bool: queries that see no key, whose row in `seen` has one nevertheless. None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskRuns:
    """The runs of a sequence, or of one rank's part of it, made once per microbatch for all layers."""

    runs: tuple[Run, ...]
    """Those that see something. Their rows rise."""
    num_queries: int
    num_keys: int

    @classmethod
    def of(
        cls,
        mask: AttentionMask,
        *,
        block: int = BLOCK,
        chosen: Ints | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Make the runs of a mask.

        chosen: numbers of the blocks of queries, in the order of their rows; None: all of them. device: that of the queries.
        """
        kinds = mask.block_map(block, chosen)
        places = rows_of_blocks(mask.num_tokens, block, chosen)
        starts = np.flatnonzero(np.diff(places // block, prepend=-1))
        runs, row = [], 0
        for _, same in itertools.groupby(kinds, key=bytes):
            kind, *others = same
            end = row + 1 + len(others)
            rows = slice(int(starts[row]), int(starts[end]) if end < len(starts) else len(places))
            if kind.any():
                runs.append(_run(mask, block, kind, rows, places[rows], device))
            row = end
        return cls(runs=tuple(runs), num_queries=len(places), num_keys=mask.num_tokens)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a query and a key that are computed, seen or not: what one head's time grows with."""
        return sum((run.rows.stop - run.rows.start) * sum(keys.stop - keys.start for keys in run.keys) for run in self.runs)


def rows_of_blocks(num_tokens: int, block: int, chosen: Ints | None = None) -> Ints:
    """Return the places of the tokens of the chosen blocks, in the order of these; None: of all blocks."""
    if chosen is None:
        return np.arange(num_tokens)
    places = (np.asarray(chosen, np.int64)[:, None] * block + np.arange(block)).ravel()
    return places[places < num_tokens]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, runs: MaskRuns) -> Tensor:
    """Return scaled dot-product attention of the blocks that the queries see.

    q: (T_q, H, D), the rows that `runs` were made for. k, v: (T, H_kv, D) of all tokens, with H a multiple of H_kv. Returns
    (T_q, H, D), zeros for queries that see nothing. The backward computes each run again and keeps no scores.

    Raises UserError where the heads do not divide, or the rows are not those of the mask.
    """
    _check(q, k, runs.num_queries, runs.num_keys)
    attended: Tensor = _Attention.apply(q, k, v, runs)  # type: ignore[no-untyped-call]
    return attended


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raise UserError where the heads of queries do not divide by those of keys."""
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise UserError(
            f"{num_heads} heads of queries do not divide by {num_kv_heads} heads of keys: take a model, or slices of it, in "
            "which they do"
        )


def attend_runs(q: Tensor, k: Tensor, v: Tensor, runs: MaskRuns) -> Tensor:
    """Return what `masked_attention` does, without a graph for its gradients."""
    output = q.new_zeros(q.shape)
    for run in runs.runs:
        output[run.rows] = _attend(q[run.rows], _gathered(k, run.keys), _gathered(v, run.keys), run)
    return output


def gradients_of_runs(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, runs: MaskRuns) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from that of the output of `masked_attention`, grad (T_q, H, D).

    Those of k and v are sums over runs, in `dtype_of_sums`.
    """
    sums = dtype_of_sums(k.dtype)
    of_q, of_k, of_v = torch.zeros_like(q), torch.zeros_like(k, dtype=sums), torch.zeros_like(v, dtype=sums)
    for run in runs.runs:
        parts = [part.detach().requires_grad_() for part in (q[run.rows], _gathered(k, run.keys), _gathered(v, run.keys))]
        with torch.enable_grad():
            output = _attend(parts[0], parts[1], parts[2], run)
        of_q[run.rows], *of_keys = torch.autograd.grad(output, parts, grad[run.rows])
        for total, part in zip((of_k, of_v), of_keys, strict=True):
            start = 0
            for keys in run.keys:
                end = start + keys.stop - keys.start
                total[keys] += part[start:end]
                start = end
    return of_q, of_k, of_v


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of keys and values are summed: float32 where these are in half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, places: Ints | None = None) -> Tensor:
    """Return the same by the formula, with the matrix of all pairs: the reference, for sequences that are short enough.

    places: of the queries in the sequence; None: the queries are the sequence.
    """
    everywhere = np.arange(mask.num_tokens)
    queries = everywhere if places is None else places
    _check(q, k, len(queries), mask.num_tokens)
    seen = torch.from_numpy(mask.visible(queries, everywhere)).to(q.device)
    shared = q.reshape(len(q), k.shape[1], q.shape[1] // k.shape[1], q.shape[2])  # neighbouring heads have the same keys
    scores = torch.einsum("qhgd,khd->hgqk", shared, k) / math.sqrt(q.shape[2])
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0.0)
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)


def _check(q: Tensor, k: Tensor, num_queries: int, num_keys: int) -> None:
    check_heads(q.shape[1], k.shape[1])
    if (q.shape[0], k.shape[0]) != (num_queries, num_keys):
        raise UserError(
            f"the attention mask is of {num_queries} queries and {num_keys} keys, but there are {q.shape[0]} and {k.shape[0]}: "
            "give queries of the rank's own blocks, and keys of the whole sequence"
        )


def _run(
    mask: AttentionMask, block: int, kinds: np.ndarray[Any, Any], rows: slice, places: Ints, device: torch.device | str
) -> Run:
    """Make the run of the queries at `places`, which see blocks of keys as `kinds` (K,) says."""
    whole, part = (_ranges(np.flatnonzero(kinds == kind), block, mask.num_tokens) for kind in (WHOLLY, PARTLY))
    if not part:
        return Run(rows=rows, keys=whole, seen=None, blind=None)
    seen = mask.visible(places, np.concatenate([np.arange(keys.start, keys.stop) for keys in part]))
    blind = ~seen.any(axis=1) if not whole else np.zeros(len(places), np.bool_)
    seen[blind, 0] = True
    return Run(
        rows=rows,
        keys=whole + part,
        seen=torch.from_numpy(seen).to(device),
        blind=torch.from_numpy(blind).to(device) if blind.any() else None,
    )


def _ranges(blocks: Ints, block: int, num_tokens: int) -> tuple[slice, ...]:
    """Join blocks that follow each other: the ranges of their tokens."""
    cuts = np.flatnonzero(np.diff(blocks) != 1) + 1
    return tuple(
        slice(int(some[0]) * block, min(num_tokens, (int(some[-1]) + 1) * block)) for some in np.split(blocks, cuts) if some.size
    )


class _Attention(torch.autograd.Function):
    """Attention run by run. Without it each run's backward would fill tensors as long as all keys, mostly with zeros."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, runs: MaskRuns) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.runs = runs
        return attend_runs(q, k, v, runs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        of_q, of_k, of_v = gradients_of_runs(q, k, v, grad, ctx.runs)
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype), None


def _attend(q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
    """Attend from the queries of a run to its keys: (q, H, D)."""
    seen = None if run.seen is None else functional.pad(run.seen, (len(k) - run.seen.shape[1], 0), value=True)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
    return mixed if run.blind is None else mixed.masked_fill(run.blind[:, None, None], 0.0)


def _gathered(x: Tensor, ranges: Sequence[slice]) -> Tensor:
    return x[ranges[0]] if len(ranges) == 1 else torch.cat([x[keys] for keys in ranges])
