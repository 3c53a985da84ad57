"""Qwen2.5-VL's vision tower (Bai et al. 2025, section 2.1.1): windows in most layers, whole images in a few."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.vision_utils import get_vision_window_index

from headrace.errors import HeadraceError, UserError
from headrace.spec import ImageSpec
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.huggingface.packed_layer import Rotations
from headrace.trainer.models.huggingface.parts import Adapted, skeleton
from headrace.trainer.models.huggingface.vision_tower import check_patch, embed_patches, vision_config
from headrace.trainer.models.projector import Projector
from headrace.trainer.models.vision_encoder import VisionEncoder, patch_positions

_PREFIXES = ("", "visual.", "model.visual.")
_OF_FUSED = re.compile(r"(?<=\.qkv)\.(query|key|value)\b")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """The patches of some images, window by window, as the layers see them. P: patches."""

    order: Tensor
    """(P,) int64: which patch, as packed, lies at each place."""
    back: Tensor
    """(P,) int64: at which place each patch, as packed, lies."""
    rotations: Rotations
    """(P, head_dim), window by window."""
    images: Segments
    """The images; each has the places that it has as packed."""
    inside: Segments
    """The windows."""


class WindowLayer(nn.Module):
    """A layer of the tower: (P, width) -> (P, width).

    The first one puts the patches into the order of windows, the last one puts them back as packed. So between stages they lie
    window by window.
    """

    def __init__(self, layer: nn.Module, *, is_first: bool, is_last: bool, sees_image: bool) -> None:
        """`sees_image`: a patch sees its whole image, and not its window only."""
        super().__init__()
        self.layer = layer
        self.is_first, self.is_last, self.sees_image = is_first, is_last, sees_image

    def forward(self, x: Tensor, windows: Windows) -> Tensor:
        """`windows` are those of the packed images."""
        x = x[windows.order] if self.is_first else x
        segments = windows.images if self.sees_image else windows.inside
        whole = torch.tensor([0, len(x)])  # where transformers would cut: nowhere
        output: Tensor = self.layer(x, cu_seqlens=whole, position_embeddings=windows.rotations, segments=segments)
        return output[windows.back] if self.is_last else output


class QueryKeyValue(nn.Module):
    """The fused matrix of an attention as three: (P, width) -> (P, 3 * width).

    A slice by heads, which would be rows from three places of the fused one, is consecutive rows of each.
    """

    def __init__(self, fused: nn.Linear) -> None:
        super().__init__()
        width, device = fused.in_features, fused.weight.device
        self.query, self.key, self.value = (nn.Linear(width, fused.out_features // 3, device=device) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Of a slice, (P, 3 * width / tp)."""
        return torch.cat((self.query(x), self.key(x), self.value(x)), dim=-1)


class QwenVision(Adapted, VisionEncoder):
    """The tower without its merger: uint8 patches (P, 3 * patch * patch) -> features (P, width), as packed.

    A still image is two equal frames to it, so one frame goes through the sum of both kernels.
    """

    checkpoint_prefixes = _PREFIXES

    def __init__(self, model: Any, path: Path) -> None:
        nn.Module.__init__(self)
        config = model.config
        for block in model.blocks:
            block.attn.qkv = QueryKeyValue(block.attn.qkv)
        self.merge, self.width = config.spatial_merge_size, config.hidden_size
        self.embed = model.patch_embed
        last = config.depth - 1
        self.layers = nn.ModuleList(
            WindowLayer(block, is_first=index == 0, is_last=index == last, sees_image=index in config.fullatt_block_indexes)
            for index, block in enumerate(model.blocks)
        )
        self.norm = nn.Identity()  # type: ignore[assignment]
        self._rotary, self._config = type(model.rotary_pos_emb), config
        self.adopt(model, path)
        self.stored_names = {name: _OF_FUSED.sub("", stored) for name, stored in self.stored_names.items()}

    def enter(self, patches: Tensor) -> Tensor:
        """What the first layer takes: (P, width)."""
        kernel = self.embed.get_parameter("proj.weight").sum(dim=2)
        return embed_patches(patches, kernel, None, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)

    def surroundings(self, image_grids: Tensor, image_cu_seqlens: Tensor, device: torch.device) -> tuple[Any, ...]:
        """What every layer takes besides. Raises HeadraceError for an image of several frames."""
        if (image_grids[:, 0] != 1).any():
            raise HeadraceError("a sample has an image of several frames, which Qwen2.5-VL joins two by two: it must have one")
        window, patch = self._config.window_size, self._config.patch_size
        groups, cu_windows = get_vision_window_index(image_grids, self.merge, window, patch)
        order = (groups[:, None] * self.merge**2 + torch.arange(self.merge**2)).flatten()
        positions = patch_positions(image_grids, self.merge)[order].to(device, non_blocking=True)
        with torch.device(device):
            rotary = self._rotary(self._config)
        windows = Windows(
            order=order.to(device, non_blocking=True),
            back=order.argsort().to(device, non_blocking=True),
            rotations=rotary(positions, positions),
            images=Segments.of(image_cu_seqlens, device),
            inside=Segments.of(cu_windows, device),
        )
        return (windows,)


class QwenMerger(Adapted, Projector):
    """The tower's own projector: features (P, width) -> tokens (P / merge^2, out_hidden_size)."""

    checkpoint_prefixes = _PREFIXES

    def __init__(self, model: Any, path: Path) -> None:
        nn.Module.__init__(self)
        self.group = model.spatial_merge_unit
        self.merger = model.merger
        self.adopt(model, path)

    def forward(self, features: Tensor, _: Tensor) -> Tensor:
        """Merge groups are whole in every image."""
        tokens: Tensor = self.merger(features)
        return tokens


def qwen_vision(path: Path, image: ImageSpec, *, token_width: int) -> tuple[QwenVision, QwenMerger | None]:
    """The tower and, where it leads to tokens as wide as the LLM's, its merger.

    Raises UserError where the model cannot take the job's patches.
    """
    config = vision_config(path)
    check_patch(path, config, image)
    if image.merge != config.spatial_merge_size:
        raise UserError(
            f"the model in {path} joins {config.spatial_merge_size} x {config.spatial_merge_size} patches, but the job's "
            f"image.merge is {image.merge}: set it to {config.spatial_merge_size}"
        )
    model = skeleton(Qwen2_5_VisionTransformerPretrainedModel._from_config, config)
    return QwenVision(model, path), QwenMerger(model, path) if config.out_hidden_size == token_width else None
