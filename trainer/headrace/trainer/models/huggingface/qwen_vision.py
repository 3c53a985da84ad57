"""Qwen2.5-VL's vision tower (Bai et al. 2025, section 2.1.1): window attention in most layers, full attention in a few."""

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
from headrace.trainer.models.huggingface.parts import Adapted, PerDevice, skeleton
from headrace.trainer.models.huggingface.vision_tower import check_patch, embed_patches, vision_config
from headrace.trainer.models.projector import Groups, Projector
from headrace.trainer.models.vision_encoder import VisionEncoder, patch_positions

_PREFIXES = ("", "visual.", "model.visual.")
_OF_FUSED = re.compile(r"(?<=\.qkv)\.(query|key|value)\b")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """The order of packed patches by attention window, as the tower's layers take it. P: patches."""

    order: Tensor
    """(P,) int64: index in packed order of the patch at each place in window order."""
    inverse_order: Tensor
    """(P,) int64, the inverse of `order`: place in window order of each patch in packed order."""
    positions: Tensor
    """(P, 2) int64: row and column of each patch in its image, in window order."""
    image_segments: Segments
    """Segments of the images, valid in window order too: patches change places only inside their image."""
    window_segments: Segments
    """Segments of the windows, in window order."""


class WindowLayer(nn.Module):
    """A layer of Qwen2.5-VL's vision tower: (P, width) -> (P, width).

    The first layer puts the patches into window order and the last one restores the packed order, so that between pipeline
    stages they are in window order.
    """

    def __init__(self, layer: nn.Module, *, is_first: bool, is_last: bool, sees_image: bool) -> None:
        """`sees_image`: attention spans the whole image instead of a window."""
        super().__init__()
        self.layer = layer
        self.is_first, self.is_last, self.sees_image = is_first, is_last, sees_image

    def forward(self, x: Tensor, windows: Windows, rotations: Rotations) -> Tensor:
        """Apply the layer to the patches of the packed images that `windows` describes. `rotations`: each (P, head_dim)."""
        x = x[windows.order] if self.is_first else x
        segments = windows.image_segments if self.sees_image else windows.window_segments
        whole = torch.tensor([0, len(windows.order)])  # no cuts by transformers: packed attention takes the segments
        output: Tensor = self.layer(x, cu_seqlens=whole, position_embeddings=rotations, segments=segments)
        return output[windows.inverse_order] if self.is_last else output


class QueryKeyValue(nn.Module):
    """Fused QKV projection split into three matrices: (P, width) -> (P, 3 * width).

    A tensor-parallel slice by heads is then consecutive rows of each matrix, and not rows from three places of a fused one.
    """

    def __init__(self, fused: nn.Linear) -> None:
        super().__init__()
        width, device = fused.in_features, fused.weight.device
        self.query, self.key, self.value = (nn.Linear(width, fused.out_features // 3, device=device) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return queries, keys and values side by side; (P, 3 * width / tp) on a tensor-parallel slice."""
        return torch.cat((self.query(x), self.key(x), self.value(x)), dim=-1)


class QwenVision(Adapted, VisionEncoder):
    """Qwen2.5-VL's tower without its merger: uint8 patches (P, 3 * patch * patch) -> features (P, width), in packed order.

    The tower embeds a still image as two equal frames; here one frame is embedded with the sum of both kernels.
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
        self.norm = nn.Identity()
        self._rotary, self._config = PerDevice(type(model.rotary_pos_emb), config), config
        self.adopt(model, path)
        self.stored_names = {name: _OF_FUSED.sub("", stored) for name, stored in self.stored_names.items()}

    def embed_inputs(self, patches: Tensor) -> Tensor:
        """Return the input of the first layer, (P, width), from uint8 patches in packed order."""
        kernel = self.embed.get_parameter("proj.weight").sum(dim=2)
        return embed_patches(patches, kernel, None, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)

    def layout(self, image_grids: Tensor, image_cu_seqlens: Tensor) -> Windows:
        """Return the windows of packed images, on the host as are `image_grids` (I, 3) and the (I + 1,) offsets.

        Raises HeadraceError for several frames.
        """
        if (image_grids[:, 0] != 1).any():
            raise HeadraceError("a sample has an image of several frames, which Qwen2.5-VL joins two by two: it must have one")
        window, patch = self._config.window_size, self._config.patch_size
        groups, cu_windows = get_vision_window_index(image_grids, self.merge, window, patch)
        order = (groups[:, None] * self.merge**2 + torch.arange(self.merge**2)).flatten()
        return Windows(
            order=order,
            inverse_order=order.argsort(),
            positions=patch_positions(image_grids, self.merge)[order],
            image_segments=Segments.of(image_cu_seqlens),
            window_segments=Segments.of(cu_windows),
        )

    def layer_args(self, layout: Windows) -> tuple[Windows, Rotations]:
        """Return what every layer takes besides its hidden states: the windows, and rotary angles in their order."""
        return layout, self._rotary.on(layout.positions.device)(layout.positions, layout.positions)


class QwenMerger(Adapted, Projector):
    """Qwen2.5-VL's own projector: features (P, width) -> tokens (P / merge^2, out_hidden_size)."""

    checkpoint_prefixes = _PREFIXES

    def __init__(self, model: Any, path: Path) -> None:
        nn.Module.__init__(self)
        self.group = model.spatial_merge_unit
        self.merger = model.merger
        self.adopt(model, path)

    def forward(self, features: Tensor, _: Groups) -> Tensor:
        """Project the features of all images, whose merge groups are complete."""
        tokens: Tensor = self.merger(features)
        return tokens


def qwen_vision(path: Path, image: ImageSpec, *, token_width: int) -> tuple[QwenVision, QwenMerger | None]:
    """Build the tower and, if its tokens are as wide as the LLM's, its merger (otherwise None), on the meta device.

    Raises UserError where the job's patch size or merge factor is not the model's.
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
