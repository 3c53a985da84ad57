"""Projectors to choose from: one matrix, an MLP or cross-attention, or a module of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.errors import UserError
from headrace.trainer.loading.collate import cumulative
from headrace.trainer.models.attention import Segments, packed_attention
from headrace.trainer.models.block import layer_norm
from headrace.trainer.models.projector import Groups, Projector

ProjectorKind = Literal["linear", "mlp", "cross_attention"]
_HEAD_DIM = 64  # of the attention heads of CLIP and Whisper


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaGroups(Groups):
    """Where the features of packed media go, and which of them belong to one medium."""

    features: Segments
    tokens: Segments


class CrossAttention(nn.Module):
    """A token of each group, which attends to all features of its medium: (L, width_in) -> (t, width_out).

    One layer, as in Qwen-VL (Bai et al. 2023, section 2.1). There the queries are learned, and each image has equally many; here
    a query is made of the group's own features, so that an image has the tokens that its size gives it.
    """

    def __init__(self, *, width_in: int, group: int, width_out: int) -> None:
        super().__init__()
        most = max(1, width_out // _HEAD_DIM)
        self.heads = next(heads for heads in range(most, 0, -1) if width_out % heads == 0)
        self.norm = layer_norm(width_in)
        self.query = nn.Linear(group * width_in, width_out)
        self.key = nn.Linear(width_in, width_out)
        self.value = nn.Linear(width_in, width_out)
        self.out = nn.Linear(width_out, width_out)

    def forward(self, features: Tensor, joined: Tensor, groups: MediaGroups) -> Tensor:
        """`joined`: (t, group * width_in), the features of each group side by side."""
        x, query = self.norm(features), self.query(joined)
        q, k, v = (rows.unflatten(-1, (self.heads, -1)) for rows in (query, self.key(x), self.value(x)))
        mixed = packed_attention(q.to(v.dtype), k, v, groups.tokens, causal=False, keys=groups.features)
        output: Tensor = query + self.out(mixed.flatten(1))
        return output


class ChosenProjector(Projector):
    """A projector of a kind, or a module that maps the joined features of a group: (t, group * width_in) -> (t, width_out)."""

    def __init__(
        self,
        kind: ProjectorKind | nn.Module,
        *,
        width_in: int,
        group: int,
        width_out: int,
        stride: int = 1,
        postprocess: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """stride: how many positions, of which `groups` is given the numbers, the encoder makes one feature of. postprocess:
        called with the tokens. Raises UserError for a module that does not fit the widths."""
        nn.Module.__init__(self)
        self.group, self.stride, self.width_out, self._postprocess = group, stride, width_out, postprocess
        self.projection = _module(kind, width_in, group, width_out)
        if isinstance(kind, nn.Module):
            _check_fits(kind, width_in, group, width_out)

    def forward(self, features: Tensor, groups: Groups) -> Tensor:
        """Project the features of all media. Raises UserError where the callback returns tokens of another width."""
        assert isinstance(groups, MediaGroups)
        x = features
        if groups.rows is not None:
            x = x.new_zeros(groups.num_rows, x.shape[1]).index_copy(0, groups.rows, x)
        joined = x.reshape(-1, self.group * x.shape[1])
        attends = isinstance(self.projection, CrossAttention)
        tokens: Tensor = self.projection(features, joined, groups) if attends else self.projection(joined)
        if self._postprocess is not None:
            tokens = self._postprocess(tokens)
            if tokens.shape != (len(joined), self.width_out):
                raise UserError(
                    f"postprocess_projector_callback returns tokens of the shape {tuple(tokens.shape)}, but the placeholders and "
                    f"the language model take {(len(joined), self.width_out)}"
                )
        return tokens

    def token_counts(self, lengths: Tensor) -> Tensor:
        """Return the (n,) numbers of tokens that media of these (n,) numbers of positions become."""
        return super().token_counts(self._features(lengths))

    def groups(self, lengths: Tensor) -> Groups:
        """Return the groups of media of these (n,) numbers of positions, on the host as they are."""
        features = self._features(lengths)
        of_features = super().groups(features)
        tokens = super().token_counts(features)
        return MediaGroups(
            num_rows=of_features.num_rows,
            rows=of_features.rows,
            features=Segments.of(cumulative(features)),
            tokens=Segments.of(cumulative(tokens)),
        )

    def _features(self, lengths: Tensor) -> Tensor:
        return (lengths + self.stride - 1) // self.stride


class _Mlp(nn.Module):
    """Two matrices with GELU between them, as in LLaVA 1.5 (Liu et al. 2023, section 3.2)."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.up = nn.Linear(width_in, width_out)
        self.down = nn.Linear(width_out, width_out)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(functional.gelu(self.up(x)))
        return output


def _module(kind: ProjectorKind | nn.Module, width_in: int, group: int, width_out: int) -> nn.Module:
    match kind:
        case nn.Module():
            return kind
        case "linear":
            return nn.Linear(group * width_in, width_out)
        case "mlp":
            return _Mlp(group * width_in, width_out)
        case "cross_attention":
            return CrossAttention(width_in=width_in, group=group, width_out=width_out)
    raise UserError(f"the projector is {kind!r}; it must be one of {', '.join(get_args(ProjectorKind))}, or a module")


@torch.no_grad()
def _check_fits(module: nn.Module, width_in: int, group: int, width_out: int) -> None:
    parameter = next(module.parameters(), torch.zeros(0))
    rows = parameter.new_zeros(2, group * width_in)
    try:
        found = tuple(module(rows).shape)
    except RuntimeError as err:
        raise UserError(
            f"the projector does not take rows of {group * width_in} values, {group} of the encoder's width {width_in}: {err}"
        ) from err
    if found != (2, width_out):
        raise UserError(
            f"the projector maps 2 rows to the shape {found}, but the language model takes tokens of width {width_out}"
        )
