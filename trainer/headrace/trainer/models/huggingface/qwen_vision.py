"""The vision towers of Qwen2-VL and Qwen2.5-VL (Wang et al. 2024, section 2.1; Bai et al. 2025, section 2.1.1).

In Qwen2.5-VL most layers attend inside of windows and a few to the whole image; in Qwen2-VL all of them attend to the whole one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.vision_utils import get_vision_window_index

from headrace.errors import HeadraceError
from headrace.spec import ImageSpec
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.huggingface.packed_layer import Rotations
from headrace.trainer.models.huggingface.parts import Adapted, PerDevice, Published, prefixed, skeleton
from headrace.trainer.models.huggingface.vision_tower import (
    check_merge,
    check_patch,
    embed_patches,
    encoder_width,
    vision_config,
)
from headrace.trainer.models.projector import Groups, Projector
from headrace.trainer.models.vision_encoder import VisionEncoder, patch_positions

_LAYOUTS = prefixed("", "visual.", "model.visual.")
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
    """A layer of a tower: (P, width) -> (P, width).

    In a tower with windows the first layer puts the patches into window order and the last one restores the packed order, so that
    between pipeline stages they are in window order.
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
    """A tower without its merger: uint8 patches (P, 3 * patch * patch) -> features (P, width), in packed order.

    The tower embeds a still image as two equal frames; here one frame is embedded with the sum of both kernels.
    """

    layouts = _LAYOUTS

    def __init__(self, model: Any, path: Path, whole: Published | None = None) -> None:
        """`whole`: the published model that the tower `model` is a part of."""
        nn.Module.__init__(self)
        config = model.config
        for block in model.blocks:
            block.attn.qkv = QueryKeyValue(block.attn.qkv)
        self.merge, self.width = config.spatial_merge_size, encoder_width(config)
        self.embed = model.patch_embed
        self._window: int | None = getattr(config, "window_size", None)
        full = range(config.depth) if self._window is None else config.fullatt_block_indexes
        first, last = (None, None) if self._window is None else (0, config.depth - 1)
        self.layers = nn.ModuleList(
            WindowLayer(block, is_first=index == first, is_last=index == last, sees_image=index in full)
            for index, block in enumerate(model.blocks)
        )
        self.norm = nn.Identity()
        self._rotary, self._patch = PerDevice(type(model.rotary_pos_emb), config), config.patch_size
        self.adopt(model, path, whole)
        self.stored_names = {name: _OF_FUSED.sub("", stored) for name, stored in self.stored_names.items()}
        self.model_names = frozenset(_OF_FUSED.sub("", name) for name in self.model_names)

    def embed_inputs(self, patches: Tensor) -> Tensor:
        """Return the input of the first layer, (P, width), from uint8 patches in packed order."""
        kernel = self.embed.get_parameter("proj.weight").sum(dim=2)
        return embed_patches(patches, kernel, None, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)

    def layout(self, image_grids: Tensor, image_cu_seqlens: Tensor) -> Windows:
        """Return the windows of packed images, on the host as are `image_grids` (I, 3) and the (I + 1,) offsets.

        Raises HeadraceError for several frames.
        """
        if (image_grids[:, 0] != 1).any():
            raise HeadraceError("a sample has an image of several frames, which Qwen-VL joins two by two: it must have one")
        positions, images = patch_positions(image_grids, self.merge), Segments.of(image_cu_seqlens)
        if self._window is None:
            order = torch.arange(len(positions))
            return Windows(order=order, inverse_order=order, positions=positions, image_segments=images, window_segments=images)
        groups, cu_windows = get_vision_window_index(image_grids, self.merge, self._window, self._patch)
        order = (groups[:, None] * self.merge**2 + torch.arange(self.merge**2)).flatten()
        return Windows(
            order=order,
            inverse_order=order.argsort(),
            positions=positions[order],
            image_segments=images,
            window_segments=Segments.of(cu_windows),
        )

    def layer_args(self, layout: Windows) -> tuple[Windows, Rotations]:
        """Return what every layer takes besides its hidden states: the windows, and rotary angles in their order."""
        return layout, self._rotary.on(layout.positions.device)(layout.positions, layout.positions)


class QwenMerger(Adapted, Projector):
    """The projector of such a model: features (P, width) -> tokens (P / merge^2, out_hidden_size)."""

    layouts = _LAYOUTS

    def __init__(self, model: Any, path: Path, whole: Published | None = None) -> None:
        nn.Module.__init__(self)
        self.group = model.config.spatial_merge_size**2
        self.merger = model.merger
        self.adopt(model, path, whole)
        self.model_names = frozenset(_OF_FUSED.sub("", name) for name in self.model_names)

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
    check_merge(path, config.spatial_merge_size, image)
    is_first = config.model_type == "qwen2_vl_vision"
    kind = Qwen2VisionTransformerPretrainedModel if is_first else Qwen2_5_VisionTransformerPretrainedModel
    model = skeleton(kind._from_config, config)
    made = config.hidden_size if is_first else config.out_hidden_size
    return QwenVision(model, path), QwenMerger(model, path) if made == token_width else None
