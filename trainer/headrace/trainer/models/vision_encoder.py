"""A ViT on packed uint8 patches of any number of images of any size (Qwen2-VL, Wang et al. 2024, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model_shape import TransformerShape
from headrace.spec import ImageSpec
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.block import encoder_blocks, layer_norm
from headrace.trainer.models.rotary import rotation

_THETA = 10_000.0  # Su et al. 2021; also Qwen2-VL's vision tower


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageLayout:
    """Where the patches of packed images lie, for the layers. P: patches."""

    positions: Tensor
    """(P, 2) int64: row and column of each patch in its image."""
    segments: Segments
    """One for each image."""


class VisionEncoder(nn.Module):
    """Vision encoder: uint8 patches (P, 3 * patch * patch) -> features (P, width). A patch sees its own image only.

    Qwen2-VL embeds a still image as two equal frames. A convolution over two equal frames is one linear map with the sum of
    both kernels, so the repetition is not computed.
    """

    def __init__(self, shape: TransformerShape, image: ImageSpec) -> None:
        super().__init__()
        self.merge = image.merge
        self.width = shape.width
        self.head_dim = shape.width // shape.heads
        self.embed = nn.Linear(3 * image.patch * image.patch, shape.width)
        self.layers = encoder_blocks(shape)
        self.norm = layer_norm(shape.width)

    def forward(self, patches: Tensor, layout: Any) -> Tensor:
        """Encode all images. `layout`: from `layout`, on the device of the patches."""
        x = self.embed_inputs(patches)
        layer_args = self.layer_args(layout)
        for layer in self.layers:
            x = layer(x, *layer_args)
        output: Tensor = self.norm(x)
        return output

    def num_rows(self, image_cu_seqlens: Tensor) -> int:
        """Return the number of rows, the patches, in the hidden states between layers."""
        return int(image_cu_seqlens[-1])

    def embed_inputs(self, patches: Tensor) -> Tensor:
        """Return the input of the first layer, (P, width), from uint8 patches."""
        dtype = self.embed.weight.dtype
        x: Tensor = self.embed(centred(patches, dtype))
        return x.to(dtype)

    def layout(self, image_grids: Tensor, image_cu_seqlens: Tensor) -> Any:
        """Return the layout of packed images for the layers, on the host as are `image_grids` (I, 3) and the (I + 1,) offsets."""
        return ImageLayout(positions=patch_positions(image_grids, self.merge), segments=Segments.of(image_cu_seqlens))

    def layer_args(self, layout: Any) -> tuple[Any, ...]:
        """Return what every layer takes besides its hidden states, from a layout on the device: rotary angles and segments."""
        return rotation(layout.positions, self.head_dim, theta=_THETA), layout.segments


def centred(patches: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale uint8 pixel values to the range from -1 to 1."""
    return patches.to(dtype) / 127.5 - 1.0


def patch_positions(image_grids: Tensor, merge: int) -> Tensor:
    """Return the (row, column) of every patch, (P, 2) int64, from grids (I, 3) of (t, h, w).

    Patches come group by group: the merge * merge patches that become one LLM token are neighbours. With merge 2, an image of
    2 x 4 patches has the order (0,0) (0,1) (1,0) (1,1) (0,2) (0,3) (1,2) (1,3). Frames repeat the positions.
    """
    frames, heights, widths = image_grids.long().unbind(dim=1)
    counts = frames * heights * widths
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    per_frame = torch.repeat_interleave(heights * widths, counts)
    groups_across = torch.repeat_interleave(widths // merge, counts)
    index = (torch.arange(len(first)) - first) % per_frame
    group, inside = index // merge**2, index % merge**2
    rows = group // groups_across * merge + inside // merge
    columns = group % groups_across * merge + inside % merge
    return torch.stack((rows, columns), dim=1)
